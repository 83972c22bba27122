"""The actor on a worker of a Ray cluster: a local executor, far away.

It holds nothing that is not on the driver too: the driver sends tasks again where an actor was lost. Kernels
crash in processes of the executor, not in the actor.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import pickle
import platform
import sys
from pathlib import Path

from tunebench import __version__
from tunebench._environment import cache_folder
from tunebench.device import Device, local_cpu, local_gpus
from tunebench.executor import Calls
from tunebench.executor._message import Answer, Equipment, Facts, Kind
from tunebench.executor.local import LocalExecutor
from tunebench.kernels import load_file, module_name
from tunebench.task import Task

__all__ = ["WorkerActor", "versions"]


def versions() -> tuple[str, str]:
    """Return the versions that driver and workers must share: of Python (without its patch) and tunebench."""
    return ".".join(platform.python_version_tuple()[:2]), __version__


class WorkerActor:
    """Compiles and measures on one GPU, or on the processor of one node."""

    def __init__(self) -> None:
        self._device: Device | None = None
        self._executor: LocalExecutor | None = None
        self._calls: dict[bytes, Calls] = {}
        self._leaving = asyncio.Event()

    async def describe(self, kind: Kind) -> Facts:
        """Return what is here. Ray shows a process its own GPU only."""
        if kind == "cpu":
            # Ray allows libraries as many threads as the actor has of the node's CPUs, whose number is
            # whatever the node was started with; a variant takes every core there is.
            self._device = local_cpu()
            os.environ["OMP_NUM_THREADS"] = str(self._device.sm_count)
        else:
            self._device = next(iter(local_gpus()), None)
        return Facts(device=self._device, versions=versions())

    async def begin(self, equipment: Equipment, compilers: int) -> int:
        """Start the processes that compile and measure; returns how many tasks are worth having here.

        Args:
            equipment: What they need.
            compilers: How many compile; 0 is one for each core.
        """
        # Processes that are started begin with the main program of this one, and have no use for Ray's.
        vars(sys.modules["__main__"]).pop("__file__", None)
        for path, text in equipment.files.items():
            load_file(_placed(path, text))
        self._executor = pickle.loads(equipment.start)(compilers)  # noqa: S301 - from our own driver
        return self._executor.capacity

    async def run(self, blob: bytes, revision: str, abort_above_us: float | None) -> Answer:
        """Compile and measure one task."""
        assert self._executor is not None, "begin comes first"
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
        """Tell why a result from here would not be one of this task."""
        assert self._device is not None, "describe comes first"
        if task.device.key != self._device.key:
            return f"its device is {self._device.key}, and the trial is for {task.device.key}"
        if task.variant.revision(task.workload, task.config) != revision:
            return (
                f"its source of {task.variant.key} is another than the driver's: install the same tunebench"
            )
        return None

    async def call(self, stage: bytes, blob: bytes) -> Answer:
        """Call the function of a stage in a process of its own, which is kept for the next call."""
        assert self._executor is not None, "begin comes first"
        try:
            if stage not in self._calls:
                self._calls[stage] = self._executor.calls(pickle.loads(stage))  # noqa: S301 - likewise
            arguments = pickle.loads(blob)  # noqa: S301 - likewise
            call = functools.partial(self._calls[stage].call, *arguments)
            answer = await asyncio.get_running_loop().run_in_executor(None, call)
        except Exception as error:  # likewise
            return "failed", _pickled(error), self._executor.busy_s
        return "done", pickle.dumps(answer), self._executor.busy_s

    async def watch(self) -> None:
        """Return when this actor is about to end; whoever waits for it learns of its death, too."""
        await self._leaving.wait()

    async def close(self) -> None:
        """Stop the processes, then the actor; all of them clean up what they hold."""
        from ray.actor import exit_actor

        for calls in self._calls.values():
            calls.__exit__(None, None, None)
        if self._executor is not None:
            self._executor.close()
        self._leaving.set()  # Ray lets what is under way end first
        exit_actor()


def _placed(path: str, text: str) -> Path:
    """Return where a user's file is on this machine: its own place, or a copy under the module's name."""
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
    except Exception:  # an error of a user's class may do anything here; its words are kept
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return blob
