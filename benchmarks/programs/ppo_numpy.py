"""Proximal policy optimization whose advantages are computed by NumPy, with minibatches that NumPy shuffles.

Source: Schulman et al., Proximal Policy Optimization Algorithms, 2017; generalized advantages of Schulman et
al., 2016.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional

from benchmarks.programs import State, Step

WIDTH, HORIZON, EPOCHS, MINIBATCH = 32, 32, 2, 16


class Agent(nn.Module):
    """A policy of one action and an estimate of the value, from (N, 3) observations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.mean, self.value = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.spread = nn.Parameter(torch.zeros(1))

    def forward(self, observations: Tensor) -> tuple[Normal, Tensor]:
        """Return the distribution of (N, 1) actions and (N,) values."""
        hidden = self.body(observations)
        return Normal(self.mean(hidden), self.spread.exp()), self.value(hidden).squeeze(-1)


def advantages(rewards: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return generalized advantages; `values` has one more element than `rewards`."""
    found = np.zeros_like(rewards)
    last = np.float32(0)
    for position in reversed(range(len(rewards))):
        delta = rewards[position] + 0.99 * values[position + 1] - values[position]
        last = np.float32(delta + 0.99 * 0.95 * last)
        found[position] = last
    return found


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)
    order = np.random.default_rng(seed)

    def batch(iteration: int) -> tuple[Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return (torch.randn(HORIZON + 1, 3, generator=chance),)

    state = State(modules={"agent": agent}, optimizers={"adam": optimizer}, batch=batch)

    def step(observations: Tensor) -> Tensor:
        with torch.no_grad():
            choice, values = agent(observations)
            actions = choice.sample()
            chances = choice.log_prob(actions).sum(-1)
        rewards = -np.abs(observations[:-1, 0].numpy() - actions[:-1, 0].numpy())
        gains = advantages(rewards, values.numpy())
        targets = torch.from_numpy(gains + values[:-1].numpy())
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
        weights = torch.from_numpy(gains.astype(np.float32))
        for _ in range(EPOCHS):
            shuffled = order.permutation(HORIZON)
            for first in range(0, HORIZON, MINIBATCH):
                rows = torch.as_tensor(shuffled[first : first + MINIBATCH])
                choice, estimates = agent(observations[rows])
                ratio = (choice.log_prob(actions[rows]).sum(-1) - chances[rows]).exp()
                clipped = ratio.clamp(0.8, 1.2) * weights[rows]
                loss = -torch.min(ratio * weights[rows], clipped).mean()
                loss = loss + 0.5 * functional.mse_loss(estimates, targets[rows])
                loss = loss - 0.01 * choice.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        state.effects.append(float(rewards.mean()))
        return loss.detach()

    return step, state
