"""Heads of steps that are compiled: within the tolerance of eager mode, or as recorded."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.coexecution.test_whole_step import soon, states
from tunebench.errors import InputError
from tunebench.training import coexecute
from tunebench.training.coexecution import _head_compiled, _update

__all__ = ["soon"]

pytestmark = pytest.mark.slow

STEPS = 20


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Run the graphs that would be compiled as they are, and return them."""
    graphs: list[Any] = []

    def keep(function: Any, module: Any, examples: Any) -> None:
        graphs.append(module)
        function._call = lambda tensors: module(*tensors)

    monkeypatch.setattr(_head_compiled._Function, "_compile", keep)
    return graphs


@pytest.fixture(autouse=True)
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use compiled code whether or not it is faster."""
    monkeypatch.setattr(_update.Times, "runs_record", lambda times: True)
    monkeypatch.setattr(_update.Times, "add", lambda times, nanoseconds, by_record: None)


def convolutional() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    """A classifier with dropout and running statistics, whose labels can be out of range."""
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    return model, lambda x, labels: functional.cross_entropy(model(x), labels), optimizer


def clipped() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return model, lambda x, labels: model(x).square().mean(), optimizer


def embedded() -> tuple[nn.Module, Callable[..., Tensor], Any]:
    model = nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5)
    return model, lambda x, labels: functional.cross_entropy(model(labels), labels), optimizer


def run(
    make: Callable[[], Any],
    before: Callable[[int, Any], Any] = lambda index, optimizer: None,
    labels: Callable[[int], Tensor] = lambda index: torch.arange(6) % 4,
    **options: Any,
) -> tuple[list[Any], Any]:
    """Return results, states and random state after some steps, and the co-executed step."""
    torch.manual_seed(0)
    model, loss_of, optimizer = make()

    def step(x: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, labels)
        loss.backward()
        if make is clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    coexecuted: Any = coexecute(step, **options) if options else step
    if options:
        coexecuted._policy.reason = "by a test"
    outputs: list[Any] = []
    for index in range(STEPS):
        before(index, optimizer)
        optimizer.param_groups[0]["lr"] *= 0.95
        try:
            outputs.append(coexecuted(torch.sin(torch.arange(48.0).view(6, 8) * (index + 1)), labels(index)))
        except IndexError as error:
            outputs.append(torch.tensor(float(len(str(error)))))
    moments = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*outputs, *states(model), *(value for value in moments if isinstance(value, Tensor))]
    return [*tensors, torch.get_rng_state()], coexecuted


def assert_close(make: Callable[[], Any], tolerance: float, **changes: Any) -> Any:
    """Run steps in eager mode and compiled, compare everything, and return the report."""
    expected, _ = run(make, **changes)
    actual, step = run(make, **changes, backend="inductor")
    for eager, compiled in zip(expected, actual, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=tolerance, atol=tolerance)
    return coexecute.report(step)


@pytest.mark.parametrize("make", [convolutional, clipped, embedded])
def test_graphs_compute_steps(make: Callable[[], Any], uncompiled: list[Any]) -> None:
    """Learning rates, bias corrections and step counts are inputs of two graphs, which are written once."""
    report = assert_close(make, 1e-4)
    assert report.exact_heads is None
    assert report.compiled_heads >= 8
    assert len(uncompiled) == 2


@pytest.mark.exhaustive
def test_inductor_computes_a_step() -> None:
    report = assert_close(convolutional, 1e-4)
    assert report.exact_heads is None
    assert report.compiled_heads >= 8
    assert report.compile_s > 0
    assert "compiled" in str(report)


def test_results_beyond_the_tolerance_are_refused(
    uncompiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_graph = _head_compiled._Function.__call__

    def rounded(function: Any, tensors: Any, numbers: Tensor) -> Any:
        results = run_graph(function, tensors, numbers)
        for result in filter(Tensor.is_floating_point, results):
            result.mul_(1 + 1e-3)
        return results

    monkeypatch.setattr(_head_compiled._Function, "__call__", rounded)
    report = assert_close(convolutional, 0.0)
    assert report.compiled_heads == 0
    assert "more than the tolerance of 1.0e-04" in report.exact_heads
    _, step = run(convolutional, backend="inductor", tolerance=0.01)
    assert coexecute.report(step).compiled_heads >= 8


def test_errors_of_the_compiler_leave_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(_head_compiled._Function, "_compile", fail)
    report = assert_close(clipped, 0.0)
    assert (report.compiled_heads, report.exact_heads) == (0, "OSError: no compiler")
    assert report.heads >= 8


def test_slower_code_leaves_the_record(uncompiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(times: Any, nanoseconds: int, *, by_record: bool) -> None:
        times.decided = True

    monkeypatch.setattr(_update.Times, "add", decide)
    monkeypatch.setattr(_update.Times, "runs_record", lambda times: not times.decided)
    report = assert_close(clipped, 1e-5)
    assert (report.compiled_heads, report.exact_heads) == (1, "recorded operations are faster")


@pytest.mark.parametrize("shares_memory", [False, True])
def test_errors_and_changes_between_steps(uncompiled: list[Any], shares_memory: bool) -> None:
    """A label out of range raises eager mode's error and updates nothing.

    Compiled code does not run with other strides, nor with two states in the same memory.
    """

    def labels(index: int) -> Tensor:
        return torch.arange(6) % (5 if index == 17 else 4)

    def before(index: int, optimizer: Any) -> None:
        if index == 10:
            moments = [state["exp_avg_sq"] for state in optimizer.state.values()]
            if shares_memory:
                moments[1].data = moments[2].data
            else:
                moments[0].data = moments[0].data.t().contiguous().t()

    report = assert_close(convolutional, 1e-4, labels=labels, before=before)
    assert 1 <= report.compiled_heads <= 4
    assert report.exact_heads is None


def test_raising_operators_keep_kernels_of_torch() -> None:
    aten = torch.ops.aten
    assert _head_compiled._functional(aten.index_put_.default) is aten.index_put.default
    assert _head_compiled._functional(aten.embedding.default) is aten.embedding.default


def test_operators_that_write_in_place() -> None:
    aten = torch.ops.aten
    assert _head_compiled._writes_in_place(aten.add_.Tensor)
    assert not any(
        map(_head_compiled._writes_in_place, (aten.add.Tensor, aten.view.default, aten.__lshift__.Scalar))
    )


def test_infinite_gradients_do_not_count() -> None:
    assert _head_compiled._finite_magnitude(torch.tensor([math.inf, -2.0, math.nan])) == 2
    assert _head_compiled._finite_magnitude(torch.tensor([math.inf])) == 0


def test_largest_difference() -> None:
    values = torch.tensor([1.0, -4.0, math.inf, math.nan])
    changed = torch.tensor([1.0, -4.4, math.inf, math.nan])
    assert math.isclose(_head_compiled.largest_difference([values], [changed]), 0.1, rel_tol=1e-5)
    assert math.isclose(_head_compiled.largest_difference([values], [changed], [8.0]), 0.05, rel_tol=1e-5)
    assert _head_compiled.largest_difference([values], [-values]) == math.inf
    assert _head_compiled.largest_difference([torch.tensor(2)], [torch.tensor(3)]) == math.inf
    assert _head_compiled.largest_difference([torch.zeros(0), values], [torch.zeros(0), values]) == 0


def test_options() -> None:
    step = coexecute(math.sqrt, backend="inductor", tolerance=0.5)
    assert (
        pickle.loads(pickle.dumps(step))._tolerance
        == coexecute(backend="inductor", tolerance=0.5)(math.sqrt)._tolerance
        == 0.5
    )
    wrong: list[dict[str, Any]] = [
        {"backend": "eager"},
        {"tolerance": 0.1},
        {"backend": "inductor", "tolerance": 0},
    ]
    for options in wrong:
        with pytest.raises(InputError):
            coexecute(math.sqrt, **options)
