"""Processes that run one function, call by call: `ProcessStage` starts them, `ProcessCaller` calls one."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from tunebench.fault import describe_exit
from tunebench.outcome import Crashed, TimedOut

__all__ = ["ProcessCaller", "ProcessStage", "answer_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStage:
    """The function that worker processes of one kind call.

    Attributes:
        function: Importable function: `compile(task)` returns a binary or a `CompileFailed`,
            `measure(task, binary, abort_above_us)` a `Result`.
        start: Called once in each new process.
        start_arguments: Arguments of `start`.
        workers: Number of processes.
        timeout_s: Time limit of one call, in seconds.
    """

    function: Callable[..., Any]
    start: Callable[..., None]
    start_arguments: tuple[Any, ...] = ()
    workers: int = 1
    timeout_s: float = 60.0

    def pool(self) -> ProcessPool:
        """Start the processes, by `forkserver` if the system has it, else by `spawn`."""
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        return ProcessPool(
            max_workers=self.workers,
            initializer=_begin,
            initargs=(_lifeline()[0], self.start, self.start_arguments),
            context=context,
        )

    def schedule(self, pool: ProcessPool, *arguments: Any) -> Future[Any]:
        """Call the function in a worker process.

        Arguments are pickled here: an argument that the worker cannot unpickle is then an error of this call;
        otherwise it would end the worker.

        Args:
            pool: The processes.
            *arguments: Arguments of the function.
        """
        blob = pickle.dumps(arguments)
        try:
            future: Future[Any] = pool.schedule(_call, args=(self.function, blob), timeout=self.timeout_s)
        except RuntimeError as error:  # the pool failed: the task ends with this error, or it would never end
            future = Future()
            future.set_exception(error)
        return future


def _call(function: Callable[..., Any], blob: bytes) -> Any:
    return function(*pickle.loads(blob))  # noqa: S301 - from our own parent process


@functools.cache
def _lifeline() -> tuple[Connection, Connection]:
    """Return a pipe without messages: workers read one end, the other closes when this process ends."""
    return multiprocessing.Pipe(duplex=False)


def _leave_with(driver: Connection) -> None:
    """End this process when the driver ends, for whatever reason."""
    with contextlib.suppress(EOFError, OSError):
        driver.recv()
    os._exit(1)


def _begin(driver: Connection, start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Prepare a worker process: it ends with its driver, and killing it leaves nothing to clean up.

    The driver handles Ctrl-C. Numba creates a lock by the default start method on import; only a lock made
    for `fork` has no name in the system, which would remain after a kill.
    """
    threading.Thread(target=_leave_with, args=(driver,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    start(*arguments)


def answer_of(done: Future[Any], timeout_s: float) -> Any:
    """Return the answer of a worker, the outcome of its death, or the error it raised."""
    try:
        return done.result()
    except TimeoutError:
        return TimedOut(reason=f"no answer within {timeout_s:g} s")
    except ProcessExpired as expired:
        return Crashed(reason=_death(expired.exitcode))
    except BaseException as error:  # an internal error, or the pool was stopped: the caller decides
        return error


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"worker killed by {signal.Signals(-exit_code).name}"
    fault = None if exit_code is None else describe_exit(exit_code)
    return fault or f"worker exited with code {exit_code}"


class ProcessCaller:
    """Calls one function in a separate process (see `FunctionCaller`); a context manager.

    Args:
        stage: The function. The process starts with the first call, and again after it died.
    """

    def __init__(self, stage: ProcessStage) -> None:
        self._stage = stage
        self._pool: ProcessPool | None = None

    def call(self, *arguments: Any) -> Any:
        """Return the result of the function, or `Crashed` or `TimedOut`; re-raise an error it raised."""
        self._pool = self._pool or self._stage.pool()
        answer = answer_of(self._stage.schedule(self._pool, *arguments), self._stage.timeout_s)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            if any(error):
                self._pool.stop()
            else:
                self._pool.close()
            self._pool.join()
