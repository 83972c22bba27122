"""Faults of the environment: never recorded as failures of kernels, and tried again by the next run."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.support import InstantExecutor, measured
from tunebench import tune, tuning
from tunebench.binary.compiled import Binary
from tunebench.compile import worker as compile_worker
from tunebench.compile.cache import BinaryCache
from tunebench.db import open_store
from tunebench.db.integrity import examine, fix
from tunebench.device import find
from tunebench.errors import EnvironmentFault, MissingDependency, SuspectedFault, WorkerUnusable
from tunebench.fault import environment_fault
from tunebench.kernels import load_file, variant
from tunebench.measure import worker
from tunebench.outcome import CompileFailed, LaunchFailed, Outcome, Result
from tunebench.task import Task
from tunebench.tuning import Plan, Report
from tunebench.workloads import parse

BOUNDED = str(Path(__file__).parents[1] / "data" / "bounded_variant.py")
WORKLOAD = "softmax:rows=33,cols=65,dtype=f32"
FULL = OSError(errno.ENOSPC, "No space left on device", "/tmp/a")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (FULL, SuspectedFault),
        (OSError(errno.EMFILE, "Too many open files"), SuspectedFault),
        (OSError(errno.EFBIG, "File too large"), SuspectedFault),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), SuspectedFault),
        (PermissionError(errno.EACCES, "Permission denied"), SuspectedFault),
        (MemoryError(), SuspectedFault),
        (RuntimeError("can't start new thread"), SuspectedFault),
        (
            RuntimeError("g++: fatal error: error writing to /tmp/x.s: No space left on device"),
            SuspectedFault,
        ),
        (MissingDependency("ml_dtypes", "cpu"), EnvironmentFault),
        (ModuleNotFoundError("No module named 'llvmlite'"), EnvironmentFault),
        (EnvironmentFault("no compiler"), EnvironmentFault),
    ],
)
def test_faults_of_the_environment_and_those_that_a_kernel_may_cause(
    error: BaseException, fault: type
) -> None:
    assert type(environment_fault(error)) is fault


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        ZeroDivisionError(),
        RuntimeError("CUDA_ERROR_INVALID_VALUE"),
        SystemExit(0),
        _Unprintable(),
    ],
)
def test_faults_of_kernels_are_not_those_of_the_environment(error: BaseException) -> None:
    assert environment_fault(error) is None


def any_task() -> Task:
    chosen, device, workload = variant("softmax/numba_cpu"), find("cpu"), parse(WORKLOAD)
    return Task(variant=chosen, workload=workload, config=chosen.default(workload, device), device=device)


def failing(*_: Any) -> Any:
    raise FULL


def test_cache_folder_of_others_is_no_failure_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab").chmod(0o777)
    binary = Binary(key="ab12", language="numba-cpu", target="t", payload=b"code")
    monkeypatch.setattr(compile_worker, "_cache", BinaryCache(tmp_path))
    monkeypatch.setattr(
        compile_worker,
        "compile_config",
        lambda *arguments: arguments[-1].get_or_compile("ab12", lambda: binary),
    )
    with pytest.raises(EnvironmentFault, match="can be written by other users"):
        compile_worker.compile_task(any_task())


def test_workers_raise_faults_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_worker, "_cache", object())
    monkeypatch.setattr(compile_worker, "compile_config", failing)
    with pytest.raises(EnvironmentFault, match="No space left"):
        compile_worker.compile_task(any_task())
    monkeypatch.setattr(worker, "_runner", type("Full", (), {"run": failing})())
    with pytest.raises(EnvironmentFault, match="No space left"):
        worker.measure(any_task(), None, None)  # type: ignore[arg-type]


class Answers(InstantExecutor[Task]):
    """Executor whose disk is full from a task on."""

    def __init__(self, full_after: int, fault: Exception) -> None:
        self._left, self._fault = full_after, fault
        super().__init__(self._answer_task)

    def _answer_task(self, task: Task) -> Outcome:
        self._left -= 1
        if self._left < 0:
            raise self._fault
        return measured(60.0 + task.config["copy"])


NO_SPACE = EnvironmentFault("no space left on device")


def run(
    database: Path, monkeypatch: pytest.MonkeyPatch, full_after: int = 1000, fault: Exception = NO_SPACE
) -> Report:
    load_file(BOUNDED)
    monkeypatch.setattr(tuning, "start_workers", lambda *_: Answers(full_after, fault))
    plan = Plan(variants=("bounded",), baselines=False, sampler="random", trials=8, finalists=1)
    return tune(WORKLOAD, device="cpu", db=database, plan=plan)


@pytest.mark.parametrize("fault", [NO_SPACE, WorkerUnusable("no process can be started")])
def test_run_on_a_broken_machine_ends_without_a_record_and_is_resumed(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = run(tmp_path / "a.db", monkeypatch, full_after=3, fault=fault)
    assert (report.interrupted, report.stopped) == (True, str(fault))
    assert report.trials == {"measured": 3}
    with open_store(tmp_path / "a.db") as store:
        assert [entry.result.outcome.kind for entry in store.history(WORKLOAD)] == ["measured"] * 3
        assert store.stats().claimed == 0
    resumed = run(tmp_path / "a.db", monkeypatch)
    assert (set(resumed.trials), resumed.cached, resumed.stopped) == ({"measured"}, 3, None)


RECORDED = (
    LaunchFailed(reason="OSError: [Errno 28] No space left on device: '/tmp/a'"),
    LaunchFailed(reason="$CXX is 'g++-99', which is no command on this machine; unset it"),
    CompileFailed(reason="PermissionError: [Errno 13] Permission denied: '/cache'"),
)


def test_recorded_faults_of_the_environment_are_tried_again_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "a.db", monkeypatch, full_after=3)
    with open_store(tmp_path / "a.db") as store:
        key = store.history(WORKLOAD)[0].key
        copies = [copy for copy in range(40) if copy != key.config["copy"]][:3]
        for outcome, copy in zip(RECORDED, copies, strict=True):
            config = type(key.config)({"copy": copy})
            store.record(type(key)(**{**_fields(key), "config": config}), Result(outcome=outcome))
        store.record(key, Result(outcome=CompileFailed(reason="syntax error at line 3")))
        exhausted = LaunchFailed(reason=RECORDED[0].reason, conditions={"attempts": 2})
        store.record(key, Result(outcome=exhausted))  # in two processes: the configuration's failure
    report = run(tmp_path / "a.db", monkeypatch)
    assert report.trials["measured"] >= 5  # the three are tried again
    with open_store(tmp_path / "a.db") as store:
        integrity = examine(store)
        assert integrity.counts["environment"] == 3
        fix(store, integrity)
        assert not examine(store).counts["environment"]
        failures = [e for e in store.history(WORKLOAD) if isinstance(e.result.outcome, CompileFailed)]
        assert [failure.result.outcome.reason for failure in failures] == ["syntax error at line 3"]


def _fields(key: Any) -> dict[str, Any]:
    return {name: getattr(key, name) for name in key.__slots__}
