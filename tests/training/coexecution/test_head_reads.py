"""Heads of steps in which Python reads values before the backward pass: bits of eager mode on each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.coexecution.test_whole_step import Make, batches, compare, network, soon
from tunebench.training.coexecution._head_reads import Computed

pytestmark = pytest.mark.slow

__all__ = ["soon"]


class Log:
    """An object without a dictionary, to which steps append."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[Any] = []


def random_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 4))


def reading(
    loss_of: Callable[[Tensor, Log], Tensor], make_model: Callable[[], nn.Module] = random_model
) -> tuple[Make, list[Log]]:
    """Return a step whose loss depends on values of its model's output, and the logs of its instances."""
    logs: list[Log] = []

    def make() -> tuple[Callable[..., Any], nn.Module]:
        model, log = make_model(), Log()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        logs.append(log)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), log)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model

    return make, logs


def branching(y: Tensor, log: Log) -> Tensor:
    if y.mean().item() > 0:
        log.values.append(1)
        return y.square().mean()
    log.values.append(0)
    return y.abs().mean()


def twice(y: Tensor, log: Log) -> Tensor:
    """Read a second value on one way only, after further random numbers."""
    if y.mean().item() > 0:
        y = nn.functional.dropout(y, 0.5)
        if y.std().item() > 0.5:
            log.values.append(2)
            return y.square().mean()
        log.values.append(1)
        return y.square().sum()
    log.values.append(0)
    return nn.functional.dropout(y, 0.5).abs().mean()


def stopping(y: Tensor, log: Log) -> Tensor:
    """Leave a loop over the rows of a tensor at a value."""
    total = y.new_zeros(4)
    for row in y[:3]:
        total = total + row.sin()
        if total.sum().item() > 0.3:
            break
    log.values.append(total.sum().item())
    return total.square().sum()


def counting(y: Tensor, log: Log) -> Tensor:
    """Read an integer that decides how often a loop runs."""
    count = int((y[:2].mean(1) > 0).sum().item())
    log.values.append(count)
    for _ in range(count):
        y = y.sin()
    return y.square().mean()


@pytest.mark.parametrize("loss_of", [branching, twice, stopping, counting])
def test_each_way_has_the_bits_of_eager_mode(
    loss_of: Callable[[Tensor, Log], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    continued = []
    fits = Computed.fits

    def noted(computed: Computed, *args: Any) -> bool:
        continued.append(fits(computed, *args))
        return continued[-1]

    monkeypatch.setattr(Computed, "fits", noted)
    make, logs = reading(loss_of)
    heads = compare(make, batches(36))
    assert logs[0].values == logs[1].values
    assert heads.reason is None
    assert heads.runs >= 8
    assert sum(graph.replays > 0 for graph in heads._graphs) >= 2
    assert any(continued)  # a head of one way computed the first values of another one


def test_buffers_that_a_head_wrote_are_taken_back() -> None:
    make, logs = reading(branching, network)
    heads = compare(make, batches(30))
    assert logs[0].values == logs[1].values
    assert heads.runs >= 8


def test_value_that_is_read_is_a_number_of_the_head() -> None:
    def scaling(y: Tensor, log: Log) -> Tensor:
        middle = y.mean().item()
        log.values.append(middle)
        return (y - middle).square().mean()

    make, logs = reading(scaling)
    heads = compare(make, batches(14))
    assert logs[0].values == logs[1].values
    assert heads.runs >= 5


def test_value_that_decides_more_than_a_way_has_no_head() -> None:
    def written(y: Tensor, log: Log) -> Tensor:
        log.values.append(f"{y.mean().item():.3f}")
        return y.square().mean()

    make, logs = reading(written)
    heads = compare(make, batches(10))
    assert logs[0].values == logs[1].values
    assert heads.runs == 0


def test_attribute_of_a_slot_is_guarded() -> None:
    make, logs = reading(branching)
    replaced: list[list[Any]] = []

    def before(index: int, model: nn.Module) -> None:
        if index == 24:
            replaced.append(logs[-1].values)
            logs[-1].values = []

    heads = compare(make, batches(30), before)
    assert heads.runs >= 8
    assert [len(values) for values in replaced] == [24, 24]
    assert logs[0].values == logs[1].values
    assert len(logs[1].values) == 6
