"""How wrong predictions are on devices that nobody measured: each device is left out in turn.

Beside the model stands what it should beat: the roofline of the specification, the same divided by the median
utilisation of the devices left, and boosted trees over the plain sizes and the specification's numbers,
without laws.
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

ROWS_WITHOUT_LAWS = 20000
"""Rows that the trees without laws learn from at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldoutError:
    """How wrong predictions of one group of rows are, on one device that nothing was learned from.

    Attributes:
        skill: Of the kernels.
        group: Of the rows, as `MeasuredKernels` has them.
        device: The device left out.
        rows: How many there are.
        percent: Mean absolute percentage error.
        bias_percent: Median error: above 0 where predictions are too long.
        within_percent: Share of rows within the interval, whose width comes from the other devices alone.
        below_bound: Predictions below the law without the launch.
        others_percent: Mean absolute percentage error of what it should beat, by name.
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
    """Leave each device out in turn, and yield the errors on it; a skill known of one device has none."""
    for skill, of_skill in kept.items():
        for one in of_skill:
            rest = [other for other in of_skill if other is not one]
            if rest:
                yield from _errors(skill, one, rest)


def _errors(skill: Skill, one: TrainedExpert, rest: list[TrainedExpert]) -> Iterator[HoldoutError]:
    # The interval must know nothing of the device left out: it is of the others, each left out of the others.
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
        "trees without laws": _without_laws(one, rest),
    }


def _roofline(of: TrainedExpert) -> Array:
    """Return the roofline of the specification, which knows nothing of power."""
    table = of.table
    share = flop_per_us(table.device, table.arithmetic) / peak_flop_per_us(table.device, table.arithmetic)
    longest: Array = np.maximum(of.roofline.compute_us * share, of.roofline.memory_us)
    return longest


def _without_laws(one: TrainedExpert, rest: list[TrainedExpert]) -> Array:
    from sklearn.ensemble import HistGradientBoostingRegressor

    rng = np.random.default_rng(0)
    features, targets = [], []
    for other in rest:
        count = min(len(other.table.us), ROWS_WITHOUT_LAWS // len(rest))
        rows = rng.permutation(len(other.table.us))[:count]
        features.append(_plain(other)[rows])
        targets.append(np.log(other.table.us[rows]))
    trees = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    found: Array = np.exp(trees.fit(np.concatenate(features), np.concatenate(targets)).predict(_plain(one)))
    return found


def _plain(of: TrainedExpert) -> Array:
    """Return sizes as they are, with the specification's numbers."""
    device = of.table.device
    rate = device.mma_flop_per_clock.get(of.table.arithmetic) or 2.0 * device.fma_per_clock
    numbers = (device.sm_count, device.max_clock_mhz, device.dram_gb_s, device.l2_bytes, rate)
    return np.concatenate(
        [of.table.figures, np.broadcast_to(numbers, (len(of.table.us), len(numbers)))], axis=1
    )


def coverage(errors: list[HoldoutError]) -> float:
    """Return the share of all rows within their intervals, in per cent, each group counting alike."""
    return float(np.mean([error.within_percent for error in errors]))
