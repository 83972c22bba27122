"""Two-stage detector whose proposals pass through Python lists and a NumPy non-maximum suppression.

Source: Ren et al., Faster R-CNN, NeurIPS 2015.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

CHANNELS, CELLS, STRIDE, KEPT = 16, 8, 4, 6


def suppress(boxes: np.ndarray, scores: np.ndarray, threshold: float) -> list[int]:
    """Return the indices of boxes (N, 4; x0, y0, x1, y1) that overlap no box with a higher score."""
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order, selected = np.argsort(-scores, kind="stable"), []
    while order.size:
        best, order = int(order[0]), order[1:]
        selected.append(best)
        corner = np.maximum(boxes[best, :2], boxes[order, :2])
        extent = np.maximum(np.minimum(boxes[best, 2:], boxes[order, 2:]) - corner, 0)
        shared = extent.prod(1)
        order = order[shared / (areas[best] + areas[order] - shared) <= threshold]
    return selected


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    network = nn.ModuleDict(
        {
            "trunk": nn.Sequential(
                nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1), nn.ReLU(),
                nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1), nn.ReLU(),
            ),
            "propose": nn.Conv2d(CHANNELS, 5, 1),
            "classify": nn.Linear(CHANNELS * 4, 4),
        }
    )  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    rows, columns = torch.meshgrid(torch.arange(CELLS), torch.arange(CELLS), indexing="ij")
    centres = torch.stack([columns, rows], -1).reshape(-1, 2) * STRIDE + STRIDE / 2

    def batch(iteration: int) -> tuple[Tensor, Tensor, int]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        corner = torch.rand(2, generator=chance) * 16
        box = torch.cat([corner, corner + 6 + torch.rand(2, generator=chance) * 8])
        return (
            torch.randn(1, 3, 32, 32, generator=chance),
            box,
            int(torch.randint(1, 4, (), generator=chance)),
        )

    state = State(modules={"network": network}, optimizers={"sgd": optimizer}, batch=batch)

    def step(image: Tensor, target: Tensor, label: int) -> Tensor:
        optimizer.zero_grad()
        features = network["trunk"](image)
        proposed = network["propose"](features)[0].flatten(1).T
        middle = centres + proposed[:, 1:3].tanh() * STRIDE
        half = 2 + 6 * proposed[:, 3:5].sigmoid()
        boxes = torch.cat([middle - half, middle + half], 1)
        objects = ((centres > target[:2]) & (centres < target[2:])).all(1)
        loss = functional.binary_cross_entropy_with_logits(proposed[:, 0], objects.float())
        if objects.any():
            loss = loss + functional.smooth_l1_loss(boxes[objects], target.expand(int(objects.sum()), 4)) / 8
        selected = suppress(boxes.detach().numpy(), proposed[:, 0].detach().numpy(), 0.5)[:KEPT]
        regions, labels = [], []
        for x0, y0, x1, y1 in boxes.detach()[selected].tolist():
            left, top = (min(max(int(edge / STRIDE), 0), CELLS - 2) for edge in (x0, y0))
            right, bottom = max(left + 2, int(x1 / STRIDE)), max(top + 2, int(y1 / STRIDE))
            region = features[:, :, top:bottom, left:right]
            regions.append(functional.adaptive_max_pool2d(region, 2).flatten())
            centre = ((x0 + x1) / 2, (y0 + y1) / 2)
            inside = float(target[0]) < centre[0] < float(target[2]) and (
                float(target[1]) < centre[1] < float(target[3])
            )
            labels.append(label if inside else 0)
        classes = network["classify"](torch.stack(regions))
        loss = loss + functional.cross_entropy(classes, torch.tensor(labels))
        loss.backward()
        optimizer.step()
        state.effects.append((tuple(selected), tuple(labels)))
        return loss.detach()

    return step, state
