"""Regression by LBFGS, which calls a closure with forward and backward pass as often as it needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.5, max_iter=4, history_size=5)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        points = torch.rand(64, 2, generator=torch.Generator().manual_seed(seed * 1000 + iteration)) * 4 - 2
        return points, (points[:, :1] * 2).sin() + points[:, 1:] ** 2

    state = State(modules={"network": network}, optimizers={"lbfgs": optimizer}, batch=batch)

    def step(points: Tensor, values: Tensor) -> Tensor:
        calls = 0

        def closure() -> Tensor:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = functional.mse_loss(network(points), values)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        state.effects.append(calls)
        return loss.detach()

    return step, state
