"""Local executor: results, failures as outcomes, and the overlap of compiling and measuring."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessCaller, ProcessStage
from tunebench.outcome import Crashed, Measured
from tunebench.testing import executor_stages as stages
from tunebench.testing.executor_contract import ExecutorContract, outcome, task


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalExecutor]:
    with stages.start_executor(0, TestLocal.timeout_s) as workers:
        yield workers


class TestLocal(ExecutorContract):
    timeout_s = 10.0  # on a busy machine, a new process takes seconds for its imports


@pytest.mark.parametrize("overlap", [True, False])
def test_compiling_and_measuring_overlap_only_where_allowed(overlap: bool) -> None:
    with stages.start_executor(0, overlap=overlap) as workers:
        wait([workers.submit(task())])  # workers are up
        both = False
        futures = [workers.submit(task(compiling="slow", run="slow")) for _ in range(6)]
        while not all(future.done() for future in futures):
            with workers._lock:
                both = both or bool(workers._compiling and workers._measuring)
            time.sleep(0.005)
        assert all(isinstance(outcome(future), Measured) for future in futures)
    assert both is overlap


def test_failed_pool_is_an_error_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(*_arguments: object, **_more: object) -> None:
        raise RuntimeError("Unexpected error within the Pool")

    with stages.start_executor(0) as workers:
        wait([workers.submit(task())])
        monkeypatch.setattr(workers._measurers, "schedule", schedule)
        for future in [workers.submit(task()) for _ in range(3)]:
            with pytest.raises(RuntimeError, match="within the Pool"):
                future.result(timeout=60)


def test_process_caller_reuses_its_process_and_replaces_it_when_it_dies() -> None:
    with ProcessCaller(ProcessStage(function=stages.measure_task, start=stages.start)) as caller:
        first, second = (caller.call(task(us=us), None, None).outcome.median_us for us in (3, 4))
        assert (first, second) == (3, 4)
        assert isinstance(caller.call(task(run="crash"), None, None), Crashed)
        assert caller.call(task(us=5), None, None).outcome.median_us == 5


def test_a_caller_that_was_never_used_has_nothing_to_stop() -> None:
    before = set(multiprocessing.active_children())
    with ProcessCaller(ProcessStage(function=stages.measure_task, start=stages.start)):
        assert set(multiprocessing.active_children()) <= before


class _Unloadable:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (eval, ("no_such_name",))


def test_argument_that_a_worker_cannot_unpickle_raises() -> None:
    stage = ProcessStage(function=stages.compile_task, start=stages.start)
    with ProcessCaller(stage) as caller, pytest.raises(NameError):
        caller.call(_Unloadable())
