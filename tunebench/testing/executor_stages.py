"""Stage functions for executors in tests; worker processes import them by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tunebench.binary.compiled import Binary
from tunebench.executor.local import LocalExecutor, ProcessStage
from tunebench.outcome import CompileFailed, Measured, Result, Verification
from tunebench.task import Task


def start(*_arguments: Any) -> None:
    """Prepare nothing."""


def compile_task(task: Task) -> Binary | CompileFailed:
    """Do what the configuration's `compile` says."""
    what = task.config["compile"]
    if what == "fail":
        return CompileFailed(reason="syntax error")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "slow":
        time.sleep(0.2)
    if what == "bug":
        raise RuntimeError("a fault of ours")
    return Binary(key="k", language="numba-cpu", target="t", payload=b"")


def measure_task(task: Task, _binary: Binary, abort_above_us: float | None) -> Result:
    """Do what the configuration's `run` says."""
    what = task.config["run"]
    if what == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(3)
    if what == "hang":
        time.sleep(60)
    if what == "slow":
        time.sleep(0.2)
    if what == "wait":
        _wait_in(Path(task.config["folder"]))
    if what == "kill":
        os.kill(actor_of(os.getpid()), signal.SIGKILL)
        time.sleep(60)
    return measured(float(task.config["us"]), abort_above_us=abort_above_us)


def measured(us: float, **conditions: Any) -> Result:
    """Return that something took so long."""
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
    """Return a stage whose function is called alone."""
    return ProcessStage(function=compile_task, start=start)


def _wait_in(folder: Path) -> None:
    """Say who is here, and go on once told to."""
    (folder / f"{os.getpid()}.pid").touch()
    for _ in range(6000):
        if (folder / "go").exists():
            return
        time.sleep(0.01)


def actor_of(pid: int) -> int:
    """Return the Ray actor that a process descends from."""
    while not Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
        pid = parent_of(pid)
    return pid


def parent_of(pid: int) -> int:
    """Return who started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def start_executor(_compilers: int, timeout_s: float = 30.0) -> LocalExecutor:
    """Start an executor of these stages; workers of a cluster call it by name."""
    return LocalExecutor(
        compiling=ProcessStage(function=compile_task, start=start, workers=2),
        measuring=ProcessStage(function=measure_task, start=start, timeout_s=timeout_s),
        overlap=True,
    )
