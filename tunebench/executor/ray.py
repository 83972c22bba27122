"""Execution on the workers of a Ray cluster.

Ray itself runs in a separate process (`tunebench.executor._gateway`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import IO, Any, Self

from tunebench._child import WORKING_FOLDER, absolute_environment, import_path, python_command
from tunebench.device import Device
from tunebench.errors import ClusterLost, InputError, MissingDependency
from tunebench.executor import (
    CalledStage,
    ExecutorClosed,
    FunctionCaller,
    PoolStatus,
    WorkerExecutor,
    WorkerLost,
)
from tunebench.executor.local import LocalExecutor
from tunebench.executor.message import LOSSES, Job, WorkerRequest, WorkerSetup
from tunebench.outcome import Crashed, Result
from tunebench.task import Task, revision_of

__all__ = ["Cluster", "RayExecutor", "check_address", "worker_setup"]

CONNECT_S = 60.0
"""Time limit for Ray to start or join a cluster, in seconds."""
CLOSE_S = 15.0
"""Time limit for Ray to stop before it is killed, in seconds."""

_MAIN = "from tunebench.executor._gateway import main; main()"

# Environment of the process of Ray, and of a cluster that it starts.
# Source: docs.ray.io, and ray/_private of Ray 2.60; other versions ignore unknown variables.
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the future default; if unset, each worker warns
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",  # 64 MB of shared memory in containers are enough
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}
_LOCAL = {
    "RAY_enable_worker_prestart": "0",  # there will be one actor only
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # the default 15 would let other processes disturb measurements
}


class Cluster:
    """A Ray cluster, connected; a context manager.

    Args:
        request: Which workers are wanted, and where.

    Raises:
        MissingDependency: if Ray is not installed.
        ClusterLost: if the cluster cannot be reached, or has other versions.
    """

    def __init__(self, request: WorkerRequest) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency("ray", "cluster")
        self.address = request.address
        self.devices: tuple[Device, ...] = ()
        self.refused: tuple[str, ...] = ()
        self._executors: dict[str, RayExecutor] = {}
        self._lost: str | None = None
        self._joined = False
        self._lock = threading.Lock()
        self._listener: threading.Thread | None = None
        self._output: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the cluster
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            python_command(_MAIN, str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            cwd=WORKING_FOLDER,  # the workers of Ray import from it
            stdout=self._output,
            stderr=self._output,
            env=_environment(request.address),
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # this process handles Ctrl-C
        )
        theirs.close()
        try:
            self._connection.send(request)
            self._wait_for_workers()
        except BaseException:
            self.close()
            raise

    def _wait_for_workers(self) -> None:
        """Wait for the first workers."""
        try:
            if not self._connection.poll(CONNECT_S):  # Ray itself would retry forever
                raise ClusterLost(_unreachable(self.address, self._last_words()))
            first, *rest = self._connection.recv()
            if first == "unreachable":
                raise ClusterLost(_unreachable(self.address, rest[0]))
            self._joined = True
            self.devices, self.refused = map(tuple, self._connection.recv()[1:])
        except (EOFError, OSError):
            raise ClusterLost(_unreachable(self.address, self._last_words())) from None

    def executors(self, setups: Mapping[str, WorkerSetup]) -> dict[str, RayExecutor]:
        """Set up the workers; may be called once.

        Args:
            setups: Setup of the workers of each device, by its key.

        Returns:
            The executor of each device, by its key.
        """
        self._executors = {key: RayExecutor(self, key) for key in setups}
        self.send("begin", dict(setups))
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self._executors

    def send(self, *message: Any) -> None:
        """Send a message to the gateway.

        Raises:
            ClusterLost: if the gateway is gone.
        """
        try:
            with self._lock:
                self._connection.send(message)
        except (OSError, ValueError):
            raise ClusterLost(
                self._lost or f"{self.address}: the connection to the cluster is lost"
            ) from None

    def _listen(self) -> None:
        try:
            while True:
                match self._connection.recv():
                    case ("answer", *answer):
                        for executor in self._executors.values():
                            executor.take(*answer)
                    case ("status", str() as device, PoolStatus() as status):
                        self._executors[device].update(status)
                    case ("lost", device, str() as reason):
                        self._give_up(f"{self.address}: {reason}", device)
        except (EOFError, OSError):
            pass
        finally:  # without this thread, no future would ever get a result
            self._give_up(f"{self.address}: the connection to the cluster is lost: {self._last_words()}")

    def _give_up(self, reason: str, device: str | None = None) -> None:
        self._lost = reason
        for key, executor in self._executors.items():
            if device in (None, key):
                executor.lose(reason)

    def _last_words(self) -> str:
        """Return the last line of Ray's output, which contains the reason for its exit."""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").split("\n")
        written = [line.strip() for line in lines if line.strip() and not line.startswith((" ", "***"))]
        return written[-1][:300] if written else "Ray's process ended without output"

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started for this run."""
        for executor in self._executors.values():
            executor.close()
        with contextlib.suppress(ClusterLost):
            self.send("bye")  # closing the pipe has no effect while a thread reads from it
        try:
            self._process.wait(CLOSE_S if self._joined else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener is not None:
            self._listener.join()
        self._connection.close()
        self._output.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class RayExecutor(WorkerExecutor[Task]):
    """The workers of one device in a cluster.

    Args:
        cluster: The cluster.
        device: Key of the device.
    """

    def __init__(self, cluster: Cluster, device: str) -> None:
        self.capacity = 1
        self.pool = PoolStatus(refused=cluster.refused)
        self._cluster, self._device = cluster, device
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._busy: dict[str, float] = {}
        self._same_worker = False
        self._ended: Exception | None = None

    @property
    def busy_s(self) -> float:
        """Time in which the busiest worker compiled or measured, in seconds."""
        return max(self._busy.values(), default=0.0)

    def submit(self, task: Task) -> Future[Result]:
        """Start a task on a free worker (see `WorkerExecutor.submit`)."""
        revision = revision_of(task.variant, task.workload, task.config)
        return self._send("run", pickle.dumps(task), revision, self.abort_above_us)

    def caller(self, stage: Callable[[], CalledStage]) -> FunctionCaller:
        """Return a caller of a function on a worker (see `WorkerExecutor.caller`)."""
        return _ClusterCaller(self, stage)

    def call(self, stage: bytes, blob: bytes) -> Any:
        """Call the function of a stage on a worker; both arguments are pickled."""
        return self._send("call", stage, blob).result()

    @contextlib.contextmanager
    def same_worker(self) -> Iterator[None]:
        """Return a context in which all jobs run on one worker (see `WorkerExecutor.same_worker`)."""
        self._cluster.send("same_worker", self._device)
        self._same_worker = True
        try:
            yield
        finally:
            self._same_worker = False

    def _send(self, method: str, *arguments: Any) -> Future[Any]:
        job = Job(
            number=next(_numbers),
            device=self._device,
            method=method,
            arguments=arguments,
            same_worker=self._same_worker,
        )
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._pending[job.number] = future
        self._cluster.send("job", job)
        return future

    def take(self, number: int, kind: str, content: Any, busy_s: float, worker: str) -> None:
        """Set the result of a job; jobs of other executors are ignored."""
        with self._lock:
            future = self._pending.pop(number, None)
        if future is None:
            return
        if worker:
            self._busy[worker] = busy_s
        match kind:
            case "done":
                future.set_result(pickle.loads(content))  # noqa: S301 - from our own workers
            case "failed":
                future.set_exception(pickle.loads(content))  # noqa: S301 - likewise
            case "killed":
                reason = f"{LOSSES} workers died with it; the last one: {content}"
                future.set_result(Result(outcome=Crashed(reason=reason)))
            case "moved":
                future.set_exception(WorkerLost())

    def update(self, status: PoolStatus) -> None:
        """Take over the status of the workers."""
        self.capacity = max(1, status.slots)  # 0 would end a search that should wait for workers
        refused = tuple(dict.fromkeys((*self._cluster.refused, *status.refused)))
        self.pool = dataclasses.replace(status, refused=refused)

    def lose(self, reason: str) -> None:
        """Fail all pending jobs: there will be no worker."""
        for future in self._end(ClusterLost(reason)):
            future.set_exception(ClusterLost(reason))

    def close(self) -> None:
        """Stop this device's workers (see `WorkerExecutor.close`)."""
        with contextlib.suppress(ClusterLost):
            if self._ended is None:
                self._cluster.send("stop", self._device)
        for future in self._end(ExecutorClosed()):
            future.cancel()

    def _end(self, why: Exception) -> list[Future[Any]]:
        with self._lock:
            self._ended = self._ended or why
            pending = list(self._pending.values())
            self._pending.clear()
        return pending


class _ClusterCaller:
    """Calls one function in a separate process of a worker (see `FunctionCaller`)."""

    def __init__(self, executor: RayExecutor, stage: Callable[[], CalledStage]) -> None:
        self._executor, self._stage = executor, pickle.dumps(stage)

    def call(self, *arguments: Any) -> Any:
        """Return the result of the function (see `FunctionCaller.call`)."""
        return self._executor.call(self._stage, pickle.dumps(arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Its process ends with the worker."""


_numbers = itertools.count()


def worker_setup(start: Callable[[int], LocalExecutor], files: Mapping[str, str]) -> WorkerSetup:
    """Return the setup of a worker.

    Args:
        start: Importable function, or a partial of one, that starts the executor of the worker, given the
            number of compile processes; 0 is one per core.
        files: Text of each user file, by its path here.
    """
    return WorkerSetup(files=dict(files), start=pickle.dumps(start))


def check_address(address: str) -> None:
    """Check the address of a cluster.

    Raises:
        InputError: if it is invalid.
        MissingDependency: if it needs grpcio, which is not installed.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("local", "auto") and not (host and port.isdecimal() and "/" not in host):
        raise InputError(
            f"--cluster {address}: expected local, auto, HOST:6379 (from a node of the cluster) or ray://HOST:10001"
        )
    if address.startswith("ray://") and importlib.util.find_spec("grpc") is None:
        raise MissingDependency("grpcio, which ray:// needs,", "cluster")


def _environment(address: str) -> dict[str, str]:
    """Return the environment of Ray's process: this process's environment, and its import path."""
    environment = absolute_environment(**_QUIET, PYTHONPATH=os.pathsep.join(import_path()))
    if address == "local":
        # A token keeps other users out; it is not written to the home directory.
        environment |= {**_LOCAL, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return environment


def _unreachable(address: str, reason: str) -> str:
    if address == "local":
        return f"Ray could not start on this machine: {reason}"
    if "ersion mismatch" in reason or "ersions" in reason:
        return f"the cluster at {address} has other versions: {reason}"
    return f"no Ray cluster at {address} ({reason}); start its head there: ray start --head"
