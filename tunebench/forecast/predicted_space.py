"""The configurations of a variant for a workload with predicted times, and the one to use unmeasured."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench._user_code import limited
from tunebench.bound import Bounds, bound
from tunebench.device import Device
from tunebench.errors import VariantError
from tunebench.forecast.execution import interval_us, least_us, predict_us
from tunebench.kernels import variants
from tunebench.outcome import CacheState
from tunebench.space import Table
from tunebench.variant import Costs, Variant
from tunebench.workload import Traffic, Workload

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TIE", "WORTH_A_CHANGE", "PredictedSpace", "best_space", "fastest_variant", "predicted_space"]

TIE = 1.001
"""Factor within which predicted times are equal."""

WORTH_A_CHANGE = 1.02
"""Predicted gain from which another configuration than the default is preferred."""


@dataclass(frozen=True, kw_only=True)
class PredictedSpace:
    """The configurations of one variant that supports a workload on a device.

    Attributes:
        variant: The variant.
        workload: The workload.
        table: Its valid configurations, at least one.
        costs: Work of each configuration.
        bounds: Lower bound of each configuration.
        traffic: Compulsory memory traffic of the workload.
        cache: Cache state of bounds and predictions.
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

    @functools.cached_property
    def times_us(self) -> NDArray[np.float64]:
        """Predicted time of each row, in microseconds."""
        return predict_us(self.bounds, self.costs, self.device, self.traffic, cache=self.cache)

    @functools.cached_property
    def _interval(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return interval_us(self.times_us, self.bounds)

    @functools.cached_property
    def default_row(self) -> int | None:
        """Row of the default; None if it has none."""
        try:
            return self.table.row(self.variant.default(self.workload, self.device))
        except VariantError:
            return None

    def fastest(self) -> int:
        """Return the row with the lowest predicted time, unless the default is nearly as good.

        Of equal ones (`TIE`), it is the row that differs from the default in the fewest parameters.
        """
        least = self.times_us.min()
        if self.default_row is None:
            return int(self.times_us.argmin())
        if self.times_us[self.default_row] <= WORTH_A_CHANGE * least:
            return self.default_row
        tied = np.flatnonzero(self.times_us <= TIE * least)
        differing = self.table.ordinals[tied] != self.table.ordinals[self.default_row]
        return int(tied[np.lexsort((self.times_us[tied], differing.sum(axis=1)))[0]])

    def unmeasured(self) -> int:
        """Return the row to use as long as nothing was measured.

        On a processor it is the default: times there are predicted by floors, which rank badly.
        """
        if self.device.kind == "gpu" or self.default_row is None:
            return self.fastest()
        return self.default_row

    def predicted_us(self, row: int) -> float:
        """Return the predicted time of a row, in microseconds."""
        return float(self.times_us[row])

    def least_us(self, rows: NDArray[np.bool_]) -> float:
        """Return the lowest predicted time of a mask of rows, in microseconds; infinite if it is empty."""
        return float(self.times_us.min(where=rows, initial=float("inf")))

    def interval_us(self, row: int) -> tuple[float, float] | None:
        """Return the 90 % prediction interval of a row, in microseconds; None on a processor.

        Intervals follow from errors on GPUs.
        """
        if self.device.kind != "gpu":
            return None
        low, high = self._interval
        return float(low[row]), float(high[row])


def predicted_space(
    variant: Variant[Any], workload: Workload, device: Device, cache: CacheState = "cold"
) -> PredictedSpace | None:
    """Return the configurations of a variant with their predicted times; None if there is none.

    Args:
        variant: A variant that supports the workload on the device.
        workload: The workload.
        device: The device.
        cache: Cache state of bounds and predictions.

    Raises:
        VariantError: if the variant fails.
    """
    table = variant.configs(workload, device)
    if not len(table):
        return None
    costs = variant.costs(workload, table, device)
    with limited(f"{workload.operator}: traffic"):
        traffic = workload.traffic()
    return PredictedSpace(
        variant=variant,
        workload=workload,
        table=table,
        costs=costs,
        bounds=bound(costs, traffic, device, cache=cache, rows=len(table)),
        device=device,
        traffic=traffic,
        cache=cache,
    )


def best_space(spaces: Iterable[PredictedSpace]) -> PredictedSpace:
    """Return the space whose row to use unmeasured has the lowest predicted time, the first of equal ones.

    Args:
        spaces: Spaces of variants of one workload and device, at least one. Those that cannot be predicted
            are used only if there is no other.
    """
    return min(
        spaces,
        key=lambda space: (not space.variant.is_predictable, space.predicted_us(space.unmeasured())),
    )


def fastest_variant(
    workload: Workload, device: Device, *, cache: CacheState = "cold"
) -> PredictedSpace | None:
    """Return the space of the variant with the lowest predicted time, the first of equal ones; None if none.

    The search ends at the first variant that takes no longer than the memory traffic, since none can be
    faster. Compilers need not be installed.

    Args:
        workload: The workload.
        device: The device.
        cache: Cache state of the predictions.
    """
    best: PredictedSpace | None = None
    best_us, least = math.inf, least_us(workload.traffic(), device, cache)
    for variant in variants(workload):
        if best_us <= least:
            break
        if not variant.is_predictable:
            continue
        try:
            refused = variant.refuses(workload, device) is not None
            space = None if refused else predicted_space(variant, workload, device, cache)
        except VariantError:  # `tunebench.tuning.tunable.find_variants` gives the reason
            continue
        if space is not None and space.predicted_us(space.fastest()) < best_us:
            best, best_us = space, space.predicted_us(space.fastest())
    return best
