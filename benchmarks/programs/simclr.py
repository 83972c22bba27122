"""SimCLR: contrastive learning of two random views of every image.

Source: Chen et al., A Simple Framework for Contrastive Learning of Visual Representations, ICML 2020.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

COUNT, SIDE, TEMPERATURE = 12, 16, 0.5


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    views = random.Random(seed)

    def batch(iteration: int) -> tuple[Tensor]:
        return (
            torch.randn(
                COUNT, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed * 1000 + iteration)
            ),
        )

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def view(images: Tensor) -> Tensor:
        if views.random() < 0.5:
            images = images.flip(-1)
        images = images * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1))
        return images + 0.1 * torch.randn_like(images)

    def step(images: Tensor) -> Tensor:
        features = functional.normalize(network(torch.cat((view(images), view(images)))), dim=1)
        scores = features @ features.T / TEMPERATURE
        scores.fill_diagonal_(float("-inf"))
        pairs = torch.arange(2 * len(images)).roll(len(images))
        loss = functional.cross_entropy(scores, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        best = (scores.argmax(1) == pairs).float().mean().item()
        state.effects.append((best, schedule.get_last_lr()[0]))
        return loss.detach()

    return step, state
