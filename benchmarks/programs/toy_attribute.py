"""Toy: a module counts its calls in an attribute and scales its output by a decaying number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.programs import State, Step


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    network.calls, network.scale = 0, 1.0

    def batch(iteration: int) -> tuple[Tensor]:
        return (torch.randn(8, 16, generator=torch.Generator().manual_seed(seed * 1000 + iteration)),)

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        network.calls += 1
        network.scale *= 0.97
        loss = (network(x) * network.scale).square().mean() / network.calls
        state.effects.append((network.calls, network.scale))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, state
