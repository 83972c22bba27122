"""The Ray actor of a worker, which runs a `LocalExecutor` on its node.

It has no state that the driver lacks: the gateway sends tasks of a dead actor to another one. Kernels crash
in the processes of the executor, not in the actor.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import pickle
import platform
from pathlib import Path

from tunebench import __version__
from tunebench._environment import cache_folder
from tunebench.device import Device, local_cpu, local_gpus
from tunebench.executor import FunctionCaller
from tunebench.executor.local import LocalExecutor
from tunebench.executor.message import Answer, Kind, WorkerInfo, WorkerSetup
from tunebench.kernels import import_file, module_name
from tunebench.task import Task, revision_of

__all__ = ["WorkerActor", "placed_file", "versions"]


def versions() -> tuple[str, str]:
    """Return the versions that driver and workers must share: Python major.minor, and tunebench."""
    return ".".join(platform.python_version_tuple()[:2]), __version__


class WorkerActor:
    """Compiles and measures on one GPU, or on the CPU of one node."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._executor: LocalExecutor | None = None
        self._callers: dict[bytes, FunctionCaller] = {}
        self._leaving = asyncio.Event()

    async def describe(self, kind: Kind) -> WorkerInfo:
        """Return device and versions. Ray makes only one GPU visible to the actor."""
        if kind == "cpu":
            # Ray limits the threads of libraries to the CPUs that the node was started with; a variant uses
            # every core.
            self._device = local_cpu()
            os.environ["OMP_NUM_THREADS"] = str(self._device.sm_count)
        else:
            self._device = next(iter(local_gpus()), None)
        return WorkerInfo(device=self._device, versions=versions())

    async def begin(self, setup: WorkerSetup, compilers: int) -> int:
        """Start the processes that compile and measure.

        Args:
            setup: User files and the function that starts the executor.
            compilers: Number of compile processes; 0 is one per core.

        Returns:
            Number of tasks that this worker takes at once.
        """
        for path, text in setup.files.items():
            import_file(placed_file(path, text))
        self._executor = pickle.loads(setup.start)(compilers)  # noqa: S301 - from our own driver
        return self._executor.capacity

    async def run(self, blob: bytes, revision: str, abort_above_us: float | None) -> Answer:
        """Compile and measure one task."""
        assert self._executor is not None, "begin must be called first"
        try:
            task: Task = pickle.loads(blob)  # noqa: S301 - from our own driver
            refusal = self._refusal(task, revision)
            if refusal is not None:
                return "refused", refusal, self._executor.busy_s
            self._executor.abort_above_us = abort_above_us
            result = await asyncio.wrap_future(self._executor.submit(task))
        except Exception as error:  # the process boundary of measuring: the driver raises it
            return "failed", _pickled(error), self._executor.busy_s
        return "done", pickle.dumps(result), self._executor.busy_s

    def _refusal(self, task: Task, revision: str) -> str | None:
        """Return why this worker cannot run a task; None if it can."""
        assert self._device is not None, "describe must be called first"
        if task.device.key != self._device.key:
            return f"its device is {self._device.key}; the trial needs {task.device.key}"
        if revision_of(task.variant, task.workload, task.config) != revision:
            return f"its source of {task.variant.key} differs from the driver's: install the same tunebench"
        return None

    async def call(self, stage: bytes, blob: bytes) -> Answer:
        """Call the function of a stage in a separate process, which is kept for the next call."""
        assert self._executor is not None, "begin must be called first"
        try:
            if stage not in self._callers:
                self._callers[stage] = self._executor.caller(pickle.loads(stage))  # noqa: S301 - likewise
            arguments = pickle.loads(blob)  # noqa: S301 - likewise
            call = functools.partial(self._callers[stage].call, *arguments)
            answer = await asyncio.get_running_loop().run_in_executor(None, call)
        except Exception as error:  # likewise
            return "failed", _pickled(error), self._executor.busy_s
        return "done", pickle.dumps(answer), self._executor.busy_s

    async def watch(self) -> None:
        """Return when this actor is about to end; the call fails when the actor dies."""
        await self._leaving.wait()

    async def close(self) -> None:
        """Stop the processes, then the actor; all of them release their resources."""
        from ray.actor import exit_actor

        for caller in self._callers.values():
            caller.__exit__(None, None, None)
        if self._executor is not None:
            self._executor.close()
        self._leaving.set()  # Ray lets running calls end first
        exit_actor()


def placed_file(path: str, text: str) -> Path:
    """Return the path of a user file on this machine: the same path, or a copy in the cache folder."""
    file = Path(path)
    try:
        if file.read_text(encoding="utf-8") == text:
            return file
    except (OSError, ValueError):
        pass
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    copy = cache_folder() / "variants" / digest / f"{module_name(path)}.py"
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        part = copy.with_suffix(f".{os.getpid()}")
        part.write_text(text, encoding="utf-8")
        part.replace(copy)
    return copy


def _pickled(error: Exception) -> bytes:
    try:
        blob = pickle.dumps(error)
        pickle.loads(blob)  # noqa: S301 - our own
    except Exception:  # an exception of a user's class may not pickle: keep its message
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return blob
