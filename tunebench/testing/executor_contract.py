"""Contract tests of executors: subclass `ExecutorContract` and define the fixture `workers`.

class TestMyExecutor(ExecutorContract):
    timeout_s = 10.0

    @pytest.fixture(scope="class")
    def workers(self) -> Iterator[WorkerExecutor[Task]]:
        with MyExecutor(...) as executor:  # with the stages of executor_stages
            yield executor
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from tunebench._figure import significant
from tunebench.device import find
from tunebench.executor import WorkerExecutor
from tunebench.kernels import variant
from tunebench.outcome import CompileFailed, Crashed, Measured, Result, TimedOut
from tunebench.space import Config
from tunebench.task import Task
from tunebench.testing import executor_stages
from tunebench.workloads import parse

__all__ = ["ExecutorContract", "outcome", "task"]

_WORKLOAD = parse("softmax:rows=4,cols=4,dtype=f32")
_LIMIT_S = 300.0
"""Longest wait for a result, in seconds; only an executor that hangs reaches it."""


def task(*, compiling: str = "ok", run: str = "ok", us: int = 7, folder: str = "") -> Task:
    """Return a task for the stages of `executor_stages`.

    Args:
        compiling: Behaviour of the compiling stage: ok, fail, fault, exhaust, crash, hang, slow or bug.
        run: Behaviour of the measuring stage: ok, fault, lasting fault, exhaust, crash, exit, hang, slow,
            wait or kill.
        us: Time that the measuring stage reports, in microseconds; number of failures of `exhaust`.
        folder: Folder where the behaviours `wait`, `fault` and `exhaust` create files.
    """
    return Task(
        variant=variant("softmax/numba_cpu"),
        workload=_WORKLOAD,
        config=Config({"compile": compiling, "run": run, "us": us, "folder": folder}),
        device=find("cpu"),
    )


def outcome(future: Future[Result]) -> Any:
    """Return the outcome of a submitted task; wait for it."""
    return future.result(timeout=_LIMIT_S).outcome


class ExecutorContract:
    """Tests that every executor must pass; they share the fixture `workers`, and the last one closes it.

    Attributes:
        timeout_s: Time limit of each stage of the executor, in seconds.
    """

    timeout_s: float

    def test_every_failure_is_an_outcome_and_the_next_task_still_runs(
        self, workers: WorkerExecutor[Task]
    ) -> None:
        found = [
            outcome(workers.submit(task())),
            outcome(workers.submit(task(compiling="fail"))),
            outcome(workers.submit(task(compiling="crash"))),
            outcome(workers.submit(task(compiling="hang"))),
            outcome(workers.submit(task(run="crash"))),
            outcome(workers.submit(task(run="exit"))),
            outcome(workers.submit(task(run="hang"))),
            outcome(workers.submit(task(us=9))),
        ]
        measured, *failed, last = found
        assert [type(item) for item in (measured, last)] == [Measured, Measured]
        assert [type(item) for item in failed] == [*[CompileFailed] * 3, Crashed, Crashed, TimedOut]
        assert [item.refused for item in failed[:3]] == [True, False, False]
        late = f"no answer within {significant(self.timeout_s)} s"
        assert [item.reason for item in failed] == [
            "syntax error",
            "the compiler: worker killed by SIGSEGV",
            f"the compiler: {late}",
            "worker killed by SIGKILL",
            "worker exited with code 3",
            late,
        ]
        assert last.median_us == 9

    def test_compile_time_is_counted_and_the_incumbent_reaches_the_worker(
        self, workers: WorkerExecutor[Task]
    ) -> None:
        workers.abort_above_us = 123.0
        result = workers.submit(task(compiling="slow")).result(timeout=_LIMIT_S)
        assert result.effort.compile_s >= 0.2
        assert isinstance(result.outcome, Measured)
        assert result.outcome.conditions["abort_above_us"] == 123.0
        assert workers.busy_s >= 0.2

    def test_exception_in_a_stage_is_raised(self, workers: WorkerExecutor[Task]) -> None:
        future = workers.submit(task(compiling="bug"))
        with pytest.raises(RuntimeError, match="a bug in the stage"):
            future.result(timeout=_LIMIT_S)

    def test_calls_run_next_to_tasks_and_raise_their_exceptions(self, workers: WorkerExecutor[Task]) -> None:
        with workers.same_worker(), workers.caller(executor_stages.compiling) as calls:
            assert calls.call(task()).key == "k"
            assert isinstance(calls.call(task(compiling="crash")), Crashed)
            with pytest.raises(RuntimeError, match="bug"):
                calls.call(task(compiling="bug"))
            assert isinstance(outcome(workers.submit(task())), Measured)

    def test_closing_cancels_unfinished_tasks(self, workers: WorkerExecutor[Task], tmp_path: Path) -> None:
        futures = [workers.submit(task(run="wait", folder=str(tmp_path))) for _ in range(4)]
        executor_stages.wait_for(lambda: any(tmp_path.iterdir()), _LIMIT_S)
        workers.close()  # would not return before the tasks do, which is never
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(timeout=_LIMIT_S)
