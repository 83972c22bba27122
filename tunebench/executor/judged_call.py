"""Calls of a measuring process whose launches a judge asks for, over a connection between the two."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from tunebench.executor.process import ProcessStage, WorkerPool, answer_of
from tunebench.outcome import Crashed, TimedOut

__all__ = ["JudgedCall", "JudgedCaller", "JudgedStage"]


class JudgedCall:
    """One call of a measuring process, and that of its judge.

    Args:
        judges: The processes that judge.
        case_of: Returns the argument of the judge from the process id of the measuring process's guard.
    """

    def __init__(self, judges: WorkerPool, case_of: Callable[[int], Any]) -> None:
        self._judges, self._case_of = judges, case_of
        self._verdict: Future[Any] | None = None
        self._connection: socket.socket | None = None

    def connect(self, guard: int) -> int:
        """Call the judge, and return the measuring process's end of their connection.

        Args:
            guard: Process id of the measuring process's guard.
        """
        ours, theirs = socket.socketpair()
        self._connection = connection = ours.dup()
        self._verdict = self._judges.schedule(self._case_of(guard), connect=lambda _guard: ours.detach())
        self._verdict.add_done_callback(lambda _verdict: _shut_down(connection))
        return theirs.detach()

    def verdict(self) -> Any:
        """Return the answer of the judge, or its error, once the measuring process has ended its call.

        Returns:
            None if the measuring process did not start.
        """
        if self._verdict is None or self._connection is None:
            return None
        with self._connection as connection:
            _shut_down(connection)  # the process may still hold its end open
            return answer_of(self._verdict)


def _shut_down(connection: socket.socket) -> None:
    """End a connection for all processes that hold it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStage:
    """A function of a measuring process, and the judge that asks for its launches.

    Attributes:
        measuring: The function.
        judging: The judge.
        case_of: Importable function: returns the argument of the judge from those of the function, and the
            process id of the guard.
    """

    measuring: ProcessStage
    judging: ProcessStage
    case_of: Callable[..., Any]

    def on_gpu(self, gpu: str) -> JudgedStage:
        """Return the same stage, whose measuring process sees one GPU."""
        return dataclasses.replace(self, measuring=self.measuring.on_gpu(gpu))

    def caller(self) -> JudgedCaller:
        """Return a caller of the two."""
        return JudgedCaller(self)


class JudgedCaller:
    """Calls a function in one process and its judge in another (see `FunctionCaller`); a context manager.

    Args:
        stage: The two functions. Their processes start with the first call, and again after they died.
    """

    def __init__(self, stage: JudgedStage) -> None:
        self._case_of = stage.case_of
        self._measurers, self._judges = stage.measuring.pool(), stage.judging.pool()

    def call(self, *arguments: Any) -> Any:
        """Return the answer of the judge, or `Crashed` or `TimedOut`; re-raise an error of either process."""
        judged = JudgedCall(self._judges, lambda guard: self._case_of(*arguments, guard))
        served = answer_of(self._measurers.schedule(*arguments, connect=judged.connect))
        verdict = judged.verdict()
        answer = served if verdict is None or isinstance(served, Crashed | BaseException) else verdict
        answer = verdict if isinstance(verdict, TimedOut) else answer
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pool in (self._measurers, self._judges):
            if any(error):
                pool.stop()
            else:
                pool.close()
        for pool in (self._measurers, self._judges):
            pool.join()
