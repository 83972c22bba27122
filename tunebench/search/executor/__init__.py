"""Where configurations are compiled and run: the loop submits tasks and awaits results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, Self, TypeVar

from tunebench.outcome import Result

__all__ = ["Executor"]


T = TypeVar("T")


class Executor(ABC, Generic[T]):
    """Turns tasks of some type into results; used by one loop, as a context manager.

    Attributes:
        capacity: How many tasks are worth having under way at once.
        abort_above_us: Median of the incumbent, read when a task begins to be measured: what is hopeless
            against it is aborted. None aborts nothing.
    """

    capacity: int
    abort_above_us: float | None = None

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Wall time in which anything was compiled or measured; the rest of a run's is overhead."""

    @abstractmethod
    def submit(self, task: T) -> Future[Result]:
        """Begin a task. A crash or a hang is an outcome of its result; only a fault of ours raises."""

    @abstractmethod
    def close(self) -> None:
        """Stop all work at once; futures of unfinished tasks are cancelled."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
