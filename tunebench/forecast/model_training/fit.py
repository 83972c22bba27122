"""Training of experts on tables of measured kernels, and assembly of the model."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunebench.device import Device
from tunebench.forecast.library.forest import Forest
from tunebench.forecast.library.model import Expert, ForecastModel, Skill, Spread, is_attention
from tunebench.forecast.library.roofline_model import RooflineModel, coordinates, roofline_times
from tunebench.forecast.model_training.data import MeasuredKernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = [
    "FEWEST",
    "LEFT_OUT",
    "TrainedExpert",
    "assemble_model",
    "chip",
    "divide_rows",
    "equal_group_weights",
    "errors",
    "forest_of",
    "spread",
    "stretch_for_few",
    "table_roofline",
    "train_expert",
]

FEWEST = 100
"""Fewest rows that a table must have to train an expert."""

ROWS_PER_GROUP = 5000
"""Most rows of a group that one expert is trained on: more do not reduce the error on other devices."""

LEFT_OUT = 0.2
"""Share of a group's rows that is left out of the training to measure the expert's error."""

RARE, MOSTLY = 0.01, 0.5
"""Share of rows below which sizes of models count as not measured, and above which a group consists of them.
"""

TREES: dict[Skill, tuple[int, int]] = {"elementwise": (40, 8), "norm": (60, 12), "softmax": (60, 12)}
"""Number of trees and of leaves per tree, for kinds of kernels that need fewer than `USUAL`."""
USUAL = (120, 31)

FAR_OF_ONE = 4.0
"""Factor on the error of an expert to estimate its error on other devices, if only one device was measured.
For kinds with several devices this factor is 2 to 6.
"""

MOST_OF_FEW = 1.6
"""Most by which errors are stretched for the small number of devices: that of four, by Student's t."""

COVERED = (0.05, 0.95)
"""Quantiles that enclose 90 % of the errors."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TrainedExpert:
    """An expert with its training data.

    Attributes:
        expert: The expert.
        table: Measurements it was trained on.
        roofline: Roofline times and features of the table.
        even: Smallest median error, as a logarithm, on a group with sizes of models, of an expert trained on
            the other groups only; None if the table does not have both.
    """

    expert: Expert
    table: MeasuredKernels
    roofline: RooflineModel
    even: float | None


def table_roofline(table: MeasuredKernels) -> RooflineModel:
    """Return roofline times and features of a table's kernels on their device."""
    return roofline_times(table.family, table.arithmetic, table.figures, table.device)


def train_expert(table: MeasuredKernels) -> TrainedExpert:
    """Train an expert on one table, for the time without the host. Its error is that on visible rows.

    Each group of rows has the same total weight. The seed for the choice of rows is derived from the device
    and the kind of kernel: the same table gives the same expert.
    """
    rng = np.random.default_rng(zlib.crc32(f"{table.device.name} {table.skill}".encode()))
    roofline = table_roofline(table)
    target = np.log(table.kernel_us / roofline.us)
    finite = np.flatnonzero(np.isfinite(target))
    seen, unseen = (finite[rows] for rows in divide_rows(table.group[finite], rng))
    tested = unseen[table.visible[unseen]]
    weights = equal_group_weights(table.group[seen])
    trees, leaves = TREES.get(table.skill, USUAL)
    forest = _fitted(roofline.features[seen], target[seen], weights, trees, leaves)
    near = spread([target[tested] - forest(roofline.features[tested])])
    made = Expert(
        device=table.device.name,
        coordinates=coordinates(table.device, table.arithmetic, attention=is_attention(table.skill)),
        forest=forest,
        near=near,
        least=roofline.features[finite].min(axis=0),
        most=roofline.features[finite].max(axis=0),
        least_us=float(table.kernel_us[table.visible].min()),
    )
    return TrainedExpert(expert=made, table=table, roofline=roofline, even=_of_even_sizes(table, roofline))


def _of_even_sizes(table: MeasuredKernels, roofline: RooflineModel) -> float | None:
    """Return the error on groups with sizes of models, of an expert trained on the other groups."""
    names = np.unique(table.group)
    of_models = [name for name in names if np.mean(roofline.even[table.group == name]) > MOSTLY]
    if not 0 < len(of_models) < len(names):
        return None
    seen = np.flatnonzero(np.isfinite(table.kernel_us) & ~np.isin(table.group, of_models))
    seen = seen[divide_rows(table.group[seen], np.random.default_rng(0))[0]]
    target = np.log(table.kernel_us / roofline.us)
    trees, leaves = TREES.get(table.skill, USUAL)
    forest = _fitted(
        roofline.features[seen], target[seen], equal_group_weights(table.group[seen]), trees, leaves
    )
    missed = target - forest(roofline.features)
    medians = (np.median(missed[table.visible & (table.group == name)]) for name in of_models)
    return min(map(float, medians), key=abs)


def divide_rows(group: NDArray[np.str_], rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the rows to train on and the rows to test on."""
    seen, unseen = [], []
    for name in np.unique(group):
        rows = rng.permutation(np.flatnonzero(group == name))
        count = min(ROWS_PER_GROUP, int(len(rows) * (1 - LEFT_OUT)))
        seen.append(rows[:count])
        unseen.append(rows[count:])
    return np.concatenate(seen), np.concatenate(unseen)


def equal_group_weights(group: NDArray[np.str_]) -> Array:
    """Return row weights that give each group the same total."""
    _, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    weights: Array = len(group) / len(counts) / counts[index]
    return weights


def _fitted(features: Array, target: Array, weights: Array, trees: int, leaves: int) -> Forest:
    """Fit a sum of trees by least absolute error of logarithms, close to least relative error."""
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
    return forest_of(fitted)


def forest_of(fitted: Any) -> Forest:
    """Return the trees of a fitted scikit-learn regressor."""
    nodes = [stage[0].nodes for stage in fitted._predictors]
    roots = np.cumsum([0, *(len(tree) for tree in nodes[:-1])]).astype(np.int32)
    every = np.concatenate(nodes)
    position = np.concatenate([np.arange(len(tree)) for tree in nodes])
    leaf = every["is_leaf"].astype(bool)
    # Rounding thresholds towards minus infinity keeps every f32 feature on its side.
    threshold = every["num_threshold"].astype(np.float32)
    above = threshold.astype(np.float64) > every["num_threshold"]
    threshold[above] = np.nextafter(threshold[above], np.float32(-np.inf))
    return Forest(
        base=float(np.ravel(fitted._baseline_prediction)[0]),
        roots=roots,
        feature=np.where(leaf, -1, every["feature_idx"]).astype(np.int8),
        threshold=np.where(leaf, every["value"], threshold).astype(np.float32),
        left=np.where(leaf, 0, every["left"].astype(np.int64) - position).astype(np.int16),
        right=np.where(leaf, 0, every["right"].astype(np.int64) - position).astype(np.int16),
        depth=int(every["depth"].max()),
    )


def spread(errors_of: Iterable[Array]) -> Spread:
    """Return the 90 % interval of the errors, with equal weight for each set."""
    sets = [np.asarray(of_set) for of_set in errors_of if len(of_set)]
    every = np.concatenate(sets)
    order = np.argsort(every)
    weights = np.concatenate([np.full(len(of_set), 1 / len(of_set)) for of_set in sets])[order]
    share = (np.cumsum(weights) - weights / 2) / weights.sum()
    low, high = np.interp(COVERED, share, every[order])
    return Spread(min(0.0, float(low)), max(0.0, float(high)))


def chip(device: Device) -> tuple[str, int]:
    """Return the chip of a device. Boards with the same chip are left out together."""
    return device.architecture, device.sm_count


def stretch_for_few(devices: int) -> float:
    """Return the factor by which errors on a few devices are stretched to hold for another device.

    The interval of one more draw is wider than that of n draws by Student's t and ``sqrt(1 + 1 / n)``. The
    rows of a device are correlated, so devices count as the draws.
    """
    from scipy import stats

    usual = stats.norm.ppf(COVERED[1])
    return min(MOST_OF_FEW, float(stats.t.ppf(COVERED[1], devices - 1) / usual * math.sqrt(1 + 1 / devices)))


def errors(trained: TrainedExpert, asked: ForecastModel) -> Array:
    """Return the logarithm of the kernel's over the predicted time for each visible row of a table."""
    table = trained.table
    blend = asked.blend(table.skill, trained.roofline, table.device, table.arithmetic)
    missed: Array = np.log(table.kernel_us / blend.us)[table.visible]
    return missed


def _evened(of_skill: list[TrainedExpert]) -> list[TrainedExpert]:
    """Correct experts that were trained on random sizes only, by the error that other experts show.

    The correction is the median; of an even number the smaller of the two middle ones, to rather correct too
    little.
    """
    shown = sorted((trained.even for trained in of_skill if trained.even is not None), key=abs)
    if not shown:
        return of_skill
    # Sorted by magnitude: of two middle ones this is the smaller correction.
    shift = shown[(len(shown) - 1) // 2]
    return [
        dataclasses.replace(trained, expert=dataclasses.replace(trained.expert, even=shift))
        if trained.roofline.even.mean() < RARE
        else trained
        for trained in of_skill
    ]


def assemble_model(trained: dict[Skill, list[TrainedExpert]]) -> ForecastModel:
    """Return the model of all experts, with the errors of each device when it is left out.

    Args:
        trained: Trained experts by kind of kernel.
    """
    trained = {skill: _evened(of_skill) for skill, of_skill in trained.items()}
    experts = {skill: tuple(expert.expert for expert in of_skill) for skill, of_skill in trained.items()}
    unknown = dict.fromkeys(trained, Spread(0.0, 0.0))
    far = {}
    for skill, of_skill in trained.items():
        # Boards with one chip are left out together, or the error would be that of a measured device.
        chips = [chip(expert.table.device) for expert in of_skill]
        if len(set(chips)) > 1:
            rests = [
                tuple(
                    o.expert
                    for o, expert_chip in zip(of_skill, chips, strict=True)
                    if expert_chip != chip_left_out
                )
                for chip_left_out in chips
            ]
            asked = [ForecastModel({skill: rest}, unknown) for rest in rests]
            seen = spread(errors(expert, rest) for expert, rest in zip(of_skill, asked, strict=True))
            wider = stretch_for_few(len(set(chips)))
            far[skill] = Spread(wider * seen.low, wider * seen.high)
        else:
            near = of_skill[0].expert.near
            far[skill] = Spread(FAR_OF_ONE * near.low, FAR_OF_ONE * near.high)
    return ForecastModel(experts, far)
