"""What may be tried for a problem on a device: the variants that can, with their spaces and bounds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunebench import device as devices
from tunebench.bound import Bounds, bound
from tunebench.compile import unavailable
from tunebench.device import Device
from tunebench.errors import InputError, MissingDependency, UnknownName
from tunebench.forecast import interval_us, predict_us
from tunebench.kernels import variants
from tunebench.measure.cuda import require_cuda_core
from tunebench.outcome import CacheState
from tunebench.search.sampler import Prospects
from tunebench.space import Table
from tunebench.variant import Costs, Variant
from tunebench.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Candidate", "RunnerName", "Target", "find", "target"]

RunnerName = Literal["cpu", "cuda", "offline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to tune, and what runs the configurations there."""

    device: Device
    runner: RunnerName


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One variant that can do a problem on a device.

    Attributes:
        variant: The variant.
        table: Its valid configurations, at least one.
        costs: What each must execute.
        bounds: What each takes at least.
        device: The device.
    """

    variant: Variant[Any]
    table: Table
    costs: Costs
    bounds: Bounds
    device: Device

    def prospects(self) -> Prospects:
        """Return what the search knows of the configurations before any is measured."""
        figures = self.costs.figures(len(self.table))
        return Prospects(table=self.table, bounds_us=self.bounds.us, figures=figures)

    @functools.cached_property
    def _predicted(self) -> NDArray[np.float64]:
        return predict_us(self.bounds, self.costs, self.device)

    @functools.cached_property
    def _interval(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return interval_us(self._predicted, self.bounds)

    def fastest(self) -> int:
        """Return the row that is predicted to take least."""
        return int(self._predicted.argmin())

    def predicted_us(self, row: int) -> float:
        """Return the expected time of one configuration: a belief, for devices that are not here."""
        return float(self._predicted[row])

    def least_us(self, rows: NDArray[np.bool_]) -> float:
        """Return the least that any of some rows is predicted to take; infinite if there is none."""
        return float(self._predicted.min(where=rows, initial=float("inf")))

    def interval_us(self, row: int) -> tuple[float, float]:
        """Return what nine of ten times of one configuration lie between, by the same belief."""
        low, high = self._interval
        return float(low[row]), float(high[row])


def target(device: Device | str | None, *, offline: bool = False) -> Target:
    """Decide where to tune.

    Args:
        device: A device, its name, or None: the first GPU of this machine, or its CPU.
        offline: Whether not to run on the device even if it is here.

    Raises:
        UnknownName: if there is no such device.
        InputError: if it is a CPU other than this machine's.
        MissingDependency: if it is a GPU of this machine and what drives it is not installed.
    """
    found = device if isinstance(device, Device) else devices.find(device)
    if found.kind == "cpu":
        if found.key != devices.local_cpu().key or offline:
            raise InputError(f"{found.name}: only this machine's own CPU can be tuned for; --device cpu")
        return Target(device=found, runner="cpu")
    if offline or found.key not in {gpu.key for gpu in devices.local_gpus()}:
        return Target(device=found, runner="offline")
    reason = unavailable("cuda")
    if reason is not None:
        raise MissingDependency(f"a GPU is here ({found.name}), but {reason}", "cuda")
    require_cuda_core()
    return Target(device=found, runner="cuda")


def find(
    workload: Workload,
    device: Device,
    names: Sequence[str] = (),
    *,
    cache: CacheState = "cold",
    compilable: bool = True,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the variants that can do `workload` on `device`, and why the others cannot.

    Args:
        workload: The problem.
        device: Where.
        names: Names or keys of the only variants to consider; all of the operator's if empty.
        cache: Cache state the bounds are for.
        compilable: Whether a variant that cannot be compiled here, for want of a compiler, is left out.

    Raises:
        UnknownName: if a name is of no variant of the operator.
        InputError: if no variant can, saying why for each.
    """
    known = {variant.key: variant for variant in variants(workload)}
    for name in names:
        if name not in known and f"{workload.operator}/{name}" not in known:
            raise UnknownName(f"variant of {workload.operator}", name, (v.name for v in known.values()))
    chosen = [v for v in known.values() if not names or v.name in names or v.key in names]
    found: list[Candidate] = []
    skipped: dict[str, str] = {}
    for variant in chosen:
        reason = variant.refuses(workload, device)
        if reason is None and compilable:
            reason = unavailable(variant.language)
        if reason is None:
            candidate = _candidate(variant, workload, device, cache)
            if candidate is not None:
                found.append(candidate)
                continue
            reason = f"{variant.key} has no valid configuration for this problem"
        skipped[variant.key] = reason
    if not found:
        reasons = "; ".join(skipped.values()) or f"{workload.operator} has no variants"
        raise InputError(f"no variant can do {workload} on {device.name}: {reasons}")
    return found, skipped


def _candidate(
    variant: Variant[Any], workload: Workload, device: Device, cache: CacheState
) -> Candidate | None:
    table = variant.configs(workload, device)
    if not len(table):
        return None
    costs = variant.costs(workload, table, device)
    bounds = bound(costs, workload.traffic(), device, cache=cache, rows=len(table))
    return Candidate(variant=variant, table=table, costs=costs, bounds=bounds, device=device)
