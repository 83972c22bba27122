"""Stage functions for executors in tests; worker processes import them by name."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tunebench.compile.binary import Binary
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
    began = time.monotonic()
    return Result(
        outcome=Measured(
            median_us=float(task.config["us"]),
            ci_us=(0.0, 1e9),
            samples_us=(float(task.config["us"]),),
            cache="cold",
            verification=Verification(how="reference", detail="none", worst=0.0),
            conditions={"began": began, "abort_above_us": abort_above_us},
        )
    )
