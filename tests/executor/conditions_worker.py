"""Processes whose kernel and whose library record the conditions of each of their launches in a file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.measure import kernel_worker
from tests.measure.cheating_kernels import softmax
from tunebench import libraries
from tunebench.device import Device
from tunebench.executor import baseline_judge
from tunebench.executor.baseline_judge import BaselineCase
from tunebench.executor.judged_call import JudgedStage
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.measure import baseline
from tunebench.measure.timing import Protocol
from tunebench.measure.worker import Setup
from tunebench.workload import Workload

Conditions = dict[str, Any]

KERNEL = "records"


def conditions(x: Any) -> Conditions:
    """Return the memory of an input, a digest of its values, and when the launch began."""
    return {"began_s": time.monotonic(), "values": hashlib.sha256(x).hexdigest(), **mapping(x.ctypes.data)}


def mapping(address: int) -> Conditions:
    """Return the file of the memory that contains an address, and whether any of its pages is huge."""
    file, contains = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            first, end = (int(bound, 16) for bound in name.split("-"))
            contains, file = first <= address < end, " ".join(values[4:])
        elif contains and name == "ShmemPmdMapped:":
            return {"file": file, "huge": values[0] != "0"}
    return {"file": "", "huge": False}


def recording(path: str, compute: Callable[..., object], x: Any, *outputs: Any) -> None:
    """Compute, after the conditions were written."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(conditions(x)) + "\n")
    compute(x, *outputs)


def recorded(path: Path) -> list[Conditions]:
    """Return the conditions of all launches in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_kernel(setup: Setup, path: str) -> None:
    """Prepare a process whose kernel records."""
    kernel_worker.KERNELS[KERNEL] = lambda: functools.partial(recording, path, softmax)
    kernel_worker.start(setup)


def executor(protocol: Protocol, path: Path) -> LocalExecutor:
    """Return an executor whose kernel records."""
    setup = Setup(runner="cpu", device=kernel_worker.DEVICE, protocol=protocol)
    stages = kernel_worker.stages(protocol)
    measuring = ProcessStage(
        function=stages["measuring"].function, start=start_kernel, start_arguments=(setup, str(path))
    )
    return LocalExecutor(**{**stages, "measuring": measuring}, overlap=False)


def start_library(path: str) -> None:
    """Prepare a process whose library records."""
    _install({"numpy": lambda x: functools.partial(recording, path, np.exp, x)})


def start_faulty_libraries(fault: str) -> None:
    """Prepare a process with a program that works and one that does not."""
    _install({"torch": lambda x: functools.partial(np.exp, x), "torch-other": lambda _: FAULTS[fault]})


def _install(programs: dict[str, Callable[[Any], Callable[[], object]]]) -> None:
    vars(libraries)["numpy_call"] = lambda *_: None
    vars(baseline)["torch_cpu"] = lambda _, inputs: {
        name: make(inputs["x"]) for name, make in programs.items()
    }


def _refuse() -> None:
    raise RuntimeError("No available kernel")


FAULTS: dict[str, Callable[[], object]] = {
    "refuses": _refuse,
    "crashes": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hangs": lambda: time.sleep(60),
}


def library_stage(stage: JudgedStage, start: Callable[[str], None], argument: str) -> JudgedStage:
    """Return the stage of baselines with other libraries."""
    function = stage.measuring.function
    measuring = ProcessStage(function=function, start=start, start_arguments=(argument,))
    return JudgedStage(measuring=measuring, judging=stage.judging, case_of=stage.case_of)


def short_case(workload: Workload, device: Device, protocol: Protocol, guard: int) -> BaselineCase:
    """Return the case of baselines with a short time limit."""
    case = baseline_judge.case_of(workload, device, protocol, guard)
    return dataclasses.replace(case, setup=dataclasses.replace(case.setup, limit_s=0.5))
