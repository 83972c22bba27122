"""Pruning after compile: `LocalExecutor` bounds a configuration with the resources of its binary."""

from __future__ import annotations

import functools
from concurrent.futures import Future

import pytest

from tests.support import measured
from tunebench.binary.compiled import Binary
from tunebench.bound import refined_us
from tunebench.device import described
from tunebench.executor import TaskRefused
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.kernels import variant
from tunebench.outcome import Measured, Pruned, Resources, Result
from tunebench.task import Task
from tunebench.testing import executor_stages as stages
from tunebench.tuning.audit import task_bound_us
from tunebench.workloads import parse

H100 = described()["h100-sxm"]
SIMT = variant("gemm/cuda_simt")
WORKLOAD = parse("gemm:m=1024,n=1024,k=2048,dtype=f32")
FULL = Resources(registers=255, static_smem_bytes=110_000)
"""Resources that let an SM hold two blocks only."""


def compile_to_full(_task: Task) -> Binary:
    """Return a binary with the resources `FULL`."""
    return Binary(key="k", language="cuda", target="sm_90a", payload=b"", entries=("k",), resources=FULL)


def compile_to_unknown(_task: Task) -> Binary:
    """Return a binary whose resources are unknown."""
    return Binary(key="k", language="cuda", target="sm_90a", payload=b"", entries=("k",))


def measure(_task: Task, binary: Binary, _abort_above_us: float | None) -> Result:
    return Result(outcome=measured(5.0), resources=binary.resources)


@functools.cache
def task_and_bound_us() -> tuple[Task, float]:
    """Return a configuration whose bound rises with the resources `FULL`, and the refined bound."""
    table = SIMT.configs(WORKLOAD, H100)
    for row in range(0, len(table), len(table) // 300):
        config = table.config(row)
        before_us, after_us = (
            refined_us(SIMT, WORKLOAD, config, H100, resources) for resources in (Resources(), FULL)
        )
        if after_us > 1.05 * before_us:
            return Task(variant=SIMT, workload=WORKLOAD, config=config, device=H100, prune=True), after_us
    pytest.fail("no configuration has a bound that these resources raise")


def executor(compile_task: object = compile_to_full, *, overlap: bool = True) -> LocalExecutor:
    return LocalExecutor(
        compiling=ProcessStage(function=compile_task, start=stages.start),  # type: ignore[arg-type]
        measuring=ProcessStage(function=measure, start=stages.start),
        overlap=overlap,
        bound=functools.partial(task_bound_us, cache="cold"),
    )


def result(future: Future[Result]) -> Result:
    return future.result(timeout=120)


def test_configuration_that_cannot_win_by_its_resources_is_pruned_and_never_measured() -> None:
    task, bound_us = task_and_bound_us()
    with executor() as workers:
        workers.abort_above_us = 0.99 * bound_us
        answer = result(workers.submit(task))
    assert answer.outcome == Pruned(bound_us=pytest.approx(bound_us), incumbent_us=0.99 * bound_us)
    assert answer.resources == FULL
    assert answer.bound_us == pytest.approx(bound_us)
    assert answer.effort.compile_s > 0
    assert answer.effort.measure_s == 0


@pytest.mark.parametrize(
    ("prune", "known", "incumbent"),
    [
        pytest.param(True, True, 1.01, id="could win"),
        pytest.param(True, True, None, id="no incumbent"),
        pytest.param(True, False, 0.99, id="resources unknown"),
        pytest.param(False, True, 0.99, id="audited"),
    ],
)
def test_configuration_that_could_win_is_measured_and_its_result_has_the_refined_bound(
    prune: bool, known: bool, incumbent: float | None
) -> None:
    task, bound_us = task_and_bound_us()
    with executor(compile_to_full if known else compile_to_unknown) as workers:
        workers.abort_above_us = None if incumbent is None else incumbent * bound_us
        answer = result(
            workers.submit(
                Task(variant=SIMT, workload=WORKLOAD, config=task.config, device=H100, prune=prune)
            )
        )
    assert isinstance(answer.outcome, Measured)
    assert answer.bound_us == pytest.approx(bound_us if known else 0.0)


@pytest.mark.parametrize("overlap", [True, False])
def test_pruned_configurations_leave_their_turn_to_compiling(overlap: bool) -> None:
    task, bound_us = task_and_bound_us()
    with executor(overlap=overlap) as workers:
        workers.abort_above_us = 0.99 * bound_us
        first = [workers.submit(task) for _ in range(3)]
        # Submitted from the thread that reports a result, while the other results are still due.
        later: list[Future[Result]] = []
        first[0].add_done_callback(lambda _: later.append(workers.submit(task)))
        assert {type(result(future).outcome) for future in first} == {Pruned}
        assert isinstance(result(later[0]).outcome, Pruned)


def test_refused_task_is_compiled_and_never_measured() -> None:
    task, _ = task_and_bound_us()
    refused = iter(["it hung", None])
    with LocalExecutor(
        compiling=ProcessStage(function=compile_to_full, start=stages.start),
        measuring=ProcessStage(function=measure, start=stages.start),
        overlap=True,
        refuse=lambda _: next(refused),
    ) as workers:
        first, second = (workers.submit(task) for _ in range(2))
        with pytest.raises(TaskRefused, match="it hung"):
            result(first)
        assert isinstance(result(second).outcome, Measured)
