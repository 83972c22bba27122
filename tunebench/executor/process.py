"""Processes that run one function, call by call: `WorkerPool` shares calls among several of them.

A process is started by `subprocess`, not by `multiprocessing`: it imports neither the main module of this
process nor anything else that `ProcessStage.start` does not import, and leaves no files, semaphores or server
processes behind. A thread of this process waits for each of them, so that a process that hangs, exits with
any status or closes its connection costs one call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from tunebench._user_code import IMPORT_S
from tunebench.errors import EnvironmentFault, TaskUnreadable, WorkerUnusable, describe_error
from tunebench.executor._running_process import END_S, CallLate, ReplyUnreadable, RunningProcess
from tunebench.executor._worker_main import Reply
from tunebench.fault import DEVICE_FAULT, describe_exit
from tunebench.outcome import Crashed, TimedOut

__all__ = ["ProcessCaller", "ProcessStage", "WorkerPool", "answer_of", "death_reason", "process_crashed"]

START_S = 60.0
"""Time limit for a process to start, in seconds: it imports tunebench, a runner and users' variants."""

START_ATTEMPTS = 2
"""Attempts to start a process that ends before it is ready; something else may have killed the first."""


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
        user_code_s: Time limit of each function of a variant that the call calls, in seconds.
        gpus: The only GPU of each process, in the form of `CUDA_VISIBLE_DEVICES`; empty if all see those of
            this process.
    """

    function: Callable[..., Any]
    start: Callable[..., None]
    start_arguments: tuple[Any, ...] = ()
    workers: int = 1
    timeout_s: float = 60.0
    user_code_s: float = IMPORT_S
    gpus: tuple[str, ...] = ()

    def on_gpu(self, gpu: str) -> ProcessStage:
        """Return the same stage with a single process, which sees one GPU."""
        return dataclasses.replace(self, workers=1, gpus=(gpu,))

    def pool(self) -> WorkerPool:
        """Return the processes; each starts at its first call."""
        return WorkerPool(self)

    def caller(self) -> ProcessCaller:
        """Return a caller of the function in one process."""
        return ProcessCaller(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledCall:
    """A call with pickled arguments that waits for a process: a new one if it is fresh."""

    future: Future[Any]
    blob: bytes
    fresh: bool
    connect: Callable[[int], int] | None


class WorkerPool:
    """The processes of a stage. A thread for each process takes calls from a shared queue.

    Args:
        stage: The function, and the number of processes.
    """

    def __init__(self, stage: ProcessStage) -> None:
        self._calls: queue.SimpleQueue[_PooledCall | None] = queue.SimpleQueue()
        gpus = stage.gpus or (None,) * stage.workers
        self._processes = [_WorkerProcess(stage, gpu) for gpu in gpus]
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def schedule(
        self, *arguments: Any, fresh: bool = False, connect: Callable[[int], int] | None = None
    ) -> Future[Any]:
        """Call the function in a process.

        Args:
            *arguments: Arguments of the function.
            fresh: Whether to call it in a new process.
            connect: Called once the process runs, with the process id of its guard; returns a file descriptor
                for the call, which is closed here.

        Returns:
            Its result, or `Crashed` or `TimedOut`. The future raises an error that the function raised,
            `TaskUnreadable` for arguments that cannot be pickled or unpickled, and `WorkerUnusable` if no
            process starts.
        """
        future: Future[Any] = Future()
        try:
            blob = _pickled(arguments)
        except TaskUnreadable as error:
            future.set_exception(error)
            return future
        with self._lock:
            if self._closed:
                future.cancel()
            else:
                self._calls.put(_PooledCall(future=future, blob=blob, fresh=fresh, connect=connect))
                self._add_thread()
        return future

    def _add_thread(self) -> None:
        """Start the thread of one more process, if there is one; the caller holds the lock."""
        if len(self._threads) < len(self._processes):
            process = self._processes[len(self._threads)]
            thread = threading.Thread(target=self._take_calls, args=(process,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _take_calls(self, process: _WorkerProcess) -> None:
        while (call := self._calls.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            if call.fresh:
                process.close()
            try:
                answer = process.call(call.blob, call.connect)
            except BaseException as error:
                if isinstance(error, EnvironmentFault | TaskUnreadable):  # the process may be damaged
                    process.close()
                call.future.set_exception(error)
            else:
                call.future.set_result(answer)
        process.close()

    def close(self) -> None:
        """End the processes once they have answered all calls; they release their resources."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._calls.put(None)

    def stop(self) -> None:
        """Kill the processes; calls that have not begun are cancelled."""
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while call := self._calls.get_nowait():
                    call.future.cancel()
            for _ in self._threads:
                self._calls.put(None)
        for process in self._processes:
            process.stop()

    def join(self) -> None:
        """Wait until all processes have ended."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


class _WorkerEnded(Exception):
    """A process ended, or closed its connection, before it answered."""


class _WorkerLate(_WorkerEnded):
    """A process was killed because it did not answer within the time limit.

    Args:
        late: The answer of the call.
    """

    def __init__(self, late: TimedOut) -> None:
        super().__init__(late.reason)
        self.late = late


class _WorkerProcess:
    """One process of a stage, which is started for the first call and again after it ended.

    Args:
        stage: The function.
        gpu: The only GPU that it sees; None for all.
    """

    def __init__(self, stage: ProcessStage, gpu: str | None = None) -> None:
        self._stage, self._gpu = stage, gpu
        self._running: RunningProcess | None = None
        self._lock = threading.Lock()
        self._stopped = False

    def call(self, blob: bytes, connect: Callable[[int], int] | None = None) -> Any:
        """Return the result of the function for pickled arguments, or `Crashed` or `TimedOut`.

        Args:
            blob: The arguments.
            connect: Returns a file descriptor for the call (see `WorkerPool.schedule`).
        """
        running = self._start()
        channel = None if connect is None else connect(running.pid)
        try:
            return _value(self._exchange(running, blob, self._stage.timeout_s, channel))
        except _WorkerLate as late:
            return late.late
        except _WorkerEnded as end:
            return Crashed(reason=str(end))
        except ReplyUnreadable as error:  # the rest of its connection is not to be trusted either
            self._kill()
            self._end()
            return Crashed(reason=str(error))
        finally:
            if channel is not None:
                os.close(channel)

    def _start(self) -> RunningProcess:
        """Return the process, and start it if it does not run.

        Raises:
            WorkerUnusable: if it does not start.
            Exception: an error of `ProcessStage.start`.
        """
        if self._running is not None and not self._running.ended(0):
            return self._running
        stage = self._stage
        message = pickle.dumps((stage.function, stage.start, stage.start_arguments, stage.user_code_s))
        for _ in range(START_ATTEMPTS):
            self._end()
            try:
                running = self._launch()
                _value(self._exchange(running, message, START_S))
                return running
            except OSError as error:
                raise WorkerUnusable(f"a worker process cannot be started: {describe_error(error)}") from None
            except _WorkerLate as late:
                hint = "does the import of a variant file hang?"
                raise WorkerUnusable(f"a worker process: {late}; {hint}") from None
            except (_WorkerEnded, ReplyUnreadable) as end:
                death = str(end)
            except BaseException:
                self._end()
                raise
        raise WorkerUnusable(
            f"worker processes end before they are ready: {death}; does a variant file end its process?"
        )

    def _launch(self) -> RunningProcess:
        with self._lock:
            if self._stopped:
                raise _WorkerEnded("it was stopped")
            self._running = RunningProcess(self._gpu)
            return self._running

    def _exchange(
        self, running: RunningProcess, message: bytes, limit_s: float, channel: int | None = None
    ) -> bytes:
        """Send a message and return the reply.

        Raises:
            _WorkerLate: if there is no reply within the time limit.
            _WorkerEnded: if the process ends first.
        """
        try:
            return running.exchange(message, limit_s, self._stage.user_code_s, channel)
        except CallLate as late:
            self._kill()
            self._end()
            raise _WorkerLate(TimedOut(reason=str(late), conditions=late.conditions)) from None
        except (OSError, EOFError):
            raise _WorkerEnded(self._end()) from None

    def _kill(self) -> None:
        with self._lock:
            if self._running is not None:
                self._running.kill()

    def stop(self) -> None:
        """Kill the process, and start no other."""
        with self._lock:
            self._stopped = True
        self._kill()

    def close(self) -> None:
        """Wait for the process to exit, and kill it after a time limit."""
        self._end()

    def _end(self) -> str:
        """Wait for the process to exit, and kill its remaining descendants; return its exit status."""
        running = self._running
        if running is None:
            return "it was stopped"
        running.connection.close()
        ended = running.ended(END_S)
        running.kill()
        running.ended(None)
        with self._lock:  # from here on, the process id may belong to another process
            self._running = None
            exit_code = running.reap()
        return death_reason(exit_code) if ended else "worker closed its connection"


def _pickled(arguments: tuple[Any, ...]) -> bytes:
    """Return pickled arguments of a call.

    Raises:
        TaskUnreadable: if they cannot be pickled.
    """
    try:
        return pickle.dumps(arguments)
    except Exception as error:  # an object of a user's class, which may raise anything
        raise TaskUnreadable(f"the task cannot be pickled: {describe_error(error)}") from None


def _value(blob: bytes) -> Any:
    """Return the result of a reply, or raise its error.

    Raises:
        ReplyUnreadable: if it is no reply.
    """
    try:
        reply: Reply = pickle.loads(blob)  # noqa: S301 - from our own worker process
        returned, value = reply
    except Exception as error:
        raise ReplyUnreadable(f"the answer of a worker process: {describe_error(error)}") from None
    if not returned:
        if not isinstance(value, Exception):  # a worker turns any other error into its text
            raise ReplyUnreadable(f"the answer of a worker process: an error of {type(value).__name__}")
        raise value
    return value


def answer_of(done: Future[Any]) -> Any:
    """Return the answer of a worker, or the error it raised."""
    try:
        return done.result()
    except BaseException as error:  # the caller decides
        return error


def process_crashed(answer: Any) -> bool:
    """Return whether a process ended, or answered nonsense, for a reason that may not be its last call.

    The system kills a process if memory runs out, and an earlier call may have left an alarm, a limit or a
    damaged module. A fault of the device is always that of the call.
    """
    return isinstance(answer, Crashed) and not answer.reason.startswith(DEVICE_FAULT)


def death_reason(exit_code: int) -> str:
    """Return why a worker ended, by its exit code or the signal that killed it."""
    if exit_code < 0:
        names = {int(number): number.name for number in signal.Signals}  # real-time signals have no name
        return f"worker killed by {names.get(-exit_code, f'signal {-exit_code}')}"
    return describe_exit(exit_code) or f"worker exited with code {exit_code}"


class ProcessCaller:
    """Calls one function in a separate process (see `FunctionCaller`); a context manager.

    Args:
        stage: The function. The process starts with the first call, and again after it died.
    """

    def __init__(self, stage: ProcessStage) -> None:
        self._process = _WorkerProcess(stage, *stage.gpus[:1])

    def call(self, *arguments: Any) -> Any:
        """Return the result of the function, or `Crashed` or `TimedOut`; re-raise an error it raised."""
        return self._process.call(_pickled(arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self._process.stop()
        self._process.close()
