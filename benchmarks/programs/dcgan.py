"""Generator and discriminator of images with two optimizers; Python decides when the generator learns.

Source: Radford et al., Unsupervised Representation Learning with DCGANs, ICLR 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

NOISE = 16


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 32, 4), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 1, 4), nn.Flatten(0),
    )  # fmt: skip
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
        "discriminator": torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999)),
    }

    def batch(iteration: int) -> tuple[Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        return (torch.rand(16, 1, 16, 16, generator=chance) * 2 - 1,)

    state = State(
        modules={"generator": generator, "discriminator": discriminator}, optimizers=optimizers, batch=batch
    )

    def step(images: Tensor) -> Tensor:
        count = len(images)
        made = generator(torch.randn(count, NOISE, 1, 1))
        optimizers["discriminator"].zero_grad()
        on_images, on_made = discriminator(images), discriminator(made.detach())
        loss = functional.softplus(-on_images).mean() + functional.softplus(on_made).mean()
        loss.backward()
        optimizers["discriminator"].step()
        learns = loss.item() < 1.4
        if learns:
            optimizers["generator"].zero_grad()
            functional.softplus(-discriminator(made)).mean().backward()
            optimizers["generator"].step()
        state.effects.append(learns)
        return loss.detach()

    return step, state
