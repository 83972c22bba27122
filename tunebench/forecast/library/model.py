"""Model of library kernels: one expert per measured device, blended by the distance between devices.

An expert predicts the logarithm of the ratio of measured time to roofline time (`roofline_model`) for one
kind of kernel on one device, from features that are relative to the device. A prediction for another device
evaluates every expert with the features that the kernels have on that device, and averages the logarithms
with weights that fall with the distance between the devices. A measured device gets nearly its own expert's
prediction; a device far from all of them gets the mean.

The model also stores errors: those of each expert on unseen workloads of its device (`near`), and those of
the blend on devices left out (`far`). The prediction interval is interpolated between the two by the
distance.

Source: Shepard, "A two-dimensional interpolation function for irregularly-spaced data", 1968 (weights).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from tunebench._lazy import np
from tunebench.device import Device, find
from tunebench.errors import UnknownName
from tunebench.forecast.library.forest import Forest
from tunebench.forecast.library.kernel import Arithmetic, Family
from tunebench.forecast.library.roofline_model import LAUNCH_US, RooflineModel, coordinates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Blend", "Expert", "ForecastModel", "Skill", "Spread", "bundled_model", "is_attention", "skill_of"]

Skill = Literal[
    "product f32",
    "product 16-bit",
    "product 8-bit",
    "grouped product",
    "elementwise",
    "softmax",
    "norm",
    "attention",
    "decode attention",
    "encoder attention",
]
"""Kind of kernel that an expert is trained for."""

FORMAT = 3
"""Version of the model file."""

DISTANCE_POWER, DISTANCE_OFFSET = 1.5, 0.02
"""Weights are ``(distance ** 2 + DISTANCE_OFFSET) ** -DISTANCE_POWER``.

The power was chosen from 0 to 3 by the error on devices left out.
"""

SAME_PLACE, SAME_CHIP = 1e-9, 0.05
"""Squared distances below which a device counts as measured, and two measured ones as boards of one chip.

A measured device is predicted by its own expert. Of several boards of one chip, the nearest counts, or
equally near ones share its weight.
"""

BY_GENERATION: frozenset[Skill] = frozenset({"grouped product", "decode attention"})
"""Kinds of kernels whose weights ignore the rates of a device.

They mostly wait for weights or keys, and depend on the serving software for a generation rather than on its
tensor cores. Chosen by the errors on devices left out: 25.5 instead of 34.5 % for decoding, 27.6 instead of
47.7 % for grouped products. Without the rates, errors of the other kinds are equal or larger.
"""

MIN_WEIGHT = 0.01
"""Experts with a smaller share of the weights are skipped: each evaluation costs the same."""

FAR_DISTANCE = 1.0
"""Squared distance from which a device counts as unlike all measured devices."""

FED = 2
"""Index of the coordinate that boards of one chip differ in: bytes of memory per SM and clock."""

BOARD_SHARE = 0.1
"""Least share of the errors on devices left out, for every device but the measured ones."""

BOARD_SHARES: Mapping[Skill, float] = {"attention": 0.3, "encoder attention": 0.3, "decode attention": 0.15}
"""The same for kinds of kernels that need another share than `BOARD_SHARE`.

Two boards with the same chip differ more than repeated measurements of one: at these shares, the intervals
of B200 contain 88 to 99 % of the times of GB200, and the reverse, by kind of kernel; at 0, 67 to 93 %. Errors
on measured devices are smallest for attention, but its boards differ as much as those of other kernels: at
0.1, 77 and 80 % of encoders are inside. Prompts were not measured on two boards of a chip, and have the share
of encoders.
"""

FEATURE_MARGIN = 0.7
"""Distance beyond the measured range, in natural logarithms, at which a feature still counts as inside: a
factor of 2.
"""

WIDENING_EXTRAPOLATED, WIDENING_PROXY = 1.5, 2.5
"""Factors by which the interval is widened, in logarithms, for workloads outside the measured range and for
kernels predicted by a proxy. Both are judgements: there is no data to fit them to.
"""


def skill_of(family: Family, arithmetic: Arithmetic) -> Skill:
    """Return the kind of kernel, for the choice of an expert."""
    if family != "product":
        return family
    if arithmetic == "f32":
        return "product f32"
    return "product 8-bit" if arithmetic in ("e4m3", "i8") else "product 16-bit"


def is_attention(skill: Skill) -> bool:
    """Return whether a kind of kernel is fused attention."""
    return skill in ("attention", "decode attention", "encoder attention")


@dataclass(frozen=True, slots=True)
class Spread:
    """90 % interval of the natural logarithm of measured time over predicted time."""

    low: float
    high: float

    def towards(self, other: Spread, share: float) -> Spread:
        """Return the linear interpolation between this interval (share 0) and another one (share 1)."""
        return Spread(self.low + share * (other.low - self.low), self.high + share * (other.high - self.high))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Expert:
    """The model of one kind of kernel on one device.

    Attributes:
        device: Name of the device.
        coordinates: Position of the device for distances (see `roofline_model.coordinates`).
        forest: Predicts the logarithm of time over roofline time from the features.
        near: Error on unseen workloads of the device.
        least: (F,) smallest value of each feature in the training data.
        most: (F,) largest value of each feature in the training data.
        least_us: Shortest kernel in the training data, in microseconds.
        even: Correction of the logarithm for sizes that models have, if the training data has random sizes
            only.
    """

    device: str
    coordinates: tuple[float, ...]
    forest: Forest
    near: Spread
    least: Array
    most: Array
    least_us: float
    even: float = 0.0

    def excess(self, roofline: RooflineModel) -> Array:
        """Return the predicted logarithm of time over roofline time of each kernel."""
        excess: Array = self.forest(roofline.features) + self.even * roofline.even
        return excess

    def covers(self, roofline: RooflineModel, us: Array) -> NDArray[np.bool_]:
        """Return whether each kernel of a predicted time is inside the measured range."""
        inside = (roofline.features >= self.least - FEATURE_MARGIN) & (
            roofline.features <= self.most + FEATURE_MARGIN
        )
        covered: NDArray[np.bool_] = inside.all(axis=1) & (np.log(us / self.least_us) >= -FEATURE_MARGIN)
        return covered


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Predicted times of kernels of one kind, in microseconds, one per row.

    Attributes:
        us: Expected times.
        low_us: Lower ends of the 90 % prediction intervals.
        high_us: Upper ends of the 90 % prediction intervals.
        extrapolated: Whether each kernel is outside the measured range.
        nearest: Name of the most similar measured device.
        near: Whether that device is similar enough to count as like this one.
    """

    us: Array
    low_us: Array
    high_us: Array
    extrapolated: NDArray[np.bool_]
    nearest: str
    near: bool

    def longer(self, times: Array) -> Blend:
        """Return times and intervals multiplied by a factor of each row."""
        return dataclasses.replace(
            self, us=self.us * times, low_us=self.low_us * times, high_us=self.high_us * times
        )


def _excess(expert: Expert, roofline: RooflineModel, target: Array, skill: Skill) -> Array:
    """Return the logarithm of time over roofline time that an expert predicts for kernels on a device.

    Features of attention that compare times, such as that of tiles over that of memory, differ between
    devices by a constant. Trees of one device know them only at the values of its head counts and head sizes,
    so that a board of the same chip with another memory falls on other branches: decoding on an H100 with
    2.4 TB/s took twice as long as with 2.8 TB/s. On boards of the chip, kernels reach the share of the
    roofline that they reach on the expert's own; on other chips the mean of both is taken. With chips left
    out, the mean has smaller errors than the features on the device alone in nine of eleven cases, by 0.4 to
    6.5 points (prompts on H100: equal, decoding on H100: 1.3 points larger). Products have larger ones, and
    keep the features on the device.

    Args:
        expert: The expert.
        roofline: Kernels on the device.
        target: (4,) coordinates of the device.
        skill: Kind of kernel.
    """
    there = np.array(expert.coordinates)
    usual = expert.excess(roofline)
    if not is_attention(skill) or roofline.on is None or np.sum((target - there) ** 2) < SAME_PLACE:
        return usual
    own = expert.excess(roofline.on(find(expert.device)))
    same_chip = np.array_equal(np.delete(target, FED), np.delete(there, FED))
    return own if same_chip else (usual + own) / 2


def _weights(target: Array, experts: Array, skill: Skill) -> Array:
    """Return the weight of each expert for a device; they add up to 1.

    Args:
        target: (4,) coordinates of the device.
        experts: (E, 4) coordinates of the experts.
        skill: Kind of kernel.
    """
    # A measured device needs no neighbours: its own experts share the whole weight.
    same = np.sum((target - experts) ** 2, axis=1) < SAME_PLACE
    if same.any():
        shares: Array = same / same.sum()
        return shares
    counted = [0, 3] if skill in BY_GENERATION else [0, 1, 2, 3]
    squared = np.sum((target - experts)[:, counted] ** 2, axis=1)
    between = np.sum((experts[:, None] - experts[None]) ** 2, axis=2) < SAME_CHIP
    # Boards of one chip differ by their power limits and clocks: the one that is most like the device counts.
    nearer = between & (squared[None] < squared[:, None])
    equal = between & (squared[None] == squared[:, None])
    weights: Array = (squared + DISTANCE_OFFSET) ** -DISTANCE_POWER / equal.sum(axis=1)
    weights[nearer.any(axis=1)] = 0.0
    weights[weights < MIN_WEIGHT * weights.sum()] = 0.0
    weights /= weights.sum()
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class ForecastModel:
    """The complete model.

    Attributes:
        experts: Experts by kind of kernel.
        far: Error of the blend on devices left out, by kind of kernel.
    """

    experts: Mapping[Skill, tuple[Expert, ...]]
    far: Mapping[Skill, Spread]

    def blend(
        self,
        skill: Skill,
        roofline: RooflineModel,
        device: Device,
        arithmetic: Arithmetic,
        *,
        proxy: NDArray[np.bool_] | bool = False,
    ) -> Blend:
        """Predict kernels of one kind.

        Args:
            skill: Kind of the kernels.
            roofline: Roofline times and features of the kernels on the device.
            device: The device.
            arithmetic: Arithmetic of the kernels.
            proxy: Whether each kernel is the proxy of a kind that was not measured.

        Raises:
            UnknownName: if the model has no expert for the kind.
        """
        target = np.array(coordinates(device, arithmetic, attention=is_attention(skill)))
        experts = self.experts.get(skill, ())
        if not experts:
            raise UnknownName(
                "kind of kernel in the model",
                skill,
                [name for name, skill_experts in self.experts.items() if skill_experts],
            )
        points = np.array([expert.coordinates for expert in experts])
        squared = np.sum((target - points) ** 2, axis=1)
        weights = _weights(target, points, skill)
        excess = np.zeros(len(roofline.features))
        for expert, weight in zip(experts, weights, strict=True):
            if weight:
                excess += weight * _excess(expert, roofline, target, skill)
        # A mean of logarithms: experts that err by a factor in opposite directions cancel.
        us = roofline.us * np.exp(excess)
        extrapolated = ~np.any([expert.covers(roofline, us) for expert in experts], axis=0)
        nearest = int(squared.argmin())
        # 0 on a measured device, 1 far from all of them: the interval goes from the error there to the error
        # on devices left out.
        share = min(1.0, float(squared[nearest]) / FAR_DISTANCE)
        if share > 0:
            share = max(share, BOARD_SHARES.get(skill, BOARD_SHARE))
        spread = experts[nearest].near.towards(self.far[skill], share)
        widened = np.where(proxy, WIDENING_PROXY, np.where(extrapolated, WIDENING_EXTRAPOLATED, 1.0))
        return Blend(
            us=us,
            low_us=us * np.exp(spread.low * widened),
            high_us=us * np.exp(spread.high * widened),
            extrapolated=extrapolated,
            nearest=experts[nearest].device,
            near=share < 1,
        )

    def weights(self, skill: Skill, device: Device, arithmetic: Arithmetic) -> dict[str, float]:
        """Return the weight of each measured device in predictions of one kind for a device."""
        experts = self.experts.get(skill, ())
        points = np.array([expert.coordinates for expert in experts]).reshape(len(experts), -1)
        weights = (
            _weights(np.array(coordinates(device, arithmetic, attention=is_attention(skill))), points, skill)
            if experts
            else ()
        )
        return {expert.device: float(weight) for expert, weight in zip(experts, weights, strict=True)}

    def without(self, device: str) -> ForecastModel:
        """Return the model without one device, to evaluate it on that device; intervals are unchanged."""
        rest = {
            skill: tuple(expert for expert in experts if expert.device != device)
            for skill, experts in self.experts.items()
        }
        return ForecastModel(rest, self.far)

    # -- its file -----------------------------------------------------------------------------

    def save(self, file: str | Path | IO[bytes]) -> None:
        """Write the model as a NumPy archive without pickled objects. The same model gives the same bytes."""
        parts: dict[str, list[NDArray[np.generic]]] = {}
        described: list[dict[str, object]] = []
        for skill, experts in self.experts.items():
            for expert in experts:
                arrays = expert.forest.arrays() | {"least": expert.least, "most": expert.most}
                described.append(
                    {
                        "skill": skill,
                        "device": expert.device,
                        "coordinates": expert.coordinates,
                        "near": [expert.near.low, expert.near.high],
                        "even": expert.even,
                        "least_us": expert.least_us,
                        "sizes": {name: len(array) for name, array in arrays.items()},
                    }
                )
                for name, array in arrays.items():
                    parts.setdefault(name, []).append(array)
        far = {skill: [spread.low, spread.high] for skill, spread in self.far.items()}
        about = json.dumps({"format": FORMAT, "launch_us": LAUNCH_US, "experts": described, "far": far})
        # One entry for each array of all experts: reading an entry takes longer than the values in it.
        together: dict[str, Any] = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        np.savez_compressed(file, about=np.frombuffer(about.encode(), dtype=np.uint8), **together)

    @classmethod
    def load(cls, file: str | Path | IO[bytes]) -> ForecastModel:
        """Read a model written by `save`.

        Raises:
            ValueError: if the file is not a model, or has another version.
        """
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if "about" not in arrays:
            raise ValueError("not a model file: it has no entry 'about'")
        about = json.loads(arrays["about"].tobytes())
        if about["format"] != FORMAT:
            raise ValueError(
                f"the model file has format {about['format']}, this version reads format {FORMAT}; train it "
                "again with `nox -s train-predictor`"
            )
        if about["launch_us"] != LAUNCH_US:
            raise ValueError(
                f"the model was trained with a launch time of {about['launch_us']} us, this version "
                f"has {LAUNCH_US} us"
            )
        experts: dict[Skill, list[Expert]] = {}
        start = dict.fromkeys(arrays, 0)
        for entry in about["experts"]:
            forest_arrays = {
                name: arrays[name][start[name] : start[name] + size] for name, size in entry["sizes"].items()
            }
            for name, size in entry["sizes"].items():
                start[name] += size
            expert = Expert(
                device=entry["device"],
                coordinates=tuple(entry["coordinates"]),
                forest=Forest.from_arrays(forest_arrays),
                near=Spread(*entry["near"]),
                even=entry["even"],
                least_us=entry["least_us"],
                least=forest_arrays["least"],
                most=forest_arrays["most"],
            )
            experts.setdefault(entry["skill"], []).append(expert)
        return cls(
            {skill: tuple(of_skill) for skill, of_skill in experts.items()},
            {skill: Spread(*quantiles) for skill, quantiles in about["far"].items()},
        )


@functools.cache
def bundled_model() -> ForecastModel:
    """Return the bundled model. Its model card is docs/predictor.md."""
    with resources.files("tunebench.forecast.library").joinpath("model.npz").open("rb") as file:
        return ForecastModel.load(file)
