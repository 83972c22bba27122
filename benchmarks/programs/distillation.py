"""Distillation of a frozen teacher into a small student; Python keeps the best loss and its weights.

Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.programs import State, Step

TEMPERATURE, CLASSES = 4.0, 10


def make(seed: int) -> tuple[Step, State]:
    """Return the step and its state."""
    torch.manual_seed(seed)
    teacher = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, CLASSES),
    )  # fmt: skip
    student = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 36, CLASSES)
    )
    teacher.eval().requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 15, gamma=0.5)

    def batch(iteration: int) -> tuple[Tensor, Tensor]:
        chance = torch.Generator().manual_seed(seed * 1000 + iteration)
        labels = torch.randint(CLASSES, (16,), generator=chance)
        images = torch.randn(16, 1, 12, 12, generator=chance) + labels.view(-1, 1, 1, 1) * 0.2
        return images, labels

    state = State(
        modules={"teacher": teacher, "student": student}, optimizers={"sgd": optimizer}, batch=batch,
        memory={"best": float("inf"), "weights": None},
    )  # fmt: skip

    def step(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = functional.softmax(teacher(images) / TEMPERATURE, dim=1)
        logits = student(images)
        soft = functional.kl_div(
            functional.log_softmax(logits / TEMPERATURE, dim=1), wanted, reduction="batchmean"
        )
        loss = 0.7 * TEMPERATURE**2 * soft + 0.3 * functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if loss.item() < state.memory["best"]:
            state.memory["best"] = loss.item()
            state.memory["weights"] = copy.deepcopy(student.state_dict())
            state.effects.append(state.memory["best"])
        return loss.detach()

    return step, state
