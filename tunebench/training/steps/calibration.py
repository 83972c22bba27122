"""Predictions moved by measured steps of a user's own machine and program: `Calibration`.

A measured step says by how much this program is slower than predicted, but not why. Two factors are inferred
from all measured steps together: one on the whole step, and a further one on exposed communication. Their
prior is the distribution of the stack (`tunebench.stack`), joined with a wide one for programs that differ
from all published ones. A step differs from the mean of its source by the published spread, and now and then
by much more (Student's t). So one measured step moves others by a part of its own error: by more, the less
the published sources agree.

The posterior is computed on a grid of both factors, without sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from tunebench._figure import significant
from tunebench._lazy import np
from tunebench.errors import InputError
from tunebench.forecast.network import NetworkPrediction
from tunebench.stack import Efficiency, quantile_95
from tunebench.training.steps.step import StepPrediction
from tunebench.training.steps.time_range import TimeRange

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Calibration", "MeasuredStep", "calibrate"]

Prediction = TypeVar("Prediction", StepPrediction, NetworkPrediction)

COMMUNICATION_SPREAD = math.log(2) / 1.645
"""Standard deviation of the logarithm of the factor on communication: within a factor of 2 in 90 %. A
judgement."""

UNPUBLISHED_SPREAD = 0.25
"""Standard deviation of the logarithm of the factor on the whole step for programs that differ from published
ones. A judgement."""

UNPUBLISHED = 0.2
"""Prior probability of such a program. A judgement."""

LEAST_SPREAD = 0.04
"""Least standard deviation of the steps of a source: that of tuned runs."""

NOISE_FREEDOM = 3
"""Degrees of freedom of the differences between the steps of a source."""

RATIO_LIMIT = 20.0
"""Largest ratio of measured and predicted time, in either direction, that is taken for a measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A measured step and its prediction.

    Attributes:
        seconds: Measured time of the step.
        prediction: Prediction of the same step.

    Raises:
        InputError: if the time is not positive, or far from the prediction, as in other units.
    """

    seconds: float
    prediction: StepPrediction | NetworkPrediction

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise InputError(f"a measured step must take more than 0 seconds, got {self.seconds}")
        if not 1 / RATIO_LIMIT <= self.ratio <= RATIO_LIMIT:
            raise InputError(
                f"the measured step of {self.seconds} s is {significant(self.ratio, 3)} times its "
                f"prediction of {significant(_modelled_us(self.prediction) / 1e6, 3)} s: "
                "expected seconds of a whole step"
            )

    @property
    def ratio(self) -> float:
        """Measured time over what is modelled, without what the software adds."""
        return self.seconds * 1e6 / _modelled_us(self.prediction)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """Two factors on predicted steps, inferred from measured ones, as weights on a grid.

    Attributes:
        steps: The measured steps.
        whole: Logarithm of the factor on the whole step at each point of the grid.
        communication: Logarithm of the further factor on exposed communication at each point.
        weights: Probability of each point.
        within: Standard deviation of the steps of a source.
    """

    steps: tuple[MeasuredStep, ...]
    whole: Array
    communication: Array
    weights: Array
    within: float

    def calibrated(self, prediction: Prediction) -> Prediction:
        """Return a prediction with the time and the 90 % interval that measured steps give.

        Args:
            prediction: Prediction of another step on the same device with the same stack.

        Raises:
            InputError: if the device or the stack is another one.
        """
        _check_same(prediction, self.steps[0].prediction)
        modelled_us = _modelled_us(prediction)
        low_us, us, high_us = (modelled_us * ratio for ratio in self.ratios(_share(prediction)))
        if isinstance(prediction, StepPrediction):
            return replace(prediction, time=TimeRange(low_us=low_us, us=us, high_us=high_us))
        bound_us = prediction.bound_us
        return replace(
            prediction,
            low_us=max(bound_us, low_us),
            time_us=max(bound_us, us),
            high_us=high_us,
            software_us=us - modelled_us,
        )

    def ratios(self, share: float) -> tuple[float, float, float]:
        """Return the ratio of a step to what is modelled: lower end of the interval, expected, upper end.

        Args:
            share: Share of exposed communication in the step, without the bubble.
        """
        logarithms = _logarithm(self.whole, self.communication, share)
        mean = float((self.weights * logarithms).sum())
        spread = math.sqrt(float((self.weights * (logarithms - mean) ** 2).sum()))
        width = math.hypot(quantile_95(10) * spread, quantile_95(NOISE_FREEDOM) * self.within)
        return math.exp(mean - width), math.exp(mean), math.exp(mean + width)

    @property
    def device(self) -> str:
        """Name of the device of the measured steps."""
        return self.steps[0].prediction.device.name

    @property
    def stack(self) -> str:
        """Name of the stack of the measured steps."""
        return self.steps[0].prediction.run.stack

    @property
    def factors(self) -> tuple[float, float]:
        """Expected factors on kernels and on exposed communication."""
        whole = float((self.weights * self.whole).sum())
        return math.exp(whole), math.exp(whole + float((self.weights * self.communication).sum()))


def calibrate(steps: Sequence[MeasuredStep], *, efficiency: Efficiency | None = None) -> Calibration:
    """Infer how much slower a program is than predicted.

    Args:
        steps: Measured training steps in 16 bits, of one device and stack.
        efficiency: Distribution of published steps; None for that of the stack.

    Raises:
        InputError: if there is no step, or their devices or stacks differ.
    """
    if not steps:
        raise InputError("a calibration needs at least one measured step")
    efficiency = efficiency or steps[0].prediction.run.efficiency
    if efficiency is None:
        raise InputError(
            "a calibration needs training steps in 16 bits: expected training, dtype f16 or bf16"
        )
    for step in steps[1:]:
        _check_same(step.prediction, steps[0].prediction)
    whole, communication = np.meshgrid(
        np.linspace(-1.0, 3.0, 401), COMMUNICATION_SPREAD * np.linspace(-3, 3, 49), indexing="ij"
    )
    within = max(LEAST_SPREAD, efficiency.within)
    logs = _log_prior(whole, efficiency) - (communication / COMMUNICATION_SPREAD) ** 2 / 2
    for step in steps:
        distance = math.log(step.ratio) - _logarithm(whole, communication, _share(step.prediction))
        logs = logs - (NOISE_FREEDOM + 1) / 2 * np.log1p((distance / within) ** 2 / NOISE_FREEDOM)
    weights = np.exp(logs - logs.max())
    return Calibration(
        steps=tuple(steps),
        whole=whole,
        communication=communication,
        weights=weights / weights.sum(),
        within=within,
    )


def _log_prior(whole: Array, efficiency: Efficiency) -> Array:
    """Return the logarithm of the density of the factor on the whole step, but for a constant."""
    distances = whole - efficiency.mean
    published = max(LEAST_SPREAD, efficiency.between * math.sqrt(1 + 1 / efficiency.sources))
    prior: Array = np.log(
        sum(
            share * np.exp(-((distances / spread) ** 2) / 2) / spread
            for share, spread in ((1 - UNPUBLISHED, published), (UNPUBLISHED, UNPUBLISHED_SPREAD))
        )
    )
    return prior


def _logarithm(whole: Array, communication: Array, share: float) -> Array:
    """Return the logarithm of a step over what is modelled, with both factors."""
    logarithms: Array = whole + np.log1p(share * np.expm1(communication))
    return logarithms


def _modelled_us(prediction: StepPrediction | NetworkPrediction) -> float:
    """Return the predicted time without what the software adds."""
    if isinstance(prediction, StepPrediction):
        return prediction.modelled.us
    return prediction.time_us - prediction.software_us


def _share(prediction: StepPrediction | NetworkPrediction) -> float:
    """Return the share of exposed communication, of which the bubble has as much."""
    if isinstance(prediction, NetworkPrediction):
        return 0.0
    communication_us = prediction.communication.us
    return communication_us / (communication_us + prediction.compute.us)


def _check_same(
    prediction: StepPrediction | NetworkPrediction, measured: StepPrediction | NetworkPrediction
) -> None:
    """Raise InputError unless both are training steps in 16 bits of one device and stack."""
    for name, value, expected in (
        ("device", prediction.device.name, measured.device.name),
        ("stack", prediction.run.stack, measured.run.stack),
    ):
        if value != expected:
            raise InputError(
                f"a step measured with {name} {expected} says nothing about {name} {value}: measure a step "
                f"with {value}, or predict with {expected}"
            )
    if prediction.run.efficiency is None:
        raise InputError("measured steps move predictions of training steps in 16 bits only")
