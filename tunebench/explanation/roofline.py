"""Roofline: arithmetic intensity of a workload compared with the ops:byte ratio of the device.

It depends on the operator and the device; of the configuration only on the pipe that it uses. Unlike the
lower bound it can be beaten: a last-level cache may serve part of the bytes, and an algorithm such as
Winograd's may need fewer operations than the textbook's, which the FLOPs count.

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.variant import Costs
from tunebench.workload import Traffic, Workload

__all__ = ["Ceiling", "Pipe", "Roofline", "roofline", "roofline_of_work"]

Pipe = Literal["tensor pipe", "fma pipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Peak rate of one kind of unit, on all SMs at the highest clock.

    Attributes:
        pipe: The units.
        dtype: Type they multiply; f32 for multiply-add units.
        gflop_s: Rate in 1e9 FLOPs per second.
        balance: FLOPs in the time of one byte from memory: the ops:byte ratio of the device. Work with a
            lower arithmetic intensity is memory limited.
    """

    pipe: Pipe
    dtype: str
    gflop_s: float
    balance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Work of an operator and ceilings of a device.

    Attributes:
        flops: FLOPs of the textbook algorithm.
        traffic: Compulsory memory traffic.
        dram_gb_s: Peak memory bandwidth of the device, in GB/s.
        ceilings: Ceiling of the pipe that the configuration uses first, then others.
    """

    flops: int
    traffic: Traffic
    dram_gb_s: float
    ceilings: tuple[Ceiling, ...]

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte of compulsory memory traffic."""
        return self.flops / self.traffic.total_bytes

    @property
    def used(self) -> Ceiling:
        """Ceiling of the pipe that the configuration uses."""
        return self.ceilings[0]

    @property
    def math_us(self) -> float:
        """Time of the FLOPs at that ceiling, in microseconds."""
        return self.flops / (self.used.gflop_s * 1e3)

    @property
    def memory_us(self) -> float:
        """Time of the bytes at the peak bandwidth, in microseconds."""
        return self.traffic.total_bytes / (self.dram_gb_s * 1e3)

    @property
    def us(self) -> float:
        """Roofline time: the longer of the two, because they can overlap."""
        return max(self.math_us, self.memory_us)

    @property
    def limit(self) -> Literal["math", "memory"]:
        """Which of the two is longer."""
        return "math" if self.math_us >= self.memory_us else "memory"

    @property
    def factor(self) -> float | None:
        """Ratio of the longer to the shorter of the two: the distance from the balance point.

        None if there are no FLOPs.
        """
        shorter = min(self.math_us, self.memory_us)
        return self.us / shorter if shorter else None

    @property
    def attainable_gflop_s(self) -> float:
        """Highest rate at this arithmetic intensity, in 1e9 FLOPs per second."""
        return min(self.used.gflop_s, self.intensity * self.dram_gb_s)


def roofline(workload: Workload, costs: Costs, device: Device) -> Roofline:
    """Return the roofline of a workload for a configuration.

    Args:
        workload: The workload.
        costs: Costs of the configuration.
        device: The device.
    """
    return roofline_of_work(
        flops=workload.flops(), traffic=workload.traffic(), dtype=workload.dtype, costs=costs, device=device
    )


def roofline_of_work(*, flops: int, traffic: Traffic, dtype: str, costs: Costs, device: Device) -> Roofline:
    """Return the roofline of some work.

    Args:
        flops: FLOPs of the textbook algorithm.
        traffic: Compulsory memory traffic.
        dtype: Type of the inputs.
        costs: Costs of the configuration.
        device: The device.
    """
    fma = _ceiling("fma pipe", "f32", 2 * device.fma_per_clock, device)
    tensor = {
        name: _ceiling("tensor pipe", name, rate, device)
        for name, rate in device.mma_flop_per_clock.items()
        if name in (dtype, costs.mma_dtype)
    }
    multiplies = bool(np.any(np.asarray(costs.mma_flop)))
    used = tensor.pop(str(costs.mma_dtype)) if multiplies else fma
    unused = (*tensor.values(), *([fma] if multiplies else []))
    return Roofline(flops=flops, traffic=traffic, dram_gb_s=device.dram_gb_s, ceilings=(used, *unused))


def _ceiling(pipe: Pipe, dtype: str, flop_per_clock: float, device: Device) -> Ceiling:
    gflop_s = flop_per_clock * device.sm_count * device.max_clock_mhz / 1e3
    return Ceiling(pipe=pipe, dtype=dtype, gflop_s=gflop_s, balance=gflop_s / device.dram_gb_s)
