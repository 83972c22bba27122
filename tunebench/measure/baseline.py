"""What a library would take for the same problem: NumPy and torch on a CPU, torch on a GPU.

Baselines run in a process of their own, under the same protocol and on inputs drawn the same way as
variants, so that the two compare. torch is used where it is installed and never required. On a GPU torch
stands for cuBLAS and cuDNN, which it calls. What they are asked for is in `tunebench.measure.baselines`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import DeviceError, MissingDependency
from tunebench.measure import baselines
from tunebench.measure.timing import Protocol, collect, median_interval
from tunebench.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Baseline", "BaselineFailed", "measure_baselines"]

T = TypeVar("T")
Tensors = Mapping[str, Any]
CallsOf = Callable[[Workload, Tensors], Mapping[str, baselines.BaselineCall]]
SamplerOf = Callable[[baselines.BaselineCall], Callable[[], float]]

LONGEST_REASON = 500
"""Characters of a reason that are kept: some libraries tell all that is on their stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """How long a library takes.

    Attributes:
        name: Which library, such as ``"numpy"``.
        median_us: Median time of one run.
        ci_us: 95 % confidence interval of the median.
        samples_us: Every sample, in the order taken.
    """

    name: str
    median_us: float
    ci_us: tuple[float, float]
    samples_us: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, samples_us: Sequence[float]) -> Baseline:
        """Return what samples say."""
        median_us, ci_us = median_interval(samples_us)
        return cls(name=name, median_us=median_us, ci_us=ci_us, samples_us=tuple(samples_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineFailed:
    """A library that could not be timed: it refuses the problem, or failed at it.

    Attributes:
        name: Which library.
        reason: Why, as it said.
    """

    name: str
    reason: str


def measure_baselines(
    workload: Workload, device: Device, protocol: Protocol, seed: int
) -> list[Baseline | BaselineFailed]:
    """Time every library that does this workload; none for an operator that libraries lack.

    Returns:
        Those that were timed, fastest first, then those that failed, which end nothing.
    """
    inputs = workload.draw(np.random.default_rng(seed))
    found: list[Baseline | BaselineFailed] = []
    for library, calls_of, sampler_of in _libraries(workload, device, protocol):
        calls = _or_failed(library, functools.partial(calls_of, workload, inputs))
        if isinstance(calls, BaselineFailed):
            found.append(calls)
            continue
        for name, call in calls.items():
            found.append(_or_failed(name, functools.partial(_time, name, sampler_of, call, protocol)))
    return sorted(found, key=lambda one: one.median_us if isinstance(one, Baseline) else math.inf)


def _libraries(
    workload: Workload, device: Device, protocol: Protocol
) -> Iterator[tuple[str, CallsOf, SamplerOf]]:
    """Yield each library with what gives its programs by name, and what makes one ready to be sampled."""
    if device.kind == "cpu":
        from tunebench.measure.cpu import CpuTimer

        stopwatch = CpuTimer(device, protocol)

        def on_cpu(call: baselines.BaselineCall) -> Callable[[], float]:
            return functools.partial(stopwatch.time_us, call)

        yield "numpy", numpy_cpu, on_cpu
        yield "torch", torch_cpu, on_cpu
        return
    from tunebench.measure._torch_gpu import TorchGpu

    try:
        gpu = TorchGpu(device)
    except (MissingDependency, DeviceError):  # torch is not installed, or sees no GPU
        return
    gpu.allow_for(workload)
    yield (
        "torch",
        lambda workload, inputs: baselines.torch_calls(workload, gpu.tensors(inputs)),
        lambda call: gpu.sampler(call, protocol).sample_us,
    )


def _or_failed(name: str, do: Callable[[], T]) -> T | BaselineFailed:
    try:
        return do()
    except Exception as error:  # libraries may raise anything; the reason is kept, and the others go on
        return BaselineFailed(name=name, reason=f"{type(error).__name__}: {error}"[:LONGEST_REASON])


def _time(name: str, sampler_of: SamplerOf, call: baselines.BaselineCall, protocol: Protocol) -> Baseline:
    return Baseline.of(name, collect(sampler_of(call), protocol).samples_us)


# -- on a processor ----------------------------------------------------------------------------------


def numpy_cpu(workload: Workload, inputs: Tensors) -> dict[str, baselines.BaselineCall]:
    """Return NumPy's program for a workload, if there is one."""
    call = baselines.numpy_call(workload, inputs)
    return {} if call is None else {"numpy": call}


def torch_cpu(workload: Workload, inputs: Tensors) -> dict[str, baselines.BaselineCall]:
    """Return torch's programs for a workload on this processor; none where torch is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    tensors = {name: _tensor(torch, value) for name, value in inputs.items()}

    def without_gradients(call: baselines.BaselineCall) -> baselines.BaselineCall:
        def run() -> object:
            with torch.inference_mode():
                return call()

        return run

    calls = baselines.torch_calls(workload, tensors)
    return {name: without_gradients(call) for name, call in calls.items()}


def _tensor(torch: Any, value: Array) -> Any:
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    if value.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(value.view(np.int8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(value) if value.shape else float(value)
