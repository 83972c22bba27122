"""The variants that support a workload on a device, with their search spaces, costs and lower bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunebench import device as devices
from tunebench._lazy import np
from tunebench._user_code import limited
from tunebench.bound import Bounds, bound
from tunebench.compile import unavailable
from tunebench.device import Device
from tunebench.errors import ConfigError, InputError, NoCompiler, UnknownName, VariantError
from tunebench.forecast import interval_us, least_us, predict_us
from tunebench.kernels import variants
from tunebench.measure.cuda import require_cuda_core
from tunebench.measure.processor import with_measured_rates
from tunebench.outcome import CacheState
from tunebench.search.sampler import Prospects
from tunebench.space import Config, Table
from tunebench.variant import Costs, Variant, exceeds_memory, unsuitable
from tunebench.workload import Traffic, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "RunnerName",
    "TunableVariant",
    "TuningTarget",
    "fastest_variant",
    "find_variants",
    "tuning_target",
]

RunnerName = Literal["cpu", "cuda", "offline"]


TIE = 1.001
"""Factor within which predicted times are equal."""

WORTH_A_CHANGE = 1.02
"""Predicted gain from which another configuration than the default is preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTarget:
    """The device to tune on, and the runner that measures there."""

    device: Device
    runner: RunnerName


@dataclass(frozen=True, kw_only=True)
class TunableVariant:
    """One variant that supports a workload on a device.

    Attributes:
        variant: The variant.
        workload: The workload.
        table: Its valid configurations, at least one.
        costs: Work of each configuration.
        bounds: Lower bound of each configuration.
        traffic: Compulsory memory traffic of the workload.
        cache: Cache state of bounds and predictions.
        gap_bounds: Lower bounds that gaps are computed with (`Device.with_meaningful_rates`): `bounds`, or
            those at the measured rates of a processor; None if the rates of the device are assumed only.
        device: The device.
    """

    variant: Variant[Any]
    workload: Workload
    table: Table
    costs: Costs
    bounds: Bounds
    device: Device
    traffic: Traffic
    cache: CacheState = "cold"
    gap_bounds: Bounds | None = None

    def prospects(self) -> Prospects:
        """Return the configurations with bounds and costs, as the samplers take them."""
        # Times on a processor are predicted by floors, which rank badly.
        predicted_us = self._predicted if self.device.kind == "gpu" else None
        return Prospects(
            table=self.table,
            bounds_us=self.bounds.us,
            figures=self.costs.figures(len(self.table)),
            predicted_us=predicted_us,
        )

    @functools.cached_property
    def _predicted(self) -> NDArray[np.float64]:
        return predict_us(self.bounds, self.costs, self.device, self.traffic, cache=self.cache)

    @functools.cached_property
    def _interval(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return interval_us(self._predicted, self.bounds)

    @functools.cached_property
    def _default_row(self) -> int | None:
        """Row of the default; None if it has none."""
        try:
            return self.table.row(self.variant.default(self.workload, self.device))
        except VariantError:
            return None

    def fastest(self) -> int:
        """Return the row with the lowest predicted time, unless the default is nearly as good.

        Of equal ones (`TIE`), it is the row that differs from the default in the fewest parameters.
        """
        least_us = self._predicted.min()
        if self._default_row is None:
            return int(self._predicted.argmin())
        if self._predicted[self._default_row] <= WORTH_A_CHANGE * least_us:
            return self._default_row
        tied = np.flatnonzero(self._predicted <= TIE * least_us)
        differing = self.table.ordinals[tied] != self.table.ordinals[self._default_row]
        return int(tied[np.lexsort((self._predicted[tied], differing.sum(axis=1)))[0]])

    def predicted_us(self, row: int) -> float:
        """Return the predicted time of a row, in microseconds."""
        return float(self._predicted[row])

    def least_us(self, rows: NDArray[np.bool_]) -> float:
        """Return the lowest predicted time of a mask of rows, in microseconds; infinite if it is empty."""
        return float(self._predicted.min(where=rows, initial=float("inf")))

    def interval_us(self, row: int) -> tuple[float, float]:
        """Return the 90 % prediction interval of a row, in microseconds."""
        low, high = self._interval
        return float(low[row]), float(high[row])


def tuning_target(device: Device | str | None, *, offline: bool = False) -> TuningTarget:
    """Return the device to tune on, with its runner.

    Args:
        device: A device, its name, or None for the first GPU of this machine, else its CPU.
        offline: Whether to predict even if the device is present.

    Raises:
        UnknownName: if there is no such device.
        InputError: if it is a CPU other than this machine's.
        NoCompiler: if it is a GPU of this machine, and NVRTC is not installed.
        MissingDependency: if it is a GPU of this machine, and cuda.core is not installed.
    """
    chosen = device if isinstance(device, Device) else devices.find(device)
    if chosen.kind == "cpu":
        if chosen.key != devices.local_cpu().key or offline:
            raise InputError(
                f"{chosen.name}: of CPUs, only that of this machine can be tuned; use --device cpu"
            )
        return TuningTarget(device=with_measured_rates(chosen), runner="cpu")
    if offline or chosen.key not in {gpu.key for gpu in devices.local_gpus()}:
        return TuningTarget(device=chosen, runner="offline")
    reason = unavailable("cuda")
    if reason is not None:
        raise NoCompiler(f"this machine has a GPU ({chosen.name}), but {reason}")
    require_cuda_core()
    return TuningTarget(device=chosen, runner="cuda")


def find_variants(
    workload: Workload,
    device: Device,
    names: Sequence[str] = (),
    *,
    cache: CacheState = "cold",
    compilable: bool = True,
) -> tuple[list[TunableVariant], dict[str, str]]:
    """Return the variants that support `workload` on `device`, and why the others do not.

    Args:
        workload: The workload.
        device: The device.
        names: Names or keys of the variants to consider; empty considers all of the operator.
        cache: Cache state of the bounds.
        compilable: Whether to skip variants whose compiler is not installed here.

    Returns:
        The variants, and the reason for each skipped one by its key.

    Raises:
        UnknownName: if a name is of no variant of the operator.
        InputError: if no variant supports the workload, with the reason for each.
        NoCompiler: if those that do cannot be compiled here.
    """
    with limited(f"{workload.operator}: its tensors"):
        reason = unsuitable(workload, device) or exceeds_memory(workload, device)
    if reason is not None:
        raise InputError(reason)
    by_key = {variant.key: variant for variant in variants(workload)}
    for name in names:
        if name not in by_key and f"{workload.operator}/{name}" not in by_key:
            raise UnknownName(f"variant of {workload.operator}", name, (v.name for v in by_key.values()))
    chosen = [v for v in by_key.values() if not names or v.name in names or v.key in names]
    tunables: list[TunableVariant] = []
    skipped: dict[str, str] = {}
    failure: type[InputError] = InputError
    for variant in chosen:
        try:
            reason = variant.refuses(workload, device)
            if reason is None and compilable:
                reason = unavailable(variant.language)
                failure = failure if reason is None else NoCompiler
            if reason is None:
                tunable = _tunable(variant, workload, device, cache)
                if tunable is not None:
                    variant.revision(workload, _default(tunable, workload))  # fails now or never
                    tunables.append(tunable)
                    continue
                reason = f"{variant.key} has no valid configuration for this workload"
        except (VariantError, ConfigError) as error:  # other variants are still tried
            reason = str(error)
        skipped[variant.key] = reason
    if not tunables:
        reasons = "; ".join(dict.fromkeys(skipped.values())) or f"{workload.operator} has no variants"
        raise failure(f"no variant can do {workload} on {device.name}: {reasons}")
    return tunables, skipped


def _default(tunable: TunableVariant, workload: Workload) -> Config:
    """Return the default of a variant.

    Raises:
        VariantError: if it is not a valid configuration for the workload.
    """
    variant = tunable.variant
    config = variant.default(workload, tunable.device)
    if tunable.table.row(config) is None:
        raise VariantError(
            f"{variant.key}: default must return a valid configuration of its space, got {config}, which is "
            f"none for {workload} on {tunable.device.name}"
        )
    return config


def fastest_variant(
    workload: Workload, device: Device, *, cache: CacheState = "cold"
) -> TunableVariant | None:
    """Return the variant with the lowest predicted time, the first of equal ones; None if there is none.

    The search ends at the first variant that takes no longer than the memory traffic, since none can be
    faster. Compilers need not be installed.

    Args:
        workload: The workload.
        device: The device.
        cache: Cache state of the predictions.
    """
    best: TunableVariant | None = None
    best_us, least = math.inf, least_us(workload.traffic(), device, cache)
    for variant in variants(workload):
        if best_us <= least:
            break
        try:
            refused = variant.refuses(workload, device) is not None
            tunable = None if refused else _tunable(variant, workload, device, cache)
        except VariantError:  # `find_variants` gives the reason
            continue
        if tunable is not None and tunable.predicted_us(tunable.fastest()) < best_us:
            best, best_us = tunable, tunable.predicted_us(tunable.fastest())
    return best


def _tunable(
    variant: Variant[Any], workload: Workload, device: Device, cache: CacheState
) -> TunableVariant | None:
    table = variant.configs(workload, device)
    if not len(table):
        return None
    costs = variant.costs(workload, table, device)
    with limited(f"{workload.operator}: traffic"):
        traffic = workload.traffic()
    bounds = bound(costs, traffic, device, cache=cache, rows=len(table))
    on = device.with_meaningful_rates()
    gap_bounds = bounds if on is device else None
    if on is not None and on is not device:
        gap_bounds = bound(costs, traffic, on, cache=cache, rows=len(table))
    return TunableVariant(
        variant=variant,
        workload=workload,
        table=table,
        costs=costs,
        bounds=bounds,
        device=device,
        traffic=traffic,
        cache=cache,
        gap_bounds=gap_bounds,
    )
