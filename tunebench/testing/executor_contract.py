"""What every executor promises: each joins by a class that derives from `ExecutorContract`."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from tunebench.device import find
from tunebench.executor import WorkerExecutor
from tunebench.kernels import variant
from tunebench.outcome import CompileFailed, Crashed, Measured, Result, TimedOut
from tunebench.space import Config
from tunebench.task import Task
from tunebench.testing import executor_stages as stages
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=4,cols=4,dtype=f32")


def task(*, compiling: str = "ok", run: str = "ok", us: int = 7, folder: str = "") -> Task:
    return Task(
        variant=variant("softmax/numba_cpu"),
        workload=WORKLOAD,
        config=Config({"compile": compiling, "run": run, "us": us, "folder": folder}),
        device=find("cpu"),
    )


def outcome(future: Future[Result]) -> Any:
    return future.result(timeout=60).outcome


class ExecutorContract:
    """Tests share one executor, the fixture `workers`; the last of them closes it.

    Attributes:
        timeout_s: What it gives to measuring a task.
    """

    timeout_s: float

    def test_every_way_to_end_is_an_outcome_and_the_next_task_still_runs(
        self, workers: WorkerExecutor[Task]
    ) -> None:
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
        assert found[5].reason == f"no answer within {self.timeout_s:g} s"
        assert found[6].median_us == 9

    def test_compile_time_is_accounted_and_the_incumbent_reaches_the_worker(
        self, workers: WorkerExecutor[Task]
    ) -> None:
        workers.abort_above_us = 123.0
        result = workers.submit(task(compiling="slow")).result(timeout=60)
        assert result.effort.compile_s >= 0.2
        assert isinstance(result.outcome, Measured)
        assert result.outcome.conditions["abort_above_us"] == 123.0
        assert workers.busy_s >= 0.2

    def test_a_fault_of_ours_is_raised_not_hidden(self, workers: WorkerExecutor[Task]) -> None:
        future = workers.submit(task(compiling="bug"))
        with pytest.raises(RuntimeError, match="a fault of ours"):
            future.result(timeout=60)

    def test_calls_are_made_beside_and_their_errors_raised(self, workers: WorkerExecutor[Task]) -> None:
        with workers.same_worker(), workers.caller(stages.compiling) as calls:
            assert calls.call(task()).key == "k"
            assert isinstance(calls.call(task(compiling="crash")), Crashed)
            with pytest.raises(RuntimeError, match="fault"):
                calls.call(task(compiling="bug"))
            assert isinstance(outcome(workers.submit(task())), Measured)

    def test_closing_cancels_what_has_not_finished(self, workers: WorkerExecutor[Task]) -> None:
        futures = [workers.submit(task(run="hang")) for _ in range(4)]
        time.sleep(0.5)
        began = time.monotonic()
        workers.close()
        assert time.monotonic() - began < 20
        for future in futures:
            with pytest.raises(CancelledError):
                future.result(timeout=1)
