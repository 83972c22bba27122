"""`explain`: one configuration of one problem on one device, taken apart."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench import device as devices
from tunebench._lazy import np
from tunebench.answer import How
from tunebench.bound import Bound, bound
from tunebench.db.location import locate
from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.explanation.advice import Advice, Forecaster, advise
from tunebench.explanation.alignment import Alignment, alignments
from tunebench.explanation.fusing import FusionGain, fusing
from tunebench.explanation.grid import BlockResources, Waves, blocks_and_waves
from tunebench.explanation.limit import Limit, limit
from tunebench.explanation.roofline import Roofline, roofline
from tunebench.forecast import predict_us
from tunebench.kernels import variants
from tunebench.outcome import CacheState, Measured
from tunebench.space import Table
from tunebench.tuning.choice import Choice, choose
from tunebench.variant import Costs, Tiling
from tunebench.workload import Category, Workload
from tunebench.workloads import parse

__all__ = ["Explanation", "MeasuredTime", "Shares", "explain", "explain_choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTime:
    """A time that was measured.

    Attributes:
        median_us: Median of the samples.
        how: Whether on this device or another of its architecture.
        cache: Cache state it was timed in.
    """

    median_us: float
    how: How
    cache: CacheState


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What a time reaches of the most that is possible.

    Attributes:
        gflop_s: 1e9 FLOPs of the textbook algorithm a second.
        of_bound: The bound over the time: never above 1.
        of_roofline: The roofline's time over the time: above 1 where a cache spares memory some bytes, or the
            algorithm some of the textbook's operations.
    """

    gflop_s: float
    of_bound: float
    of_roofline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a configuration takes the time it takes.

    Attributes:
        choice: The configuration, and why it is this one.
        roofline: The problem against the device's ceilings.
        bound: A time that nothing beats, with the floor of each resource.
        predicted_us: Its expected time: a belief.
        measured: Its measured time, where one is known.
        limit: What it waits for.
        tiles: How it cuts the problem; none if its variant does not say.
        block: What a block takes and what an SM holds of such; None if it is not launched in blocks.
        waves: How its blocks fill the SMs; None likewise.
        alignments: How the lines of tensors are aligned.
        advice: What would take less, greatest gain first.
        fusing: What its parts would take; None if nothing is fused.
        refused: Why other variants cannot do the problem on the device, by key.
    """

    choice: Choice
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
        """What kind of operation it is; None if its operator does not say."""
        return self.choice.workload.category

    @property
    def tiles_used(self) -> float:
        """The share of the tiles that lies inside the problem: tile quantization takes the rest."""
        return math.prod(tiling.used for tiling in self.tiles)

    def shares(self, us: float) -> Shares:
        """Return what of the most that is possible a time of this configuration reaches."""
        gflop_s = self.roofline.flops / (us * 1e3)
        return Shares(gflop_s=gflop_s, of_bound=self.bound.us / us, of_roofline=self.roofline.us / us)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data, with what its properties tell."""
        times = {"predicted": self.predicted_us}
        if self.measured is not None and self.measured.how == "measured here":
            times["measured"] = self.measured.median_us
        return {
            "workload": str(self.choice.workload),
            "device": self.choice.device.key,
            "variant": self.choice.variant.key,
            "config": dict(self.choice.config),
            "why": self.choice.why,
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
    """Return a dataclass as plain data, with some of its properties."""
    return {**dataclasses.asdict(value), **{name: getattr(value, name) for name in properties}}


def explain(
    workload: Workload | str,
    device: Device | str | None = None,
    *,
    variant: str | None = None,
    config: str | None = None,
    db: str | Path | None = None,
) -> Explanation:
    """Explain a configuration: the one asked for, else the best known one, else the default.

    Nothing is compiled, and the device need not be here.

    Args:
        workload: The problem, or its text.
        device: Where it is to run: a device or its name (see `tunebench.device.find`).
        variant: Name or key of the only variant to consider.
        config: The configuration, as text; needs a variant, unless only one can do the problem.
        db: Where the best known one, and measured times, are looked for; None is the user's database.

    Raises:
        InputError: if the problem or the device cannot be used, no variant can do it, or several can and a
            configuration is given.
        ConfigError: if the configuration is no valid point of the variant's space, today.
        DatabaseError: if the database cannot be read.
    """
    problem = parse(workload) if isinstance(workload, str) else workload
    target = device if isinstance(device, Device) else devices.find(device)
    choice = choose(problem, target, variant=variant, config=config, db=db, compilable=False)
    return explain_choice(choice, _measured(choice, db))


def _measured(choice: Choice, db: str | Path | None) -> MeasuredTime | None:
    """Return the measured time of a choice, where there is one."""
    if choice.why == "best known" and choice.cache is not None:
        return MeasuredTime(median_us=choice.expected_us, how=choice.how, cache=choice.cache)
    location = locate(db)
    if location.path is not None and not (location.path.exists() and location.path.stat().st_size):
        return None
    place = (choice.device.key, str(choice.workload), choice.variant.key)
    revision = choice.variant.revision(choice.workload, choice.config)
    with open_store(db, read_only=True) as store:
        for known in store.known(*place, cache="cold"):
            same = (known.config, known.revision) == (choice.config, revision)
            if same and isinstance(known.outcome, Measured):
                outcome = known.outcome
                return MeasuredTime(median_us=outcome.median_us, how="measured here", cache=outcome.cache)
    return None


def explain_choice(choice: Choice, measured: MeasuredTime | None = None) -> Explanation:
    """Explain a configuration that was chosen already.

    Args:
        choice: The configuration.
        measured: Its time, where it was measured; bound and prediction are for the same cache state.
    """
    workload, device, variant = choice.workload, choice.device, choice.variant
    cache: CacheState = measured.cache if measured is not None else "cold"
    table = Table(variant.space, np.array([variant.space.ordinals(choice.config)], dtype=np.int16))
    costs = variant.costs(workload, table, device)
    bounds = bound(costs, workload.traffic(), device, cache=cache, rows=1)
    predicted_us = float(predict_us(bounds, costs, device)[0])
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
        fusing=fusing(workload, forecaster),
        refused=_refused(workload, device),
    )


def _launches(costs: Costs, device: Device) -> int:
    return int(np.max(costs.serial_launches)) if device.kind == "gpu" else 0


def _refused(workload: Workload, device: Device) -> dict[str, str]:
    """Return why variants that are for this kind of device cannot do a problem there."""
    reasons = {variant: variant.refuses(workload, device) for variant in variants(workload)}
    return {
        variant.key: reason
        for variant, reason in reasons.items()
        if reason is not None and (variant.language == "numba-cpu") == (device.kind == "cpu")
    }
