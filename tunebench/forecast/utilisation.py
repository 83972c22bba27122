"""Expected times from bounds: each resource reaches a usual share of its peak, and a launch costs something.

The share is ``a - b / waves``, where waves are the blocks an SM runs one after the other: the last blocks
of a launch leave units idle. `b` is small because the bound counts whole blocks an SM already.

Source: the form is that of NeuSight (Lee, Phanishayee and Mahajan, ASPLOS 2025). The constants were fitted
to public measurements, by mean absolute relative error, and rounded; each names its own below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.bound import Bounds, Resource
from tunebench.device import Device
from tunebench.variant import Costs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["INTERVAL", "LAUNCH_US", "UTILISATION", "Utilisation", "interval_us", "predict_us"]


@dataclass(frozen=True, slots=True)
class Utilisation:
    """The share of a resource's peak that kernels reach: ``a - b / waves``, where waves is at least 1."""

    a: float
    b: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.a - self.b <= self.a <= 1):
            raise ValueError(f"a utilisation lies in (0, 1] for any number of waves; got {self}")

    def at(self, waves: Array) -> Array:
        """Return the share reached with this many waves."""
        return self.a - self.b / np.maximum(1.0, waves)


UTILISATION: dict[Resource, Utilisation] = {
    # bf16 products of vendor libraries on A100 SXM and H100 SXM, 71,484 rows.
    # Source: library_gemm_*.csv of ai-dynamo/aiconfigurator.
    "tensor pipe": Utilisation(0.80, 0.05),
    "fill port": Utilisation(0.85),
    "dram": Utilisation(0.77),
    # f32 products of vendor libraries on P100, V100 and A100, 39,497 rows. P4 and T4 run into their power
    # limit and reach half of it. Source: operator latencies of sitar-lab/NeuSight.
    "fma pipe": Utilisation(0.85, 0.05),
    # No public rows are bound by these: they are taken to behave as the FMA pipe.
    "issue": Utilisation(0.85, 0.05),
    "special functions": Utilisation(0.85, 0.05),
    "latency": Utilisation(0.85, 0.05),
    # The highest share of the floor that any configuration reaches in recorded SGEMM and convolution spaces
    # (RTX 3090, A100). Source: AutoTuningAssociation/benchmark_hub.
    "shared": Utilisation(0.75),
    # Likewise, on RTX 3060 laptop and RTX 3090.
    "load/store": Utilisation(0.80),
}

LAUNCH_US = 3.5
"""What one launch costs beside its work: ramp-up, prologue and drain, without the host's share.

Fitted with the tensor-pipe constants; the fastest rows of the same data take 2.5 us on H100 and A100.
"""

INTERVAL = (0.55, 1.9)
"""What nine of ten times lie between, as multiples of the expected one.

Of bf16 products of vendor libraries (the same data, the fastest of 80 tiles and splits) 98 % do on H100, 94 %
on A100, and on B200 and RTX PRO 6000, which the constants have not seen, 97 % and 92 %. On kernels of this
package it has not been measured.
"""


def predict_us(bounds: Bounds, costs: Costs, device: Device) -> Array:
    """Return the expected time of each row of `bounds`, in microseconds; never below its bound.

    It is a belief. Known error, as mean absolute percentage, against vendor-library bf16 products
    (`docs/bound.md` tells how it was measured):

    - every product as blocks of one 128 x 128 tile, where those fill every SM once: 18 % on H100 and on
      A100; over all shapes 113 % and 179 %, since nobody runs a product of few rows so;
    - the fastest of 80 tiles and splits, over all shapes: 15 % on H100, 21 % on A100, and on B200 and
      RTX PRO 6000, which the constants have not seen, 21 % and 26 %.

    Its error on kernels of this package is not known; on a CPU it rests on assumed rates.

    Args:
        bounds: Of the same rows.
        costs: What those bounds were computed from.
        device: Likewise.
    """
    blocks = np.asarray(costs.blocks, dtype=np.float64)
    waves = blocks / device.sm_count
    busy = np.zeros(len(bounds))
    for resource, floor in bounds.floors.items():
        busy = np.maximum(busy, floor / UTILISATION[resource].at(waves))
    launches = np.asarray(costs.serial_launches if device.kind == "gpu" else 0, dtype=np.float64)
    expected: Array = busy + launches * LAUNCH_US
    return expected


def interval_us(expected: Array, bounds: Bounds) -> tuple[Array, Array]:
    """Return what nine of ten times lie between (see `INTERVAL`), in microseconds; never below the bound.

    Args:
        expected: What `predict_us` returned.
        bounds: Of the same rows.
    """
    low, high = INTERVAL
    return np.maximum(expected * low, bounds.us), expected * high
