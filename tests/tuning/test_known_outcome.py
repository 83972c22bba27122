"""Which recorded failures are tried again: no verdict is for ever, and none is repeated without a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support import InstantExecutor, measured
from tunebench import tune, tuning
from tunebench.db import open_store
from tunebench.kernels import load_file
from tunebench.outcome import CompileFailed, Crashed, LaunchFailed, Outcome, TimedOut, WrongResult
from tunebench.task import Task
from tunebench.tuning import Plan, Report
from tunebench.tuning.known_outcome import answers, made_under_load
from tunebench.tuning.run_context import TuningSetup

BOUNDED = str(Path(__file__).parents[1] / "data" / "bounded_variant.py")
WORKLOAD = "softmax:rows=33,cols=65,dtype=f32"
BUSY, IDLE = (
    {"busy_elsewhere": 0.9, "load": 8.0, "cores": 2},
    {"busy_elsewhere": 0.02, "load": 8.0, "cores": 2},
)


def late(limited: str = "call", limit_s: float = 60.0, **load: Any) -> TimedOut:
    return TimedOut(reason="late", conditions={"limited": limited, "limit_s": limit_s, **(load or IDLE)})


def late_compiler(limited: str, limit_s: float, load: Mapping[str, Any] = IDLE) -> CompileFailed:
    conditions = {"limited": limited, "limit_s": limit_s, **load}
    return CompileFailed(reason="the compiler: late", refused=False, conditions=conditions)


FAILED_AGAIN = {"attempts": 2}


@pytest.mark.parametrize(
    ("outcome", "is_used"),
    [
        (late(), True),
        (late(limit_s=59.0), False),
        (late(limit_s=61.0), True),
        (late(**BUSY), False),
        (late(load=3.0, cores=2), False),  # where the use of processors is unknown
        (late(load=2.0, cores=2), True),
        (late("inputs", 600.0), True),
        (late("inputs", 600.0, **BUSY), False),
        (late("connection", 30.0), True),
        (late("user code", 60.0), True),
        (late("user code", 12.0), False),
        (late(limit_s=cast("float", "damaged")), False),
        (TimedOut(reason="of an earlier version"), False),
        (late_compiler("call", 300.0), True),
        (late_compiler("call", 300.0, BUSY), False),
        (late_compiler("call", 200.0), False),
        (late_compiler("user code", 60.0), True),
        (late_compiler("user code", 12.0), False),
        (CompileFailed(reason="the compiler: worker killed by SIGSEGV", refused=False), True),
        (CompileFailed(reason="MemoryError", refused=False, conditions=FAILED_AGAIN), True),
        (LaunchFailed(reason="OSError: [Errno 24] Too many open files", conditions=FAILED_AGAIN), True),
        (LaunchFailed(reason="OSError: [Errno 24] Too many open files"), False),
        (Crashed(reason="worker exited with code 1"), True),
        (WrongResult(reason="y[0,0]"), True),
    ],
)
def test_failures_are_used_until_another_attempt_may_succeed(outcome: Outcome, is_used: bool) -> None:
    setup = TuningSetup(target=cast("Any", None), plan=Plan(timeout_s=60.0), store=cast("Any", None))
    assert answers(setup, outcome) is is_used
    every = dataclasses.replace(setup, plan=Plan(timeout_s=60.0, retry_failed=True))
    assert not answers(every, outcome)


def test_only_time_outs_are_made_under_load() -> None:
    assert made_under_load(late(**BUSY))
    assert made_under_load(late_compiler("call", 300.0, BUSY))
    assert not made_under_load(late())
    assert not made_under_load(LaunchFailed(reason="no", conditions=BUSY))
    assert not made_under_load(measured(1.0))


class Answers(InstantExecutor[Task]):
    """Executor whose default (copy 20) times out some times, and whose copy 3 always fails."""

    def __init__(self, time_outs: int, conditions: Mapping[str, Any]) -> None:
        super().__init__(self._answer_task)
        self._time_outs, self._conditions = time_outs, {"limited": "call", "limit_s": 60.0, **conditions}

    def _answer_task(self, task: Task) -> Outcome:
        copy = task.config["copy"]
        if copy == 20 and self._time_outs:
            self._time_outs -= 1
            return TimedOut(reason="no answer within 60 s", conditions=self._conditions)
        return Crashed(reason="worker exited with code 1") if copy == 3 else measured(60.0 + int(copy))


def run(
    database: Path, monkeypatch: pytest.MonkeyPatch, executor: Answers, **changes: Any
) -> tuple[Report, list[int]]:
    """Return the report of a run, and the configurations that it tried."""
    load_file(BOUNDED)
    monkeypatch.setattr(tuning, "start_workers", lambda *_: executor)
    options = {"baselines": False, "sampler": "random", "trials": 60, "finalists": 1, "audit": 0.0, **changes}
    report = tune(WORKLOAD, device="cpu", db=database, plan=Plan(variants=("bounded",), **options))
    return report, [int(task.config["copy"]) for task in executor.tasks if not task.thorough]


@pytest.mark.parametrize(("time_outs", "attempts", "lost"), [(1, 2, False), (2, 3, False), (9, 3, True)])
def test_default_that_times_out_under_load_is_tried_again_in_the_same_run(
    time_outs: int, attempts: int, lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, tried = run(tmp_path / "a.db", monkeypatch, Answers(time_outs, BUSY))
    assert tried[:attempts] == [20] * attempts
    assert tried.count(20) == attempts
    assert (report.default_failure is not None) is lost
    retried, tried = run(tmp_path / "a.db", monkeypatch, Answers(0, BUSY))
    assert tried == ([20] if lost else [])  # by the next run, on a machine that may be idle
    assert retried.default_failure is None


def test_default_that_times_out_on_an_idle_machine_is_known_until_the_limit_is_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, tried = run(tmp_path / "a.db", monkeypatch, Answers(9, IDLE))
    assert tried.count(20) == 1
    assert report.default_failure is not None
    _, tried = run(tmp_path / "a.db", monkeypatch, Answers(0, IDLE))
    assert tried == []
    longer, tried = run(tmp_path / "a.db", monkeypatch, Answers(0, IDLE), timeout_s=300.0)
    assert tried == [20]
    assert longer.default_failure is None
    _, tried = run(tmp_path / "a.db", monkeypatch, Answers(0, IDLE), timeout_s=300.0)
    assert tried == []  # the newest outcome of a trial decides


def test_failed_configurations_are_all_tried_again_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, tried = run(tmp_path / "a.db", monkeypatch, Answers(9, IDLE))
    assert {3, 20} <= set(tried)
    retried, tried = run(tmp_path / "a.db", monkeypatch, Answers(0, IDLE), retry_failed=True)
    assert sorted(tried) == [3, 20]
    assert retried.cached == sum(first.trials.values()) - 2
    with open_store(tmp_path / "a.db") as store:
        kinds = [e.result.outcome.kind for e in store.history(WORKLOAD) if e.key.config["copy"] == 3]
    assert kinds == ["crashed", "crashed"]
