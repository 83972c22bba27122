"""Work of the acceptance runs that opens the GPU or compiles: in child processes, which may crash or hang.

    python -m tests.gpu.gpu_process facts WORKLOAD…
    python -m tests.gpu.gpu_process smoke ARCHITECTURE PROCESSES
    python -m tests.gpu.gpu_process imports
    python -m tests.gpu.gpu_process carried ARCHITECTURE
    python -m tests.gpu.gpu_process conformance EXPECTED CASE…
    python -m tests.gpu.gpu_process small VARIANT WORKLOAD…
    python -m tests.gpu.gpu_process contest JOBS
    python -m tests.gpu.gpu_process tune WORKLOAD TRIALS MINUTES DATABASE VARIANT…

`facts` measures what the device reaches and checks references, `smoke` compiles one default of each variant,
`imports` and `carried` do what comes before the first call of the driver, and `contest` times variants and
baselines in turn; JOBS is a JSON list of `ContestJob`. Each command prints lines of JSON: what is about to
run, and results.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.acceptance_workloads import smoke_workloads
from tests.gpu.interleaved import ContestJob, TimedCall, compare
from tests.gpu.triton_baselines import TritonProgram, factors, triton_program
from tests.gpu.wrapper_conformance import answers as conformance
from tests.gpu.wrapper_conformance import on_device
from tunebench import kernels
from tunebench._environment import binary_folder
from tunebench.compile import BinaryCache, compile_config
from tunebench.device import Device, find, representative
from tunebench.errors import TunebenchError
from tunebench.libraries import torch_calls
from tunebench.measure._device_arrays import reference_device
from tunebench.measure._torch_gpu import TorchGpu
from tunebench.measure.cuda import CudaRunner
from tunebench.measure.timed_launches import spare_inputs
from tunebench.measure.timing import Protocol, collect
from tunebench.measure.verify import InputSet, draw
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
INTERLEAVED = Protocol(min_samples=20, max_samples=100, max_s=0.3)
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


# -- before the first call of the driver ---------------------------------------------------------------------

MODULES = (
    *(
        "numpy",
        "ml_dtypes",
        "numba",
        "numba.cuda",
        "cuda.core",
        "cuda.bindings.driver",
        "cuda.bindings.nvrtc",
    ),
    *(
        "cuda.bindings.nvjitlink",
        "pynvml",
        "optuna",
        "sqlalchemy",
        "alembic",
        "platformdirs",
        "threadpoolctl",
    ),
    *("rich", "typer", "torch", "triton"),
)
"""Modules that a run uses."""


def imports() -> dict[str, Any]:
    """Import what a run uses, and return the time of each module in seconds, and why others fail."""
    seconds, failed = {}, {}
    for name in MODULES:
        begun = time.perf_counter()
        try:
            importlib.import_module(name)
        except Exception as error:  # a package may raise anything when its partners do not fit
            failed[name] = f"{type(error).__name__}: {error}"
        seconds[name] = round(time.perf_counter() - begun, 2)
    return {"seconds": seconds, "failed": failed}


def carried(architecture: str) -> Iterator[dict[str, Any]]:
    """Look up every carried kernel; yield their number, the missing ones, and the time in seconds."""
    from tests.gpu.carried import devices_of, is_carried, kernels_to_carry
    from tunebench._environment import carried_folder

    begun, folder = time.perf_counter(), carried_folder()
    if folder is None:
        yield {"problem": "no carried kernels: write them by --prepare, and name the file as --previous"}
        return
    listed = {kernel.key: kernel for on in devices_of(architecture) for kernel in kernels_to_carry(on)}
    listed_s, begun = time.perf_counter() - begun, time.perf_counter()
    missing = [
        f"{kernel.variant.key} {kernel.workload}"
        for kernel in listed.values()
        if not is_carried(folder, kernel)
    ]
    read_s = time.perf_counter() - begun
    yield {
        "kernels": len(listed),
        "missing": missing,
        "listed_s": round(listed_s, 1),
        "read_s": round(read_s, 2),
    }


def smoke(architecture: str, workers: str) -> Iterator[dict[str, Any]]:
    """Compile one default of each variant with the compilers of this machine.

    Args:
        architecture: Architecture to compile for.
        workers: Number of processes, at most one per core.

    Yields:
        `compiled`, a variant, with `reason`, why it does not compile, or None, and the time in `seconds`.
    """
    os.environ.pop("TUNEBENCH_CARRIED", None)
    device = representative(architecture)
    jobs = [(key, text, device) for key, text in smoke_workloads(device).items()]
    count = min(int(workers), os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(count) as pool:
        yield from pool.imap_unordered(functools.partial(_compile_default, folder), jobs)


def _compile_default(folder: str, job: tuple[str, str, Device]) -> dict[str, Any]:
    key, text, device = job
    begun = time.perf_counter()
    try:
        variant, workload = kernels.variant(key), parse(text)
        compile_config(
            variant, workload, variant.default(workload, device), device, BinaryCache(Path(folder))
        )
        reason = None
    except Exception as error:  # a compiler may raise anything
        reason = f"{type(error).__name__}: {error}"[:1000]
    return {"compiled": key, "reason": reason, "seconds": round(time.perf_counter() - begun, 2)}


# -- on the device -------------------------------------------------------------------------------------------


def facts(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what the device reaches, then the differences of references (see `references`) with it."""
    reached = {"ceilings": ceilings()}
    yield reached
    for answer in references(texts):
        yield reached | answer


def ceilings() -> dict[str, Any]:
    """Measure the copy bandwidth (read and written) and the rate of a bf16 matrix product by cuBLAS, warm."""
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
    runner = ContestRunner(INTERLEAVED, device)
    gpu = _torch_gpu(device)
    for job in jobs:
        yield {"running": "inputs"}
        workload = parse(job.workload)
        calls = _baselines(gpu, runner, workload, device, job.baselines) if job.baselines else []
        calls = [call for call in calls if call.name not in job.without]
        if job.variant is not None:
            calls.append(TimedCall(job.variant, functools.partial(_ours, runner, job, workload, device)))
        comparison = compare(calls, rounds=ROUNDS, ours=job.variant, most_s=ROUNDS_S, clock=clock)
        rows = yield from _running(comparison)
        yield {"row": {**dataclasses.asdict(job), "cache": INTERLEAVED.cache, "rows": rows}}
        del calls
        _release()


class ContestRunner(CudaRunner):
    """Runner that keeps one set of inputs for each workload, which the baselines read, too.

    Drawing takes longer than timing: inputs, and those that timed launches exchange, are drawn concurrently.
    """

    _contest: tuple[Workload, InputSet, Mapping[str, Any]] | None = None

    def _drawn(self, workload: Workload) -> tuple[InputSet, Mapping[str, Any]]:
        if self._contest is None or self._contest[0] != workload:
            self._contest = None
            self._forget(workload, 1)
            with ThreadPoolExecutor(1) as pool:
                spare = pool.submit(spare_inputs, workload)
                inputs = draw(workload, 1, self.reference_device(workload))
                self._contest = (workload, inputs, spare.result())
        return self._contest[1:]

    def input_set(self, workload: Workload, seed: int) -> InputSet:
        """Return the inputs of a workload, the same ones for every configuration."""
        return self._drawn(workload)[0]

    def first_inputs(self, inputs: InputSet) -> InputSet:
        """Return the inputs of timed launches: the same kernels read extreme ones in the conformance run."""
        return inputs

    def spare(self, inputs: InputSet) -> Mapping[str, Any]:
        """Return the inputs to exchange parts with."""
        return self._drawn(inputs.workload)[1]


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
    gpu: TorchGpu | TunebenchError,
    runner: ContestRunner,
    workload: Workload,
    device: Device,
    names: Sequence[str],
) -> list[TimedCall]:
    """Return the requested baselines that exist for the workload: torch's programs, Triton."""
    if isinstance(gpu, TunebenchError):
        return [TimedCall("torch", functools.partial(_refuse, gpu))]
    gpu.allow_for(workload)
    tensors = gpu.tensors(runner.input_set(workload, 1).inputs)
    try:
        calls = torch_calls(workload, tensors)
    except Exception as error:  # baselines may raise any exception: report it in place of the time
        return [TimedCall("torch", functools.partial(_refuse, error))]
    timed_calls = []
    if "torch" in names:
        timed_calls += [TimedCall(name, functools.partial(_timed, gpu, call)) for name, call in calls.items()]
    if "triton" in names and importlib.util.find_spec("triton"):
        program = triton_program(workload, tensors, device)
        if program is not None:
            timed_calls.append(
                TimedCall("triton", functools.partial(_triton, gpu, workload, tensors, program))
            )
    return timed_calls


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
    request, *rest = arguments
    if request == "facts":
        yield from facts(rest)
    elif request == "smoke":
        yield from smoke(*rest)
    elif request == "imports":
        yield imports()
    elif request == "carried":
        yield from carried(*rest)
    elif request == "conformance":
        yield from conformance(Path(rest[0]), rest[1:], on_device(find("cuda")))
    elif request == "small":
        yield from small(rest[0], rest[1:])
    elif request == "tune":
        yield tuned(*rest)
    else:
        yield from contest([ContestJob(**job) for job in json.loads(rest[0])])


if __name__ == "__main__":
    for answer in answers(sys.argv[1:]):
        print(json.dumps(answer), flush=True)
