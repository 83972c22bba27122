"""Arithmetic intensity against what the device can do: the roofline.

It knows the operator and the device, no configuration but for the pipe that is used. Unlike the bound it is
no floor: a last-level cache may spare memory some of the bytes, and an algorithm (Winograd's) take fewer
operations than the textbook's, of which its FLOPs are.

Source: Williams, Waterman and Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.variant import Costs
from tunebench.workload import Traffic, Workload

__all__ = ["Ceiling", "Pipe", "Roofline", "roofline"]

Pipe = Literal["tensor pipe", "fma pipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The most that one kind of unit does, on all SMs at the highest clock.

    Attributes:
        pipe: Which units.
        dtype: What they multiply: the type for tensor cores, f32 for the others.
        gflop_s: 1e9 FLOPs a second.
        balance: FLOPs in the time of one byte from memory: the device's ops:byte ratio. Work of a lower
            intensity is memory limited.
    """

    pipe: Pipe
    dtype: str
    gflop_s: float
    balance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """An operator's work against a device's ceilings.

    Attributes:
        flops: FLOPs of the textbook algorithm.
        traffic: Bytes that any implementation must move.
        dram_gb_s: Peak memory bandwidth of the device.
        ceilings: Of the pipe that the configuration uses first, then of others.
    """

    flops: int
    traffic: Traffic
    dram_gb_s: float
    ceilings: tuple[Ceiling, ...]

    @property
    def intensity(self) -> float:
        """FLOPs for each byte from and to memory."""
        return self.flops / self.traffic.total_bytes

    @property
    def used(self) -> Ceiling:
        """The ceiling of the pipe that the configuration uses."""
        return self.ceilings[0]

    @property
    def math_us(self) -> float:
        """Time of the FLOPs at the ceiling that is used."""
        return self.flops / (self.used.gflop_s * 1e3)

    @property
    def memory_us(self) -> float:
        """Time of the bytes at the peak bandwidth."""
        return self.traffic.total_bytes / (self.dram_gb_s * 1e3)

    @property
    def us(self) -> float:
        """Time at the roof: the longer of the two, since one can hide the other."""
        return max(self.math_us, self.memory_us)

    @property
    def limit(self) -> Literal["math", "memory"]:
        """What the roof is where this work meets it."""
        return "math" if self.math_us >= self.memory_us else "memory"

    @property
    def factor(self) -> float | None:
        """How many times as long the longer of the two takes: the distance to the balance point.

        None where there is nothing to compute.
        """
        shorter = min(self.math_us, self.memory_us)
        return self.us / shorter if shorter else None

    @property
    def attainable_gflop_s(self) -> float:
        """The most FLOPs a second at this intensity."""
        return min(self.used.gflop_s, self.intensity * self.dram_gb_s)


def roofline(workload: Workload, costs: Costs, device: Device) -> Roofline:
    """Return the roofline of a workload, for a configuration with such costs."""
    fma = _ceiling("fma pipe", "f32", 2 * device.fma_per_clock, device)
    tensor = {
        dtype: _ceiling("tensor pipe", dtype, rate, device)
        for dtype, rate in device.mma_flop_per_clock.items()
        if dtype in (workload.dtype, costs.mma_dtype)
    }
    multiplies = bool(np.any(np.asarray(costs.mma_flop)))
    used = tensor.pop(str(costs.mma_dtype)) if multiplies else fma
    others = (*tensor.values(), *([fma] if multiplies else []))
    return Roofline(
        flops=workload.flops(),
        traffic=workload.traffic(),
        dram_gb_s=device.dram_gb_s,
        ceilings=(used, *others),
    )


def _ceiling(pipe: Pipe, dtype: str, flop_per_clock: float, device: Device) -> Ceiling:
    gflop_s = flop_per_clock * device.sm_count * device.max_clock_mhz / 1e3
    return Ceiling(pipe=pipe, dtype=dtype, gflop_s=gflop_s, balance=gflop_s / device.dram_gb_s)
