"""Predicted time of workloads on library kernels, for devices that do not have to be present: `predict`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunebench._command import command_line
from tunebench._lazy import np
from tunebench.bound import dram_us
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.errors import DeviceError, InputError
from tunebench.forecast.library.kernel import Arithmetic, Family, LibraryKernel, library_kernels
from tunebench.forecast.library.model import Blend, ForecastModel, bundled_model, skill_of
from tunebench.forecast.library.power import slowdown_beyond_measured, slowdown_from_blend
from tunebench.forecast.library.roofline_model import (
    LAUNCH_US,
    RooflineModel,
    flop_per_us,
    roofline_times,
)
from tunebench.forecast.prediction import Basis, Binding, Prediction, Predictions
from tunebench.variant import exceeds_memory
from tunebench.workload import Workload
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["MOST_GROUPED", "bounds_us", "equal_products", "predict", "predict_all", "predict_fitting"]

WINOGRAD = 4.0
"""Factor by which a convolution algorithm may reduce the multiplications of the textbook algorithm.

Source: Lavin and Gray, "Fast algorithms for convolutional neural networks", CVPR 2016: F(4x4, 3x3).
"""

_FEWEST_GROUPS = 8
"""Fewest experts of a layer that was measured on one device.

Layers with fewer groups on a device belong to several devices, whose work they include.
"""

MOST_GROUPED = 1.5
"""Longest time of a grouped product, relative to a batch of equal products of the same sizes.

Grouped products were measured as parts of whole layers of experts, with the order, the activation and the
sums of tokens, which networks list as kernels of their own. Layers of devices that divide the experts were
measured with these kernels for the tokens of all devices, it seems, and skewed ones on the busiest device:
they take up to 50 times as long as products of a mean device's rows. Layers with all experts on one device
take 1.1 to 1.4 times as long as batches of equal products in the median, and 1.5 to 1.9 times in the upper
quartile, by device. Source: `library_moe_*.csv.gz` of aiconfigurator, every fourth row.
"""

_PRODUCTS: tuple[Family, ...] = ("product", "grouped product")
_AT_LIMIT: tuple[Family, ...] = (*_PRODUCTS, "attention", "encoder attention")
"""Kernels whose rate of operations can reach the power limit."""


def predict(workload: Workload, device: Device) -> Prediction:
    """Predict the time of one workload on the library kernels that a framework launches for it.

    As `predict_all`, with layers of experts as they were measured.

    Args:
        workload: The workload.
        device: A GPU; it does not have to be present.

    Raises:
        DeviceError: if the device is not a GPU.
    """
    return predict_all((workload,), device)[0]


def predict_all(
    workloads: Iterable[Workload],
    device: Device,
    *,
    model: ForecastModel | None = None,
    sustained: bool = False,
    measured_layers: bool = True,
) -> Predictions:
    """Predict many workloads on one device in one vectorised evaluation.

    Args:
        workloads: The workloads.
        device: A GPU; it does not have to be present.
        model: Model of the library kernels; None for the bundled one.
        sustained: Whether products run for long on random numbers, at the clock that the power limit allows,
            instead of in a short measurement.
        measured_layers: Whether grouped products include what was measured with them in layers of experts:
            the order, the activation and the sums of tokens, of all devices that divide the experts.

    Raises:
        DeviceError: if the device is not a GPU.
    """
    problems = tuple(workloads)
    if device.kind != "gpu":
        tune = command_line("tune", workload=problems[0] if problems else None, device="cpu")
        measure = f"; `{tune}` measures on this processor" if problems else ""
        raise DeviceError(f"{device.name} is not a GPU: times are predicted for GPUs only{measure}")
    sums = _Totals.of(len(problems))
    for (family, arithmetic), group in _grouped(problems, device).items():
        figures = np.array([launch.kernel.figures for launch in group], dtype=np.float64)
        roofline = roofline_times(family, arithmetic, figures, device)
        proxy = np.array([bool(launch.kernel.proxy) for launch in group])
        forecast, skill = model or bundled_model(), skill_of(family, arithmetic)
        blend = forecast.blend(skill, roofline, device, arithmetic, proxy=proxy)
        if family in _AT_LIMIT:
            # Operations over predicted time: the rate that decides whether the power limit is reached.
            rates = roofline.compute_us * flop_per_us(device, arithmetic) / blend.us
            weights = forecast.weights(skill, device, arithmetic)
            lasts = sustained and family in _PRODUCTS
            slowed = slowdown_from_blend if lasts else slowdown_beyond_measured
            blend = blend.longer(slowed(device, arithmetic, rates, weights))
        sums.add(group, roofline, blend)
    if not measured_layers:
        sums.scale(_grouped_limits(problems, device, sums, model=model, sustained=sustained))
    floors = _floors_us(problems, device)
    bound_us: Array = floors.max(axis=0)
    time_us = np.maximum(sums.us, bound_us)
    return Predictions(
        workloads=problems,
        device=device,
        time_us=time_us,
        # Raising the expected time to the bound must keep the order of the interval.
        low_us=np.clip(sums.low_us, bound_us, time_us),
        high_us=np.maximum(sums.high_us, time_us),
        bound_us=bound_us,
        utilisation=np.maximum.reduce([sums.compute_us, sums.memory_us, bound_us]) / time_us,
        binding=sums.binding(problems, device, floors),
        basis=sums.basis(),
        because=sums.because(),
    )


def _grouped_limits(
    problems: tuple[Workload, ...],
    device: Device,
    sums: _Totals,
    *,
    model: ForecastModel | None,
    sustained: bool,
) -> Array:
    """Return the factor of each time that brings grouped products between their roofline and other kernels.

    A product of fewer groups than a measured layer of one device takes at most as long as one launch of a
    product for each group, and as `MOST_GROUPED` batches of equal products. It takes at least as long as its
    operations or bytes; bytes that the last-level cache holds do not count.
    """
    factors = np.ones(len(problems))
    grouped = {
        index: problem
        for index, problem in enumerate(problems)
        if isinstance(problem, GroupedGemm) and problem.skew != "one" and problem.groups < _FEWEST_GROUPS
    }
    if not grouped:
        return factors
    rows = np.array(list(grouped))
    products = [equal_products(problem) for problem in grouped.values()]
    others = dict.fromkeys([*products, *(dataclasses.replace(product, batch=1) for product in products)])
    times_us = predict_all(others, device, model=model, sustained=sustained).time_us
    other_us = dict(zip(others, times_us.tolist(), strict=True))
    most_us = np.array(
        [
            min(
                MOST_GROUPED * other_us[product],
                product.batch * other_us[dataclasses.replace(product, batch=1)],
            )
            for product in products
        ]
    )
    cached = sums.memory_us[rows] * device.dram_gb_s * 1e3 <= device.l2_bytes
    least_us = np.maximum(sums.compute_us[rows], np.where(cached, 0.0, sums.memory_us[rows]))
    factors[rows] = np.maximum(least_us, np.minimum(sums.us[rows], most_us)) / sums.us[rows]
    return factors


def equal_products(work: GroupedGemm) -> Gemm:
    """Return the products of the groups of a grouped product that have rows, as a batch of equal ones.

    Args:
        work: The grouped product.
    """
    return Gemm(
        batch=work.most_filled,
        m=max(1, round(work.m / work.most_filled)),
        n=work.n,
        k=work.k,
        dtype=work.dtype,
        out=work.out,
        trans=work.trans,
    )


def predict_fitting(workloads: Iterable[Workload], device: Device) -> Predictions:
    """Predict as `predict_all`, but refuse workloads that the device cannot hold, as tuning does.

    Grouped products are those of one device alone (``measured_layers=False``).

    Raises:
        DeviceError: if the device is not a GPU.
        InputError: if the tensors of a workload do not fit into its memory.
    """
    problems = tuple(workloads)
    for problem in problems:
        if reason := exceeds_memory(problem, device):
            raise InputError(reason)
    return predict_all(problems, device, measured_layers=False)


def bounds_us(workloads: Iterable[Workload], device: Device) -> Array:
    """Return the lower bound of each workload in microseconds, by memory traffic and by arithmetic.

    Bytes that caches cannot hold count as traffic; inputs may be cached. Peak rates are those of the highest
    clock.
    """
    longest: Array = _floors_us(workloads, device).max(axis=0)
    return longest


def _floors_us(workloads: Iterable[Workload], device: Device) -> Array:
    """Return the lower bounds by arithmetic and by memory, in microseconds: (2, W)."""
    floors = [
        (_arithmetic_us(workload, device), dram_us(workload.traffic(), device, "warm"))
        for workload in workloads
    ]
    return np.array(floors, dtype=np.float64).reshape(-1, 2).T


def _arithmetic_us(workload: Workload, device: Device) -> float:
    if workload.category != "dot product":
        return 0.0
    rates = device.mma_flop_per_clock
    # A dtype that the device lacks is multiplied in another one; the fastest keeps the bound valid.
    usual = rates.get(workload.dtype, 0.0 if workload.dtype == "f32" else max(rates.values(), default=0.0))
    if workload.operator == "attention" and workload.dtype == "f32":
        # PyTorch's fused kernel computes an f32 product as three tf32 products.
        usual = max(usual, rates.get("tf32", 0.0) / 3)
    # Multiply-add units process packed narrow types: two halves from sm_60 on, four bytes from sm_61 on.
    packed = 4 / itemsize(storage(workload.dtype))
    rate = max(usual, 2.0 * device.fma_per_clock * packed)
    fewer = WINOGRAD if workload.operator == "conv2d" else 1.0
    return workload.flops() / (device.sm_count * device.max_clock_mhz * rate * fewer)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel, the index of its workload, and the number of launches of that workload before it."""

    workload: int
    before: int
    kernel: LibraryKernel


def _grouped(
    problems: tuple[Workload, ...], device: Device
) -> dict[tuple[Family, Arithmetic], list[_Launch]]:
    """Return the launches of all workloads, grouped by family and arithmetic."""
    groups: dict[tuple[Family, Arithmetic], list[_Launch]] = {}
    for index, problem in enumerate(problems):
        for before, kernel in enumerate(library_kernels(problem, device)):
            groups.setdefault((kernel.family, kernel.arithmetic), []).append(_Launch(index, before, kernel))
    return groups


@dataclass(slots=True, eq=False)
class _Totals:
    """Kernel times summed by workload. Errors within a workload are assumed to be fully correlated."""

    us: Array
    low_us: Array
    high_us: Array
    compute_us: Array
    memory_us: Array
    launch_us: Array
    tensor: list[bool]
    reasons: list[dict[int, str]]

    @classmethod
    def of(cls, count: int) -> _Totals:
        """Return totals of zero for a number of workloads."""
        us, low_us, high_us, compute_us, memory_us, launch_us = np.zeros((6, count))
        reasons: list[dict[int, str]] = [{} for _ in range(count)]
        return cls(us, low_us, high_us, compute_us, memory_us, launch_us, [False] * count, reasons)

    def add(self, group: list[_Launch], roofline: RooflineModel, blend: Blend) -> None:
        """Add kernels of one family."""
        rows = np.array([launch.workload for launch in group])
        for total, amount in (
            (self.us, blend.us),
            (self.low_us, blend.low_us),
            (self.high_us, blend.high_us),
            (self.compute_us, roofline.compute_us),
            (self.memory_us, roofline.memory_us),
            (self.launch_us, np.full(len(rows), LAUNCH_US)),
        ):
            np.add.at(total, rows, amount)
        for launch, extrapolated in zip(group, blend.extrapolated, strict=True):
            self.tensor[launch.workload] |= launch.kernel.arithmetic != "f32"
            reason = launch.kernel.proxy or (
                "workload outside the measured range of sizes" if extrapolated else ""
            )
            if not reason and not blend.near:
                reason = f"device unlike all measured ones; the nearest is {blend.nearest}"
            if reason:
                self.reasons[launch.workload][launch.before] = reason

    def scale(self, factors: Array) -> None:
        """Multiply the times and their intervals by a factor of each workload."""
        for total in (self.us, self.low_us, self.high_us):
            total *= factors

    def binding(self, workloads: tuple[Workload, ...], device: Device, floors: Array) -> tuple[Binding, ...]:
        """Return the limiting resource of each predicted time, or of the lower bound if that is longer."""
        parts = np.array([self.compute_us, self.memory_us, self.launch_us])
        bound = np.array([*floors, np.zeros(len(self.us))])
        floored = floors.max(axis=0) > self.us
        largest = np.where(floored, bound, parts).argmax(axis=0)
        rates = device.mma_flop_per_clock
        pipes = (
            tensor or "f32" in rates or bool(floor_binds and workload.dtype in rates)
            for tensor, floor_binds, workload in zip(self.tensor, floored, workloads, strict=True)
        )
        return tuple(
            ("tensor pipe" if tensor else "fma pipe", "dram", "launch")[index]
            for tensor, index in zip(pipes, largest, strict=True)
        )

    def because(self) -> tuple[str, ...]:
        """Return the reason for each basis, from the first launch that was not measured."""
        return tuple(reasons[min(reasons)] if reasons else "" for reasons in self.reasons)

    def basis(self) -> tuple[Basis, ...]:
        """Return the basis of each prediction."""
        return tuple("extrapolated" if reasons else "interpolated" for reasons in self.reasons)
