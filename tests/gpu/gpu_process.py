"""Steps of the acceptance run that need a separate process, because they may crash or hang.

    python -m tests.gpu.gpu_process ceilings
    python -m tests.gpu.gpu_process conformance CASE…
    python -m tests.gpu.gpu_process small VARIANT WORKLOAD…
    python -m tests.gpu.gpu_process contest WORKLOAD VARIANT CONFIG [VARIANT CONFIG …]

`contest` times variants and baselines in turn. Each command prints lines of JSON; each line includes the
content of the lines before it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tests.gpu.interleaved import TimedCall, compare
from tests.gpu.triton_baselines import TritonProgram, factors, triton_program
from tests.gpu.wrapper_conformance import answers as conformance
from tests.gpu.wrapper_conformance import on_device
from tunebench import kernels
from tunebench._environment import cache_folder
from tunebench.compile import BinaryCache, compile_config
from tunebench.device import Device, find
from tunebench.measure._torch_gpu import TorchGpu
from tunebench.measure.baselines import torch_calls
from tunebench.measure.cuda import CudaRunner
from tunebench.measure.timing import Protocol, collect
from tunebench.outcome import Measured, to_json
from tunebench.space import Config
from tunebench.task import Task
from tunebench.variant import Variant
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.operators.gemm import Gemm

ROUNDS = 3
INTERLEAVED = Protocol(min_samples=20, max_samples=100, max_s=0.5)
SMALL = Protocol(warmups=0, min_samples=2, max_samples=2)


def run(runner: CudaRunner, variant: Variant[Any], workload: Workload, config: Config, device: Device) -> Any:
    """Compile, verify and time one configuration in this process; return its outcome."""
    binary = compile_config(variant, workload, config, device, BinaryCache(cache_folder() / "binaries"))
    task = Task(variant=variant, workload=workload, config=config, device=device, seed=1)
    return runner.run(task, binary, None)[0]


def small(key: str, texts: Sequence[str]) -> dict[str, Any]:
    """Run the default configuration of a variant on each workload, for the checker that runs this process."""
    device, variant = find("cuda"), kernels.variant(key)
    runner = CudaRunner(SMALL, device)
    outcomes = {}
    for text in texts:
        workload = parse(text)
        outcome = run(runner, variant, workload, variant.default(workload, device), device)
        outcomes[text] = {**to_json(outcome), "samples_us": None}
    return {"outcomes": outcomes}


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


def contest(text: str, *paths: str) -> Iterator[dict[str, Any]]:
    """Time configurations and baselines of a workload in turn, first without and then with `torch.compile`.

    Args:
        text: The workload.
        paths: Variant, configuration, variant, configuration, ...; speedups are relative to the first pair.

    Yields:
        The rows of `interleaved.compare`. `torch.compile` takes minutes, so its row comes in a second answer.
    """
    device, workload = find("cuda"), parse(text)
    runner = CudaRunner(INTERLEAVED, device)
    ours = [
        TimedCall(key, functools.partial(_ours, runner, kernels.variant(key), workload, config, device))
        for key, config in zip(paths[::2], paths[1::2], strict=True)
    ]
    ready, slow = _others(workload, device)
    yield {"rows": compare([*ours, *ready], rounds=ROUNDS, ours=paths[0])}
    if slow:
        yield {"rows": compare([*ours, *ready, *slow], rounds=ROUNDS, ours=paths[0])}


def _ours(
    runner: CudaRunner, variant: Variant[Any], workload: Workload, config_text: str, device: Device
) -> Callable[[], Sequence[float]]:
    config = variant.space.parse(config_text)

    def take() -> Sequence[float]:
        outcome = run(runner, variant, workload, config, device)
        if not isinstance(outcome, Measured):
            raise RuntimeError(f"{outcome.kind}: {getattr(outcome, 'reason', '')}")
        return outcome.samples_us

    return take


def _others(workload: Workload, device: Device) -> tuple[list[TimedCall], list[TimedCall]]:
    """Return the fast baselines (torch, Triton) and the slow one (torch.compile takes minutes to compile)."""
    try:
        import torch

        gpu = TorchGpu(device)
    except ImportError:
        return [], []
    gpu.allow_for(workload)
    tensors = gpu.tensors(workload.draw(np.random.default_rng(1)))
    try:
        calls = torch_calls(workload, tensors)
    except Exception as error:  # baselines may raise any exception: report it in place of the time
        return [TimedCall("torch", functools.partial(_refuse, error))], []
    ready = [TimedCall(name, functools.partial(_timed, gpu, call)) for name, call in calls.items()]
    program = triton_program(workload, tensors, device) if importlib.util.find_spec("triton") else None
    if program is not None:
        ready.append(TimedCall("triton", functools.partial(_triton, gpu, workload, tensors, program)))
    if "torch" not in calls:
        return ready, []
    compiled = torch.compile(calls["torch"], mode="max-autotune-no-cudagraphs", dynamic=False)
    return ready, [TimedCall("torch.compile", functools.partial(_timed, gpu, compiled))]


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


def main(arguments: Sequence[str]) -> None:
    """Run one command and print its answers as JSON lines."""
    what, *rest = arguments
    if what == "ceilings":
        answers: Iterable[dict[str, Any]] = [ceilings()]
    elif what == "conformance":
        answers = conformance(rest, on_device(find("cuda")))
    elif what == "small":
        answers = [small(rest[0], rest[1:])]
    else:
        answers = contest(*rest)
    for answer in answers:
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
