"""Timing of baselines: NumPy and torch on a CPU, torch (with cuBLAS and cuDNN) on a GPU.

Baselines run in a separate process, under the same protocol and on inputs drawn in the same way as variants,
so that the times are comparable. torch is used if it is installed, and never required. The programs are in
`tunebench.libraries`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tunebench import libraries
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import DeviceError, MissingDependency
from tunebench.measure.timing import Protocol, collect, median_interval
from tunebench.workload import Workload

__all__ = ["Baseline", "BaselineFailed", "measure_baselines"]

T = TypeVar("T")
CallsOf = Callable[[Workload, libraries.Tensors], Mapping[str, libraries.LibraryCall]]
SamplerOf = Callable[[libraries.LibraryCall], Callable[[], float]]

LONGEST_REASON = 500
"""Maximum length of a stored reason, in characters: some libraries print their stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Time of a baseline.

    Attributes:
        name: Name of the baseline, such as ``"numpy"``.
        median_us: Median time of one run.
        ci_us: 95 % confidence interval of the median.
        samples_us: All samples, in the order taken.
    """

    name: str
    median_us: float
    ci_us: tuple[float, float]
    samples_us: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, samples_us: Sequence[float]) -> Baseline:
        """Return the baseline with the median and confidence interval of samples.

        Args:
            name: Name of the baseline.
            samples_us: Samples in microseconds.
        """
        median_us, ci_us = median_interval(samples_us)
        return cls(name=name, median_us=median_us, ci_us=ci_us, samples_us=tuple(samples_us))


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineFailed:
    """A baseline that could not be timed: the library rejects the workload, or failed.

    Attributes:
        name: Name of the baseline.
        reason: The library's error.
    """

    name: str
    reason: str


def measure_baselines(
    workload: Workload, device: Device, protocol: Protocol, seed: int
) -> list[Baseline | BaselineFailed]:
    """Time every baseline of a workload.

    Args:
        workload: The workload.
        device: This machine's processor, or one of its GPUs.
        protocol: How samples are taken.
        seed: Seed of the inputs.

    Returns:
        Timed baselines, fastest first, then those that failed; empty if no library has the operator.
    """
    inputs = workload.draw(np.random.default_rng(seed))
    timings: list[Baseline | BaselineFailed] = []
    seconds = time.thread_time if device.kind == "cpu" else time.monotonic
    for library, calls_of, sampler_of in _libraries(workload, device, protocol):
        calls = _or_failed(library, functools.partial(calls_of, workload, inputs))
        if isinstance(calls, BaselineFailed):
            timings.append(calls)
            continue
        for name, call in calls.items():
            sampler = functools.partial(sampler_of, call)
            timings.append(_or_failed(name, functools.partial(_time, name, sampler, protocol, seconds)))
    return sorted(
        timings, key=lambda baseline: baseline.median_us if isinstance(baseline, Baseline) else math.inf
    )


def _libraries(
    workload: Workload, device: Device, protocol: Protocol
) -> Iterator[tuple[str, CallsOf, SamplerOf]]:
    """Yield each library, a function that returns its programs, and one that returns a program's sampler."""
    if device.kind == "cpu":
        from tunebench.measure.cpu import CpuTimer

        stopwatch = CpuTimer(device, protocol)

        def on_cpu(call: libraries.LibraryCall) -> Callable[[], float]:
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
        lambda workload, inputs: libraries.torch_calls(workload, gpu.tensors(inputs)),
        lambda call: gpu.sampler(call, protocol).sample_us,
    )


def _or_failed(name: str, do: Callable[[], T]) -> T | BaselineFailed:
    try:
        return do()
    except Exception as error:  # libraries may raise anything: keep the reason, time the other baselines
        return BaselineFailed(name=name, reason=f"{type(error).__name__}: {error}"[:LONGEST_REASON])


def _time(
    name: str, sampler: Callable[[], Callable[[], float]], protocol: Protocol, seconds: Callable[[], float]
) -> Baseline:
    return Baseline.of(name, collect(sampler(), protocol, seconds=seconds).samples_us)


# -- CPU ---------------------------------------------------------------------------------------------


def numpy_cpu(workload: Workload, inputs: libraries.Tensors) -> dict[str, libraries.LibraryCall]:
    """Return NumPy's program for a workload, if there is one, as ``{"numpy": program}``.

    Args:
        workload: The workload.
        inputs: Inputs by name.
    """
    call = libraries.numpy_call(workload, inputs)
    return {} if call is None else {"numpy": call}


def torch_cpu(workload: Workload, inputs: libraries.Tensors) -> dict[str, libraries.LibraryCall]:
    """Return torch's programs for a workload on this processor; empty if torch is not installed.

    Args:
        workload: The workload.
        inputs: Inputs by name.
    """
    try:
        import torch
    except ImportError:
        return {}
    tensors = {name: libraries.torch_tensor(value) for name, value in inputs.items()}

    def without_gradients(call: libraries.LibraryCall) -> libraries.LibraryCall:
        def run() -> object:
            with torch.inference_mode():
                return call()

        return run

    calls = libraries.torch_calls(workload, tensors)
    return {name: without_gradients(call) for name, call in calls.items()}
