"""Explanation of one configuration of one workload on one device: `explain`."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench import device as devices
from tunebench._lazy import np
from tunebench.answer import HERE, How
from tunebench.bound import Bound, bound
from tunebench.db.location import locate
from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.explanation.advice import Advice, Forecaster, advise
from tunebench.explanation.alignment import Alignment, alignments
from tunebench.explanation.fusion import FusionGain, fusion_gain
from tunebench.explanation.grid import BlockResources, Waves, blocks_and_waves
from tunebench.explanation.limit import Limit, limit
from tunebench.explanation.roofline import Roofline, roofline
from tunebench.forecast import predict_us
from tunebench.kernels import variants
from tunebench.outcome import CacheState, Measured
from tunebench.space import Table
from tunebench.tuning.choice import ChosenConfig, choose_config
from tunebench.variant import Costs, Tiling
from tunebench.workload import Category, Workload
from tunebench.workloads import parse

__all__ = ["Explanation", "MeasuredTime", "Shares", "explain", "explain_choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """A measured time from the database.

    Attributes:
        median_us: Median of the samples, in microseconds.
        how: Whether it was measured on this device or on another one of the same architecture.
        cache: Cache state of the measurement.
    """

    median_us: float
    how: How
    cache: CacheState


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """A time relative to the lower bound and the roofline.

    Attributes:
        gflop_s: Rate in 1e9 FLOPs of the textbook algorithm per second.
        of_bound: Lower bound divided by the time; at most 1.
        of_roofline: Roofline time divided by the time; above 1 if a cache serves part of the bytes, or if the
            algorithm needs fewer operations than the textbook's.
    """

    gflop_s: float
    of_bound: float
    of_roofline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of the time of a configuration.

    Attributes:
        choice: The configuration, and why it was chosen.
        roofline: Arithmetic intensity of the workload and ceilings of the device.
        bound: Lower bound of the time, by resource.
        predicted_us: Predicted time in microseconds.
        measured: Measured time; None if there is none.
        limit: Limiting resource.
        tiles: Division of the workload into tiles; empty if the variant does not state it.
        block: Resources of a block and occupancy; None without thread blocks.
        waves: Waves of blocks on the SMs; None without thread blocks.
        alignments: Alignment of the rows of each tensor.
        advice: Changes that are predicted to save time, largest gain first.
        fusing: Predicted gain over unfused kernels; None if nothing is fused.
        refused: Reason why each other variant does not support the workload on the device, by variant key.
    """

    choice: ChosenConfig
    roofline: Roofline
    bound: Bound
    predicted_us: float
    measured: MeasuredTime | None
    limit: Limit
    tiles: tuple[Tiling, ...]
    block: BlockResources | None
    waves: Waves | None
    alignments: tuple[Alignment, ...]
    advice: tuple[Advice, ...]
    fusing: FusionGain | None
    refused: dict[str, str]

    @property
    def category(self) -> Category | None:
        """Kind of operation; None if the operator does not state it."""
        return self.choice.workload.category

    @property
    def tiles_used(self) -> float:
        """Share of the tiles' work that is useful; the rest is lost to tile quantization."""
        return math.prod(tiling.used for tiling in self.tiles)

    def shares(self, us: float) -> Shares:
        """Return a time of this configuration relative to the lower bound and the roofline."""
        gflop_s = self.roofline.flops / (us * 1e3)
        return Shares(gflop_s=gflop_s, of_bound=self.bound.us / us, of_roofline=self.roofline.us / us)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dictionary, including derived figures."""
        times = {"predicted": self.predicted_us}
        if self.measured is not None and self.measured.how in HERE:
            times["measured"] = self.measured.median_us
        return {
            "workload": str(self.choice.workload),
            "device": self.choice.device.key,
            "variant": self.choice.variant.key,
            "config": dict(self.choice.config),
            "why": self.choice.why,
            "because": self.choice.because,
            "category": self.category,
            "roofline": _with(self.roofline, "intensity", "limit", "factor", "us", "attainable_gflop_s"),
            "bound": dataclasses.asdict(self.bound),
            "predicted_us": self.predicted_us,
            "measured": _with(self.measured) if self.measured is not None else None,
            "shares": {name: _with(self.shares(us)) for name, us in times.items()},
            "limit": _with(self.limit),
            "tiles": [_with(tiling, "count", "used") for tiling in self.tiles],
            "tiles_used": self.tiles_used,
            "block": self.block.to_json() if self.block is not None else None,
            "waves": self.waves and _with(self.waves, "count", "last_blocks", "idle_sms", "used"),
            "alignments": [_with(alignment, "wanted", "full") for alignment in self.alignments],
            "advice": [advice.to_json() for advice in self.advice],
            "fusing": self.fusing.to_json() if self.fusing is not None else None,
            "refused": self.refused,
        }


def _with(value: Any, *properties: str) -> dict[str, Any]:
    """Return the fields of a dataclass and some of its properties."""
    return {**dataclasses.asdict(value), **{name: getattr(value, name) for name in properties}}


def explain(
    workload: Workload | str,
    device: Device | str | None = None,
    *,
    variant: str | None = None,
    config: str | None = None,
    db: str | Path | None = None,
) -> Explanation:
    """Explain a configuration: the given one, or else the best known one, or else the default.

    Nothing is compiled, and the device does not have to be present.

    Args:
        workload: The workload or its text.
        device: The device or its name (see `tunebench.device.find`); None for this machine's.
        variant: Name or key of the variant; None for any.
        config: The configuration as text; needs `variant` unless only one variant supports the workload.
        db: Database of known configurations and measured times; None for the user's database.

    Raises:
        InputError: if the workload or the device is invalid, no variant supports it, or several do and
            `config` is given without `variant`.
        ConfigError: if the configuration is not a valid point of the variant's search space.
        DatabaseError: if the database cannot be read.
    """
    problem = parse(workload) if isinstance(workload, str) else workload
    target = device if isinstance(device, Device) else devices.find(device)
    choice = choose_config(problem, target, variant=variant, config=config, db=db, compilable=False)
    return explain_choice(choice, _measured(choice, db))


def _measured(choice: ChosenConfig, db: str | Path | None) -> MeasuredTime | None:
    """Return the measured time of a configuration, if there is one."""
    if choice.why == "best known" and choice.cache is not None:
        return MeasuredTime(median_us=choice.expected_us, how=choice.how, cache=choice.cache)
    location = locate(db)
    if location.path is not None and not (location.path.exists() and location.path.stat().st_size):
        return None
    space = (choice.device.key, str(choice.workload), choice.variant.key)
    revision = choice.variant.revision(choice.workload, choice.config)
    with open_store(db, read_only=True) as store:
        for trial in store.trial_outcomes(*space, cache="cold"):
            same = (trial.config, trial.revision) == (choice.config, revision)
            if same and isinstance(trial.outcome, Measured):
                outcome = trial.outcome
                return MeasuredTime(median_us=outcome.median_us, how="measured here", cache=outcome.cache)
    return None


def explain_choice(choice: ChosenConfig, measured: MeasuredTime | None = None) -> Explanation:
    """Explain a configuration that has been chosen already.

    Args:
        choice: The configuration.
        measured: Its measured time. Lower bound and prediction are for the same cache state.
    """
    workload, device, variant = choice.workload, choice.device, choice.variant
    cache: CacheState = measured.cache if measured is not None else "cold"
    table = Table(variant.space, np.array([variant.space.ordinals(choice.config)], dtype=np.int16))
    costs = variant.costs(workload, table, device)
    traffic = workload.traffic()
    bounds = bound(costs, traffic, device, cache=cache, rows=1)
    predicted_us = float(predict_us(bounds, costs, device, traffic, cache=cache)[0])
    block, waves = blocks_and_waves(variant, workload, choice.config, costs, device)
    forecaster = Forecaster(device=device, cache=cache)
    return Explanation(
        choice=choice,
        roofline=roofline(workload, costs, device),
        bound=bounds.row(0),
        predicted_us=predicted_us,
        measured=measured,
        limit=limit(bounds.row(0), predicted_us, _launches(costs, device), waves),
        tiles=variant.tiles(workload, choice.config),
        block=block,
        waves=waves,
        alignments=alignments(workload),
        advice=advise(workload, forecaster, predicted_us),
        fusing=fusion_gain(workload, forecaster),
        refused=_refused(workload, device),
    )


def _launches(costs: Costs, device: Device) -> int:
    return int(np.max(costs.serial_launches)) if device.kind == "gpu" else 0


def _refused(workload: Workload, device: Device) -> dict[str, str]:
    """Return why variants for this kind of device do not support a workload there."""
    reasons = {variant: variant.refuses(workload, device) for variant in variants(workload)}
    return {
        variant.key: reason
        for variant, reason in reasons.items()
        if reason is not None and variant.device_kind == device.kind
    }
