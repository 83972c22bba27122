"""Runs of `CudaRunner` on the driver of `fake_driver.cpp`; prints the outcomes as JSON.

It runs in a separate process that finds this driver before the system's, since a process loads its driver
only once.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.fake_driver.nvml import FakeNvml
from tests.fake_driver.variants import (
    Calls,
    Mapped,
    MappedPixels,
    compile_fake,
    fake_binary,
    measure_and_name_gpu,
    start_compiler,
)
from tests.toy_variants import CONFIG, NumbaToy, Toy, TritonToy
from tunebench.device import Device, local_gpus
from tunebench.errors import DeviceError
from tunebench.executor import judge
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessCaller, ProcessStage
from tunebench.measure import worker
from tunebench.measure._gpu import open_gpu
from tunebench.measure.cuda import CudaRunner
from tunebench.measure.observer import NVML
from tunebench.measure.timing import Protocol
from tunebench.measure.worker import Setup
from tunebench.outcome import to_json
from tunebench.space import Config
from tunebench.task import Task

DEVICE = local_gpus()[0]
COLD = Protocol(min_samples=3, max_samples=5)
WARM = Protocol(cache="warm", min_samples=3, max_samples=5)


def task(variant: Any, *, thorough: bool = False, n: int = 1000, config: Config = CONFIG) -> Task:
    workload = Toy(n=n)
    return Task(variant=variant, workload=workload, config=config, device=DEVICE, seed=7, thorough=thorough)


class Session:
    """One CUDA runner, as in a worker process."""

    def __init__(self, protocol: Protocol) -> None:
        self.runner = CudaRunner(protocol, DEVICE)

    def run(self, variant: Any, abort_above_us: float | None = None, **changes: Any) -> dict[str, Any]:
        """Return the outcome of one task as JSON; a device error is returned with its type and reason."""
        payload = changes.pop("payload", b"fake")
        try:
            outcome, _ = self.runner.run(
                task(variant, **changes), fake_binary(variant, payload), abort_above_us
            )
        except DeviceError as error:
            return {"kind": type(error).__name__, "reason": str(error)}
        return to_json(outcome)


def scenarios() -> dict[str, Any]:
    cold, warm = Session(COLD), Session(WARM)
    seen: dict[str, Any] = {
        "before": dict(cold.runner.conditions()),
        "cold": cold.run(Calls("right")),
        "cold short": cold.run(Calls("short")),
        "warm": warm.run(Calls("right")),
        "warm short": warm.run(Calls("short")),
        "numba": cold.run(NumbaToy()),
        "triton": cold.run(TritonToy()),
        "mapped": cold.run(Mapped()),
        "mapped in a graph": warm.run(Mapped("mapped_short")),
        "mapped pixels": cold.run(MappedPixels("pixels")),
        "mapped elsewhere": cold.run(Mapped(tensor="y")),
        "map of another kernel": cold.run(Mapped("right")),
        "two launches": cold.run(Calls("right", scratch=True)),
        "shared memory": cold.run(Calls("large", smem_bytes=100_000)),
        "too much shared memory": cold.run(Calls("large", smem_bytes=240_000)),
        "thorough": cold.run(Calls("right"), 0.001, thorough=True),
        "hopeless": cold.run(Calls("right"), 1.0),
        "wrong": cold.run(Calls("wrong")),
        "unwritten": cold.run(Calls("unwritten")),
        "past the end": cold.run(Calls("past_the_end")),
        "overwrites its input": cold.run(Calls("overwrites_input")),
        "replays a result": cold.run(Calls("replays")),
        "works only once": cold.run(Calls("once")),
        "works only once, warm": warm.run(Calls("once"), n=900),
        "after that": cold.run(Calls("right")),
        "block too large": cold.run(Calls("right", block=2048)),
        "wrong parameter": cold.run(Calls("right", long=True)),
        "no such kernel": cold.run(Calls("nowhere")),
        "no cubin": cold.run(Calls("right"), payload=b"text"),
        "another size": cold.run(Calls("right"), n=77),
        "conditions": dict(cold.runner.conditions()),
    }
    elsewhere = Device(**{name: getattr(DEVICE, name) for name in DEVICE.__slots__} | {"name": "v100"})
    try:
        open_gpu(elsewhere)
    except DeviceError as error:
        seen["another device"] = str(error)
    seen |= observed()
    seen["fault"] = cold.run(Calls("illegal"))
    seen["after the fault"] = cold.run(Calls("right"))
    setup = Setup(runner="cuda", device=DEVICE, protocol=COLD)
    stage = ProcessStage(function=worker.measure, start=worker.start, start_arguments=(setup,))
    with ProcessCaller(stage) as caller:
        died = caller.call(task(Calls("illegal")), fake_binary(Calls("illegal")), None)
    seen["worker"] = to_json(died)
    return seen | judged(stage) | on_gpus(setup)


def observed() -> dict[str, Any]:
    """Return outcomes with the observer of NVML, on a fake of it."""
    sys.modules["pynvml"] = nvml = FakeNvml()
    session = Session(COLD)
    session.runner.observers = (NVML,)
    outcomes: dict[str, Any] = {f"observed {name}": session.run(Calls(name)) for name in ("right", "wrong")}
    outcomes["at a clock"] = session.run(Calls("right"), config=Config({**CONFIG, "sm_clock_mhz": 1200}))
    outcomes["clock calls"] = nvml.calls
    del sys.modules["pynvml"]
    return outcomes


def judged(measuring: ProcessStage) -> dict[str, Any]:
    """Return the outcomes of finalists that another process judges."""
    setup = judge.JudgeSetup(device=DEVICE, protocol=COLD, limit_s=20.0)
    judging = ProcessStage(function=judge.examine, start=judge.start, start_arguments=(setup,))
    compiling = ProcessStage(function=compile_fake, start=start_compiler)
    names = ("right", "short", "wrong", "unwritten", "past_the_end", "replays", "once", "saves", "illegal")
    with LocalExecutor(compiling=compiling, measuring=measuring, judging=judging, overlap=True) as workers:
        return {
            f"judged {name}": to_json(workers.submit(task(Calls(name), thorough=True)).result().outcome)
            for name in names
        }


def on_gpus(setup: Setup) -> dict[str, Any]:
    """Return the outcomes and PCI addresses of tasks on two GPUs, then of those on one worker."""
    compiling = ProcessStage(function=compile_fake, start=start_compiler)
    measuring = ProcessStage(
        function=measure_and_name_gpu,
        start=worker.start,
        start_arguments=(setup,),
        workers=2,
        gpus=("0", "1"),
    )
    with LocalExecutor(compiling=compiling, measuring=measuring, overlap=True) as workers:
        spread = [workers.submit(task(Calls("right"))) for _ in range(8)]
        results = [future.result() for future in spread]
        with workers.same_worker():
            together = [workers.submit(task(Calls("right"))).result() for _ in range(3)]
    return {
        name: [(result.outcome.kind, result.conditions["pci_bus_id"]) for result in done]
        for name, done in (("on two GPUs", results), ("on one GPU", together))
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(scenarios()))
