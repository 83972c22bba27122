"""What a library would take for the same problem: NumPy and torch on a CPU, torch on a GPU.

Baselines run in a process of their own, under the same protocol and on inputs drawn the same way as
variants, so that the two compare. torch is used where it is installed and never required. On a GPU torch
stands for cuBLAS and cuDNN, which it calls. What they are asked for is in `tunebench.measure.libraries`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import DeviceError, MissingDependency
from tunebench.measure import libraries
from tunebench.measure.timing import Protocol, collect, median_interval
from tunebench.workload import Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Baseline", "measure_baselines"]

Tensors = Mapping[str, Any]


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


def measure_baselines(workload: Workload, device: Device, protocol: Protocol, seed: int) -> list[Baseline]:
    """Time every library that does this workload, fastest first; none for an operator libraries lack."""
    inputs = workload.draw(np.random.default_rng(seed))
    found = []
    if device.kind == "cpu":
        from tunebench.measure.cpu import Stopwatch

        stopwatch = Stopwatch(device, protocol)
        numpy = libraries.numpy_call(workload, inputs)
        calls = ({} if numpy is None else {"numpy": numpy}) | torch_cpu(workload, inputs)
        for name, call in calls.items():
            found.append(_time(name, functools.partial(stopwatch.time_us, call), protocol))
    else:
        found += _torch_gpu(workload, inputs, device, protocol)
    return sorted(found, key=lambda baseline: baseline.median_us)


def _time(name: str, sample_us: Callable[[], float], protocol: Protocol) -> Baseline:
    return Baseline.of(name, collect(sample_us, protocol).samples_us)


# -- torch -------------------------------------------------------------------------------------------


def torch_cpu(workload: Workload, inputs: Tensors) -> dict[str, libraries.Call]:
    """Return torch's programs for a workload on this processor; none where torch is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    tensors = {name: _tensor(torch, value) for name, value in inputs.items()}

    def without_gradients(call: libraries.Call) -> libraries.Call:
        def run() -> object:
            with torch.inference_mode():
                return call()

        return run

    calls = libraries.torch_calls(workload, tensors)
    return {name: without_gradients(call) for name, call in calls.items()}


def _tensor(torch: Any, value: Array) -> Any:
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    if value.dtype.name == "float8_e4m3fn":
        return torch.from_numpy(value.view(np.int8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(value) if value.shape else float(value)


def _torch_gpu(workload: Workload, inputs: Tensors, device: Device, protocol: Protocol) -> list[Baseline]:
    """Time torch on a GPU; nothing where it is not installed, or sees no GPU."""
    from tunebench.measure._torch_gpu import TorchGpu

    try:
        gpu = TorchGpu(device)
    except (MissingDependency, DeviceError):
        return []
    gpu.allow_for(workload)
    tensors = gpu.tensors(inputs)
    return [
        _time(name, gpu.sampler(call, protocol).sample_us, protocol)
        for name, call in libraries.torch_calls(workload, tensors).items()
    ]
