"""Stages for tests of executors, which compile and measure nothing; worker processes import them by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebench.binary.compiled import Binary
from tunebench.errors import EnvironmentFault, SuspectedFault
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.outcome import CompileFailed, Measured, Result, Verification
from tunebench.task import Task

__all__ = ["actor_of", "compile_task", "compiling", "measure_task", "parent_of", "start", "start_executor"]
__all__ += ["stand_in_result", "wait_for"]


def start(*_arguments: Any) -> None:
    """Prepare nothing."""


def _fail_twice(log: Path) -> None:
    """Raise a fault of the environment, until two calls before have added a line to a file."""
    lines = log.read_text() if log.exists() else ""
    log.write_text(lines + "called\n")
    if lines.count("called") < 2:
        raise EnvironmentFault("no space left on device")


def _exhaust(log: Path, times: int) -> None:
    """Lack memory in the first calls; each adds its process id to a file."""
    pids = log.read_text().split() if log.exists() else []
    log.write_text(" ".join([*pids, str(os.getpid())]))
    if len(pids) < times:
        raise SuspectedFault("MemoryError")


def _exit_once(log: Path) -> None:
    """End the process in the first call."""
    if not log.exists():
        log.touch()
        os._exit(3)


def compile_task(task: Task) -> Binary | CompileFailed:
    """Compile nothing, with the behaviour of the configuration's `compile`."""
    behaviour = task.config["compile"]
    if behaviour == "fail":
        return CompileFailed(reason="syntax error")
    if behaviour == "fault":
        _fail_twice(Path(task.config["folder"], "compile"))
    if behaviour == "exhaust":
        _exhaust(Path(task.config["folder"], "compile"), task.config["us"])
    if behaviour == "exit once":
        _exit_once(Path(task.config["folder"], "compile"))
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "hang":
        threading.Event().wait()
    if behaviour == "slow":
        time.sleep(0.2)
    if behaviour == "bug":
        raise RuntimeError("a bug in the stage")
    return Binary(key="k", language="numba-cpu", target="t", payload=b"")


def measure_task(task: Task, _binary: Binary, abort_above_us: float | None) -> Result:
    """Measure nothing, with the behaviour of the configuration's `run`."""
    behaviour = task.config["run"]
    if behaviour == "fault":
        _fail_twice(Path(task.config["folder"], "run"))
    if behaviour == "exhaust":
        _exhaust(Path(task.config["folder"], "run"), task.config["us"])
    if behaviour == "exit once":
        _exit_once(Path(task.config["folder"], "run"))
    if behaviour == "lasting fault":
        raise EnvironmentFault("no space left on device")
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "exit":
        os._exit(3)
    if behaviour == "hang":
        threading.Event().wait()
    if behaviour == "slow":
        time.sleep(0.2)
    if behaviour == "wait":
        folder = Path(task.config["folder"])
        (folder / f"{os.getpid()}.pid").touch()
        wait_for((folder / "go").exists, 600.0)
    if behaviour == "kill":
        os.kill(actor_of(os.getpid()), signal.SIGKILL)
        threading.Event().wait()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES")
    return stand_in_result(float(task.config["us"]), abort_above_us=abort_above_us, gpu=gpu)


def stand_in_result(us: float, **conditions: Any) -> Result:
    """Return the result of a task that took `us` microseconds."""
    return Result(
        outcome=Measured(
            median_us=us,
            ci_us=(0.0, 1e9),
            samples_us=(us,),
            cache="cold",
            verification=Verification(how="reference", detail="none", worst=0.0),
            conditions={"began": time.monotonic(), **conditions},
        )
    )


def compiling() -> ProcessStage:
    """Return the compiling stage, for executors that call a single stage."""
    return ProcessStage(function=compile_task, start=start)


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait until a condition holds, checking every 10 ms, for `limit_s` seconds at most."""
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def actor_of(pid: int) -> int:
    """Return the process id of the Ray actor that started a process, directly or indirectly."""
    while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
        pid = parent_of(pid)
    return pid


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start_executor(
    _compilers: int, timeout_s: float = 30.0, *, overlap: bool = True, gpus: tuple[str, ...] = ()
) -> LocalExecutor:
    """Return a local executor of these stages; cluster workers call this function by name.

    Args:
        timeout_s: Time limit of each stage, in seconds.
        overlap: Whether compiling and measuring may overlap.
        gpus: The GPU of each measuring process; empty for one process that sees all.
    """
    workers = max(1, len(gpus))
    return LocalExecutor(
        compiling=ProcessStage(function=compile_task, start=start, workers=2, timeout_s=timeout_s),
        measuring=ProcessStage(
            function=measure_task, start=start, timeout_s=timeout_s, workers=workers, gpus=gpus
        ),
        overlap=overlap,
    )
