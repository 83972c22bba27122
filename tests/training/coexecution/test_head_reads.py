"""Heads of steps in which Python reads values before the backward pass: bits of eager mode on each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.coexecution.test_whole_step import Make, batches, compare, network, soon
from tunebench.training.coexecution import _head_reads

pytestmark = pytest.mark.slow

__all__ = ["soon"]


def reading(loss_of: Callable[[Tensor, list[Any]], Tensor], make_model: Callable[[], nn.Module]) -> Make:
    """Return a step whose loss depends on values of the output of its model."""

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model = make_model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        effects: list[Any] = []

        def step(x: Tensor) -> tuple[Tensor, Any]:
            optimizer.zero_grad()
            loss = loss_of(model(x), effects)
            loss.backward()
            optimizer.step()
            return loss.detach(), torch.tensor(effects[-1])

        return step, model

    return make


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))


def random_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 4))


def branching(y: Tensor, effects: list[Any]) -> Tensor:
    if y.mean().item() > 0:
        effects.append(1)
        return y.square().mean()
    effects.append(0)
    return y.abs().mean()


def twice(y: Tensor, effects: list[Any]) -> Tensor:
    """Read two values, the second one on one way only, after further random numbers."""
    if y.mean().item() > 0:
        y = nn.functional.dropout(y, 0.5)
        if y.std().item() > 0.5:
            effects.append(2)
            return y.square().mean()
        effects.append(1)
        return y.square().sum()
    effects.append(0)
    return nn.functional.dropout(y, 0.5).abs().mean()


def scaling(y: Tensor, effects: list[Any]) -> Tensor:
    """Use a value that is read as a number, and append it."""
    middle = y.mean().item()
    effects.append(middle)
    return (y - middle).square().mean()


def stopping(y: Tensor, effects: list[Any]) -> Tensor:
    """Leave a loop over the rows of a tensor at a value."""
    total = y.new_zeros(4)
    for count, row in enumerate(y):
        total = total + row.sin()
        effects.append(count)
        if total.sum().item() > 0.3:
            break
    return total.square().sum()


def counting(y: Tensor, effects: list[Any]) -> Tensor:
    """Read an integer that decides how often a loop runs."""
    count = int((y.mean(1) > 0).sum().item())
    effects.append(count)
    for _ in range(count):
        y = y.sin()
    return y.square().mean()


@pytest.mark.parametrize("make_model", [plain, random_model, network])
@pytest.mark.parametrize("loss_of", [branching, twice, scaling, stopping, counting])
def test_each_way_has_the_bits_of_eager_mode(
    loss_of: Callable[[Tensor, list[Any]], Tensor], make_model: Callable[[], nn.Module]
) -> None:
    heads = compare(reading(loss_of, make_model), batches(40))
    print(heads.runs, heads.reason, heads._problems, [(g.outcomes, g.reason, g.misfit, g.replays) for g in heads._graphs])
