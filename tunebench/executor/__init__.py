"""Where configurations are compiled and run: the loop submits tasks and awaits results."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from tunebench.outcome import Result

if TYPE_CHECKING:
    from tunebench.executor.local import Stage

__all__ = ["Calls", "Executor", "Fleet", "PlaceLost", "Stopped"]


T = TypeVar("T")


class Stopped(Exception):
    """The executor was closed from elsewhere: there will be no more results."""


class PlaceLost(Exception):
    """What was to run in one place began in one that is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The workers of a cluster that serve one run.

    Attributes:
        workers: How many are at work now.
        lost: Those that died, each with where it was and what is known of its end.
        refused: Those that were not made use of, each with the reason.
        retried: How many times a trial was begun again because its worker died.
    """

    workers: int = 0
    lost: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    retried: int = 0


class Calls(Protocol):
    """Calls one function in a process of its own, beside whoever measures; a context manager."""

    def call(self, *arguments: Any) -> Any:
        """Return what the function returns, or `Crashed` or `TimedOut`; an error it raised is raised here."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""


class Executor(ABC, Generic[T]):
    """Turns tasks of some type into results; used by one loop, as a context manager.

    Attributes:
        capacity: How many tasks are worth having under way at once; may change from task to task.
        abort_above_us: Median of the incumbent, read when a task begins to be measured: what is hopeless
            against it is aborted. None aborts nothing.
        fleet: The workers of a cluster; None on this machine.
    """

    capacity: int
    abort_above_us: float | None = None
    fleet: Fleet | None = None

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Wall time in which anything was compiled or measured; the rest of a run's is overhead."""

    @abstractmethod
    def submit(self, task: T) -> Future[Result]:
        """Begin a task. A crash or a hang is an outcome of its result; only a fault of ours raises.

        Raises:
            Stopped: if it was closed.
            ClusterLost: here or from the future, if its workers are gone and none has come back.
        """

    def calls(self, stage: Callable[[], Stage]) -> Calls:
        """Return what calls the function of a stage where tasks are measured: on this machine, if not said.

        Args:
            stage: An importable function: the stage is made where it is used.
        """
        from tunebench.executor.local import Caller

        return Caller(stage())

    def together(self) -> AbstractContextManager[None]:
        """Return a context in which all tasks and calls run in one place, so that their times compare.

        They raise `PlaceLost` once that place is gone; the next such context has another one.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Stop all work at once; futures of unfinished tasks are cancelled."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
