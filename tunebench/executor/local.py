"""Worker processes on this machine: several that compile, one that measures.

On a GPU, compiling and measuring overlap. On a CPU they would disturb each other: there they alternate, each
for as long as there is work for it.
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

from tunebench.executor import WorkerExecutor
from tunebench.fault import describe_exit
from tunebench.outcome import CompileFailed, Crashed, Effort, Pruned, Resources, Result, TimedOut
from tunebench.task import Task

__all__ = ["LocalExecutor", "ProcessCaller", "ProcessStage", "call_once"]


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

        Arguments are pickled here: one that the worker cannot unpickle is then an error of this call;
        otherwise it would end the worker.

        Args:
            pool: The processes.
            *arguments: Arguments of the function.
        """
        blob = pickle.dumps(arguments)
        future: Future[Any] = pool.schedule(_call, args=(self.function, blob), timeout=self.timeout_s)
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


@dataclass(slots=True, eq=False)
class _LocalJob:
    task: Task
    future: Future[Result] = field(default_factory=Future)
    binary: Any = None
    bound_us: float = 0.0
    compile_s: float = 0.0
    began: float = 0.0


class LocalExecutor(WorkerExecutor[Task]):
    """Compiles and measures in processes of this machine.

    Between the two, it computes the lower bound of the configuration with the resources of its binary, which
    is returned in `Result.bound_us`; tasks with `Task.prune` are not measured if it exceeds the incumbent's
    time.

    Args:
        compiling: The stage that turns a task into a binary.
        measuring: The stage that turns a task and its binary into a result.
        overlap: Whether compiling and measuring may overlap.
        bound: Returns the lower bound of a task from the resources of its binary, in microseconds; None
            computes no bound.
    """

    def __init__(
        self,
        *,
        compiling: ProcessStage,
        measuring: ProcessStage,
        overlap: bool,
        bound: Callable[[Task, Resources], float] | None = None,
    ) -> None:
        self.capacity = 2 * compiling.workers + measuring.workers
        self._stages = (compiling, measuring)
        self._overlap, self._bound = overlap, bound
        self._compilers, self._measurers = compiling.pool(), measuring.pool()
        self._lock = threading.RLock()
        self._waiting: deque[_LocalJob] = deque()
        self._ready: deque[_LocalJob] = deque()
        self._unfinished: list[_LocalJob] = []
        self._compiling = self._measuring = 0
        self._turn_to_measure = False
        self._closed = False
        self._busy_s, self._busy_since = 0.0, 0.0

    @property
    def busy_s(self) -> float:
        """Wall time in which anything was compiled or measured (see `WorkerExecutor.busy_s`)."""
        with self._lock:
            running = time.perf_counter() - self._busy_since if self._compiling + self._measuring else 0.0
            return self._busy_s + running

    def submit(self, task: Task) -> Future[Result]:
        """Begin a task (see `WorkerExecutor.submit`)."""
        job = _LocalJob(task)
        with self._lock:
            self._waiting.append(job)
            self._unfinished.append(job)
            self._advance()
        return job.future

    def close(self) -> None:
        """Stop all workers at once (see `WorkerExecutor.close`)."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._ready.clear()
            idle = self._compiling + self._measuring == 0
        for pool in (self._compilers, self._measurers):
            if idle:
                pool.close()  # idle workers end by themselves and release their resources
            else:
                pool.stop()
            pool.join()
        with self._lock:
            for job in self._unfinished:
                job.future.cancel()

    def _advance(self) -> None:
        """Start the calls that may start now; the caller holds the lock."""
        while not self._closed:
            if self._may_compile():
                self._start_compiling(self._waiting.popleft())
            elif self._may_measure():
                self._start_measuring(self._ready.popleft())
            else:  # pruned jobs never measure, so each step checks both again
                return

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
        """Count calls that begin or end, and the time with any call."""
        before = self._compiling + self._measuring
        self._compiling += compiling
        self._measuring += measuring
        now = time.perf_counter()
        if before == 0:
            self._busy_since = now
        elif self._compiling + self._measuring == 0:
            self._busy_s += now - self._busy_since

    def _start_compiling(self, job: _LocalJob) -> None:
        self._count(compiling=1)
        job.began = time.perf_counter()
        running = self._stages[0].schedule(self._compilers, job.task)
        running.add_done_callback(lambda done: self._compiled(job, done))

    def _compiled(self, job: _LocalJob, done: Future[Any]) -> None:
        job.compile_s = time.perf_counter() - job.began
        stage = self._stages[0]
        answer = _answer(done, stage.timeout_s)
        if isinstance(answer, Crashed | TimedOut):
            answer = CompileFailed(reason=f"the compiler: {answer.reason}", refused=False)
        with self._lock:
            self._count(compiling=-1)
            if isinstance(answer, CompileFailed):
                answer = Result(outcome=answer)
            if not isinstance(answer, Result | BaseException):
                answer = self._compiled_bound(job, answer)
            if self._closed or answer is not None:
                self._finish(job, answer)
            else:
                self._ready.append(job)
            self._advance()

    def _compiled_bound(self, job: _LocalJob, binary: Any) -> BaseException | None:
        """Compute the bound of a compiled job; return an error of the costs, to be raised."""
        job.binary = binary
        try:
            job.bound_us = 0.0 if self._bound is None else self._bound(job.task, binary.resources)
        except Exception as error:
            return error
        return None

    def _start_measuring(self, job: _LocalJob) -> None:
        incumbent_us = self.abort_above_us
        if getattr(job.task, "prune", False) and incumbent_us is not None and job.bound_us > incumbent_us:
            pruned = Pruned(bound_us=job.bound_us, incumbent_us=incumbent_us)
            self._finish(job, Result(outcome=pruned, resources=job.binary.resources))
            return
        self._count(measuring=1)
        job.began = time.perf_counter()
        running = self._stages[1].schedule(self._measurers, job.task, job.binary, incumbent_us)
        running.add_done_callback(lambda done: self._measured(job, done))

    def _measured(self, job: _LocalJob, done: Future[Any]) -> None:
        answer = _answer(done, self._stages[1].timeout_s)
        if isinstance(answer, Crashed | TimedOut):
            spent = Effort(measure_s=time.perf_counter() - job.began)
            resources = getattr(job.binary, "resources", Resources())
            answer = Result(outcome=answer, effort=spent, resources=resources)
        with self._lock:
            self._count(measuring=-1)
            self._finish(job, answer)
            self._advance()

    def _finish(self, job: _LocalJob, answer: Any) -> None:
        """Set the result of a job, with bound and compile time, or its exception."""
        if self._closed:  # an answer of a stopped worker is no result
            return
        self._unfinished.remove(job)
        if isinstance(answer, Result):
            effort = dataclasses.replace(answer.effort, compile_s=job.compile_s)
            job.future.set_result(dataclasses.replace(answer, effort=effort, bound_us=job.bound_us))
        else:
            job.future.set_exception(answer)


def _answer(done: Future[Any], timeout_s: float) -> Any:
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


def call_once(stage: ProcessStage, *arguments: Any) -> Any:
    """Call the function of a stage in a separate process, and return its result (see `ProcessCaller`)."""
    with ProcessCaller(stage) as caller:
        return caller.call(*arguments)
