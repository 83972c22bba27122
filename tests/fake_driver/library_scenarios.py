"""Calls of libraries by `CudaRunner` on the driver of `fake_driver.cpp`; prints the outcomes as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.fake_driver.libraries import Program, compiled, install, start, start_compiler
from tests.fake_driver.measure_scenarios import COLD, DEVICE, WARM
from tests.fake_driver.variants import Calls, fake_binary
from tests.kernels import fake_nvmath
from tests.toy_variants import CONFIG, Toy
from tunebench import kernels
from tunebench.errors import DeviceError
from tunebench.executor import judge
from tunebench.executor.local import LocalExecutor
from tunebench.executor.process import ProcessStage
from tunebench.measure import worker
from tunebench.measure._library_gpu import library_device
from tunebench.measure.cuda import CudaRunner
from tunebench.measure.worker import Setup
from tunebench.outcome import to_json
from tunebench.space import Config
from tunebench.task import Task
from tunebench.workloads import parse

GEMM = parse("gemm:m=24,n=40,k=32,dtype=bf16,epilogue=bias,trans=nt")
OWN = {
    "addmm": (GEMM, "torch_addmm"),
    "in steps": (parse("gemm:m=24,n=40,k=32,dtype=f32,trans=nt,epilogue=bias+relu+residual"), "torch"),
    "fp8": (parse("gemm:m=32,n=48,k=64,dtype=e4m3,trans=nt,out=bf16"), "torch_scaled_mm"),
    "softmax": (parse("softmax:rows=11,cols=131,dtype=bf16"), "torch_out"),
    "scalar": (parse("elementwise:rows=5,cols=13,dtype=f32,expression=alpha*x,scalars=alpha"), "torch"),
}


def task_of(program: str, *, thorough: bool = False) -> Task:
    config = Config({"program": program})
    return Task(
        variant=Program(), workload=Toy(n=1000), config=config, device=DEVICE, seed=7, thorough=thorough
    )


def ranked(rank: int) -> Task:
    """Return a task of an algorithm of cuBLASLt, which a stand-in lists."""
    library, config = kernels.variant("gemm/library_cublaslt"), Config({"rank": rank})
    return Task(variant=library, workload=GEMM, config=config, device=DEVICE, seed=7)


def run(runner: CudaRunner, task: Task, binary: Any = None) -> dict[str, Any]:
    """Return the outcome of one task as JSON; a device error is returned with its type and reason."""
    try:
        outcome, _ = runner.run(task, binary or compiled(task), None)
    except DeviceError as error:
        return {"kind": type(error).__name__, "reason": str(error)}
    return to_json(outcome)


def scenarios() -> dict[str, Any]:
    install()
    fake_nvmath.install(pytest.MonkeyPatch())
    cold, warm = (CudaRunner(protocol, DEVICE) for protocol in (COLD, WARM))
    seen: dict[str, Any] = {f"cold {name}": run(cold, task_of(name)) for name in Program.faults}
    seen["cold right again"] = run(cold, task_of("right"))
    seen |= {f"warm {name}": run(warm, task_of(name)) for name in Program.faults}
    for name, (workload, program) in OWN.items():
        library = kernels.variant(f"{workload.operator}/library_gpu")
        config = library.space.check({"program": program}, workload=workload, device=DEVICE)
        seen[name] = run(cold, Task(variant=library, workload=workload, config=config, device=DEVICE, seed=7))
    seen |= {f"rank {rank}": run(cold, ranked(rank)) for rank in (1, fake_nvmath.ALGORITHMS)}
    kernel = Task(variant=Calls("right"), workload=Toy(n=1000), config=CONFIG, device=DEVICE, seed=7)
    seen["kernel after libraries"] = run(cold, kernel, fake_binary(Calls("right")))
    seen["released"] = library_device(0).released  # type: ignore[attr-defined]
    seen["target"] = compiled(task_of("right")).target
    return seen | judged()


def judged() -> dict[str, Any]:
    """Return the outcomes of finalists, which another process judges."""
    setup = Setup(runner="cuda", device=DEVICE, protocol=COLD)
    judging = ProcessStage(
        function=judge.examine,
        start=judge.start,
        start_arguments=(judge.JudgeSetup(device=DEVICE, protocol=COLD, limit_s=20.0),),
    )
    measuring = ProcessStage(function=worker.measure, start=start, start_arguments=(setup,))
    compiling = ProcessStage(function=compiled, start=start_compiler)
    with LocalExecutor(compiling=compiling, measuring=measuring, judging=judging, overlap=True) as workers:
        return {
            f"judged {name}": to_json(workers.submit(task_of(name, thorough=True)).result().outcome)
            for name in Program.faults
        }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(scenarios()))
