"""Worker processes on this machine: some that compile, one that measures.

On a GPU compiling goes on while the device measures. On a CPU the two would disturb each other: then
compiling and measuring take turns, each turn as long as there is work for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from tunebench.executor import Executor
from tunebench.fault import describe_exit
from tunebench.outcome import CompileFailed, Crashed, Effort, Resources, Result, TimedOut
from tunebench.task import Task

__all__ = ["Caller", "LocalExecutor", "Stage", "call_once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the processes of one kind do.

    Attributes:
        function: Called in a worker: `compile(task)` returns a binary or a `CompileFailed`,
            `measure(task, binary, abort_above_us)` a `Result`. Must be importable.
        start: Called once in each new worker.
        start_arguments: For `start`.
        workers: How many processes.
        timeout_s: Longest that one call may take.
    """

    function: Callable[..., Any]
    start: Callable[..., None]
    start_arguments: tuple[Any, ...] = ()
    workers: int = 1
    timeout_s: float = 60.0

    def pool(self) -> ProcessPool:
        """Start the processes, from a clean server process where the system has one."""
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        return ProcessPool(
            max_workers=self.workers,
            initializer=_begin,
            initargs=(_lifeline()[0], self.start, self.start_arguments),
            context=context,
        )

    def schedule(self, pool: ProcessPool, *arguments: Any) -> Future[Any]:
        """Call the function in a worker.

        Arguments travel as bytes: one that a worker cannot load is then an error of this call, where it
        would otherwise end the worker before it took the call.
        """
        blob = pickle.dumps(arguments)
        future: Future[Any] = pool.schedule(_call, args=(self.function, blob), timeout=self.timeout_s)
        return future


def _call(function: Callable[..., Any], blob: bytes) -> Any:
    return function(*pickle.loads(blob))  # noqa: S301 - from our own parent process


@functools.cache
def _lifeline() -> tuple[Connection, Connection]:
    """Return a pipe that nobody writes to: workers hold one end, the other closes with this process."""
    return multiprocessing.Pipe(duplex=False)


def _leave_with(driver: Connection) -> None:
    """End this process as soon as the driver is gone, however it went."""
    with contextlib.suppress(EOFError, OSError):
        driver.recv()
    os._exit(1)


def _begin(driver: Connection, start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Prepare a worker: it leaves with its driver, and killing it must leave nothing behind.

    Ctrl-C is the driver's to handle. Numba makes a lock by the default start method when it is imported;
    only one made for `fork` has no name in the system that somebody would have to clean up.
    """
    threading.Thread(target=_leave_with, args=(driver,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "fork" in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("fork", force=True)
    start(*arguments)


@dataclass(slots=True, eq=False)
class _Job:
    task: Task
    future: Future[Result] = field(default_factory=Future)
    binary: Any = None
    compile_s: float = 0.0
    began: float = 0.0


class LocalExecutor(Executor[Task]):
    """Compiles in `compiling.workers` processes and measures in one at a time.

    Args:
        compiling: The stage that turns a task into a binary.
        measuring: The stage that turns a task and its binary into a result.
        overlap: Whether compiling may go on while measuring.
    """

    def __init__(self, *, compiling: Stage, measuring: Stage, overlap: bool) -> None:
        self.capacity = 2 * compiling.workers + measuring.workers
        self._stages = (compiling, measuring)
        self._overlap = overlap
        self._compilers, self._measurers = compiling.pool(), measuring.pool()
        self._lock = threading.RLock()
        self._waiting: deque[_Job] = deque()
        self._ready: deque[_Job] = deque()
        self._unfinished: list[_Job] = []
        self._compiling = self._measuring = 0
        self._turn_to_measure = False
        self._closed = False
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def busy_s(self) -> float:
        """Wall time in which anything was compiled or measured (see `Executor.busy_s`)."""
        with self._lock:
            running = time.perf_counter() - self._busy_since if self._compiling + self._measuring else 0.0
            return self._busy_s + running

    def submit(self, task: Task) -> Future[Result]:
        """Begin a task (see `Executor.submit`)."""
        job = _Job(task)
        with self._lock:
            self._waiting.append(job)
            self._unfinished.append(job)
            self._advance()
        return job.future

    def close(self) -> None:
        """Stop all workers at once (see `Executor.close`)."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._ready.clear()
            idle = self._compiling + self._measuring == 0
        for pool in (self._compilers, self._measurers):
            if idle:
                pool.close()  # workers leave by themselves, and clean up what they hold
            else:
                pool.stop()
            pool.join()
        with self._lock:
            for job in self._unfinished:
                job.future.cancel()

    def _advance(self) -> None:
        """Start whatever may start now; called with the lock held."""
        if self._closed:
            return
        while self._may_compile():
            self._start_compiling(self._waiting.popleft())
        while self._may_measure():
            self._start_measuring(self._ready.popleft())

    def _may_compile(self) -> bool:
        free = bool(self._waiting) and self._compiling < self._stages[0].workers
        if not free or self._overlap:
            return free
        if self._turn_to_measure and not self._ready and not self._measuring:
            self._turn_to_measure = False
        return not self._turn_to_measure

    def _may_measure(self) -> bool:
        free = bool(self._ready) and self._measuring < self._stages[1].workers
        if not free or self._overlap:
            return free
        if not self._waiting and not self._compiling:
            self._turn_to_measure = True
        return self._turn_to_measure

    def _count(self, *, compiling: int = 0, measuring: int = 0) -> None:
        """Count work that begins or ends, and the time in which there was any."""
        before = self._compiling + self._measuring
        self._compiling += compiling
        self._measuring += measuring
        now = time.perf_counter()
        if before == 0:
            self._busy_since = now
        elif self._compiling + self._measuring == 0:
            self._busy_s += now - self._busy_since

    def _start_compiling(self, job: _Job) -> None:
        self._count(compiling=1)
        job.began = time.perf_counter()
        running = self._stages[0].schedule(self._compilers, job.task)
        running.add_done_callback(lambda done: self._compiled(job, done))

    def _compiled(self, job: _Job, done: Future[Any]) -> None:
        job.compile_s = time.perf_counter() - job.began
        stage = self._stages[0]
        answer = _answer(done, stage.timeout_s)
        if isinstance(answer, Crashed | TimedOut):
            answer = CompileFailed(reason=f"the compiler: {answer.reason}", refused=False)
        with self._lock:
            self._count(compiling=-1)
            if isinstance(answer, CompileFailed):
                answer = Result(outcome=answer)
            if self._closed or isinstance(answer, Result | BaseException):
                self._finish(job, answer)
            else:
                job.binary = answer
                self._ready.append(job)
            self._advance()

    def _start_measuring(self, job: _Job) -> None:
        self._count(measuring=1)
        job.began = time.perf_counter()
        running = self._stages[1].schedule(self._measurers, job.task, job.binary, self.abort_above_us)
        running.add_done_callback(lambda done: self._measured(job, done))

    def _measured(self, job: _Job, done: Future[Any]) -> None:
        answer = _answer(done, self._stages[1].timeout_s)
        if isinstance(answer, Crashed | TimedOut):
            spent = Effort(measure_s=time.perf_counter() - job.began)
            resources = getattr(job.binary, "resources", Resources())
            answer = Result(outcome=answer, effort=spent, resources=resources)
        with self._lock:
            self._count(measuring=-1)
            self._finish(job, answer)
            self._advance()

    def _finish(self, job: _Job, answer: Any) -> None:
        """Hand over a result, with the compile time; an error of ours goes on to whoever awaits it."""
        if self._closed:  # whatever a stopped worker left behind is no result
            return
        self._unfinished.remove(job)
        if isinstance(answer, Result):
            effort = dataclasses.replace(answer.effort, compile_s=job.compile_s)
            job.future.set_result(dataclasses.replace(answer, effort=effort))
        else:
            job.future.set_exception(answer)


def _answer(done: Future[Any], timeout_s: float) -> Any:
    """Return what a worker answered, the outcome its death amounts to, or the error it raised."""
    try:
        return done.result()
    except TimeoutError:
        return TimedOut(reason=f"no answer within {timeout_s:g} s")
    except ProcessExpired as expired:
        return Crashed(reason=_death(expired.exitcode))
    except BaseException as error:  # an error of ours, or the pool being stopped: whoever awaits decides
        return error


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"worker killed by {signal.Signals(-exit_code).name}"
    fault = None if exit_code is None else describe_exit(exit_code)
    return fault or f"worker exited with code {exit_code}"


class Caller:
    """Calls one function in a process of its own, again and again; a context manager.

    Args:
        stage: What is called. The process is started with the first call, and again after it died.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._pool: ProcessPool | None = None

    def call(self, *arguments: Any) -> Any:
        """Return what the function returns, or `Crashed` or `TimedOut`; an error it raised is raised here."""
        self._pool = self._pool or self._stage.pool()
        answer = _answer(self._stage.schedule(self._pool, *arguments), self._stage.timeout_s)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            if error is None:
                self._pool.close()
            else:
                self._pool.stop()
            self._pool.join()


def call_once(stage: Stage, *arguments: Any) -> Any:
    """Run one call in a process of its own; its death is an outcome, `Crashed` or `TimedOut`."""
    with Caller(stage) as caller:
        return caller.call(*arguments)
