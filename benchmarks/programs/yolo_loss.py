"""Single-stage detector whose loss indexes its output by the cells of a varying number of objects.

Source: Redmon et al., You Only Look Once, CVPR 2016.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

CELLS, CLASSES = 8, 5


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.SiLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.SiLU(),
        nn.Conv2d(32, 5 + CLASSES, 1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        count = int(torch.randint(0, 12, (), generator=chance))
        images = torch.randint(4, (count, 1), generator=chance)
        kinds = torch.randint(CLASSES, (count, 1), generator=chance)
        boxes = torch.rand(count, 4, generator=chance) * 0.98
        return torch.randn(4, 3, 32, 32, generator=chance), torch.cat([images, kinds, boxes], 1)

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def step(images: Tensor, objects: Tensor) -> Tensor:
        optimizer.zero_grad()
        output = network(images).permute(0, 2, 3, 1)
        objectness = torch.zeros_like(output[..., 0])
        loss = output.new_zeros(())
        if len(objects):
            image, kind = objects[:, 0].long(), objects[:, 1].long()
            column, row = (objects[:, 2:4] * CELLS).long().unbind(1)
            matched = output[image, row, column]
            objectness[image, row, column] = 1.0
            loss = functional.mse_loss(matched[:, 1:5].sigmoid(), objects[:, 2:])
            loss = loss + functional.cross_entropy(matched[:, 5:], kind)
        confident = output[..., 0].detach() > 0
        wrong = output[..., 0][confident & (objectness == 0)]
        if wrong.numel() > 0:
            loss = loss + wrong.sigmoid().mean()
        loss = loss + functional.binary_cross_entropy_with_logits(output[..., 0], objectness)
        loss.backward()
        optimizer.step()
        state.effects.append((len(objects), confident.nonzero().shape[0]))
        return loss.detach()

    return step, state
