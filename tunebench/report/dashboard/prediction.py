"""Predicted times next to measured ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunebench.db.browse import DeviceEntry
from tunebench.device import Device
from tunebench.errors import TunebenchError
from tunebench.report.dashboard.catalogue import Line

__all__ = ["METHODS", "Agreement", "ComparedPrediction", "agreement", "compared_predictions", "prepare"]

METHODS = {
    "library": "tunebench predict: time of library kernels, against the fastest library that was measured",
    "offline": "tune --arch: best predicted time of kernels here, against the best measured one",
}
"""Predictions that are compared, with what they are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPrediction:
    """A predicted time and a measured one of a workload on a device.

    Attributes:
        line: The workload on the device that was measured.
        method: One of `METHODS`.
        measured: What was measured: the name of a library, or of a variant.
        predicted_us: Predicted time, in microseconds.
        measured_us: Measured time.
        interval_us: 90 % prediction interval; None if there is none.
    """

    line: Line
    method: str
    measured: str
    predicted_us: float
    measured_us: float
    interval_us: tuple[float, float] | None = None

    @property
    def ratio(self) -> float:
        """Predicted over measured time."""
        return self.predicted_us / self.measured_us

    @property
    def error(self) -> float:
        """Relative error of the prediction, at least 0."""
        return abs(self.ratio - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Errors of one method.

    Attributes:
        method: One of `METHODS`.
        count: Number of predictions.
        median: Median error.
        high: 90th percentile of the error.
        inside: Share of measured times inside the 90 % prediction interval; None if there is no interval.
    """

    method: str
    count: int
    median: float
    high: float
    inside: float | None


def compared_predictions(lines: Sequence[Line]) -> list[ComparedPrediction]:
    """Return every prediction with a measured time to compare with.

    Args:
        lines: The catalogue.
    """
    return [*_of_libraries(lines), *_of_searches(lines)]


def agreement(predictions: Iterable[ComparedPrediction]) -> list[Agreement]:
    """Return the errors of each method that has predictions."""
    groups: dict[str, list[ComparedPrediction]] = {}
    for prediction in predictions:
        groups.setdefault(prediction.method, []).append(prediction)
    return [_agreement(method, groups[method]) for method in METHODS if method in groups]


def _agreement(method: str, group: Sequence[ComparedPrediction]) -> Agreement:
    errors = sorted(prediction.error for prediction in group)
    intervals = [
        (prediction.measured_us, prediction.interval_us)
        for prediction in group
        if prediction.interval_us is not None
    ]
    inside = [low <= measured_us <= high for measured_us, (low, high) in intervals]
    return Agreement(
        method=method,
        count=len(group),
        median=statistics.median(errors),
        high=errors[math.ceil(0.9 * len(errors)) - 1],
        inside=sum(inside) / len(inside) if inside else None,
    )


def _of_libraries(lines: Iterable[Line]) -> Iterable[ComparedPrediction]:
    for line in filter(_is_compared, lines):
        predicted = _known.get((line.device.key, line.entry.workload))
        if predicted is not None and line.library is not None and line.library[1].time_us:
            yield ComparedPrediction(
                line=line,
                method="library",
                measured=line.library[0],
                predicted_us=predicted[0],
                measured_us=line.library[1].time_us,
                interval_us=predicted[1:],
            )


_Times = tuple[float, float, float]
_known: dict[tuple[str, str], _Times | None] = {}
"""Predicted time and interval by device and workload, which determine them."""


def predict_library(line: Line) -> _Times | None:
    """Return predicted time and 90 % interval of library kernels, in microseconds.

    The first call for a workload takes a millisecond; the result is kept.

    Args:
        line: The workload on the device. None is returned if `tunebench.forecast` supports neither.
    """
    key = (line.device.key, line.entry.workload)
    if key not in _known:
        _known[key] = _predicted(line.device, line.entry.workload)
    return _known[key]


def prepare(line: Line) -> None:
    """Predict a workload now, so that `compared_predictions` takes no time for it."""
    if _is_compared(line):
        predict_library(line)


def _is_compared(line: Line) -> bool:
    best = line.best
    return (
        best is not None
        and best.kind == "measured"
        and line.device.kind == "gpu"
        and line.library is not None
    )


def _predicted(device: DeviceEntry, workload: str) -> _Times | None:
    from tunebench.forecast.library import predict
    from tunebench.workloads import parse

    try:
        prediction = predict(parse(workload), Device(**device.descriptor))
    except (TunebenchError, TypeError, ValueError):  # of another version, or a recorded space
        return None
    return (prediction.time_us, prediction.low_us, prediction.high_us)


def _of_searches(lines: Sequence[Line]) -> Iterable[ComparedPrediction]:
    predicted: dict[tuple[str, str, str], float] = {}
    for line in lines:
        answer = line.fastest("predicted")
        if answer is not None:
            predicted.setdefault(_product(line), answer.time_us)
    for line in lines:
        answer = line.fastest("measured")
        if answer is not None and _product(line) in predicted:
            yield ComparedPrediction(
                line=line,
                method="offline",
                measured=answer.variant,
                predicted_us=predicted[_product(line)],
                measured_us=answer.time_us,
            )


def _product(line: Line) -> tuple[str, str, str]:
    """Return what a predicted and a measured time must share: the power limit may differ."""
    return line.device.architecture, line.device.product, line.entry.workload
