"""Predicted time of this project's own kernels: each resource reaches a typical share of its peak rate.

The share (utilisation) is ``a - b / waves``, where waves is the number of blocks that an SM runs one after
the other: the last wave of a launch leaves units idle (tail effect). `b` is small because the lower bound
already counts whole blocks per SM. Each launch adds a constant.

Source: the form is that of NeuSight (Lee, Phanishayee and Mahajan, ASPLOS 2025). The constants were fitted to
public measurements by mean absolute relative error, and rounded; each comment below names its data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.bound import Bounds, Resource, dram_us
from tunebench.device import Device
from tunebench.outcome import CacheState
from tunebench.variant import Costs
from tunebench.workload import Traffic

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["INTERVAL", "LAUNCH_US", "UTILISATION", "Utilisation", "interval_us", "least_us", "predict_us"]


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Share of a resource's peak rate that kernels reach: ``a - b / waves``, with waves at least 1."""

    a: float
    b: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.a - self.b <= self.a <= 1):
            raise ValueError(f"a utilisation must be in (0, 1] for every number of waves, got {self}")

    def at(self, waves: Array) -> Array:
        """Return the utilisation for each number of waves."""
        return self.a - self.b / np.maximum(1.0, waves)


UTILISATION: dict[Resource, Utilisation] = {
    # bf16 library matrix products on A100 SXM and H100 SXM, 71,484 rows.
    # Source: library_gemm_*.csv of ai-dynamo/aiconfigurator.
    "tensor pipe": Utilisation(0.80, 0.05),
    "fill port": Utilisation(0.85),
    "dram": Utilisation(0.77),
    # f32 library matrix products on P100, V100 and A100, 39,497 rows. P4 and T4 run into their power
    # limit and reach half of it. Source: operator latencies of sitar-lab/NeuSight.
    "fma pipe": Utilisation(0.85, 0.05),
    # No public measurements are limited by these resources; the FMA pipe's utilisation is assumed.
    "issue": Utilisation(0.85, 0.05),
    "special functions": Utilisation(0.85, 0.05),
    "latency": Utilisation(0.85, 0.05),
    # Highest share of the lower bound that any configuration reaches in recorded SGEMM and convolution spaces
    # (RTX 3090, A100). Source: AutoTuningAssociation/benchmark_hub.
    "shared": Utilisation(0.75),
    # The same on RTX 3060 laptop and RTX 3090.
    "load/store": Utilisation(0.80),
}

LAUNCH_US = 3.5
"""Overhead of one launch in microseconds: ramp-up, prologue and drain, without the host's share.

Fitted together with the tensor-pipe constants; the fastest rows of the same data take 2.5 us on H100 and
A100.
"""

INTERVAL = (0.55, 1.9)
"""90 % prediction interval, as multiples of the expected time.

It contains 98 % of the bf16 library products on H100 and 94 % on A100 (same data, the fastest of 80 tiles and
splits), and 97 % and 92 % on B200 and RTX PRO 6000, which were not used to fit the constants. On this
project's own kernels it has not been measured.
"""


def predict_us(bounds: Bounds, costs: Costs, device: Device) -> Array:
    """Return the expected time of each row of `bounds`, in microseconds; never below its lower bound.

    Mean absolute percentage error against bf16 library products (method in `docs/bound.md`):

    - every product in blocks of one 128 x 128 tile, where blocks fill every SM at least once: 18 % on H100
      and on A100; over all shapes 113 % and 179 %, because nobody runs a product of few rows that way;
    - the fastest of 80 tiles and splits, over all shapes: 15 % on H100, 21 % on A100, and 21 % and 26 % on
      B200 and RTX PRO 6000, which were not used to fit the constants.

    The error on this project's own kernels is unknown. On a CPU the prediction uses assumed rates.

    Args:
        bounds: Lower bounds of the configurations.
        costs: Costs that the lower bounds were computed from.
        device: The device.
    """
    blocks = np.asarray(costs.blocks, dtype=np.float64)
    waves = blocks / device.sm_count
    busy = np.zeros(len(bounds))
    for resource, floor in bounds.floors.items():
        # The slowest resource decides, each at its own typical share of the peak.
        busy = np.maximum(busy, floor / UTILISATION[resource].at(waves))
    launches = np.asarray(costs.serial_launches if device.kind == "gpu" else 0, dtype=np.float64)
    expected: Array = busy + launches * LAUNCH_US
    return expected


def least_us(traffic: Traffic, device: Device, cache: CacheState) -> float:
    """Return the time in microseconds of a workload's memory traffic in one launch; no prediction is below.

    Args:
        traffic: Bytes that any implementation must read and write.
        device: The device.
        cache: Cache state of the predictions.
    """
    busy_us = dram_us(traffic, device, cache) / UTILISATION["dram"].a
    return busy_us + (LAUNCH_US if device.kind == "gpu" else 0.0)


def interval_us(expected: Array, bounds: Bounds) -> tuple[Array, Array]:
    """Return both ends of the 90 % prediction interval (`INTERVAL`) in microseconds, at least the bound.

    Args:
        expected: Times returned by `predict_us`.
        bounds: Lower bounds of the same configurations.
    """
    low, high = INTERVAL
    return np.maximum(expected * low, bounds.us), expected * high
