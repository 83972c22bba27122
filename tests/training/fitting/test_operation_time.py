"""Times of the calls of a graph, measured in its order."""

from __future__ import annotations

import itertools
import os
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, fx  # noqa: E402
from torch._dispatch.python import enable_python_dispatcher  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from benchmarks.planned_peaks import LiveStorages  # noqa: E402
from tunebench.training.fitting import operation_time  # noqa: E402
from tunebench.training.fitting.operation_time import ThreadClock, around_us, measured_times  # noqa: E402

ROWS = 64
TENSOR_BYTES = 4 * ROWS * ROWS


def chain(x: Tensor, weight: Tensor) -> Tensor:
    for _ in range(6):
        x = (x @ weight).tanh().view(-1).view(ROWS, ROWS)
    return x


@pytest.fixture
def calls() -> list[fx.Node]:
    """Return the calls of six products, each with a tanh and two views."""
    graph = make_fx(chain, tracing_mode="fake")(torch.ones(ROWS, ROWS), torch.ones(ROWS, ROWS)).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def test_calls_run_together_as_long_as_their_tensors_fit(calls: list[fx.Node]) -> None:
    for tensors, lengths in ((0, {1}), (3, {1, 3}), (4, {len(calls)}), (100, {len(calls)})):
        parts = list(operation_time._parts(calls, tensors * TENSOR_BYTES))
        assert list(itertools.chain(*parts)) == calls
        assert {len(part) for part in parts} == lengths


def test_measured_calls_stay_within_their_memory(calls: list[fx.Node]) -> None:
    for tensors in (3, 4):
        with LiveStorages([]) as counted:
            measured_times(calls, tensors * TENSOR_BYTES)
        assert counted.peak_bytes == 3 * TENSOR_BYTES


def test_calls_are_measured_without_the_dispatcher_in_python(calls: list[fx.Node]) -> None:
    key = torch._C.DispatchKey.PythonDispatcher
    active = []

    def product(x: Tensor, weight: Tensor) -> Tensor:
        active.append(torch._C._dispatch_tls_is_dispatch_key_included(key))
        return x @ weight

    calls[0].target = product
    with enable_python_dispatcher():
        times_us = measured_times(calls, 3 * TENSOR_BYTES)
        assert torch._C._dispatch_tls_is_dispatch_key_included(key)
    assert len(times_us) == len(calls)
    assert set(active) == {False}


def test_calls_that_cannot_run_count_by_their_bytes(calls: list[fx.Node]) -> None:
    ran = []

    def refused(*_: Any) -> Tensor:
        raise RuntimeError("expected another type")

    def tanh(x: Tensor) -> Tensor:
        ran.append(x)
        assert x.shape == (ROWS, ROWS)
        return x.tanh()

    calls[0].target, calls[1].target, calls[4].target = refused, tanh, refused
    times_us = measured_times(calls)
    assert times_us[0] == times_us[4] > 0
    assert all(torch.equal(x, torch.ones(ROWS, ROWS)) for x in ran)


def test_results_that_cannot_be_made_up_are_an_error(
    calls: list[fx.Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Tensor:
        raise RuntimeError("out of memory")

    calls[0].target = refused
    monkeypatch.setattr(operation_time, "_maker", lambda node: refused)
    with pytest.raises(RuntimeError, match="out of memory"):
        measured_times(calls)


def test_measuring_changes_no_random_numbers_and_no_mode() -> None:
    state = torch.get_rng_state()
    with torch.no_grad():
        assert around_us() > 0
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_clock_stops_while_other_programs_have_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second wait begins between the readings of the two clocks."""
    waits_ns, walls_s = iter([0, 0, 0, 200_000_000, 200_000_000]), iter([1.0, 1.5, 1.75])
    monkeypatch.setattr(os, "pread", lambda *_: b"5 %d 7\n" % next(waits_ns))
    monkeypatch.setattr(time, "perf_counter", lambda: next(walls_s))
    clock = ThreadClock()
    assert [clock.now_s(), clock.now_s()] == pytest.approx([1.0, 1.55])


def test_clock_counts_sleep() -> None:
    clock = ThreadClock()
    began_s = clock.now_s()
    time.sleep(0.05)
    assert clock.now_s() - began_s >= 0.05


def test_clock_runs_on_a_system_that_counts_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    clock = ThreadClock()
    assert clock.now_s() <= time.perf_counter() <= clock.now_s()
