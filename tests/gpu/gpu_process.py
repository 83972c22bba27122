"""Steps of the acceptance run that open the GPU: in a separate process, because they may crash or hang.

    python -m tests.gpu.gpu_process ceilings
    python -m tests.gpu.gpu_process references WORKLOAD…
    python -m tests.gpu.gpu_process conformance EXPECTED CASE…
    python -m tests.gpu.gpu_process small VARIANT WORKLOAD…
    python -m tests.gpu.gpu_process contest JOBS
    python -m tests.gpu.gpu_process tune WORKLOAD TRIALS MINUTES DATABASE VARIANT…

`contest` times variants and baselines in turn; JOBS is a JSON list of `ContestJob`. Each command prints lines
of JSON: what is about to run, and results.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.interleaved import TORCH_COMPILE, ContestJob, TimedCall, compare
from tests.gpu.triton_baselines import TritonProgram, factors, triton_program
from tests.gpu.wrapper_conformance import answers as conformance
from tests.gpu.wrapper_conformance import on_device
from tunebench import kernels
from tunebench._environment import binary_folder
from tunebench.compile import BinaryCache, compile_config
from tunebench.device import Device, find
from tunebench.errors import TunebenchError
from tunebench.measure._device_arrays import reference_device
from tunebench.measure._torch_gpu import TorchGpu
from tunebench.measure.baselines import torch_calls
from tunebench.measure.cuda import CudaRunner
from tunebench.measure.timing import Protocol, collect
from tunebench.measure.verify import draw
from tunebench.outcome import Measured, to_json
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning import Plan, tune
from tunebench.variant import Variant
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.operators.gemm import Gemm

ROUNDS, ROUNDS_S = 3, 10.0
"""Rounds of a contest, and the time after which no other round begins, in seconds."""
clock = time.monotonic
INTERLEAVED = Protocol(min_samples=20, max_samples=100, max_s=0.5)
SMALL = Protocol(warmups=0, min_samples=2, max_samples=2)
TRIAL_TIMEOUT_S = 20.0


def run(runner: CudaRunner, variant: Variant[Any], workload: Workload, config: Config, device: Device) -> Any:
    """Compile, verify and time one configuration in this process; return its outcome."""
    binary = compile_config(variant, workload, config, device, BinaryCache(binary_folder()))
    task = Task(variant=variant, workload=workload, config=config, device=device, seed=1)
    return runner.run(task, binary, None)[0]


def small(key: str, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run the default configuration of a variant on each workload, for the checker that runs this process."""
    device, variant = find("cuda"), kernels.variant(key)
    runner = CudaRunner(SMALL, device)
    outcomes = {}
    for text in texts:
        workload = parse(text)
        outcome = run(runner, variant, workload, variant.default(workload, device), device)
        outcomes[text] = {**to_json(outcome), "samples_us": None}
        yield {"outcomes": outcomes}


def ceilings() -> dict[str, Any]:
    """Measure the copy bandwidth (read and written) and the rate of a bf16 matrix product by cuBLAS."""
    import torch

    device = find("cuda")
    gpu = TorchGpu(device)
    gpu.allow_for(parse("gemm:m=1,n=1,k=1,dtype=bf16"))
    protocol = Protocol(cache="warm", min_samples=10, max_samples=10)
    source = torch.randn(1 << 29, device=gpu.device)
    target = torch.empty_like(source)
    copy_us = np.median(
        collect(gpu.sampler(lambda: target.copy_(source), protocol).sample_us, protocol).samples_us
    )
    a, b = (torch.randn(8192, 8192, device=gpu.device, dtype=torch.bfloat16) for _ in range(2))
    product_us = np.median(collect(gpu.sampler(lambda: a @ b, protocol).sample_us, protocol).samples_us)
    return {
        "copy_gb_s": float(2 * source.nbytes / copy_us / 1e3),
        "bf16_8192_tflop_s": float(2 * 8192**3 / product_us / 1e6),
    }


def references(texts: Iterable[str], name: str = "cuda") -> Iterator[dict[str, Any]]:
    """Compute the reference of each workload on a device of torch and on the host.

    Args:
        texts: The workloads.
        name: Name of torch's device.

    Yields:
        `differences`: by workload, the largest difference of an element of values or scales, relative to the
        largest element.
    """
    on = reference_device(name)
    if on is None:
        yield {"problem": "torch cannot compute references here"}
        return
    differences: dict[str, float] = {}
    for text in texts:
        inputs = draw(parse(text), 1)
        device = dataclasses.replace(inputs, on=on).references
        pairs = [
            (np.asarray(getattr(device[key], part)), getattr(right, part))
            for key, right in inputs.references.items()
            for part in ("value", "scale")
        ]
        differences[text] = max(float(_difference(*pair)) for pair in pairs)
        yield {"differences": differences}


def _difference(got: Any, right: Any) -> Any:
    finite = np.isfinite(right)
    if not np.array_equal(got[~finite], right[~finite], equal_nan=True):
        return np.inf
    return np.abs(got - right)[finite].max(initial=0.0) / np.abs(right[finite]).max(initial=1e-300)


def contest(jobs: Iterable[ContestJob]) -> Iterator[dict[str, Any]]:
    """Time a configuration and baselines of each workload in turn.

    Yields:
        `running`, the name of the program that is about to run, and for each job `row`: its programs as
        `interleaved.compare` returns them.
    """
    device = find("cuda")
    runner = CudaRunner(INTERLEAVED, device)
    gpu = _torch_gpu(device)
    for job in jobs:
        yield {"running": "inputs"}
        workload = parse(job.workload)
        calls = _baselines(gpu, workload, device, job.baselines) if job.baselines else []
        calls = [call for call in calls if call.name not in job.without]
        if job.variant is not None:
            calls.append(TimedCall(job.variant, functools.partial(_ours, runner, job, workload, device)))
        comparison = compare(calls, rounds=ROUNDS, ours=job.variant, most_s=ROUNDS_S, clock=clock)
        rows = yield from _running(comparison)
        yield {"row": {**dataclasses.asdict(job), "rows": rows}}
        del calls
        _release()


def _torch_gpu(device: Device) -> TorchGpu | TunebenchError:
    """Return the GPU as torch uses it, or why torch cannot use it."""
    try:
        return TorchGpu(device)
    except TunebenchError as error:
        return error


def _release() -> None:
    """Free the memory of a job that torch keeps."""
    gc.collect()
    if torch := sys.modules.get("torch"):
        torch.cuda.empty_cache()


def _running(names: Any) -> Any:
    """Yield each name as an answer, and return the result of the generator."""
    while True:
        try:
            yield {"running": next(names)}
        except StopIteration as end:
            return end.value


def _ours(
    runner: CudaRunner, job: ContestJob, workload: Workload, device: Device
) -> Callable[[], Sequence[float]]:
    assert job.variant is not None
    variant = kernels.variant(job.variant)
    config = variant.space.parse(job.config) if job.config else variant.default(workload, device)

    def take() -> Sequence[float]:
        outcome = run(runner, variant, workload, config, device)
        if not isinstance(outcome, Measured):
            raise RuntimeError(f"{outcome.kind}: {getattr(outcome, 'reason', '')}")
        return outcome.samples_us

    return take


def _baselines(
    gpu: TorchGpu | TunebenchError, workload: Workload, device: Device, names: Sequence[str]
) -> list[TimedCall]:
    """Return the requested baselines that exist for the workload: torch's programs, Triton, torch.compile."""
    if isinstance(gpu, TunebenchError):
        return [TimedCall("torch", functools.partial(_refuse, gpu))]
    import torch

    gpu.allow_for(workload)
    tensors = gpu.tensors(workload.draw(np.random.default_rng(1)))
    try:
        calls = torch_calls(workload, tensors)
    except Exception as error:  # baselines may raise any exception: report it in place of the time
        return [TimedCall("torch", functools.partial(_refuse, error))]
    found = []
    if "torch" in names:
        found += [TimedCall(name, functools.partial(_timed, gpu, call)) for name, call in calls.items()]
    if "triton" in names and importlib.util.find_spec("triton"):
        program = triton_program(workload, tensors, device)
        if program is not None:
            found.append(TimedCall("triton", functools.partial(_triton, gpu, workload, tensors, program)))
    if TORCH_COMPILE in names and "torch" in calls:
        compiled = torch.compile(calls["torch"], mode="max-autotune-no-cudagraphs", dynamic=False)
        found.append(TimedCall(TORCH_COMPILE, functools.partial(_timed, gpu, compiled)))
    return found


def _refuse(error: Exception) -> Callable[[], Sequence[float]]:
    raise error


def _timed(gpu: TorchGpu, call: Callable[[], object]) -> Callable[[], Sequence[float]]:
    sampler = gpu.sampler(call, INTERLEAVED)
    return lambda: collect(sampler.sample_us, INTERLEAVED).samples_us


def _triton(
    gpu: TorchGpu, workload: Workload, tensors: dict[str, Any], program: TritonProgram
) -> Callable[[], Sequence[float]]:
    if isinstance(workload, Gemm):  # torch supports 8-bit products in some layouts only
        a, b = factors(workload, tensors)
        right = a.float() @ b.float()
    else:
        computed = torch_calls(workload, tensors)["torch"]()
        right = computed[0] if isinstance(computed, tuple) else computed
    return _timed(gpu, program.checked(right))


def tuned(text: str, trials: str, minutes: str, database: str, *variants: str) -> dict[str, Any]:
    """Tune a workload for a limited time and return the report."""
    plan = Plan(
        trials=int(trials),
        minutes=float(minutes),
        baselines=False,
        timeout_s=TRIAL_TIMEOUT_S,
        variants=variants,
    )
    report = tune(text, device=find("cuda"), db=Path(database), plan=plan)
    violations = [str(violation) for violation in report.violations]
    return {"tuned": {**report.to_json(), "config": str(report.config), "violations": violations}}


def answers(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run one command and yield its answers."""
    what, *rest = arguments
    if what == "ceilings":
        yield ceilings()
    elif what == "references":
        yield from references(rest)
    elif what == "conformance":
        yield from conformance(Path(rest[0]), rest[1:], on_device(find("cuda")))
    elif what == "small":
        yield from small(rest[0], rest[1:])
    elif what == "tune":
        yield tuned(*rest)
    else:
        yield from contest([ContestJob(**job) for job in json.loads(rest[0])])


if __name__ == "__main__":
    for answer in answers(sys.argv[1:]):
        print(json.dumps(answer), flush=True)
