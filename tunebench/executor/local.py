"""Worker processes on this machine: several compile processes and one measurement process.

On a GPU, compiling and measuring overlap. On a CPU they would disturb each other: there they alternate, each
for as long as there is work for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tunebench.binary.compiled import Binary
from tunebench.errors import (
    CodeTimeout,
    EnvironmentFault,
    SuspectedFault,
    TaskUnreadable,
    VariantError,
)
from tunebench.executor import CalledStage, ExecutorClosed, FunctionCaller, TaskRefused, WorkerExecutor
from tunebench.executor._machine_check import machine_fault
from tunebench.executor.judge import JudgedCase
from tunebench.executor.judged_call import JudgedCall
from tunebench.executor.process import ProcessStage, answer_of, process_crashed
from tunebench.measure.judged import UNJUDGED
from tunebench.outcome import (
    FAILURES,
    CompileFailed,
    Crashed,
    Effort,
    LaunchFailed,
    Pruned,
    Resources,
    Result,
    TimedOut,
    WrongResult,
)
from tunebench.task import Task

__all__ = ["LocalExecutor"]

RETRY_S: tuple[float, ...] = (0.2, 1.0)
"""Pauses before a call is repeated after a fault of the environment, in seconds; then the task raises it."""

SUSPECT_RETRY_S: tuple[float, ...] = (0.2,)
"""Pauses before a call is repeated in a new process after a fault that the configuration may have caused."""


@dataclass(slots=True, eq=False)
class _LocalJob:
    task: Task
    future: Future[Result] = field(default_factory=Future)
    binary: Any = None
    bound_us: float = 0.0
    compile_s: float = 0.0
    began: float = 0.0
    faults: int = 0
    fresh: bool = False
    judged: JudgedCall | None = None


class LocalExecutor(WorkerExecutor[Task]):
    """Compiles and measures in processes of this machine.

    A call that lacks a resource (memory, files, disk space), or whose process ends or answers nonsense, is
    repeated in a new process, because an earlier call may have damaged the first one. If it
    fails again, and a check finds that this machine has all resources, the configuration failed; if the
    machine lacks one, the task raises it.

    Between the two, it computes the lower bound of the configuration with the resources of its binary, which
    is returned in `Result.bound_us`; tasks with `Task.prune` are not measured if it exceeds the incumbent's
    time.

    Args:
        compiling: The stage that turns a task into a binary.
        measuring: The stage that turns a task and its binary into a result. With several GPUs of one kind,
            each has a process; those of `same_worker` and `caller` use the first GPU.
        judging: The stage that verifies and times thorough tasks, while the measuring process runs their
            launches (see `tunebench.executor.judge`); None leaves both to the measuring process.
        overlap: Whether compiling and measuring may overlap.
        bound: Returns the lower bound of a task from the resources of its binary, in microseconds; None
            computes no bound.
        refuse: Returns why a compiled task is not to be measured, or None to measure it. A refused task
            raises `TaskRefused`.
    """

    def __init__(
        self,
        *,
        compiling: ProcessStage,
        measuring: ProcessStage,
        judging: ProcessStage | None = None,
        overlap: bool,
        bound: Callable[[Task, Resources], float] | None = None,
        refuse: Callable[[Task], str | None] | None = None,
    ) -> None:
        self.capacity = 2 * compiling.workers + measuring.workers
        self._stages = (compiling, measuring)
        self._overlap, self._bound, self._refuse = overlap, bound, refuse
        self._compilers, self._measurers = compiling.pool(), measuring.pool()
        self._gpus = measuring.gpus
        self._first_gpu = measuring.on_gpu(self._gpus[0]).pool() if len(self._gpus) > 1 else None
        self._on_first = False
        self._judges = None if judging is None else judging.pool()
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
            if self._closed:
                raise ExecutorClosed
            self._waiting.append(job)
            self._unfinished.append(job)
            self._advance()
        return job.future

    def caller(self, stage: Callable[[], CalledStage]) -> FunctionCaller:
        """Return a caller of the function of a stage, on the first GPU (see `WorkerExecutor.caller`)."""
        called = stage()
        return (called.on_gpu(self._gpus[0]) if self._gpus else called).caller()

    @contextlib.contextmanager
    def same_worker(self) -> Iterator[None]:
        """Return a context in which all tasks run on the first GPU (see `WorkerExecutor.same_worker`)."""
        with self._lock:
            self._on_first = self._first_gpu is not None
        try:
            yield
        finally:
            with self._lock:
                self._on_first = False

    def close(self) -> None:
        """Stop all workers at once (see `WorkerExecutor.close`)."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._ready.clear()
            idle = self._compiling + self._measuring == 0
        pools = [self._compilers, self._measurers]
        pools += [pool for pool in (self._first_gpu, self._judges) if pool is not None]
        for pool in pools:
            if idle:
                pool.close()  # idle workers end by themselves and release their resources
            else:
                pool.stop()
        for pool in pools:
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
        workers = 1 if self._on_first else self._stages[1].workers
        free = bool(self._ready) and self._measuring < workers
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
        running = self._compilers.schedule(job.task, fresh=job.fresh)
        running.add_done_callback(lambda done: self._compiled(job, done))

    def _compiled(self, job: _LocalJob, done: Future[Any]) -> None:
        job.compile_s = time.perf_counter() - job.began
        answer = _expected(answer_of(done), Binary, CompileFailed)
        repeats = self._pause(job, answer)
        answer = answer if repeats else self._judged(answer)
        if isinstance(answer, Crashed | TimedOut):
            conditions = answer.conditions if isinstance(answer, TimedOut) else {}
            answer = CompileFailed(
                reason=f"the compiler: {answer.reason}", refused=False, conditions=conditions
            )
        elif isinstance(answer, SuspectedFault):
            answer = CompileFailed(reason=str(answer), refused=False, conditions=_attempts(job))
        elif isinstance(answer, TaskUnreadable):
            answer = CompileFailed(reason=str(answer))
        with self._lock:
            self._count(compiling=-1)
            if repeats and not self._closed:
                self._waiting.append(job)
                self._advance()
                return
            job.faults, job.fresh = 0, False
            if isinstance(answer, CompileFailed):
                answer = Result(outcome=answer)
            if not isinstance(answer, Result | BaseException):
                answer = self._compiled_bound(job, answer)
            if self._closed or answer is not None:
                self._finish(job, answer)
            else:
                self._ready.append(job)
            self._advance()

    def _compiled_bound(self, job: _LocalJob, binary: Any) -> Result | BaseException | None:
        """Compute the bound of a compiled job; return the failure of a variant's costs, or another error."""
        job.binary = binary
        try:
            job.bound_us = 0.0 if self._bound is None else self._bound(job.task, binary.resources)
        except VariantError as error:  # for other configurations, the costs may be right
            conditions = error.conditions if isinstance(error, CodeTimeout) else {}
            failure = CompileFailed(reason=str(error), refused=False, conditions=conditions)
            return Result(outcome=failure, resources=binary.resources)
        except Exception as error:  # a user's variant may raise anything: the caller raises it
            return error
        return None

    def _start_measuring(self, job: _LocalJob) -> None:
        if self._refuse is not None and (reason := self._refuse(job.task)) is not None:
            self._finish(job, TaskRefused(reason))
            return
        incumbent_us = self.abort_above_us
        if getattr(job.task, "prune", False) and incumbent_us is not None and job.bound_us > incumbent_us:
            pruned = Pruned(bound_us=job.bound_us, incumbent_us=incumbent_us)
            self._finish(job, Result(outcome=pruned, resources=job.binary.resources))
            return
        self._count(measuring=1)
        job.began = time.perf_counter()
        job.judged = None
        if self._judges is not None and job.task.thorough:
            job.judged = JudgedCall(self._judges, functools.partial(JudgedCase.of_task, job.task))
        measurers = self._first_gpu if self._on_first and self._first_gpu is not None else self._measurers
        running = measurers.schedule(
            job.task,
            job.binary,
            incumbent_us,
            fresh=job.fresh,
            connect=None if job.judged is None else job.judged.connect,
        )
        running.add_done_callback(lambda done: self._measured(job, done))

    def _measured(self, job: _LocalJob, done: Future[Any]) -> None:
        answer = _expected(answer_of(done), Result)
        verdict = None if job.judged is None else job.judged.verdict()
        if verdict is not None:
            answer = _decided(job, answer, verdict)
        repeats = self._pause(job, answer)
        answer = answer if repeats else self._judged(answer)
        if isinstance(answer, SuspectedFault):
            answer = LaunchFailed(reason=str(answer), conditions=_attempts(job))
        elif isinstance(answer, TaskUnreadable):
            answer = Crashed(reason=str(answer))
        if isinstance(answer, Crashed | TimedOut | LaunchFailed):
            spent = Effort(measure_s=time.perf_counter() - job.began)
            resources = getattr(job.binary, "resources", Resources())
            answer = Result(outcome=answer, effort=spent, resources=resources)
        with self._lock:
            self._count(measuring=-1)
            if repeats and not self._closed:
                self._ready.append(job)
                self._advance()
                return
            self._finish(job, answer)
            self._advance()

    def _pause(self, job: _LocalJob, answer: Any) -> bool:
        """Wait without the lock, and return whether to repeat a call, in a new process, after a fault."""
        if isinstance(answer, SuspectedFault | TaskUnreadable) or process_crashed(answer):
            pauses_s = SUSPECT_RETRY_S
        elif isinstance(answer, EnvironmentFault):
            pauses_s = RETRY_S
        else:
            return False
        if job.faults >= len(pauses_s) or self._closed:
            return False
        time.sleep(pauses_s[job.faults])
        job.faults += 1
        job.fresh = True
        return True

    def _judged(self, answer: Any) -> Any:
        """Return the fault of this machine for a suspected fault that returned, if it has one."""
        if not isinstance(answer, SuspectedFault) or self._closed:
            return answer
        return machine_fault() or answer

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


def _decided(job: _LocalJob, answer: Any, verdict: Any) -> Any:
    """Return the answer of a measuring process with the verdict of its judge.

    A process may call its own configuration wrong, never right.
    """
    if isinstance(verdict, Crashed | TimedOut):
        return Crashed(reason=f"the process that verifies: {verdict.reason}")
    if isinstance(verdict, BaseException):
        return verdict
    is_served = isinstance(answer, Result) and (
        not isinstance(answer.outcome, FAILURES) or answer.outcome.reason == UNJUDGED
    )
    if not is_served and not isinstance(verdict.outcome, FAILURES):
        return answer
    return Result(
        outcome=verdict.outcome or WrongResult(reason=UNJUDGED),
        resources=job.binary.resources,
        effort=verdict.effort,
        conditions=answer.conditions if isinstance(answer, Result) else {},
    )


def _expected(answer: Any, *kinds: type) -> Any:
    """Return the answer of a worker or its error; one of another kind, which user code made, is a crash."""
    if isinstance(answer, (*kinds, Crashed, TimedOut, BaseException)):
        return answer
    return Crashed(reason=f"the answer of a worker process: {type(answer).__name__}")


def _attempts(job: _LocalJob) -> dict[str, int]:
    """Return the conditions of a configuration that exhausted a resource in each of several processes."""
    return {"attempts": 1 + job.faults}
