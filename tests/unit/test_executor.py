"""Worker processes: results, failures as outcomes, and who may work while whom."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import CancelledError, Future, wait

import pytest
import stages

from tunebench.device import find
from tunebench.kernels import variant
from tunebench.outcome import CompileFailed, Crashed, Measured, Result, TimedOut
from tunebench.search.executor.local import Caller, LocalExecutor, Stage, call_once
from tunebench.space import Config
from tunebench.task import Task
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=4,cols=4,dtype=f32")


def task(*, compiling: str = "ok", run: str = "ok", us: int = 7) -> Task:
    return Task(
        variant=variant("softmax/numba_cpu"),
        workload=WORKLOAD,
        config=Config({"compile": compiling, "run": run, "us": us}),
        device=find("cpu"),
    )


def executor(*, overlap: bool = True, timeout_s: float = 30.0) -> LocalExecutor:
    return LocalExecutor(
        compiling=Stage(function=stages.compile_task, start=stages.start, workers=2),
        measuring=Stage(function=stages.measure_task, start=stages.start, timeout_s=timeout_s),
        overlap=overlap,
    )


def outcome(future: Future[Result]) -> object:
    return future.result(timeout=60).outcome


def test_every_way_to_end_is_an_outcome_and_the_next_task_still_runs() -> None:
    with executor(timeout_s=2.0) as workers:
        found = [
            outcome(workers.submit(task())),
            outcome(workers.submit(task(compiling="fail"))),
            outcome(workers.submit(task(compiling="crash"))),
            outcome(workers.submit(task(run="crash"))),
            outcome(workers.submit(task(run="exit"))),
            outcome(workers.submit(task(run="hang"))),
            outcome(workers.submit(task(us=9))),
        ]
    assert [type(item) for item in found] == [
        Measured,
        CompileFailed,
        CompileFailed,
        Crashed,
        Crashed,
        TimedOut,
        Measured,
    ]
    assert found[1].reason == "syntax error"
    assert (found[1].refused, found[2].refused) == (True, False)
    assert "SIGSEGV" in found[2].reason
    assert found[3].reason == "worker killed by SIGKILL"
    assert found[4].reason == "worker exited with code 3"
    assert found[5].reason == "no answer within 2 s"
    assert found[6].median_us == 9


def test_compile_time_is_accounted_and_the_incumbent_reaches_the_worker() -> None:
    with executor() as workers:
        workers.abort_above_us = 123.0
        result = workers.submit(task(compiling="slow")).result(timeout=60)
        assert result.effort.compile_s >= 0.2
        assert result.outcome.conditions["abort_above_us"] == 123.0
        assert workers.busy_s >= 0.2


@pytest.mark.parametrize("overlap", [True, False])
def test_compiling_and_measuring_overlap_only_where_allowed(overlap: bool) -> None:
    with executor(overlap=overlap) as workers:
        wait([workers.submit(task())])  # workers are up
        both = False
        futures = [workers.submit(task(compiling="slow", run="slow")) for _ in range(6)]
        while not all(future.done() for future in futures):
            with workers._lock:
                both = both or bool(workers._compiling and workers._measuring)
            time.sleep(0.005)
        assert all(isinstance(outcome(future), Measured) for future in futures)
    assert both is overlap


def test_a_fault_of_ours_is_raised_not_hidden() -> None:
    with executor() as workers:
        future = workers.submit(task(compiling="bug"))
        with pytest.raises(RuntimeError, match="a fault of ours"):
            future.result(timeout=60)


def test_closing_cancels_what_has_not_finished() -> None:
    workers = executor()
    futures = [workers.submit(task(run="hang")) for _ in range(4)]
    time.sleep(0.5)
    began = time.monotonic()
    workers.close()
    assert time.monotonic() - began < 20
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(timeout=1)


def test_one_call_in_a_process_of_its_own() -> None:
    stage = Stage(function=stages.compile_task, start=stages.start)
    assert call_once(stage, task()).key == "k"
    assert isinstance(call_once(stage, task(compiling="crash")), Crashed)
    with pytest.raises(RuntimeError, match="fault"):
        call_once(stage, task(compiling="bug"))


def test_a_process_answers_again_and_again_and_is_replaced_when_it_dies() -> None:
    with Caller(Stage(function=stages.measure_task, start=stages.start)) as caller:
        first, second = (caller.call(task(us=us), None, None).outcome.median_us for us in (3, 4))
        assert (first, second) == (3, 4)
        assert isinstance(caller.call(task(run="crash"), None, None), Crashed)
        assert caller.call(task(us=5), None, None).outcome.median_us == 5


def test_a_caller_that_was_never_used_has_nothing_to_stop() -> None:
    before = set(multiprocessing.active_children())
    with Caller(Stage(function=stages.measure_task, start=stages.start)):
        assert set(multiprocessing.active_children()) <= before


class _Unloadable:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (eval, ("no_such_name",))


def test_what_a_worker_cannot_load_is_an_error_not_a_hang() -> None:
    stage = Stage(function=stages.compile_task, start=stages.start)
    with pytest.raises(NameError):
        call_once(stage, _Unloadable())
