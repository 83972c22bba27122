"""Convolutional classifier with DropBlock, whose drop rate is a Python attribute that grows with every call.

Source: Ghiasi et al., DropBlock, NeurIPS 2018.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step


class DropBlock(nn.Module):
    """Zero square blocks of (N, C, H, W) features; `rate` grows to `final_rate` over `calls` calls."""

    def __init__(self, *, size: int, final_rate: float, calls: int) -> None:
        super().__init__()
        self.size, self.final_rate, self.calls = size, final_rate, calls
        self.rate, self.seen = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, C, H, W) features without the dropped blocks."""
        self.seen += 1
        self.rate = self.final_rate * min(1.0, self.seen / self.calls)
        height, width = x.shape[-2:]
        valid = (height - self.size + 1) * (width - self.size + 1)
        gamma = self.rate * height * width / self.size**2 / valid
        centres = (torch.rand(x.shape[0], 1, height, width) < gamma).to(x.dtype)
        mask = 1 - functional.max_pool2d(centres, self.size, stride=1, padding=self.size // 2)
        return x * mask * (mask.numel() / mask.sum().clamp(min=1))


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    drop = DropBlock(size=3, final_rate=0.2, calls=40)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), drop,
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return torch.randn(16, 3, 16, 16, generator=chance), torch.randint(10, (16,), generator=chance)

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        state.effects.append(drop.rate)
        return loss.detach()

    return step, state
