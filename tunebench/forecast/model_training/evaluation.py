"""Errors of predictions for devices without measurements: each device is left out in turn.

Boards with the same chip, such as B200 and GB200, are left out together.

The model is compared with three simpler ones: the roofline of the datasheet, that roofline divided by the
median utilisation of the other devices, and boosted trees over plain sizes and datasheet figures, without
roofline features.

Errors are relative to the measured times. Where these include the host, the median host time of the other
devices is added to the predictions of all models: nothing is known about the device left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tunebench.forecast.library.model import Skill
from tunebench.forecast.library.roofline_model import roofline_times
from tunebench.forecast.model_training import fit
from tunebench.forecast.model_training.data import MeasuredKernels
from tunebench.forecast.model_training.fit import TrainedExpert

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
        hidden: Number of rows of kernels that the host hides: they end before it is ready.
        percent: Mean absolute percentage error of the measured times, which may include the host.
        kernel_percent: Mean absolute percentage error of the times without the host, of rows not hidden.
        bias_percent: Median error; positive if predictions are too long.
        within_percent: Share of the times without the host inside the 90 % interval, of rows not hidden. The
            width comes from the other devices only.
        below_bound: Number of predictions below the roofline time without the launch.
        others_percent: Mean absolute percentage error of the simpler models, by name.
    """

    skill: Skill
    group: str
    device: str
    rows: int
    hidden: int
    percent: float
    kernel_percent: float
    bias_percent: float
    within_percent: float
    below_bound: int
    others_percent: Mapping[str, float]


def evaluate_holdouts(experts: Mapping[Skill, list[TrainedExpert]]) -> Iterator[HoldoutError]:
    """Leave each chip out in turn and yield the errors on its devices; skip kinds measured on one chip."""
    for skill, of_skill in experts.items():
        for trained in of_skill:
            chip = fit.chip(trained.table.device)
            rest = [candidate for candidate in of_skill if fit.chip(candidate.table.device) != chip]
            if rest:
                yield from _errors(skill, trained, rest)


def _errors(skill: Skill, trained: TrainedExpert, rest: list[TrainedExpert]) -> Iterator[HoldoutError]:
    # The interval must not use the device left out: it comes from the other devices, each left out in turn.
    asked = fit.assemble_model({skill: rest})
    table = trained.table
    blend = asked.blend(skill, trained.roofline, table.device, table.arithmetic)
    least = np.maximum(trained.roofline.compute_us, trained.roofline.memory_us)
    predicted = np.maximum(blend.us, least)
    within = (blend.low_us <= table.kernel_us) & (table.kernel_us <= blend.high_us)
    floor_us, lead_us = _host_of_others(table, [expert.table for expert in rest])
    missed = np.maximum(floor_us, lead_us + predicted) / table.us - 1
    alternatives = {
        name: np.maximum(floor_us, lead_us + us) / table.us - 1 for name, us in _others(trained, rest).items()
    }
    for group in np.unique(table.group):
        rows = table.group == group
        visible = rows & table.visible
        yield HoldoutError(
            skill=skill,
            group=str(group),
            device=table.device.name,
            rows=int(rows.sum()),
            hidden=int(rows.sum() - visible.sum()),
            percent=_percent(missed[rows]),
            kernel_percent=_percent(predicted[visible] / table.kernel_us[visible] - 1),
            bias_percent=100 * float(np.median(missed[rows])),
            within_percent=100 * float(np.mean(within[visible])),
            below_bound=int(np.sum(blend.us[rows] < least[rows])),
            others_percent={name: _percent(ratios[rows]) for name, ratios in alternatives.items()},
        )


def _host_of_others(table: MeasuredKernels, tables: Sequence[MeasuredKernels]) -> tuple[Array, Array]:
    """Return floor and lead of each row: the median over other devices of their medians in its group."""
    floor_us, lead_us = np.zeros_like(table.us), np.zeros_like(table.us)
    for group in np.unique(table.group[table.lead_us > 0]):
        same = [(source, source.group == group) for source in tables if group in source.group]
        usable = same or [(source, source.lead_us > 0) for source in tables if source.lead_us.any()]
        if usable:
            rows = table.group == group
            floor_us[rows] = np.median(
                [np.median(source.floor_us[source_rows]) for source, source_rows in usable]
            )
            lead_us[rows] = np.median(
                [np.median(source.lead_us[source_rows]) for source, source_rows in usable]
            )
    return floor_us, lead_us


def _percent(missed: Array) -> float:
    return 100 * float(np.mean(np.abs(missed)))


def _others(trained: TrainedExpert, rest: list[TrainedExpert]) -> dict[str, Array]:
    roofline = _roofline(trained)
    reached = [(_roofline(o) / o.table.kernel_us)[o.table.visible] for o in rest]
    usual = float(np.median(np.concatenate(reached)))
    return {
        "roofline": roofline,
        "roofline / median utilisation": roofline / usual,
        "trees without roofline features": _without_roofline(trained, rest),
    }


def _roofline(trained: TrainedExpert) -> Array:
    """Return the roofline time of the datasheet, which ignores limits by power and by issue slots."""
    table = trained.table
    unlimited = dataclasses.replace(table.device, tdp_w=None, issue_per_clock=1e9)
    roofline = roofline_times(table.family, table.arithmetic, table.figures, unlimited)
    longest: Array = np.maximum(roofline.compute_us, roofline.memory_us)
    return longest


def _without_roofline(trained: TrainedExpert, rest: list[TrainedExpert]) -> Array:
    from sklearn.ensemble import HistGradientBoostingRegressor

    rng = np.random.default_rng(0)
    features, targets = [], []
    for expert in rest:
        rows = rng.permutation(np.flatnonzero(expert.table.visible))[: ROWS_WITHOUT_FEATURES // len(rest)]
        features.append(_plain(expert)[rows])
        targets.append(np.log(expert.table.kernel_us[rows]))
    trees = HistGradientBoostingRegressor(loss="absolute_error", max_iter=200, random_state=0)
    predicted_us: Array = np.exp(
        trees.fit(np.concatenate(features), np.concatenate(targets)).predict(_plain(trained))
    )
    return predicted_us


def _plain(trained: TrainedExpert) -> Array:
    """Return plain sizes with the figures of the datasheet."""
    device = trained.table.device
    rate = device.mma_flop_per_clock.get(trained.table.arithmetic) or 2.0 * device.fma_per_clock
    numbers = (device.sm_count, device.max_clock_mhz, device.dram_gb_s, device.l2_bytes, rate)
    return np.concatenate(
        [trained.table.figures, np.broadcast_to(numbers, (len(trained.table.us), len(numbers)))], axis=1
    )


def coverage(errors: list[HoldoutError]) -> float:
    """Return the share of rows inside their intervals, in per cent, with equal weight for each group."""
    return float(np.mean([error.within_percent for error in errors]))
