"""Laws of performance for kernels of libraries: what their time would be if they were perfect.

The law of a kernel is ``launch + max(compute, memory)``: its operations at the rate the device sustains, its
compulsory bytes at the bandwidth of its memory, and what a launch costs. What real kernels take is this,
divided by a utilisation which is learned from measurements (`tunebench.forecast.library.model`). Beside the law stand
features that a utilisation depends on, each relative to the device, so that what was learned on one
device can be asked of another.

Source: Lee, Phanishayee and Mahajan, "Forecasting GPU performance for deep learning training and inference"
(NeuSight), ASPLOS 2025, for tiles, waves and laws as limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import UnknownName
from tunebench.forecast.library.kernel import COLUMNS, Arithmetic, Family

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["LAUNCH_US", "RooflineModel", "coordinates", "flop_per_us", "peak_flop_per_us", "roofline_times"]

LAUNCH_US = 3.0
"""What a launch costs beside its work. The fastest kernels of public measurements take 2.5 to 3.5 us."""

ENERGY_PJ = ((16.0, 16.0), (12.0, 16.0), (7.0, 7.0), (4.0, 5.0))
"""Energy of an f32 operation with all that goes with it, in pJ, by process in nm.

16 and 12 nm: what board power over the rate of the largest f32 products comes to on P4 (75 W, 15 to 16 pJ)
and T4 (70 W, 16 to 17 pJ), which their power limits. 7 and 4 nm: that, less about what the foundry says each
process saves (60 % from 16 to 7 nm, 30 % from 7 to 5 nm); A100 and H100 stay below it, as they should.
Source: sitar-lab/NeuSight; TSMC.
"""

TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64), (32, 32))
"""Tiles that products are usually divided into, rows by columns of the result."""

EVEN = 16
"""Sizes of models are multiples of this; of sizes at random next to none are."""

QUERIES = 128
"""Queries that a block of fused attention usually works on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineModel:
    """Times of perfect kernels in microseconds, one a row, and what their utilisation depends on.

    Attributes:
        compute_us: Operations at the sustained rate.
        memory_us: Compulsory bytes at the bandwidth.
        features: One row a kernel; the columns are those of its family.
        even: (R,) whether it is a product of sizes that models have: multiples of `EVEN`.
    """

    compute_us: Array
    memory_us: Array
    features: Array
    even: NDArray[np.bool_]

    @property
    def us(self) -> Array:
        """The law."""
        longest: Array = np.maximum(self.compute_us, self.memory_us)
        return longest + LAUNCH_US


def peak_flop_per_us(device: Device, arithmetic: Arithmetic) -> float:
    """Return the peak rate of a device at the clock its datasheet quotes it at.

    Raises:
        UnknownName: if the device has no tensor cores for the type.
    """
    clock = device.boost_clock_mhz or device.max_clock_mhz
    rates = device.mma_flop_per_clock
    if arithmetic in rates:  # CDNA has it for f32, too
        return device.sm_count * clock * rates[arithmetic]
    if arithmetic != "f32":
        raise UnknownName(f"tensor-core type of {device.name}", arithmetic, rates)
    return 2.0 * device.sm_count * clock * device.fma_per_clock


def flop_per_us(device: Device, arithmetic: Arithmetic) -> float:
    """Return the rate that a device sustains: its peak, or what its power allows.

    Only f32 on multiply-add units is held to the board's power: of tensor cores nobody has measured enough.

    Raises:
        UnknownName: if the device has no tensor cores for the type.
    """
    peak = peak_flop_per_us(device, arithmetic)
    if arithmetic in device.mma_flop_per_clock or device.tdp_w is None or device.process_nm is None:
        return peak
    sizes, energies = zip(*reversed(ENERGY_PJ), strict=True)
    return min(peak, 1e6 * device.tdp_w / float(np.interp(device.process_nm, sizes, energies)))


def coordinates(device: Device, arithmetic: Arithmetic) -> tuple[float, ...]:
    """Return where a device lies among devices: how near two are says how alike their kernels behave.

    Generation, in steps of one; operations and bytes of memory per SM and clock, in octaves; and the vendor,
    far apart.
    """
    rate = device.mma_flop_per_clock.get(arithmetic) or 2.0 * device.fma_per_clock
    clock = device.boost_clock_mhz or device.max_clock_mhz
    fed = device.dram_gb_s * 1e3 / clock / device.sm_count
    major, minor = device.compute_capability
    if not major:
        return (_CDNA.get(device.architecture, 8.0), float(np.log2(rate)), float(np.log2(fed)), 5.0)
    generation = 10.5 if major == 12 else major + minor / 10
    return (generation, float(np.log2(rate)), float(np.log2(fed)), 0.0)


_CDNA = {"gfx908": 7.5, "gfx90a": 8.0, "gfx942": 9.0}
"""Generations of AMD's devices, by the year they came out in."""


def roofline_times(family: Family, arithmetic: Arithmetic, figures: Array, device: Device) -> RooflineModel:
    """Return the law of kernels of one family, with their features.

    Args:
        family: Of all of them.
        arithmetic: Of all of them.
        figures: One row a kernel, with the columns that `COLUMNS` has for the family.
        device: Where they run.
    """
    columns = dict(zip(COLUMNS[family], figures.T, strict=True))
    return _ROOFLINES[family](columns, flop_per_us(device, arithmetic), device)


def _product(c: dict[str, Array], rate: float, device: Device) -> RooflineModel:
    b, m, n, k = c["batch"], c["m"], c["n"], c["k"]
    operands = c["in_bytes"] * (m * k + k * n)
    nbytes = b * (operands + c["out_bytes"] * m * n) + c["extra_bytes"]
    compute_us, memory_us = 2 * b * m * n * k / rate, nbytes / (device.dram_gb_s * 1e3)
    features = [
        np.log(compute_us),
        np.log(memory_us),
        np.log(compute_us / memory_us),
        *(np.log(size) for size in (m, n, k, b)),
    ]
    for rows, cols in TILES:
        waves = b * np.ceil(m / rows) * np.ceil(n / cols) / device.sm_count
        busy = b * m * n / (rows * cols * device.sm_count) / np.ceil(waves)
        features += [np.log(waves), np.log(busy)]
    # Loads of 16 bytes need as many elements to be a multiple.
    features += [(size % np.floor(16 / c["in_bytes"]) == 0) * 1.0 for size in (m, n, k)]
    features += [np.log(nbytes / device.l2_bytes), np.log(nbytes / b / device.l2_bytes), (b == 1) * 1.0]
    return RooflineModel(
        compute_us=compute_us,
        memory_us=memory_us,
        features=np.stack(features, axis=1),
        even=(m % EVEN == 0) & (n % EVEN == 0) & (k % EVEN == 0),
    )


def _rows(c: dict[str, Array], rate: float, device: Device) -> RooflineModel:
    nbytes = c["read_bytes"] + c["write_bytes"]
    memory_us = nbytes / (device.dram_gb_s * 1e3)
    features = [
        np.log(memory_us),
        np.log(nbytes / device.l2_bytes),
        c["read_bytes"] / np.maximum(1.0, c["write_bytes"]),
        np.log(c["cols"]),
        np.log(c["rows"] / device.sm_count),
        (c["cols"] % 2 == 0) * 1.0 + (c["cols"] % 4 == 0),
    ]
    return RooflineModel(
        compute_us=np.zeros_like(memory_us),
        memory_us=memory_us,
        features=np.stack(features, axis=1),
        even=np.zeros(len(memory_us), dtype=bool),
    )


def _attention(c: dict[str, Array], rate: float, device: Device) -> RooflineModel:
    heads, queries, keys = c["batch"] * c["heads"], c["seq_q"], c["seq_k"]
    # A query of a causal square sees half of the keys, itself included; the last one sees all.
    seen = np.where(c["causal"] > 0, keys - (np.minimum(queries, keys) - 1) / 2, keys)
    compute_us = c["products"] * 2 * heads * queries * seen * c["head_dim"] / rate
    lines = 2 * heads * queries + 2 * c["batch"] * c["heads_k"] * keys
    memory_us = c["bytes"] * c["products"] / 2 * lines * c["head_dim"] / (device.dram_gb_s * 1e3)
    waves = heads * np.ceil(queries / QUERIES) / device.sm_count
    features = [
        np.log(compute_us),
        np.log(memory_us),
        np.log(compute_us / memory_us),
        np.log(queries),
        c["head_dim"],
        np.log(waves),
        np.log(waves / np.ceil(waves)),
        np.log(heads / device.sm_count),
        np.log(c["heads"] / c["heads_k"]),
    ]
    return RooflineModel(
        compute_us=compute_us,
        memory_us=memory_us,
        features=np.stack(features, axis=1),
        even=np.zeros(len(memory_us), dtype=bool),
    )


_ROOFLINES: dict[Family, Callable[[dict[str, Array], float, Device], RooflineModel]] = {
    "product": _product,
    "elementwise": _rows,
    "softmax": _rows,
    "norm": _rows,
    "attention": _attention,
}
