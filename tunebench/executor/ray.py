"""Workers of a Ray cluster: the same tasks, compiled and measured wherever the device is.

Ray itself is in a process of its own (`tunebench.executor._gateway`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import IO, Any, Self

from tunebench.device import Device
from tunebench.errors import ClusterLost, InputError, MissingDependency
from tunebench.executor import Calls, Executor, Fleet, PlaceLost, Stopped
from tunebench.executor._message import LOSSES, Equipment, Job, Look, State
from tunebench.executor.local import LocalExecutor, Stage
from tunebench.outcome import Crashed, Result
from tunebench.task import Task

__all__ = ["Cluster", "Equipment", "Look", "RayExecutor", "check_address", "equipment"]

CONNECT_S = 60.0
"""Longest that Ray may take to start or to join a cluster."""
CLOSE_S = 15.0
"""Longest that Ray may take to stop; then it is killed."""

# What Ray is told through the environment of its process, and of the cluster where it starts one.
# Source: docs.ray.io, and ray/_private of Ray 2.60; other versions pass over what they do not know.
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the coming default; unset, each worker warns of it
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",  # containers have 64 MB of shared memory, and we need none
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
}
_LOCAL = {
    "RAY_enable_worker_prestart": "0",  # one actor is all that will be there
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",  # 15 unless told: whatever else runs here would disturb what is timed
}


class Cluster:
    """A Ray cluster, connected; a context manager.

    Args:
        look: Which workers are wanted, and where.

    Raises:
        MissingDependency: if Ray is not installed.
        ClusterLost: if the cluster cannot be reached, or has other versions.
    """

    def __init__(self, look: Look) -> None:
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency("ray", "cluster")
        self.address = look.address
        self.devices: tuple[Device, ...] = ()
        """What its workers can measure on."""
        self.refused: tuple[str, ...] = ()
        """Why workers are not made use of."""
        self._executors: dict[str, RayExecutor] = {}
        self._lost: str | None = None
        self._joined = False
        self._lock = threading.Lock()
        self._listener: threading.Thread | None = None
        self._said: IO[bytes] = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the cluster
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tunebench.executor._gateway", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            env=_environment(look.address),
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the driver's to handle
        )
        theirs.close()
        try:
            self._connection.send(look)
            self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        """Wait for the workers that are there."""
        try:
            if not self._connection.poll(CONNECT_S):  # Ray itself tries again for ever
                raise ClusterLost(_unreachable(self.address, self._last_words()))
            first, *rest = self._connection.recv()
            if first == "unreachable":
                raise ClusterLost(_unreachable(self.address, rest[0]))
            self._joined = True
            self.devices, self.refused = map(tuple, self._connection.recv()[1:])
        except (EOFError, OSError):
            raise ClusterLost(_unreachable(self.address, self._last_words())) from None

    def executors(self, equipment: Mapping[str, Equipment]) -> dict[str, RayExecutor]:
        """Put workers to work, once; returns an executor for each device.

        Args:
            equipment: What the workers of a device need, by its key.
        """
        self._executors = {key: RayExecutor(self, key) for key in equipment}
        self.send("begin", dict(equipment))
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        return self._executors

    def send(self, *message: Any) -> None:
        """Tell the gateway something.

        Raises:
            ClusterLost: if it is gone.
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
                    case ("state", str() as device, State() as state):
                        self._executors[device].told(state)
                    case ("lost", device, str() as reason):
                        self._give_up(f"{self.address}: {reason}", device)
        except (EOFError, OSError):
            pass
        finally:  # whatever ends this thread, nobody may wait for what nobody will tell
            self._give_up(f"{self.address}: the connection to the cluster is lost: {self._last_words()}")

    def _give_up(self, reason: str, device: str | None = None) -> None:
        self._lost = reason
        for key, executor in self._executors.items():
            if device in (None, key):
                executor.lose(reason)

    def _last_words(self) -> str:
        """Return the last line that Ray has said of its own end."""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip() and not line.startswith((" ", "***"))]
        return said[-1][:300] if said else "Ray's process ended without a word"

    def close(self) -> None:
        """Stop the workers, and the cluster if it was started for this run."""
        for executor in self._executors.values():
            executor.close()
        with contextlib.suppress(ClusterLost):
            self.send("bye")  # the end of the pipe alone is not seen while a thread of ours reads from it
        try:
            self._process.wait(CLOSE_S if self._joined else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._listener is not None:
            self._listener.join()
        self._connection.close()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RayExecutor(Executor[Task]):
    """The workers of one device in a cluster.

    Args:
        cluster: The cluster.
        device: Key of the device.
    """

    def __init__(self, cluster: Cluster, device: str) -> None:
        self.capacity = 1
        self.fleet = Fleet(refused=cluster.refused)
        self._cluster, self._device = cluster, device
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}
        self._busy: dict[str, float] = {}
        self._together = False
        self._ended: Exception | None = None

    @property
    def busy_s(self) -> float:
        """Time in which the busiest worker compiled or measured: what is left is overhead at most."""
        return max(self._busy.values(), default=0.0)

    def submit(self, task: Task) -> Future[Result]:
        """Begin a task on whichever worker has room (see `Executor.submit`)."""
        revision = task.variant.revision(task.workload, task.config)
        return self._send("run", pickle.dumps(task), revision, self.abort_above_us)

    def calls(self, stage: Callable[[], Stage]) -> Calls:
        """Return what calls a function where tasks are measured (see `Executor.calls`)."""
        return _RemoteCalls(self, stage)

    def call(self, stage: bytes, blob: bytes) -> Any:
        """Call a stage's function on a worker; both arguments are pickled."""
        return self._send("call", stage, blob).result()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a context in which all runs on one worker (see `Executor.together`)."""
        self._cluster.send("together", self._device)
        self._together = True
        try:
            yield
        finally:
            self._together = False

    def _send(self, method: str, *arguments: Any) -> Future[Any]:
        job = Job(
            number=next(_numbers),
            device=self._device,
            method=method,
            arguments=arguments,
            together=self._together,
        )
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._pending[job.number] = future
        self._cluster.send("job", job)
        return future

    def take(self, number: int, kind: str, content: Any, busy_s: float, worker: str) -> None:
        """Hand over what became of a job; another executor's is passed over."""
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
                reason = f"{LOSSES} workers died with it; of the last: {content}"
                future.set_result(Result(outcome=Crashed(reason=reason)))
            case "moved":
                future.set_exception(PlaceLost())

    def told(self, state: State) -> None:
        """Take over how the workers are."""
        self.capacity = max(1, state.slots)  # none at all would end a search that had better wait
        self.fleet = Fleet(
            workers=state.workers,
            lost=state.lost,
            refused=tuple(dict.fromkeys((*self._cluster.refused, *state.refused))),
            retried=state.retried,
        )

    def lose(self, reason: str) -> None:
        """Fail all that is pending: no worker will do it."""
        for future in self._end(ClusterLost(reason)):
            future.set_exception(ClusterLost(reason))

    def close(self) -> None:
        """Stop this device's workers (see `Executor.close`)."""
        with contextlib.suppress(ClusterLost):
            if self._ended is None:
                self._cluster.send("stop", self._device)
        for future in self._end(Stopped()):
            future.cancel()

    def _end(self, why: Exception) -> list[Future[Any]]:
        with self._lock:
            self._ended = self._ended or why
            pending = list(self._pending.values())
            self._pending.clear()
        return pending


class _RemoteCalls:
    """Calls one function in a process of its own on a worker (see `Calls`)."""

    def __init__(self, executor: RayExecutor, stage: Callable[[], Stage]) -> None:
        self._executor, self._stage = executor, pickle.dumps(stage)

    def call(self, *arguments: Any) -> Any:
        """Return what the function returns (see `Calls.call`)."""
        return self._executor.call(self._stage, pickle.dumps(arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Its process ends with the worker."""


_numbers = itertools.count()


def equipment(start: Callable[[int], LocalExecutor], files: Mapping[str, str]) -> Equipment:
    """Return what a worker needs to begin.

    Args:
        start: An importable function, or a partial of one, that starts the worker's executor there, given how
            many processes compile; 0 is one for each core.
        files: Users' files: the text of each, by its path here.
    """
    return Equipment(files=dict(files), start=pickle.dumps(start))


def check_address(address: str) -> None:
    """Refuse what is no address of a cluster.

    Raises:
        InputError: saying what is.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("local", "auto") and not (host and port.isdecimal() and "/" not in host):
        raise InputError(
            f"--cluster {address}: give local, auto, HOST:6379 (from a node of the cluster) or ray://HOST:10001"
        )
    if address.startswith("ray://") and importlib.util.find_spec("grpc") is None:
        raise MissingDependency("grpcio, which ray:// needs,", "cluster")


def _environment(address: str) -> dict[str, str]:
    """Return the environment of Ray's process: ours, our import path, and what keeps Ray quiet."""
    found = {**os.environ, **_QUIET, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if address == "local":
        # Nobody else is to use it, and no token is to be left in the user's home.
        found |= {**_LOCAL, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return found


def _unreachable(address: str, reason: str) -> str:
    if address == "local":
        return f"Ray could not start on this machine: {reason}"
    if "ersion mismatch" in reason or "ersions" in reason:
        return f"the cluster at {address} has other versions: {reason}"
    return f"no Ray cluster at {address} ({reason}); start its head there: ray start --head"
