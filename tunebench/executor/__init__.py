"""Executors that compile and measure: on this machine (`local`) or on a Ray cluster (`ray`).

`tunebench.task.Executor` is the protocol that the search loop needs; `WorkerExecutor` adds the methods that
only a complete tuning run needs. A run uses one executor, as a context manager.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from tunebench.outcome import Result

__all__ = [
    "CalledStage",
    "ExecutorClosed",
    "FunctionCaller",
    "PoolStatus",
    "TaskRefused",
    "WorkerExecutor",
    "WorkerLost",
]


T = TypeVar("T")


class ExecutorClosed(Exception):
    """The executor was closed by another thread: there will be no more results."""


class TaskRefused(Exception):
    """A compiled task was not measured, by the caller's choice (see `LocalExecutor`)."""


class WorkerLost(Exception):
    """The worker of a `WorkerExecutor.same_worker` context died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Status of the workers of one device in a cluster.

    Attributes:
        workers: Number of workers.
        slots: Number of tasks that they take at once.
        lost: Workers that died, each with its node and the reason.
        refused: Nodes and workers that are not used, each with the reason.
        retried: Number of retries of trials whose worker died.
    """

    workers: int = 0
    slots: int = 0
    lost: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    retried: int = 0


class FunctionCaller(Protocol):
    """Calls one function in a separate process, where tasks are measured; a context manager."""

    def call(self, *arguments: Any) -> Any:
        """Return the result of the function, or `Crashed` or `TimedOut`; re-raise an error it raised."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, *error: object) -> None:
        """End the process."""


class CalledStage(Protocol):
    """A function, and the processes that call it."""

    def caller(self) -> FunctionCaller:
        """Return a caller of the function."""

    def on_gpu(self, gpu: str) -> Self:
        """Return the same stage on one GPU, in the form of `CUDA_VISIBLE_DEVICES`."""


class WorkerExecutor(ABC, Generic[T]):
    """Compiles and measures tasks in worker processes; a context manager for one run.

    Attributes:
        capacity: Number of tasks worth keeping in flight; may change between tasks.
        abort_above_us: Median time of the incumbent, read when a measurement starts. Clearly slower
            configurations are aborted; None aborts none.
        pool: Workers of the cluster; None on this machine.
    """

    capacity: int
    abort_above_us: float | None = None
    pool: PoolStatus | None = None

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Wall time in which anything was compiled or measured, in seconds; the rest of a run is overhead."""

    @abstractmethod
    def submit(self, task: T) -> Future[Result]:
        """Start a task. Crashes and timeouts are outcomes of its result; only internal errors raise.

        Raises:
            ExecutorClosed: if the executor is closed.
            ClusterLost: here or from the future, if all workers are gone.
        """

    def caller(self, stage: Callable[[], CalledStage]) -> FunctionCaller:
        """Return a caller of the function of a stage, on the machine that measures.

        Args:
            stage: Importable function that makes the stage; called on that machine.
        """
        return stage().caller()

    def same_worker(self) -> AbstractContextManager[None]:
        """Return a context in which all tasks and calls run on one worker, so that their times compare.

        They raise `WorkerLost` once that worker dies; the next such context uses another worker.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Stop all work at once; futures of unfinished tasks are cancelled."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
