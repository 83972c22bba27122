"""REINFORCE: a policy plays episodes of a pole on a cart, simulated in Python, and learns from their returns.

Source: Williams, Simple Statistical Gradient-Following Algorithms, Machine Learning 8, 1992; the equations of
the cart are those of Barto, Sutton and Anderson, 1983.
"""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.programs import State, Step

WIDTH, LONGEST, DISCOUNT = 32, 24, 0.99


class Cart:
    """A pole on a cart: position, velocity, angle and angular velocity."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.values = [chance.uniform(-0.05, 0.05) for _ in range(4)]

    def move(self, direction: int) -> bool:
        """Push the cart for 20 ms; return whether the pole still stands."""
        x, speed, angle, turning = self.values
        force = 10.0 if direction else -10.0
        sine, cosine = math.sin(angle), math.cos(angle)
        push = (force + 0.05 * turning**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        speed_change = push - 0.05 * turn * cosine / 1.1
        self.values = [
            x + 0.02 * speed,
            speed + 0.02 * speed_change,
            angle + 0.02 * turning,
            turning + 0.02 * turn,
        ]
        return abs(self.values[0]) < 2.4 and abs(self.values[2]) < 0.21


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def batch(iteration: int) -> tuple[int]:
        return (seed * 1000 + iteration,)

    state = State(modules={"policy": policy}, optimizers={"adam": optimizer}, batch=batch)

    def step(start: int) -> Tensor:
        cart, chances, rewards = Cart(start), [], []
        for _ in range(LONGEST):
            choice = Categorical(logits=policy(torch.tensor(cart.values)))
            action = choice.sample()
            chances.append(choice.log_prob(action))
            rewards.append(1.0)
            if not cart.move(int(action.item())):
                break
        returns: list[float] = []
        for reward in reversed(rewards):
            returns.insert(0, reward + DISCOUNT * (returns[0] if returns else 0.0))
        targets = torch.tensor(returns)
        targets = (targets - targets.mean()) / (targets.std() + 1e-6)
        loss = -(torch.stack(chances) * targets).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.effects.append(len(rewards))
        return loss.detach()

    return step, state
