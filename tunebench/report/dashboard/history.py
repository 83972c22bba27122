"""Charts of search histories and predictions, whose points lead to trials and workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tunebench._console import printable
from tunebench._figure import duration
from tunebench.db.browse import Answer, HistoryPoint
from tunebench.report.dashboard.catalogue import Line
from tunebench.report.dashboard.chart import ScatterPoint, scatter_chart, spark_line
from tunebench.report.dashboard.listing import Query
from tunebench.report.dashboard.prediction import ComparedPrediction
from tunebench.report.search_chart import (
    Curve,
    Point,
    TimeLine,
    best_so_far,
    convergence_chart,
    search_chart,
)

__all__ = [
    "DRAWN",
    "compared_drawing",
    "history_drawing",
    "prediction_drawing",
    "run_drawing",
    "small_drawing",
    "timed_points",
    "workload_href",
]

DRAWN = 1000
"""Most points that a chart draws."""


def history_drawing(points: Sequence[HistoryPoint], line: Line) -> str:
    """Return the chart of a workload's history, with its lower bound and the times of baselines."""
    lines = []
    if line.bound_us:
        lines.append(TimeLine(style="bound", label="lowest bound", us=line.bound_us))
    best, default = line.best, line.figures.default
    default_us = default.time_us if default is not None else None
    if best is not None and best.is_default:  # its point is marked as the default, if it is there
        default_us = None if _served(points, best) else best.time_us
    if default_us:
        lines.append(TimeLine(style="default", label="default", us=default_us))
    if line.library is not None and (library_us := line.library[1].time_us):
        lines.append(TimeLine(style="library", label=printable(line.library[0]), us=library_us))
    return _drawing(points, lines, line.best)


def run_drawing(points: Sequence[HistoryPoint], bound_us: float | None, best: Answer | None) -> str:
    """Return the chart of a search, with its lowest lower bound, and the answer if it measured that."""
    lines = [TimeLine(style="bound", label="lowest bound", us=bound_us)] if bound_us else []
    return _drawing(points, lines, best)


def small_drawing(points: Sequence[HistoryPoint], workload: str) -> str:
    """Return the best time so far of a search, without axes."""
    times = [point.time_us if point.kind != "aborted" else None for point in points]
    return spark_line(times, name=f"Best time so far of {printable(workload)}")


def prediction_drawing(predictions: Sequence[ComparedPrediction]) -> str:
    """Return the chart of predicted against measured times; of many, evenly spaced ones."""
    drawn = predictions[:: max(1, -(-len(predictions) // DRAWN))]
    return scatter_chart(
        [_scatter_point(prediction) for prediction in drawn],
        x_title="measured",
        y_title="predicted",
        name="Predicted against measured times",
    )


def compared_drawing(searches: Sequence[tuple[str, Sequence[HistoryPoint]]]) -> str:
    """Return the best times so far of several searches in one chart.

    Args:
        searches: Label and measurements of each, oldest first.
    """
    curves = [
        Curve(style=f"curve{number}", label=label, steps=best_so_far(timed_points(points)))
        for number, (label, points) in enumerate(searches)
    ]
    trials = max((len(points) for _, points in searches), default=0)
    return convergence_chart(curves, trials=trials, name="Best time so far after each measurement")


def _drawing(points: Sequence[HistoryPoint], lines: Sequence[TimeLine], best: Answer | None) -> str:
    """Return the chart of a history; of a long one, evenly spaced measurements and every new best."""
    timed = timed_points(points)
    served = _served(points, best)
    steps = {trial for trial, _ in best_so_far(timed)} | {served}
    mark = "served, default" if best is not None and best.is_default else "served"
    every = max(1, -(-len(points) // DRAWN))
    drawn = [
        _titled(point, points[point.trial - 1], mark=mark if point.trial == served else "")
        for point in timed
        if point.trial in steps or point.trial % every == 0
    ]
    return search_chart(drawn, lines, trials=len(points), name="Time of each measurement")


def timed_points(points: Sequence[HistoryPoint]) -> list[Point]:
    """Return the measurements with a time, without titles."""
    return [
        Point(
            trial=number,
            us=point.time_us,
            style="finalist" if point.purpose == "finalist" else point.kind,
            title="",
        )
        for number, point in enumerate(points, start=1)
        if point.time_us is not None and point.time_us > 0
    ]


def _titled(point: Point, measured: HistoryPoint, *, mark: str) -> Point:
    title = f"{point.trial}: {duration(point.us)}, {point.style}, {measured.variant} {measured.config}"
    return replace(point, title=printable(title), href=f"/trials/{measured.trial_id}", mark=mark)


def _served(points: Sequence[HistoryPoint], best: Answer | None) -> int:
    """Return the number of the newest measurement with the time that lookup returns; 0 without one."""
    numbers = (
        number
        for number, point in enumerate(points, start=1)
        if best is not None and (point.trial_id, point.time_us) == (best.trial_id, best.time_us)
    )
    return max(numbers, default=0)


def _scatter_point(compared: ComparedPrediction) -> ScatterPoint:
    entry = compared.line.entry
    title = (
        f"{entry.workload} on {compared.line.device.product}: predicted {duration(compared.predicted_us)}, "
        f"measured {duration(compared.measured_us)} ({compared.measured})"
    )
    return ScatterPoint(
        x_us=compared.measured_us,
        y_us=compared.predicted_us,
        style="measured" if compared.method == "library" else "finalist",
        title=printable(title),
        href=workload_href(compared.line),
    )


def workload_href(line: Line) -> str:
    """Return the URL of the page of a workload on a device."""
    return Query("/workload", {}, ()).link(device=line.device.key, workload=line.entry.workload)
