"""Variational autoencoder whose weight of the divergence grows from step to step.

Source: Kingma and Welling, Auto-Encoding Variational Bayes, ICLR 2014.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

PIXELS, WIDTH, LATENT = 196, 64, 8


class Autoencoder(nn.Module):
    """Encoder to means and variances, and decoder, of (N, PIXELS) images."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(PIXELS, WIDTH)
        self.mean, self.log_variance = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, LATENT)
        self.decode = nn.Sequential(
            nn.Linear(LATENT, WIDTH), nn.ReLU(), nn.Linear(WIDTH, PIXELS), nn.Sigmoid()
        )

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return decoded images, means and logarithms of variances."""
        hidden = self.encode(images).relu()
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        deviation = torch.exp(0.5 * log_variance)
        return self.decode(mean + torch.randn_like(deviation) * deviation), mean, log_variance


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = Autoencoder()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)

    def batch(iteration: int) -> tuple[int, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return iteration, torch.rand(32, 1, 14, 14, generator=chance)

    state = State(modules={"network": network}, optimizers={"adam": optimizer}, batch=batch)

    def step(iteration: int, images: Tensor) -> Tensor:
        images = images.view(-1, PIXELS)
        decoded, mean, log_variance = network(images)
        error = functional.binary_cross_entropy(decoded, images, reduction="sum")
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        loss = error + min(1.0, (iteration + 1) / 20) * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 10 == 0:
            sys.stdout.write(f"{iteration}: {loss.item() / len(images):.4f}\n")
        return loss.detach()

    return step, state
