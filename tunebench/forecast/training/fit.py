"""Experts from tables of measured kernels, and the model they make together."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebench.forecast.library.forest import Forest
from tunebench.forecast.library.model import Expert, ForecastModel, Skill, Spread
from tunebench.forecast.library.roofline_model import RooflineModel, coordinates, roofline_times
from tunebench.forecast.training.data import MeasuredKernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "FEWEST",
    "LEFT_OUT",
    "TrainedExpert",
    "assemble_model",
    "errors",
    "spread",
    "table_roofline",
    "train_expert",
]

FEWEST = 100
"""Rows that a table must have to be learned from."""

ROWS_PER_GROUP = 5000
"""Rows of a group that one expert learns from at most: more do not lower errors on other devices."""

LEFT_OUT = 0.2
"""Share of a group's rows that an expert does not learn from, to know its own errors."""

RARE, MOSTLY = 0.01, 0.5
"""Share of rows below which sizes of models count as not measured, and above which a group is one of them."""

TREES: dict[Skill, tuple[int, int]] = {"elementwise": (40, 8), "norm": (60, 12), "softmax": (60, 12)}
"""Trees of an expert and leaves of a tree, where they are fewer than those of `USUAL`."""
USUAL = (120, 31)

FAR_OF_ONE = 4.0
"""How much larger errors are taken to be on other devices where only one was measured. For those with several
they are 2 to 6 times as large.
"""

MOST_OF_FEW = 1.6
"""Most that errors are stretched for having been seen on few devices: four, by Student's t."""

COVERED = (0.05, 0.95)
"""Quantiles between which nine of ten errors lie."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedExpert:
    """An expert, the table it learned from, and the law of that table.

    Attributes:
        even: Least median error, as a logarithm, on a group of sizes of models, of an expert that learns
            from the other groups alone; None where the table has not both.
    """

    expert: Expert
    table: MeasuredKernels
    roofline: RooflineModel
    even: float | None


def table_roofline(table: MeasuredKernels) -> RooflineModel:
    """Return the law of a table's kernels on their device."""
    return roofline_times(table.family, table.arithmetic, table.figures, table.device)


def train_expert(table: MeasuredKernels) -> TrainedExpert:
    """Learn from one table.

    Each group of rows counts alike, however many rows it has. Which rows are learned from is drawn with a
    seed made from the device and the skill: the same table gives the same expert.
    """
    rng = np.random.default_rng(zlib.crc32(f"{table.device.name} {table.skill}".encode()))
    roofline = table_roofline(table)
    target = np.log(table.us / roofline.us)
    seen, unseen = _divided(table.group, rng)
    weights = _alike(table.group[seen])
    trees, leaves = TREES.get(table.skill, USUAL)
    forest = _fitted(roofline.features[seen], target[seen], weights, trees, leaves)
    near = spread([target[unseen] - forest(roofline.features[unseen])])
    made = Expert(
        device=table.device.name,
        coordinates=coordinates(table.device, table.arithmetic),
        forest=forest,
        near=near,
        least=roofline.features.min(axis=0),
        most=roofline.features.max(axis=0),
    )
    return TrainedExpert(expert=made, table=table, roofline=roofline, even=_of_even_sizes(table, roofline))


def _of_even_sizes(table: MeasuredKernels, roofline: RooflineModel) -> float | None:
    """Return by how much an expert that has learned from other groups errs on those of sizes of models."""
    names = np.unique(table.group)
    of_models = [name for name in names if np.mean(roofline.even[table.group == name]) > MOSTLY]
    if not 0 < len(of_models) < len(names):
        return None
    seen = np.flatnonzero(~np.isin(table.group, of_models))
    seen = seen[_divided(table.group[seen], np.random.default_rng(0))[0]]
    target = np.log(table.us / roofline.us)
    trees, leaves = TREES.get(table.skill, USUAL)
    forest = _fitted(roofline.features[seen], target[seen], _alike(table.group[seen]), trees, leaves)
    missed = target - forest(roofline.features)
    return min((float(np.median(missed[table.group == name])) for name in of_models), key=abs)


def _divided(group: NDArray[np.str_], rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows to learn from, and those to be judged by."""
    seen, unseen = [], []
    for name in np.unique(group):
        rows = rng.permutation(np.flatnonzero(group == name))
        count = min(ROWS_PER_GROUP, int(len(rows) * (1 - LEFT_OUT)))
        seen.append(rows[:count])
        unseen.append(rows[count:])
    return np.concatenate(seen), np.concatenate(unseen)


def _alike(group: NDArray[np.str_]) -> Array:
    """Return weights by which each group counts alike."""
    _, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    weights: Array = len(group) / len(counts) / counts[index]
    return weights


def _fitted(features: Array, target: Array, weights: Array, trees: int, leaves: int) -> Forest:
    """Fit a sum of trees by least absolute error of logarithms, which is near least relative error."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    fitted = HistGradientBoostingRegressor(
        loss="absolute_error",
        max_iter=trees,
        learning_rate=0.15,
        max_leaf_nodes=leaves,
        max_depth=12,
        min_samples_leaf=20,
        early_stopping=False,
        random_state=0,
    ).fit(features.astype(np.float32), target, sample_weight=weights)
    return _forest(fitted)


def _forest(fitted: Any) -> Forest:
    """Take the trees out of a fitted regressor."""
    nodes = [stage[0].nodes for stage in fitted._predictors]
    roots = np.cumsum([0, *(len(tree) for tree in nodes[:-1])]).astype(np.int32)
    every = np.concatenate(nodes)
    place = np.concatenate([np.arange(len(tree)) for tree in nodes])
    leaf = every["is_leaf"].astype(bool)
    # Thresholds rounded towards minus infinity part f32 features as the unrounded ones do.
    threshold = every["num_threshold"].astype(np.float32)
    above = threshold.astype(np.float64) > every["num_threshold"]
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    return Forest(
        base=float(np.ravel(fitted._baseline_prediction)[0]),
        roots=roots,
        feature=np.where(leaf, -1, every["feature_idx"]).astype(np.int8),
        threshold=np.where(leaf, every["value"], threshold).astype(np.float32),
        left=np.where(leaf, 0, every["left"].astype(np.int64) - place).astype(np.int16),
        right=np.where(leaf, 0, every["right"].astype(np.int64) - place).astype(np.int16),
        depth=int(every["depth"].max()),
    )


def spread(errors_of: Iterable[Array]) -> Spread:
    """Return where nine of ten errors lie, each of the given sets counting alike."""
    sets = [np.asarray(of_set) for of_set in errors_of if len(of_set)]
    every = np.concatenate(sets)
    order = np.argsort(every)
    weights = np.concatenate([np.full(len(of_set), 1 / len(of_set)) for of_set in sets])[order]
    share = (np.cumsum(weights) - weights / 2) / weights.sum()
    low, high = np.interp(COVERED, share, every[order])
    return Spread(min(0.0, float(low)), max(0.0, float(high)))


def _of_few(devices: int) -> float:
    """Return by how much errors seen on so few devices must be stretched to hold on one more.

    An interval for one more draw from n is wider than that of the n by Student's t and ``sqrt(1 + 1 / n)``.
    The rows of a device err together, so that it is devices that are drawn.
    """
    from scipy import stats

    usual = stats.norm.ppf(COVERED[1])
    return min(MOST_OF_FEW, float(stats.t.ppf(COVERED[1], devices - 1) / usual * math.sqrt(1 + 1 / devices)))


def errors(kept: TrainedExpert, asked: ForecastModel) -> Array:
    """Return the logarithm of measured over predicted of each row of a table."""
    table = kept.table
    blend = asked.blend(table.skill, kept.roofline, table.device, table.arithmetic)
    missed: Array = np.log(table.us / blend.us)
    return missed


def _evened(of_skill: list[TrainedExpert]) -> list[TrainedExpert]:
    """Correct experts that know sizes at random alone by what others of the skill show.

    That is the smaller of the middle two, where they are an even number: rather too little than too much.
    """
    shown = sorted((one.even for one in of_skill if one.even is not None), key=abs)
    if not shown:
        return of_skill
    shift = shown[(len(shown) - 1) // 2]
    return [
        dataclasses.replace(one, expert=dataclasses.replace(one.expert, even=shift))
        if one.roofline.even.mean() < RARE
        else one
        for one in of_skill
    ]


def assemble_model(kept: dict[Skill, list[TrainedExpert]]) -> ForecastModel:
    """Return the model that experts make, with the errors that each one's device has without it."""
    kept = {skill: _evened(of_skill) for skill, of_skill in kept.items()}
    experts = {skill: tuple(one.expert for one in of_skill) for skill, of_skill in kept.items()}
    unknown = dict.fromkeys(kept, Spread(0.0, 0.0))
    far = {}
    for skill, of_skill in kept.items():
        if len(of_skill) > 1:
            without = [tuple(o.expert for o in of_skill if o is not one) for one in of_skill]
            asked = [ForecastModel({skill: rest}, unknown) for rest in without]
            seen = spread(errors(one, rest) for one, rest in zip(of_skill, asked, strict=True))
            wider = _of_few(len(of_skill))
            far[skill] = Spread(wider * seen.low, wider * seen.high)
        else:
            near = of_skill[0].expert.near
            far[skill] = Spread(FAR_OF_ONE * near.low, FAR_OF_ONE * near.high)
    return ForecastModel(experts, far)
