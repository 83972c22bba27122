"""Toy: Python draws the branch of every step."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn

from benchmarks.programs import State, Step


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    chance = random.Random(seed)

    def batch(iteration: int) -> tuple[Tensor]:
        return (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed * 1000 + iteration)),)

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        branch = chance.randrange(3)
        y = network(x)
        if branch == 0:
            y = y.relu()
        elif branch == 1:
            y = y * y
        loss = y.abs().mean()
        state.effects.append(branch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, state
