"""Wasserstein generative network with a gradient penalty: the backward pass has a graph of its own.

Source: Gulrajani et al., Improved Training of Wasserstein GANs, NeurIPS 2017.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.programs import State, Step

NOISE, WIDTH, CRITIC_STEPS = 8, 64, 3


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    critic = nn.Sequential(nn.Linear(2, WIDTH), nn.Softplus(), nn.Linear(WIDTH, 1))
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), lr=1e-4, betas=(0.0, 0.9)),
        "critic": torch.optim.Adam(critic.parameters(), lr=1e-4, betas=(0.0, 0.9)),
    }

    def batch(iteration: int) -> tuple[int, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        angle = torch.rand(32, generator=chance) * 6.2831855
        return iteration, torch.stack((angle.cos(), angle.sin()), 1)

    state = State(modules={"generator": generator, "critic": critic}, optimizers=optimizers, batch=batch)

    def penalty(points: Tensor, made: Tensor) -> Tensor:
        share = torch.rand(len(points), 1)
        between = (share * points + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return (slope.norm(2, dim=1) - 1).square().mean()

    def step(iteration: int, points: Tensor) -> Tensor:
        made = generator(torch.randn(len(points), NOISE)).detach()
        optimizers["critic"].zero_grad()
        distance = critic(points).mean() - critic(made).mean()
        loss = 10 * penalty(points, made) - distance
        loss.backward()
        optimizers["critic"].step()
        if iteration % CRITIC_STEPS == CRITIC_STEPS - 1:
            optimizers["generator"].zero_grad()
            (-critic(generator(torch.randn(len(points), NOISE))).mean()).backward()
            optimizers["generator"].step()
        state.effects.append(distance.item())
        return loss.detach()

    return step, state
