"""Residual classifier that downsamples its features at a layer drawn by Python for every step.

Source: Kuen et al., Stochastic Downsampling for Cost-Adjustable Inference, CVPR 2018.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

LAYERS, CHANNELS = 4, 16


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    points = random.Random(seed)
    network = nn.ModuleDict(
        {
            "stem": nn.Conv2d(3, CHANNELS, 3, padding=1),
            "layers": nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(LAYERS)),
            "head": nn.Linear(CHANNELS, 10),
        }
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return torch.randn(16, 3, 16, 16, generator=chance), torch.randint(10, (16,), generator=chance)

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        point, ratio = points.randrange(LAYERS + 1), points.choice((0.5, 0.75))
        optimizer.zero_grad()
        features = network["stem"](images)
        for position, layer in enumerate(network["layers"]):
            if position == point:
                features = functional.interpolate(features, scale_factor=ratio, mode="nearest")
            features = features + layer(features.relu())
        loss = functional.cross_entropy(network["head"](features.mean((2, 3))), labels)
        loss.backward()
        optimizer.step()
        state.effects.append((point, ratio))
        return loss.detach()

    return step, state
