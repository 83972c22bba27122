"""Charts of the dashboard as SVG: samples of a measurement, predicted and measured times, a small history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunebench._figure import duration, significant
from tunebench.report.svg import Axis, Box, linked, log_axis, svg, text, time_unit, titled

__all__ = ["ScatterPoint", "sample_chart", "scatter_chart", "spark_line"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScatterPoint:
    """A point: two times in microseconds, its class, a title and a link."""

    x_us: float
    y_us: float
    style: str
    title: str
    href: str


def scatter_chart(points: Sequence[ScatterPoint], *, x_title: str, y_title: str, name: str) -> str:
    """Return points on two logarithmic axes with the same range, and the line where both are equal.

    Args:
        points: The points, with positive times.
        x_title: Title of the horizontal axis, without its unit.
        y_title: Title of the vertical axis, without its unit.
        name: Accessible name of the chart.
    """
    values = [value for point in points for value in (point.x_us, point.y_us)]
    if not values:
        return ""
    box = Box(height=460)
    x, y = log_axis(values, box.left, box.x_end), log_axis(values, box.y_end, box.top)
    unit, scale = time_unit(math.sqrt(min(values) * max(values)))
    parts = [box.horizontal_grid(y, scale), box.frame(x=f"{x_title}, {unit}", y=f"{y_title}, {unit}")]
    for tick in x.ticks():
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {box.top}V{box.y_end}"/>')
        parts.append(text(x(tick), box.y_end + 18, significant(tick * scale)))
    parts.append(f'<path class="equal" d="M{box.left} {box.y_end}L{box.x_end} {box.top}"/>')
    for point in points:
        attributes = f'class="{point.style}" cx="{x(point.x_us):.1f}" cy="{y(point.y_us):.1f}" r="4"'
        parts.append(linked(titled("circle", attributes, point.title), point.href))
    return svg(box, name, *parts)


def sample_chart(
    samples_us: Sequence[float], *, median_us: float | None, ci_us: tuple[float, float] | None, name: str
) -> str:
    """Return the samples of a measurement in the order taken, with the median and its confidence interval.

    Args:
        samples_us: The samples, in microseconds.
        median_us: Median; None for an aborted measurement.
        ci_us: 95 % confidence interval of the median; None for an aborted measurement.
        name: Accessible name of the chart.
    """
    if not samples_us:
        return ""
    box = Box(height=220)
    low, high = min(samples_us), max(samples_us)
    room = (high - low or high or 1.0) * 0.08
    y = Axis(low=low - room, high=high + room, start=box.y_end, end=box.top, log=False)
    x = Axis(low=0.5, high=len(samples_us) + 0.5, start=box.left, end=box.x_end, log=False)
    unit, scale = time_unit(high)
    parts = [
        box.horizontal_grid(y, scale),
        box.frame(x=f"sample, 1 to {len(samples_us)}", y=f"time, {unit}"),
    ]
    if ci_us is not None:
        top, bottom = y(min(ci_us[1], y.high)), y(max(ci_us[0], y.low))
        size = f'width="{box.x_end - box.left}" height="{max(1.0, bottom - top):.1f}"'
        parts.append(f'<rect class="ci" x="{box.left}" y="{top:.1f}" {size}/>')
    if median_us is not None:
        parts.append(f'<path class="best" d="M{box.left} {y(median_us):.1f}H{box.x_end}"/>')
    for at, us in enumerate(samples_us, start=1):
        attributes = f'class="measured" cx="{x(at):.1f}" cy="{y(us):.1f}" r="3"'
        parts.append(titled("circle", attributes, f"sample {at}: {duration(us)}"))
    return svg(box, name, *parts)


def spark_line(times_us: Sequence[float | None], *, name: str) -> str:
    """Return the best time so far over the measurements, on a logarithmic axis without labels.

    Args:
        times_us: Time of each measurement, in microseconds; None for a failure.
        name: Accessible name of the chart.
    """
    best: list[tuple[int, float]] = []
    for at, us in enumerate(times_us):
        if us is not None and us > 0 and (not best or us < best[-1][1]):
            best.append((at, us))
    if not best:
        return ""
    box = Box(width=160, height=36, left=0, right=0, top=3, bottom=3)
    x = Axis(low=0, high=max(1, len(times_us) - 1), start=0, end=box.width, log=False)
    y = log_axis([us for _, us in best], box.y_end, box.top)
    (first, first_us), *later = best
    steps = f"M{x(first):.1f} {y(first_us):.1f}" + "".join(f"H{x(at):.1f}V{y(us):.1f}" for at, us in later)
    return svg(box, name, f'<path class="best" d="{steps}H{box.width}"/>')
