"""Charts of search histories and predictions, whose points lead to trials and workloads."""

from __future__ import annotations

from collections.abc import Sequence

from tunebench._console import printable
from tunebench._figure import duration
from tunebench.db.browse import HistoryPoint
from tunebench.report import chart
from tunebench.report.dashboard.catalogue import Line
from tunebench.report.dashboard.chart import ScatterPoint, scatter_chart, spark_line
from tunebench.report.dashboard.listing import Query
from tunebench.report.dashboard.prediction import ComparedPrediction

__all__ = ["DRAWN", "history_drawing", "prediction_drawing", "run_drawing", "small_drawing"]

DRAWN = 1000
"""Most points that a chart draws."""


def history_drawing(points: Sequence[HistoryPoint], line: Line) -> str:
    """Return the chart of a workload's history, with its lower bound and the times of baselines."""
    lines = []
    if line.entry.least_bound_us:
        lines.append(chart.Line(style="bound", label="lowest bound", us=line.entry.least_bound_us))
    best = line.best
    if best is not None and line.default_ratio:
        lines.append(chart.Line(style="default", label="default", us=best.time_us * line.default_ratio))
    if best is not None and line.library is not None and line.library[1] > 0:
        name, ratio = line.library
        lines.append(chart.Line(style="library", label=printable(name), us=best.time_us * ratio))
    return _drawing(points, lines)


def run_drawing(points: Sequence[HistoryPoint], bound_us: float | None) -> str:
    """Return the chart of a search, with its lowest lower bound."""
    lines = [chart.Line(style="bound", label="lowest bound", us=bound_us)] if bound_us else []
    return _drawing(points, lines)


def small_drawing(points: Sequence[HistoryPoint], workload: str) -> str:
    """Return the best time so far of a search, without axes."""
    times = [point.time_us if point.kind != "aborted" else None for point in points]
    return spark_line(times, name=f"Best time so far of {printable(workload)}")


def prediction_drawing(found: Sequence[ComparedPrediction]) -> str:
    """Return the chart of predicted against measured times; of many, evenly spaced ones."""
    drawn = found[:: max(1, -(-len(found) // DRAWN))]
    return scatter_chart(
        [_scatter_point(each) for each in drawn],
        x_title="measured",
        y_title="predicted",
        name="Predicted against measured times",
    )


def _drawing(points: Sequence[HistoryPoint], lines: Sequence[chart.Line]) -> str:
    """Return the chart of a history; of a long one, evenly spaced measurements and every new best."""
    step, best_us, drawn = max(1, -(-len(points) // DRAWN)), float("inf"), []
    for number, point in enumerate(points, start=1):
        if point.time_us is None or point.time_us <= 0:
            continue
        new_best = point.kind != "aborted" and point.time_us < best_us
        if new_best:
            best_us = point.time_us
        if new_best or number % step == 0:
            style = "finalist" if point.purpose == "finalist" else point.kind
            text = f"{number}: {duration(point.time_us)}, {style}, {point.variant} {point.config}"
            href = f"/trials/{point.trial_id}"
            drawn.append(
                chart.Point(trial=number, us=point.time_us, style=style, title=printable(text), href=href)
            )
    if not drawn:
        return ""
    return chart.history_chart(drawn, lines, trials=len(points), name="Time of each measurement")


def _scatter_point(each: ComparedPrediction) -> ScatterPoint:
    entry = each.line.entry
    title = (
        f"{entry.workload} on {each.line.device.product}: predicted {duration(each.predicted_us)}, "
        f"measured {duration(each.measured_us)} ({each.measured})"
    )
    return ScatterPoint(
        x_us=each.measured_us,
        y_us=each.predicted_us,
        style="measured" if each.method == "library" else "finalist",
        title=printable(title),
        href=_workload_href(each.line),
    )


def _workload_href(line: Line) -> str:
    """Return the URL of the page of a workload on a device."""
    return Query("/workload", {}, ()).link(device=line.device.key, workload=line.entry.workload)
