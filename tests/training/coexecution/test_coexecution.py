"""`coexecute`: traces, their graph, and steps that equal eager mode."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import pickle
import random
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tunebench.errors import InputError
from tunebench.training import coexecute
from tunebench.training.coexecution import _policy, _recorder, _testing, _update
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._modes import SETTERS, settings
from tunebench.training.coexecution._policy import Policy
from tunebench.training.coexecution._segment import Piece
from tunebench.training.coexecution.analysis import StepAnalysis, UpdateTimes
from tunebench.training.coexecution.coexecution_report import advice
from tunebench.training.coexecution.trace_graph import TracedOperation, TraceGraph


def _trace(names: str) -> list[TracedOperation]:
    return [TracedOperation(operator=name, attributes="", site=("program.py:1",)) for name in names]


def test_merging_traces_is_idempotent_and_independent_of_their_order() -> None:
    traces = [_trace("abcd"), _trace("abxd"), _trace("abcbcd"), _trace("")]
    graphs = []
    for order in itertools.permutations(traces):
        graph = TraceGraph()
        assert [graph.add(trace) for trace in order].count(True) >= 1
        assert not any(graph.add(trace) for trace in order)
        graphs.append(graph)
    assert all(graph == graphs[0] and graph.blocks() == graphs[0].blocks() for graph in graphs)


def test_a_branch_divides_basic_blocks() -> None:
    graph = TraceGraph()
    graph.add(_trace("abcd"))
    assert [len(block.operations) for block in graph.blocks()] == [0, 4, 0]
    graph.add(_trace("abxd"))
    blocks = graph.blocks()
    assert sorted("".join(call.operator for call in block.operations) for block in blocks) == [
        "", "", "ab", "c", "d", "x",
    ]  # fmt: skip


def test_blocks_of_random_graphs_hold_every_operation_once() -> None:
    chance = random.Random(3)
    for _ in range(200):
        graph = TraceGraph()
        for _ in range(chance.randint(1, 5)):
            graph.add(_trace("".join(chance.choices("abcde", k=chance.randint(0, 6)))))
        operations = [operation for block in graph.blocks() for operation in block.operations]
        assert len(operations) == len(set(operations))
        assert set(operations) == graph.operations()


def test_a_step_is_traced_with_backward_and_optimizer() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @coexecute(mode="always")
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        step(torch.ones(4, 3))
    report = coexecute.report(step)
    assert report.iterations == report.traced + report.coexecuted + report.diverged == 3
    names = {operation.operator.split(".")[0] for operation in step.graph.operations()}
    assert {"aten::addmm", "aten::mm", "aten::add_"} <= names
    assert "test_coexecution.py" in next(iter(step.graph.operations())).site[0]
    assert "3" in str(report)


def test_a_with_block_is_an_iteration() -> None:
    iteration = coexecute()
    for _ in range(2):
        with iteration:
            assert (torch.ones(2) + 1).sum().item() == 4
    assert coexecute.report(iteration).iterations == 2


def test_a_method_is_a_step() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.total = torch.zeros(())

        @coexecute
        def step(self, x: float) -> float:
            self.total += x
            return float(self.total.item())

    trainer = Trainer()
    assert [trainer.step(1.0), trainer.step(2.0)] == [1.0, 3.0]
    assert coexecute.report(trainer.step).iterations == 2


def test_a_step_that_is_no_function_is_refused() -> None:
    with pytest.raises(InputError, match="function"):
        coexecute(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="@coexecute"):
        coexecute.report(print)

    async def coroutine() -> None: ...

    def generator() -> Iterator[int]:
        yield 1

    class AsyncStep:
        async def __call__(self) -> None: ...

    for step in (coroutine, functools.partial(coroutine), AsyncStep()):
        with pytest.raises(InputError, match="async function"):
            coexecute(step)
    with pytest.raises(InputError, match="generator function"):
        coexecute(generator)


def _trainer(*, momentum: float = 0.9) -> tuple[nn.Module, Callable[[Tensor, float], Tensor], list[object]]:
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=momentum)
    seen: list[object] = []

    def step(x: Tensor, factor: float) -> Tensor:
        optimizer.zero_grad()
        hidden = network(x) * factor
        loss = hidden.square().mean()
        loss.backward()
        optimizer.step()
        seen.append(round(loss.item(), 6))
        if loss.item() > 0.05:
            seen.append(hidden.detach()[0].tolist())
        return loss.detach()

    return network, step, seen


def _outcome(wrap: Callable[..., Any], iterations: int) -> tuple[list[Tensor], list[object]]:
    network, step, seen = _trainer()
    step = wrap(step)
    inputs = torch.Generator().manual_seed(1)
    losses = [step(torch.randn(3, 4, generator=inputs), 1.0 + 0.1 * i) for i in range(iterations)]
    gradients = [tensor.grad.clone() for tensor in network.parameters() if tensor.grad is not None]
    state = [tensor.clone() for tensor in network.state_dict().values()]
    return [*losses, *gradients, *state, torch.get_rng_state()], seen


def test_known_paths_are_coexecuted_with_numbers_as_inputs() -> None:
    expected, effects = _outcome(lambda step: step, 9)
    steps: list[Any] = []

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        steps.append(coexecute(step))
        return steps[0]  # type: ignore[no-any-return]

    with _testing.forced():
        got, effects_seen = _outcome(wrap, 9)
    assert effects == effects_seen
    assert all(torch.equal(wanted_tensor, two) for wanted_tensor, two in zip(expected, got, strict=True))
    report = coexecute.report(steps[0])
    assert report.coexecuted >= 4
    assert report.iterations == report.traced + report.coexecuted + report.diverged == 9
    assert {segment.runner for segment in report.segments} == {"TorchScript"}
    assert all(segment.runs for segment in report.segments)
    assert 0 < report.waiting_s <= report.coexecuted_s


def test_a_changed_number_of_threads_also_holds_in_the_graph_runner() -> None:
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            torch.set_num_threads(threads)
            expected, _ = _outcome(lambda step: step, 9)
            with _testing.forced():
                got, _ = _outcome(coexecute, 9)
            assert all(torch.equal(tensor, two) for tensor, two in zip(expected, got, strict=True)), threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_an_array_of_a_weight_shows_each_update_at_once(optimizer: Any) -> None:
    def read(wrap: Callable[..., Any]) -> list[float]:
        torch.manual_seed(2)
        layer = nn.Linear(8, 1)
        weights = layer.weight.detach().numpy()
        update = optimizer(layer.parameters(), lr=0.1)
        seen = []

        def step(x: Tensor) -> None:
            update.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            update.step()
            loss.item()
            seen.append(float(weights[0, 0]))

        step = wrap(step)
        for _ in range(8):
            step(torch.randn(4, 8))
        return seen

    expected = read(lambda step: step)
    with _testing.forced():
        assert read(coexecute) == expected


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "nesterov": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.1, maximize=True),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1, weight_decay=0.1),
    "Adamax": lambda weights: torch.optim.Adamax(weights, lr=0.1),
    "AMSGrad": lambda weights: torch.optim.AdamW(weights, lr=0.1, amsgrad=True, maximize=True),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=0.1, centered=True, momentum=0.9),
    "Rprop": lambda weights: torch.optim.Rprop(weights, lr=0.1),
    "ASGD": lambda weights: torch.optim.ASGD(weights, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_gradients_are_those_of_eager_mode_when_the_learning_rate_changes(name: str) -> None:
    """The functions of some optimizers on lists of tensors write into the gradients."""

    def gradients(wrap: Callable[..., Any]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(5)
        layer = nn.Linear(4, 2)
        optimizer = _OPTIMIZERS[name](layer.parameters())

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()

        step, seen = wrap(step), []
        for number in range(8):
            optimizer.param_groups[0]["lr"] = 0.1 if number < 5 else 0.05
            step(torch.randn(3, 4))
            seen += [tensor.clone() for value in layer.parameters() for tensor in (value, value.grad)]
        return seen, step

    expected, _ = gradients(lambda step: step)
    with _testing.forced():
        got, step = gradients(coexecute)
    assert all(map(torch.equal, expected, got))
    assert name in ("Rprop", "ASGD") or coexecute.report(step).coexecuted > 2


_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "DLPack": lambda weight: np.from_dlpack(weight.detach()),
    "array interface": lambda weight: np.asarray(weight.detach()),
    "memory view": lambda weight: memoryview(weight.detach().numpy()),
    "shared memory": lambda weight: np.ctypeslib.as_array(
        ctypes.cast(weight.share_memory_().data_ptr(), ctypes.POINTER(ctypes.c_float)), (1, 8)
    ),
}
"""Functions that give other code the memory of a weight."""


@pytest.mark.parametrize("name", _VIEWS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_another_view_of_a_weight_shows_each_update_at_once(name: str, optimizer: Any) -> None:
    def read(wrap: Callable[..., Any]) -> tuple[list[float], Any]:
        torch.manual_seed(2)
        layer = nn.Linear(8, 1)
        weights = _VIEWS[name](layer.weight)
        update = optimizer(layer.parameters(), lr=0.1)
        seen = []

        def step(x: Tensor) -> None:
            update.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            update.step()
            loss.item()
            seen.append(float(weights[0, 0]))

        step = wrap(step)
        for _ in range(8):
            step(torch.randn(4, 8))
        return seen, step

    expected, _ = read(lambda step: step)
    with _testing.forced():
        got, step = read(coexecute)
    assert got == expected
    assert coexecute.report(step).coexecuted > 3


def test_a_view_that_a_thread_holds_for_a_while_is_not_one_of_the_program() -> None:
    """Otherwise, paths would be left at random."""
    layer = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    @coexecute
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with _testing.forced():
        for number in range(8):
            view = layer.weight.detach() if number >= 5 else None
            step(torch.randn(4, 8))
            del view
    assert coexecute.report(step).coexecuted == 6


def test_a_weak_reference_to_a_tensor_ends_when_the_step_drops_it() -> None:
    def lives(wrap: Callable[..., Any]) -> tuple[list[bool], Any]:
        seen = []

        def step(x: Tensor) -> None:
            makers = (lambda: x * 2, lambda: torch.ones(2), lambda: nn.Parameter(torch.ones(3)))
            for make in makers:
                tensor = make()  # type: ignore[no-untyped-call]
                reference = weakref.ref(tensor)
                (tensor + 1).sum().item()
                del tensor
                seen.append(reference() is not None)

        step = wrap(step)
        for _ in range(6):
            step(torch.randn(4))
        return seen, step

    with _testing.forced():
        got, step = lives(coexecute)
    assert got == lives(lambda step: step)[0] == [False] * 18
    assert "weak reference" in coexecute.report(step).fallbacks[0].reason
    assert "__del__" not in vars(Tensor)


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD])
def test_an_error_in_the_last_segment_takes_back_what_ran(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last segment fails once after a part that wrote; the step then runs again as in eager mode."""

    def outcome(wrap: Callable[..., Any], fails: Callable[[], None]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(3)
        layer, total = nn.Linear(4, 2), torch.zeros(2)
        update = optimizer(layer.parameters(), lr=0.1) if optimizer is not None else None

        def step(x: Tensor) -> None:
            layer.zero_grad()
            loss = layer(x).square().sum()
            loss.backward()
            if update is not None:
                update.step()
            total.add_(layer.weight.detach().sum(1)).mul_(0.9)

        step = wrap(step)
        for number in range(8):
            if number == 5:
                fails()
            step(torch.randn(3, 4))
        return [*layer.parameters(), total], step

    run = Piece.run
    failed: list[Piece] = []

    def failing(self: Piece, values: Any, numbers: Any) -> None:
        run(self, values, numbers)
        if self.writes and not failed:
            failed.append(self)
            raise RuntimeError("no memory")

    expected, _ = outcome(lambda step: step, lambda: None)
    with _testing.forced():
        got, step = outcome(coexecute, lambda: monkeypatch.setattr(Piece, "run", failing))
    assert failed
    assert all(map(torch.equal, expected, got))
    reasons = [place.reason for place in coexecute.report(step).divergences]
    assert "RuntimeError in an operation" in reasons


@contextlib.contextmanager
def _set(name: str, change: bool) -> Iterator[None]:
    getattr(torch, name)(change)
    try:
        yield
    finally:
        getattr(torch, name)(False)


_CHANGES: dict[str, Callable[[bool], contextlib.AbstractContextManager[Any]]] = {
    "set_flush_denormal": functools.partial(_set, "set_flush_denormal"),
    "set_sdp_use_flash": lambda change: sdpa_kernel(SDPBackend.MATH) if change else contextlib.nullcontext(),
    "set_deterministic_algorithms": functools.partial(_set, "use_deterministic_algorithms"),
}


@pytest.mark.parametrize("name", _CHANGES)
@pytest.mark.parametrize("within", [True, False])
def test_a_setting_of_torch_that_changes_holds_for_what_runs_then(name: str, within: bool) -> None:
    """A setting changes in some steps only, within the step or around it; results are those of eager mode."""

    def outcome(wrap: Callable[..., Any]) -> tuple[list[Tensor], Any]:
        torch.manual_seed(4)
        layer = nn.Linear(16, 16)

        def compute(x: Tensor) -> Tensor:
            query = layer(x).view(2, 2, -1, 16)
            return nn.functional.scaled_dot_product_attention(query, query, query) * 1e-39

        def change_within(x: Tensor, change: bool) -> Tensor:
            with _CHANGES[name](change):
                return compute(x).detach()

        def change_around(x: Tensor, change: bool) -> Tensor:
            with _CHANGES[name](change):
                return around(x)

        around = wrap(lambda x: compute(x).detach())
        step = wrap(change_within) if within else change_around
        results = [step(torch.randn(64, 16), index % 3 == 2) for index in range(12)]
        return results, step if within else around

    expected, _ = outcome(lambda step: step)
    with _testing.forced():
        results, step = outcome(coexecute)
    assert all(map(torch.equal, expected, results))
    report = coexecute.report(step)
    assert report.coexecuted > 0
    assert not within or any(name in place.reason for place in (*report.divergences, *report.fallbacks))


_TREATED_BY_CALL = (
    "set_grad_enabled set_autocast_enabled set_autocast_dtype set_autocast_cpu_enabled "
    "set_autocast_cpu_dtype _set_grad_enabled"
)
"""Read at every call of a path."""

_READ_BY_OTHER_NAMES = (
    "set_autocast_cache_enabled set_deterministic_debug_mode set_float32_matmul_precision "
    "set_default_dtype _set_fp32_precision_setter set_default_tensor_type _set_default_tensor_type"
)
"""Guards of paths, read by another function than their own."""

_MODES_OF_TORCH = (
    "set_default_device _set_dispatch_mode _set_torch_function_state _set_skip_next_torch_function "
    "_set_tracing_state _set_value_trace _set_meta_in_tls_dispatch_include "
    "_set_only_lift_cpu_tensors _set_fwd_grad_enabled"
)
"""Modes, in which the step or the call runs as in eager mode."""

_OTHER_DEVICES = (
    "_set_blas_preferred_backend _set_cublas_ _set_cudnn_ _set_linalg_preferred_backend "
    "_set_miopen_immediate _set_rocm_fa_ _set_sdp_use_cudnn _set_sdp_use_fa3 _set_sm_carveout "
    "_set_override_stale_capture_stream _set_warn_on_accumulate_grad_stream "
    "_set_cached_tensors_enabled set_autocast_gpu set_autocast_ipu set_autocast_xla _set_qengine "
    "_set_dtensor"
)
"""Settings of tensors that run as in eager mode: on other devices, quantized or distributed."""

_NO_RESULTS = (
    "_set_autograd_fallback_mode _set_backcompat_ _set_check_sparse_tensor_invariants _set_conj "
    "_set_neg _set_default_mobile_cpu_allocator _set_generator_metaclass "
    "_set_grad_layout_enforcement_enabled _set_graph_exec_group _set_graph_executor_optimize "
    "_set_multithreading_enabled _set_print_stack_traces _set_should_use_format _set_tensor_metadata "
    "_set_thread_name _set_throw_on_mutable _set_view_replay _set_warnAlways _set_warn_deprecated "
    "_set_worker_ set_num_interop_threads set_printoptions set_rng_state set_warn_always"
)
"""Warnings, errors, threads of the backward pass, and what the step's own Python reads."""


def test_every_setting_of_torch_is_a_guard_or_has_a_reason_not_to_be() -> None:
    """A function that a later torch adds must be treated, and listed here and in the guide."""
    names = {name for owner in (torch, torch._C) for name in dir(owner) if name.startswith(("set_", "_set_"))}
    guards = {name for _, name in SETTERS}
    groups = (_TREATED_BY_CALL, _READ_BY_OTHER_NAMES, _MODES_OF_TORCH, _OTHER_DEVICES, _NO_RESULTS)
    listed = tuple(prefix for group in groups for prefix in group.split())
    assert sorted(name for name in names - guards if not name.startswith(listed)) == []


@pytest.mark.parametrize("setter", [torch.set_autocast_cache_enabled, torch.set_default_dtype])
def test_settings_that_another_function_reads_are_part_of_a_path(setter: Callable[..., None]) -> None:
    before, new = settings(), torch.float64 if setter is torch.set_default_dtype else False
    try:
        setter(new)
        assert settings() != before
    finally:
        setter(torch.float32 if setter is torch.set_default_dtype else True)
    assert settings() == before


def test_leaving_a_path_at_any_call_is_invisible() -> None:
    """After some steps that are recorded, each step leaves the path one call later than the one before."""
    recorded, places = 4, 20
    expected, effects = _outcome(lambda step: step, recorded + places)
    steps: list[Any] = []

    def wrap(step: Callable[..., Any]) -> Callable[..., Any]:
        steps.append(coexecute(step))
        calls = itertools.chain([-1] * recorded, range(places))

        def run(*args: Any) -> Any:
            with _testing.forced(), _testing.diverge_at(next(calls)):
                return steps[0](*args)

        return run

    actual, effects_seen = _outcome(wrap, recorded + places)
    assert effects == effects_seen
    assert all(map(torch.equal, expected, actual))
    assert _left(steps[0]) >= 15


def _left(step: Any) -> int:
    """Return how many iterations of a step left a path because a test forced them."""
    divergences = coexecute.report(step).divergences
    return sum(place.count for place in divergences if place.reason == _testing.FORCED)


def test_objects_that_outlive_a_step_are_tensors() -> None:
    outliving: list[Tensor] = []

    @coexecute
    def step(x: Tensor) -> Tensor:
        y = x * 2
        y.note = "mine"
        outliving.append(y)
        return y + 1

    with _testing.forced():
        results = [step(torch.full((2,), float(i))) for i in range(5)]
    assert [tensor.tolist() for tensor in outliving] == [[2.0 * i] * 2 for i in range(5)]
    assert [tensor.tolist() for tensor in results] == [[2.0 * i + 1] * 2 for i in range(5)]
    assert all(type(tensor) is Tensor and tensor.note == "mine" for tensor in outliving)
    assert coexecute.report(step).coexecuted >= 3


def test_an_error_is_raised_at_its_call_and_what_came_before_is_kept() -> None:
    table, log = torch.eye(3), []

    @coexecute
    def step(index: Tensor) -> Any:
        table.add_(1)
        row = torch.index_select(table, 0, index)
        log.append("selected")
        table.mul_(2)
        return row.sum().item()

    with _testing.forced():
        for _ in range(3):
            step(torch.tensor([1]))
        before = table.clone()
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            step(torch.tensor([9]))
    assert torch.equal(table, before + 1)
    assert log == ["selected"] * 3


def test_a_step_that_gains_nothing_returns_to_eager_mode() -> None:
    policy = Policy()
    for _ in range(200):
        if policy.runs_eagerly():
            policy.add_eager(1e-3)
        else:
            policy.add(2e-3, known=True, threaded=False)
    assert policy.reason is not None
    assert "1.00 ms" in policy.reason
    faster = Policy()
    for _ in range(200):
        if faster.runs_eagerly():
            faster.add_eager(2e-3)
        else:
            faster.add(1e-3, known=True, threaded=False)
    assert faster.reason is None


def _run_policy(eager_s: float, other_s: float, learning_s: float, count: int) -> tuple[float, int]:
    """Return the time of iterations over that in eager mode, and how many were recorded."""
    policy, total, recorded = Policy(), 0.0, 0
    for _ in range(count):
        if policy.runs_eagerly():
            policy.add_eager(eager_s)
            total += eager_s
        else:
            policy.add(other_s, known=False, threaded=False, learning_s=learning_s)
            total += other_s + learning_s
            recorded += 1
    return total / (count * eager_s), recorded


def test_records_of_a_step_that_always_takes_new_paths_cost_a_part_of_its_time() -> None:
    assert _run_policy(1e-3, 30e-3, 20e-3, 40)[1] == 0
    ratio, recorded = _run_policy(1e-3, 30e-3, 20e-3, 2000)
    assert 1.0 < ratio < 1.2
    assert recorded >= 2


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_a_step_with_a_permanent_reason_is_recorded_twice(mode: Any) -> None:
    network = _hooked()
    step = coexecute(lambda x: network(x).sum().backward(), mode=mode)
    step._policy._affords = lambda: True  # type: ignore[method-assign]
    for _ in range(12):
        step(torch.ones(3, 2))
    report = coexecute.report(step)
    assert report.traced == 2
    assert "hooks" in str(report.returned)
    assert "remove the hooks" in str(report)


def _hooked() -> nn.Module:
    layer = nn.Linear(2, 1)
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="always, auto, report"):
        coexecute(lambda: None, mode="never")  # type: ignore[arg-type]


def test_a_step_that_is_only_reported_runs_as_in_eager_mode() -> None:
    step = coexecute(lambda x: (x * 2).sum().item(), mode="report")
    assert [step(torch.ones(3)) for _ in range(20)] == [6.0] * 20
    report = coexecute.report(step)
    assert (report.coexecuted, report.diverged, report.traced) == (0, 0, 3)
    assert report.operations == 3


def _decorated(x: Tensor) -> float:
    return float(x.sum().item())


def test_a_step_is_pickled_as_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    decorated = coexecute(_decorated)
    monkeypatch.setattr(sys.modules[__name__], "_decorated", decorated)  # as a decorator does
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    step = pickle.loads(pickle.dumps(coexecute(_plain, mode="always")))
    assert [step(torch.ones(2)) for _ in range(4)] == [2.0] * 4
    assert coexecute.report(step).coexecuted == 3


def _plain(x: Tensor) -> float:
    return float(x.sum().item())


def test_a_step_that_returned_to_eager_mode_holds_no_paths_and_reports_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @coexecute
    def step(x: torch.Tensor) -> float:
        return float((x * 2).sum().item())

    with _testing.forced():
        for _ in range(4):
            step(torch.ones(3))
    follow = weakref.ref(step._tree.paths[0][0][0].follow)
    before = coexecute.report(step)
    monkeypatch.setattr(step._policy, "reason", "too slow")
    monkeypatch.setattr(Policy, "runs_eagerly", lambda policy: False)  # one more iteration
    gc.disable()
    try:
        step(torch.ones(3))
        assert follow() is None
    finally:
        gc.enable()
    assert not step._tree.paths
    assert not step._tree.root.following
    after = coexecute.report(step)
    assert after.fetches == before.fetches != frozenset()
    assert after.runners == before.runners != {}
    assert step(torch.ones(3)) == 6.0


def test_hooks_run_as_in_eager_mode() -> None:
    layer, seen = nn.Linear(2, 1), []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.sum().item()))

    def plain(x: Tensor) -> None:
        layer(x).sum().backward()

    step, line = coexecute(plain), plain.__code__.co_firstlineno + 1

    with _testing.forced():
        for _ in range(4):
            step(torch.ones(3, 2))
    assert seen == [6.0] * 4
    report = coexecute.report(step)
    assert report.coexecuted == 0
    assert report.fallbacks[0].site.endswith(str(line))
    assert "hooks" in report.fallbacks[0].reason


def test_an_analysis_says_where_python_reads_and_what_would_be_gained() -> None:
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    reference = copy.deepcopy(layer)
    other = torch.optim.Adam(reference.parameters(), lr=0.01)

    def step(x: Tensor, network: nn.Module = layer, update: torch.optim.Optimizer = optimizer) -> float:
        update.zero_grad()
        loss = network(x).square().mean()
        loss.backward()
        update.step()
        return float(loss.item() + loss.item())

    batches = [torch.full((3, 4), float(number)) for number in range(12)]
    analysis = coexecute.analyze(step, batches)
    for batch in batches:
        step(batch, reference, other)
    assert all(map(torch.equal, layer.parameters(), reference.parameters()))
    assert (analysis.steps, analysis.paths) == (12, 1)
    (read,) = analysis.reads
    assert read.per_step == 2
    assert read.site.endswith(str(step.__code__.co_firstlineno + 5))
    assert any(line.startswith(read.site) for line in analysis.advice())
    assert [update.optimizer for update in analysis.updates] == ["Adam"]
    assert analysis.coexecuted_ms is not None
    assert f"{analysis.eager_ms:.2f} ms" in str(analysis)


def test_advice_of_an_analysis_follows_from_its_times() -> None:
    update = UpdateTimes(optimizer="Adam", update_ms=0.5, fused_ms=0.1)
    slow = UpdateTimes(optimizer="SGD", update_ms=0.1, fused_ms=0.1)
    report = coexecute.report(coexecute(lambda: None))
    analysis = StepAnalysis(
        steps=9, eager_ms=2.0, coexecuted_ms=1.5, paths=1, reads=(), updates=(update, slow), report=report
    )
    assert analysis.advice() == (
        "Pass fused=True to Adam: a step takes 20% less time.",
        "Decorate the step with coexecute: a step takes 25% less time.",
    )


def test_an_analysis_names_the_place_where_paths_never_repeat() -> None:
    lengths = itertools.count(1)

    def step(x: Tensor) -> float:
        for _ in range(next(lengths)):
            x = x * 2
        return float(x.sum().item())

    analysis = coexecute.analyze(step, [torch.ones(2)] * 8)
    assert analysis.coexecuted_ms is None
    place = f"{__file__}:{step.__code__.co_firstlineno + 2}"
    assert any(line.startswith("To be co-executed") and place in line for line in analysis.advice())
    assert f"left the known paths at {place}" in str(analysis)
    assert "(2 iterations)" in str(analysis)


def test_an_analysis_needs_some_batches() -> None:
    with pytest.raises(InputError, match="at least 4 batches"):
        coexecute.analyze(lambda x: x.sum().item(), [torch.ones(2)])


@pytest.mark.parametrize(
    "name",
    ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"],
)
def test_co_executed_updates_have_the_bits_of_the_optimizer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_update, "_CALLS", 4)  # after which an update is recorded, and runs in turn

    def trained(wrap: Callable[[Any], Any]) -> tuple[Any, Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(7, 33)
        optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.01)

        def plain(x: Tensor) -> float:
            optimizer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            optimizer.step()
            return float(loss.item())

        step = wrap(plain)
        for _ in range(16):
            step(torch.randn(4, 7))
        return step, layer.weight.detach().clone()

    _, expected = trained(lambda step: step)
    step, actual = trained(functools.partial(coexecute, mode="always"))
    report = coexecute.report(step)
    assert report.coexecuted > 8
    assert (report.updates > 2) is (name not in ("ASGD", "RAdam", "Rprop")), report
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("taken_mib", "records", "threads"), [(10, True, True), (30, True, False), (200, False, False)]
)
def test_a_step_with_much_memory_is_not_recorded(
    taken_mib: int, records: bool, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, resident_mib = Policy(), 400.0
    monkeypatch.setattr(_policy, "resident_bytes", lambda: resident_mib * 2**20)
    started = []
    for _ in range(120):
        if policy.runs_eagerly():
            resident_mib = 400.0 + taken_mib
            policy.add_eager(1e-3)
        else:
            started.append(policy.threaded())
            policy.add(9e-4, known=True, threaded=started[-1])
    assert bool(started) is records is (policy.reason is None)
    assert any(started) is threads
    assert records or "memory" in str(policy.reason)


def test_a_step_that_is_only_reported_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(3)
    monkeypatch.setattr(torch.UntypedStorage, "clone", None)
    step = coexecute(lambda: weight.mul_(2), mode="report")
    for _ in range(3):
        step()
    assert weight.tolist() == [8.0] * 3
    assert coexecute.report(step).traced == 2


def test_a_call_without_tensors_is_no_reason_for_eager_mode() -> None:
    @coexecute(mode="always")
    def step(x: Tensor) -> float:
        device, limits = torch.device("cpu"), torch.finfo(x.dtype)
        return float((x * 2).to(device).clamp_max(limits.max).sum().item())

    assert [step(torch.ones(3)) for _ in range(4)] == [6.0] * 4
    assert coexecute.report(step).coexecuted == 3


_FOLDER = Path(_recorder.__file__).parent
_REASON = re.compile(r'(?:NotUnderstoodError|refuse)\(\s*f?"([^"]*)"|refused = f?"([^"]*)"|other = "([^"]*)"')


def test_every_reason_of_eager_mode_has_advice() -> None:
    reasons = [
        "".join(parts)
        for file in ("_autograd.py", "_learning.py", "_modes.py", "_recorder.py", "_tensors.py")
        for parts in _REASON.findall((_FOLDER / file).read_text(encoding="utf-8"))
    ]
    reasons += [kind.value for kind in (Kind.UNSEEN,)]
    assert len(reasons) > 25
    assert [reason for reason in reasons if advice(reason) is None and reason != _UNSEEN] == []


_UNSEEN = "{_name(function)} {found.value}"
"""The reason that `Kind.UNSEEN` completes."""


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: torch.normal(x, 1.0), "torch.normal draws random numbers that depend on values"),
        (lambda x: torch.zeros(2).index_add_(0, torch.tensor([0, 1]), x), "Tensor.index_add_ changed"),
    ],
)
def test_a_permanent_reason_ends_recording_after_two_records(
    call: Callable[[Tensor], Any], name: str
) -> None:
    weight = nn.Parameter(torch.ones(2))

    def plain() -> None:
        call(weight * 2)

    step = coexecute(plain)
    step._policy._affords = lambda: True  # type: ignore[method-assign]
    for _ in range(8):
        step()
    report = coexecute.report(step)
    assert report.traced == 2
    assert report.returned is not None
    (fallback,) = report.fallbacks
    assert fallback.reason.startswith(name)
    assert fallback.site.startswith(f"{__file__}:")
    assert fallback.count == 2
    assert str(report).count(f"{fallback.site}: {fallback.reason}") == 2
    assert (advice(fallback.reason) or "no advice") in str(report)
