"""Denoising diffusion with an exponential moving average of the weights.

Source: Ho et al., Denoising Diffusion Probabilistic Models, NeurIPS 2020.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

TIMES, CHANNELS = 100, 16


class Denoiser(nn.Module):
    """Convolutions with an embedding of the time, on (N, 1, S, S) images."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(TIMES, CHANNELS), nn.SiLU(), nn.Linear(CHANNELS, CHANNELS))
        self.first = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.between = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.last = nn.Conv2d(CHANNELS, 1, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Return the noise in images."""
        hidden = functional.silu(self.first(images)) + self.time(times)[:, :, None, None]
        return self.last(hidden + functional.silu(self.between(self.norm(hidden))))


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = Denoiser()
    average = copy.deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), 0)

    def batch(iteration: int) -> tuple[int, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return iteration, torch.rand(8, 1, 12, 12, generator=chance) * 2 - 1

    state = State(
        modules={"network": network, "average": average}, optimizers={"adamw": optimizer}, batch=batch,
        tensors={"kept": kept},
    )  # fmt: skip

    def step(iteration: int, images: Tensor) -> Tensor:
        times = torch.randint(TIMES, (len(images),))
        noise = torch.randn_like(images)
        share = kept[times].view(-1, 1, 1, 1)
        loss = functional.mse_loss(network(share.sqrt() * images + (1 - share).sqrt() * noise, times), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        decay = min(0.995, (1 + iteration) / (10 + iteration))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), network.parameters(), strict=True):
                mean.mul_(decay).add_(value, alpha=1 - decay)
        state.effects.append(decay)
        return loss.detach()

    return step, state
