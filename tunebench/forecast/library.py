"""How long the kernels of vendor libraries take, on devices that need not be here: `predict`."""

from __future__ import annotations

from collections.abc import Iterable

from tunebench._lazy import np
from tunebench.bound import dram_us
from tunebench.device import Device
from tunebench.forecast.prediction import Binding, Prediction, Predictions
from tunebench.workload import Workload

__all__ = ["predict", "predict_all"]


def predict(workload: Workload, device: Device) -> Prediction:
    """Predict one workload on one device (see `predict_all` for many)."""
    return predict_all([workload], device)[0]


def predict_all(workloads: Iterable[Workload], device: Device) -> Predictions:
    """Predict many workloads on one device, at once.

    Args:
        workloads: What is computed.
        device: Where; it need not be here.
    """
    problems = tuple(workloads)
    memory = np.array([dram_us(problem.traffic(), device, "warm") for problem in problems])
    per_us = device.sm_count * device.fma_per_clock * 2 * device.max_clock_mhz
    compute = np.array(
        [
            problem.flops()
            / (device.sm_count * device.max_clock_mhz * device.mma_flop_per_clock[problem.dtype])
            if problem.dtype in device.mma_flop_per_clock
            else problem.flops() / per_us
            for problem in problems
        ]
    )
    bound = np.maximum(memory, compute)
    time = bound / 0.7 + 3.5
    binding: tuple[Binding, ...] = tuple(
        "dram" if of_memory > of_compute else "fma pipe"
        for of_memory, of_compute in zip(memory, compute, strict=True)
    )
    return Predictions(
        workloads=problems,
        device=device,
        time_us=time,
        low_us=np.maximum(bound, time * 0.7),
        high_us=time * 1.4,
        bound_us=bound,
        binding=binding,
        basis=("law",) * len(problems),
        because=("",) * len(problems),
    )
