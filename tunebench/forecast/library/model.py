"""What was learned from measurements: one expert a device, and how their answers are blended for another.

An expert knows by how much kernels of one kind took longer than their law on the device where they were
measured, as a function of features that are relative to that device. For any device each is asked with the
features that the kernels have there, and their logarithms are averaged with weights that fall with the
distance between devices: one that was measured gets its own expert's answer, a sister of it almost that, and
a device far from all gets the consensus.

Errors are kept likewise: those of each expert on problems of its device it has not seen, and those of the
blend on devices left out. An interval lies between the two as the device lies between the measured ones.

Source: Shepard, "A two-dimensional interpolation function for irregularly-spaced data", 1968 (weights).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.errors import UnknownName
from tunebench.forecast.library.forest import Forest
from tunebench.forecast.library.kernel import Arithmetic, Family
from tunebench.forecast.library.roofline_model import LAUNCH_US, RooflineModel, coordinates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Blend", "Expert", "ForecastModel", "Skill", "Spread", "bundled_model", "skill_of"]

Skill = Literal[
    "product f32", "product 16-bit", "product 8-bit", "elementwise", "softmax", "norm", "attention"
]
"""What an expert is an expert of."""

FORMAT = 1
"""Version of the file."""

DISTANCE_POWER, DISTANCE_OFFSET = 1.5, 0.02
"""Weights are ``(distance ** 2 + SAME) ** -DISTANCE_POWER``: chosen by error on devices left out, from 0 to 3."""

MIN_WEIGHT = 0.01
"""An expert with a smaller share of the weights is not asked: it would cost as much as any other."""

FAR_DISTANCE = 1.0
"""Squared distance from which a device counts as unlike any that was measured."""

FEATURE_MARGIN = 0.7
"""How far beyond what was measured a feature may lie and still count as within: a factor of 2."""

WIDENING_EXTRAPOLATED, WIDENING_PROXY = 1.5, 2.5
"""By how much an interval is wider, in logarithms, for problems beyond what was measured, and for kernels of
a kind that nobody measured. Both are judgements: there is nothing to learn them from.
"""


def skill_of(family: Family, arithmetic: Arithmetic) -> Skill:
    """Return whose times a kernel's follow."""
    if family != "product":
        return family
    if arithmetic == "f32":
        return "product f32"
    return "product 8-bit" if arithmetic in ("e4m3", "i8") else "product 16-bit"


@dataclass(frozen=True, slots=True)
class Spread:
    """Where nine of ten real times lie, as natural logarithms of their ratio to the predicted one."""

    low: float
    high: float

    def towards(self, other: Spread, share: float) -> Spread:
        """Return what lies between this one (share 0) and another (share 1)."""
        return Spread(self.low + share * (other.low - self.low), self.high + share * (other.high - self.high))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Expert:
    """What was learned of one device.

    Attributes:
        device: Name of the device.
        coordinates: Where it lies among devices.
        forest: Features to the logarithm of time over law.
        near: Its errors on problems it has not seen.
        least: (F,) least value of each feature that it has seen.
        most: (F,) likewise, the largest.
        even: What is added to the logarithm for sizes of models, if it has seen sizes at random alone.
    """

    device: str
    coordinates: tuple[float, ...]
    forest: Forest
    near: Spread
    least: Array
    most: Array
    even: float = 0.0

    def excess(self, roofline: RooflineModel) -> Array:
        """Return the logarithm of time over law."""
        found: Array = self.forest(roofline.features) + self.even * roofline.even
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Blend:
    """Predicted times of kernels of one skill, in microseconds, one a row.

    Attributes:
        us: Expected times.
        low_us: Nine of ten real times lie between this
        high_us: and this.
        beyond: Whether a kernel lies beyond what was measured.
        nearest: Name of the measured device that is most like this one.
        near: Whether that is near enough to count as like it.
    """

    us: Array
    low_us: Array
    high_us: Array
    extrapolated: NDArray[np.bool_]
    nearest: str
    near: bool


@dataclass(frozen=True, slots=True, eq=False)
class ForecastModel:
    """All that was learned.

    Attributes:
        experts: By skill.
        far: Errors of a blend on devices left out, by skill.
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
        """Predict kernels of one skill.

        Args:
            skill: Of all of them.
            law: Of them, on the device.
            device: Where they run.
            arithmetic: What they multiply in.
            borrowed: Which of them are of a kind that nobody measured.

        Raises:
            UnknownName: if nothing was learned of the skill.
        """
        here = np.array(coordinates(device, arithmetic))
        experts = self.experts.get(skill, ())
        if not experts:
            raise UnknownName(
                "skill of the model", skill, [name for name, known in self.experts.items() if known]
            )
        squared = np.array([float(np.sum((here - np.array(e.coordinates)) ** 2)) for e in experts])
        weights = (squared + DISTANCE_OFFSET) ** -DISTANCE_POWER
        weights[weights < MIN_WEIGHT * weights.sum()] = 0.0
        weights /= weights.sum()
        excess = np.zeros(len(roofline.features))
        extrapolated = np.ones(len(roofline.features), dtype=bool)
        for expert, weight in zip(experts, weights, strict=True):
            if weight:
                excess += weight * expert.excess(roofline)
            within = (roofline.features >= expert.least - FEATURE_MARGIN) & (
                roofline.features <= expert.most + FEATURE_MARGIN
            )
            extrapolated &= ~within.all(axis=1)
        nearest = int(squared.argmin())
        share = min(1.0, float(squared[nearest]) / FAR_DISTANCE)
        spread = experts[nearest].near.towards(self.far[skill], share)
        us = roofline.us * np.exp(excess)
        widened = np.where(proxy, WIDENING_PROXY, np.where(extrapolated, WIDENING_EXTRAPOLATED, 1.0))
        return Blend(
            us=us,
            low_us=us * np.exp(spread.low * widened),
            high_us=us * np.exp(spread.high * widened),
            extrapolated=extrapolated,
            nearest=experts[nearest].device,
            near=share < 1,
        )

    def without(self, device: str) -> ForecastModel:
        """Return the model as it would be if one device had never been measured; intervals stay as wide."""
        rest = {
            skill: tuple(expert for expert in experts if expert.device != device)
            for skill, experts in self.experts.items()
        }
        return ForecastModel(rest, self.far)

    # -- its file -----------------------------------------------------------------------------

    def save(self, file: str | Path | IO[bytes]) -> None:
        """Write it as a NumPy archive without pickled objects; the same model gives the same bytes."""
        arrays: dict[str, NDArray[np.generic]] = {}
        described: list[dict[str, object]] = []
        for skill, experts in self.experts.items():
            for expert in experts:
                prefix = f"{len(described)}."
                described.append(
                    {
                        "skill": skill,
                        "device": expert.device,
                        "coordinates": expert.coordinates,
                        "near": [expert.near.low, expert.near.high],
                        "even": expert.even,
                    }
                )
                arrays |= {prefix + name: array for name, array in expert.forest.arrays().items()}
                arrays |= {prefix + "least": expert.least, prefix + "most": expert.most}
        far = {skill: [spread.low, spread.high] for skill, spread in self.far.items()}
        about = json.dumps({"format": FORMAT, "launch_us": LAUNCH_US, "experts": described, "far": far})
        np.savez_compressed(file, about=np.frombuffer(about.encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, file: str | Path | IO[bytes]) -> ForecastModel:
        """Read a model that `save` has written.

        Raises:
            ValueError: if the file is of another version, or no such file.
        """
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if "about" not in arrays:
            raise ValueError("no file of a model: it does not say what it is about")
        about = json.loads(arrays["about"].tobytes())
        if about["format"] != FORMAT:
            raise ValueError(f"a model of format {about['format']}; this version reads {FORMAT}")
        if about["launch_us"] != LAUNCH_US:
            raise ValueError(f"learned with launches of {about['launch_us']} us; laws have {LAUNCH_US}")
        experts: dict[Skill, list[Expert]] = {}
        for index, entry in enumerate(about["experts"]):
            prefix = f"{index}."
            own = {n.removeprefix(prefix): array for n, array in arrays.items() if n.startswith(prefix)}
            expert = Expert(
                device=entry["device"],
                coordinates=tuple(entry["coordinates"]),
                forest=Forest.from_arrays(own),
                near=Spread(*entry["near"]),
                even=entry["even"],
                least=own["least"],
                most=own["most"],
            )
            experts.setdefault(entry["skill"], []).append(expert)
        return cls(
            {skill: tuple(of_skill) for skill, of_skill in experts.items()},
            {skill: Spread(*ends) for skill, ends in about["far"].items()},
        )


@functools.cache
def bundled_model() -> ForecastModel:
    """Return the model that comes with the package (see docs/predictor.md, its card)."""
    with resources.files("tunebench.forecast.library").joinpath("model.npz").open("rb") as file:
        return ForecastModel.load(file)
