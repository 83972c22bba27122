"""Processes that are forks of a server process, which has imported what they need.

A new interpreter that imports Numba, Optuna and SQLAlchemy takes seconds of processor time, and PyTorch takes
as long again; a fork takes milliseconds. `ForkServer.launch` starts a fork that is a child of this process,
as `subprocess.Popen` does, with its own environment, folder and standard streams. Tests of how processes
start use `subprocess` (see `NEW_WORKERS` in tests/conftest.py).

The server forks a process that forks the child and ends. While it does, this process is a subreaper, so that
the child becomes its own. The server ends when this process closes the connection, or ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

__all__ = [
    "GC_THRESHOLDS",
    "WORKER_MODULES",
    "Fork",
    "ForkServer",
    "Programs",
    "fork_workers",
    "main",
    "prepare_workers",
    "warm_numba",
]

ROOT = Path(__file__).resolve().parents[1]

WORKER_MODULES = (
    *("numba", "ml_dtypes", "threadpoolctl", "numpy.random", "tunebench.executor._worker_main"),
    *("tunebench.executor._supervisor", "tunebench.compile.worker", "tunebench.compile.numba_cpu"),
    *("tunebench.measure.worker", "tunebench.measure.cpu", "tunebench.measure.offline"),
)
"""Modules that worker processes of every kind, or of most kinds, import."""

GC_THRESHOLDS = (10_000, 20, 20)
"""Thresholds of garbage collection. With Python's own, a full collection visits the modules that tests import
and the caches of compilers after every few thousand new objects, a tenth of the time of a compilation."""

_MESSAGE_BYTES = 1 << 20
_STREAMS = 3

# Source: linux/prctl.h
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass
class Fork:
    """A child process that a server forked, with the part of `subprocess.Popen` that callers use."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status once the process has ended; minus the number of a signal that ended it."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise `subprocess.TimeoutExpired` if there is none within the time."""
        if timeout is None and self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        end_s = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        """Kill the process and its process group, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class ForkServer:
    """A process that forks on request.

    Args:
        connection: Connection to the process.
        process: The process, if it must be waited for.
    """

    def __init__(
        self, connection: socket.socket, process: subprocess.Popen[bytes] | Fork | None = None
    ) -> None:
        self._connection, self._process = connection, process
        self._owner, self._lock = os.getpid(), threading.Lock()

    @classmethod
    def start(cls, modules: Sequence[str], prepare: str = "") -> ForkServer:
        """Start a server in a new interpreter.

        Args:
            modules: Modules that it imports.
            prepare: `module:function` that it calls afterwards, if any.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = f"{theirs.fileno()}, {[*modules]!r}, {prepare!r}"
        code = f"from tests.fork_server import main; main({arguments})"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                process_group=0,
            )
        return cls(ours, process)

    @classmethod
    def fork(cls) -> ForkServer:
        """Start a server that is a fork of this process, which must have one thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            os.setpgid(0, 0)
            _serve(theirs)
        theirs.close()
        return cls(ours)

    def extended(self, modules: Sequence[str]) -> ForkServer:
        """Return a fork of this server that imports further modules."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            fork = self.launch("tests.fork_server:serve_with", [*modules], descriptors=[theirs.fileno()])
        return ForkServer(ours, fork)

    @property
    def usable(self) -> bool:
        """Whether this process is the one that started the server; its forks cannot use the connection."""
        return os.getpid() == self._owner

    def launch(
        self,
        target: str,
        *arguments: Any,
        folder: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
        streams: Sequence[int] = (0, 1, 2),
        descriptors: Sequence[int] = (),
    ) -> Fork:
        """Start a fork that calls a function, and exits with what it returns.

        Args:
            target: `module:function`.
            *arguments: Its arguments, as JSON has them.
            folder: Folder that the process runs in; that of this process by default.
            environment: Its environment; that of this process by default.
            streams: File descriptors of its standard streams.
            descriptors: File descriptors that the function receives after its arguments.
        """
        request = {
            "target": target,
            "arguments": arguments,
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        with self._lock, _subreaper():
            socket.send_fds(self._connection, [json.dumps(request).encode()], [*streams, *descriptors])
            reply = self._connection.recv(64)
            if not reply:
                raise OSError("the fork server has ended")
            return Fork(int(reply))

    def close(self) -> None:
        """End the server; processes that it forked continue."""
        if self.usable:
            self._connection.close()
            if self._process is not None:
                self._process.wait()


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Let orphans among the descendants of this process become its children, within the context."""
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value), 0, 0, 0)


# -- the server ----------------------------------------------------------------------------------------------


def main(connection: int, modules: Sequence[str], prepare: str) -> NoReturn:
    """Import modules and serve requests.

    Args:
        connection: File descriptor of the connection.
        modules: Names of the modules.
        prepare: `module:function` that is called afterwards, if any.
    """
    for name in modules:
        importlib.import_module(name)
    if prepare:
        _function(prepare)()
    _serve(socket.socket(fileno=connection))


def serve_with(modules: Sequence[str], connection: int) -> NoReturn:
    """Import further modules in a fork of a server, and serve requests."""
    main(connection, modules, "")


def _serve(connection: socket.socket) -> NoReturn:
    """Fork for each request until the connection closes.

    Raises:
        RuntimeError: if this process has several threads: a fork would lack them, and what they hold.
    """
    if threading.active_count() > 1:
        raise RuntimeError(f"a fork server has one thread: {threading.enumerate()}")
    gc.collect()
    gc.freeze()  # a collection in a fork would copy the pages of all objects
    gc.set_threshold(*GC_THRESHOLDS)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            _fork_again(writer)
            for unused in (reader, writer):
                os.close(unused)
            connection.close()
            _run(json.loads(message), descriptors)
        os.waitpid(between, 0)
        for unused in (writer, *descriptors):
            os.close(unused)
        pid = os.read(reader, 64)
        os.close(reader)
        connection.send(pid)


def _fork_again(writer: int) -> None:
    """Return in a fork of this process when this process has ended; write the process id of the fork."""
    between = os.getpid()
    if pid := os.fork():
        os.setpgid(pid, pid)  # before the caller can kill the group
        os.write(writer, str(pid).encode())
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)


def _run(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Call the function of a request in this process, and exit as Python does."""
    for number, descriptor in enumerate(descriptors[:_STREAMS]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.exit(_function(request["target"])(*request["arguments"], *descriptors[_STREAMS:]))


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


FINAL_SAMPLES = 10
"""Samples of a finalist in each round, where users get 30 to 100: most of the time of a short search."""


def prepare_workers() -> None:
    """Prepare a server of worker processes: load what they need, and let finalists take few samples."""
    from tunebench.executor import judge
    from tunebench.measure import runner

    runner.THOROUGH.update(min_samples=FINAL_SAMPLES, max_samples=FINAL_SAMPLES)
    judge.LEAST_CHANGED = 2
    warm_numba()


def warm_numba() -> None:
    """Compile a function, which loads the typing and lowering of Numba; starts no thread."""
    import numba
    import numpy as np

    @numba.njit
    def total(values):  # type: ignore[no-untyped-def]
        result = 0.0
        for index in range(values.size):
            result += values[index]
        return result

    total(np.ones(4, dtype=np.float32))


# -- Python programs -----------------------------------------------------------------------------------------


class Programs:
    """Runs Python programs in forks of a server, or in new interpreters.

    Args:
        server: Returns the server, called for each program; None for new interpreters.
    """

    def __init__(self, server: Callable[[], ForkServer] | None) -> None:
        self._server = server

    @contextlib.contextmanager
    def importing(self, modules: Sequence[str]) -> Iterator[Programs]:
        """Run programs in processes that have imported further modules, within the context."""
        if self._server is None:
            yield self
            return
        extended = self._server().extended(modules)
        yield Programs(lambda: extended)
        extended.close()

    def start(
        self,
        arguments: Sequence[str],
        *,
        output: IO[Any],
        errors: IO[Any],
        folder: str | Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Fork | subprocess.Popen[bytes]:
        """Start a program.

        Args:
            arguments: What follows `python` on a command line: ``-m MODULE``, ``-c CODE`` or a file, and
                arguments.
            output: File for its standard output.
            errors: File for its standard error.
            folder: Folder that it runs in; that of this process by default.
            environment: Its environment; that of this process by default.
        """
        if self._server is None:
            command = [sys.executable, *arguments]
            return subprocess.Popen(command, stdout=output, stderr=errors, cwd=folder, env=environment)
        with open(os.devnull, "rb") as nothing:
            return self._server().launch(
                "tests.fork_server:run_as_main",
                *arguments,
                folder=folder,
                environment=environment,
                streams=[stream.fileno() for stream in (nothing, output, errors)],
            )

    def run(
        self, arguments: Sequence[str], *, timeout_s: float = 200, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; the options are those of `start`."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self.start(arguments, output=output, errors=errors, **options)
            try:
                returncode = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            for stream in (output, errors):
                stream.seek(0)
            printed, complaints = output.read().decode(), errors.read().decode()
        return subprocess.CompletedProcess([*arguments], returncode, printed, complaints)


def run_as_main(*arguments: str) -> None:
    """Do what `python ARGUMENTS` does, for ``-m MODULE``, ``-c CODE`` or a file, and arguments."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads and "torch" in sys.modules:  # OpenMP has read the variables of the server
        sys.modules["torch"].set_num_threads(int(threads))
    option, *further = arguments
    if option == "-c":
        code, *following = further
        sys.argv[:] = ["-c", *following]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif option == "-m":
        module, *following = further
        sys.argv[:] = [module, *following]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [option, *further]
        sys.path[0] = str(Path(option).parent)
        runpy.run_path(option, run_name="__main__")


# -- worker processes ----------------------------------------------------------------------------------------


def fork_workers(server: Callable[[], ForkServer]) -> Callable[[], None]:
    """Let worker processes of the executor be forks of a server, and return a function that ends that.

    Args:
        server: Returns the server, called for each process.
    """
    from tunebench.executor import _running_process

    before = _running_process.subprocess

    def launch(command: list[str], **options: Any) -> Any:
        running = server()
        if not running.usable:
            return before.Popen(command, **options)
        *_, calls, lifeline, memory_bytes, path = command
        streams = [os.open(os.devnull, os.O_RDONLY), 1, 2]
        try:
            return running.launch(
                "tests.fork_server:serve_worker",
                *(memory_bytes, path),
                folder=options["cwd"],
                environment=options["env"],
                streams=streams,
                descriptors=[int(calls), int(lifeline)],
            )
        finally:
            os.close(streams[0])

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": launch})
    _running_process.subprocess = stand_in  # type: ignore[assignment]

    def restore() -> None:
        _running_process.subprocess = before

    return restore


def serve_worker(memory_bytes: str, path: str, calls: int, lifeline: int) -> None:
    """Do what the command of a worker process does (see `tunebench.executor._running_process`)."""
    from tunebench.executor._supervisor import supervise
    from tunebench.executor._worker_main import serve

    sys.argv[:] = ["-c"]
    sys.path[:] = json.loads(path)
    supervise(calls, lifeline, int(memory_bytes), serve)
