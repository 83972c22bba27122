"""Clocks of long runs: how much longer matrix products take when the board's power limit lowers the clock.

The measured products that the model is trained with ran for milliseconds, on boards with the highest limit of
their chip. In a training step they run for hours, on random numbers, and a board at its power limit lowers
its clock f. A board with a lower limit than the measured ones does so within milliseconds. The power of a
product is

    static + e * f**2 * FLOPs per second,

where e is a constant of the architecture (`Device.mma_pj_per_ghz2`): the energy of an operation rises with
the square of the voltage, and the voltage with the clock. FLOPs per second are proportional to f, so a
product that needs x times the power that is left for it at the clock of the measurement takes the cube root
of x times as long. Products that need less, and kernels that wait for memory, take as long as measured.

e follows from one published rate of large products of random numbers for each architecture, and from no
training step. `python -m benchmarks.predict_sustained` states these rates, and the errors on boards of the
same chips with other power limits, to which nothing was fitted: at most 10 % on H100 PCIe (350 W) and A100
PCIe (250 W), instead of 23 %. L4 (72 W) takes 1.5 times as long as predicted; probably its voltage cannot
fall so far.

Sources: He, "Strangely, matrix multiplications on GPUs run faster when given predictable data", 2024 (clocks
and data under a power limit); zzc0721/torch-performance-test-data and stas00/ml-engineering (rates).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tunebench import device as devices
from tunebench._lazy import np
from tunebench.device import Device
from tunebench.forecast.library.kernel import Arithmetic
from tunebench.forecast.library.roofline_model import peak_flop_per_us

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "MEASURED_AT_LIMIT",
    "dynamic_power_w",
    "slowdown",
    "slowdown_beyond_measured",
    "slowdown_from_blend",
]

STATIC_SHARE = 0.15
"""Power that does not depend on the operations, as a share of the thermal design power of the largest board
with the chip. Assumed: idle data-centre GPUs are stated to draw 10 to 22 %."""

ENERGY_OF: dict[str, float] = {"f16": 1.0, "bf16": 1.0, "tf32": 2.0, "e4m3": 0.5, "i8": 0.5}
"""Energy of an operation relative to one on 16-bit numbers: proportional to the bytes of its operands.

Assumed. It makes the fastest measured rows of H100 in 8 bits, 1602 TFLOP/s, 1491; 1403 (H100) and 1453 (H200)
are published.
"""

MEASURED_AT_LIMIT: frozenset[str] = frozenset({"a100-80-sxm"})
"""Devices whose 16-bit products were measured on random numbers, at the clock that their power limit allows.

The others of the public files have weights that were never written, so their data says nothing about power.
Source: ai-dynamo/aiconfigurator, `collector/sglang/collect_gemm.py` and `collector/vllm/collect_gemm.py`.
"""


@functools.cache
def _static_w_per_sm(architecture: str) -> float:
    """Return the static power of an SM, with its share of the chip, in watts."""
    largest = devices.representative(architecture)
    return STATIC_SHARE * (largest.tdp_w or 0.0) / largest.sm_count


def dynamic_power_w(device: Device) -> float | None:
    """Return the power that is left for operations, in watts; None if the limit or the energy is unknown."""
    limit_w = device.power_limit_w or device.tdp_w
    if (
        limit_w is None
        or device.mma_pj_per_ghz2 is None
        or device.architecture not in devices.architectures()
    ):
        return None
    return max(0.1 * limit_w, limit_w - _static_w_per_sm(device.architecture) * device.sm_count)


def slowdown(device: Device, arithmetic: Arithmetic, flop_per_us: Array) -> Array:
    """Return how much longer products on random numbers take at the power limit, at least 1.

    Args:
        device: The device.
        arithmetic: Arithmetic of the products.
        flop_per_us: (R,) rates at the clock of the datasheet's peaks.
    """
    left_w, energy = dynamic_power_w(device), ENERGY_OF.get(arithmetic)
    if left_w is None or energy is None or arithmetic not in device.mma_flop_per_clock:
        return np.ones_like(flop_per_us)
    clock_ghz = (device.boost_clock_mhz or device.max_clock_mhz) / 1e3
    needed_w = (device.mma_pj_per_ghz2 or 0.0) * energy * clock_ghz**2 * flop_per_us / 1e6
    # Power grows with the cube of the clock: its square times the rate, which is proportional to it.
    longer: Array = np.cbrt(np.maximum(1.0, needed_w / left_w))
    return longer


def slowdown_from_blend(
    device: Device, arithmetic: Arithmetic, flop_per_us: Array, weights: Mapping[str, float]
) -> Array:
    """Return how much longer products take than predicted from measured devices.

    A device that was measured at its power limit contributes times that are longer already.

    Args:
        device: The device.
        arithmetic: Arithmetic of the products.
        flop_per_us: (R,) predicted rates.
        weights: Weight of each measured device in the prediction.
    """
    at_limit = {name: weight for name, weight in weights.items() if name in MEASURED_AT_LIMIT}
    longer = slowdown(device, arithmetic, flop_per_us)
    return longer / _measured_slowdown(device, arithmetic, flop_per_us, at_limit)


def slowdown_beyond_measured(
    device: Device, arithmetic: Arithmetic, flop_per_us: Array, weights: Mapping[str, float]
) -> Array:
    """Return how much longer a short measurement takes where the limit is below those of measured boards.

    At the limits of the measured boards, milliseconds are too short for the clock to fall. At half of that
    power, they are not: products of 6 ms to 0.1 s on H100 PCIe and A100 PCIe run at their limits.

    Args:
        device: The device.
        arithmetic: Arithmetic of the products.
        flop_per_us: (R,) predicted rates.
        weights: Weight of each measured device in the prediction.
    """
    longer = slowdown(device, arithmetic, flop_per_us)
    if (longer == 1).all():
        return longer
    beyond: Array = np.maximum(1.0, longer / _measured_slowdown(device, arithmetic, flop_per_us, weights))
    return beyond


@functools.cache
def _described(name: str) -> Device | None:
    """Return a measured device; None if only its owner has a description of it."""
    return devices.described().get(name)


def _measured_slowdown(
    device: Device, arithmetic: Arithmetic, flop_per_us: Array, weights: Mapping[str, float]
) -> Array:
    """Return the mean slowdown of measured devices at the same share of their peaks."""
    share = flop_per_us / peak_flop_per_us(device, arithmetic)
    mean = np.ones_like(flop_per_us)
    for name, weight in weights.items():
        measured = _described(name)
        if weight and measured and arithmetic in measured.mma_flop_per_clock:
            mean *= slowdown(measured, arithmetic, share * peak_flop_per_us(measured, arithmetic)) ** weight
    return mean
