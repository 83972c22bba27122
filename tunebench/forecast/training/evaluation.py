"""Errors of predictions for devices without measurements: each device is left out in turn.

The model is compared with three simpler ones: the roofline of the datasheet, that roofline divided by the
median utilisation of the other devices, and boosted trees over plain sizes and datasheet figures, without
roofline features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunebench.forecast.library.model import Skill
from tunebench.forecast.library.roofline_model import flop_per_us, peak_flop_per_us
from tunebench.forecast.training import fit
from tunebench.forecast.training.fit import TrainedExpert

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["HoldoutError", "coverage", "evaluate_holdouts"]

ROWS_WITHOUT_FEATURES = 20000
"""Most training rows of the trees without roofline features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutError:
    """Error of predictions for one group of rows, on a device that was left out of the training.

    Attributes:
        skill: Kind of the kernels.
        group: Group of the rows (see `MeasuredKernels`).
        device: The device left out.
        rows: Number of rows.
        percent: Mean absolute percentage error.
        bias_percent: Median error; positive if predictions are too long.
        within_percent: Share of rows inside the 90 % interval, whose width comes from the other devices only.
        below_bound: Number of predictions below the roofline time without the launch.
        others_percent: Mean absolute percentage error of the simpler models, by name.
    """

    skill: Skill
    group: str
    device: str
    rows: int
    percent: float
    bias_percent: float
    within_percent: float
    below_bound: int
    others_percent: Mapping[str, float]


def evaluate_holdouts(kept: Mapping[Skill, list[TrainedExpert]]) -> Iterator[HoldoutError]:
    """Leave each device out in turn and yield the errors on it; skip kinds measured on one device only."""
    for skill, of_skill in kept.items():
        for one in of_skill:
            rest = [other for other in of_skill if other is not one]
            if rest:
                yield from _errors(skill, one, rest)


def _errors(skill: Skill, one: TrainedExpert, rest: list[TrainedExpert]) -> Iterator[HoldoutError]:
    # The interval must not use the device left out: it comes from the other devices, each left out in turn.
    asked = fit.assemble_model({skill: rest})
    table = one.table
    blend = asked.blend(skill, one.roofline, table.device, table.arithmetic)
    least = np.maximum(one.roofline.compute_us, one.roofline.memory_us)
    predicted = np.maximum(blend.us, least)
    within = (blend.low_us <= table.us) & (table.us <= blend.high_us)
    others = _others(one, rest)
    for group in np.unique(table.group):
        rows = table.group == group
        us = table.us[rows]
        missed = predicted[rows] / us - 1
        yield HoldoutError(
            skill=skill,
            group=str(group),
            device=table.device.name,
            rows=int(rows.sum()),
            percent=_percent(missed),
            bias_percent=100 * float(np.median(missed)),
            within_percent=100 * float(np.mean(within[rows])),
            below_bound=int(np.sum(blend.us[rows] < least[rows])),
            others_percent={name: _percent(found[rows] / us - 1) for name, found in others.items()},
        )


def _percent(missed: Array) -> float:
    return 100 * float(np.mean(np.abs(missed)))


def _others(one: TrainedExpert, rest: list[TrainedExpert]) -> dict[str, Array]:
    roofline = _roofline(one)
    reached = [_roofline(o) / o.table.us for o in rest]
    usual = float(np.median(np.concatenate(reached)))
    return {
        "roofline": roofline,
        "roofline / median utilisation": roofline / usual,
        "trees without roofline features": _without_roofline(one, rest),
    }


def _roofline(of: TrainedExpert) -> Array:
    """Return the roofline time of the datasheet, which ignores power limits."""
    table = of.table
    share = flop_per_us(table.device, table.arithmetic) / peak_flop_per_us(table.device, table.arithmetic)
    longest: Array = np.maximum(of.roofline.compute_us * share, of.roofline.memory_us)
    return longest


def _without_roofline(one: TrainedExpert, rest: list[TrainedExpert]) -> Array:
    from sklearn.ensemble import HistGradientBoostingRegressor

    rng = np.random.default_rng(0)
    features, targets = [], []
    for other in rest:
        count = min(len(other.table.us), ROWS_WITHOUT_FEATURES // len(rest))
        rows = rng.permutation(len(other.table.us))[:count]
        features.append(_plain(other)[rows])
        targets.append(np.log(other.table.us[rows]))
    trees = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    found: Array = np.exp(trees.fit(np.concatenate(features), np.concatenate(targets)).predict(_plain(one)))
    return found


def _plain(of: TrainedExpert) -> Array:
    """Return plain sizes with the figures of the datasheet."""
    device = of.table.device
    rate = device.mma_flop_per_clock.get(of.table.arithmetic) or 2.0 * device.fma_per_clock
    numbers = (device.sm_count, device.max_clock_mhz, device.dram_gb_s, device.l2_bytes, rate)
    return np.concatenate(
        [of.table.figures, np.broadcast_to(numbers, (len(of.table.us), len(numbers)))], axis=1
    )


def coverage(errors: list[HoldoutError]) -> float:
    """Return the share of rows inside their intervals, in per cent, with equal weight for each group."""
    return float(np.mean([error.within_percent for error in errors]))
