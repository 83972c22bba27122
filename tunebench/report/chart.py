"""Charts as SVG without scripts. Colours come from the page, so that one chart fits light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunebench._figure import significant

__all__ = ["Line", "Point", "bar_chart", "history_chart"]

WIDTH, HEIGHT = 760, 340
LEFT, RIGHT, TOP, BOTTOM = 78, 16, 14, 44
BAR_ROW, BAR_LEFT = 26, 190
MARGIN = 1.05
"""Ratio of the ends of the time axis to the extreme times."""
MANY, RADIUS, SMALL_RADIUS = 500, 3.5, 2.0
"""Number of points above which they are small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A trial in a history chart.

    Attributes:
        trial: Number of the trial, from 1.
        us: Time, in microseconds.
        style: Class of the point: ``measured``, ``predicted``, ``finalist`` or ``aborted``.
        title: Text that a pointer on the point shows.
    """

    trial: int
    us: float
    style: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A horizontal line in a history chart: class of the line, label, and time in microseconds."""

    style: str
    label: str
    us: float


def history_chart(points: Sequence[Point], lines: Sequence[Line], *, trials: int, name: str) -> str:
    """Return the time of each trial, the best time so far, and horizontal lines, on a logarithmic axis.

    Args:
        points: The trials with a time, in order.
        lines: The lower bound, the default and baselines.
        trials: Number of trials, failures included.
        name: Accessible name of the chart.
    """
    values = [*(point.us for point in points), *(line.us for line in lines)]
    if not values:
        return ""
    low, high = min(values) / MARGIN, max(values) * MARGIN

    def x(trial: float) -> float:
        return LEFT + (trial - 0.5) / max(1, trials) * (WIDTH - LEFT - RIGHT)

    def y(us: float) -> float:
        share = (math.log(us) - math.log(low)) / (math.log(high) - math.log(low))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)}">']
    for us in _log_ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {y(us):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y(us) + 4, significant(us), "end"))
    for trial in _trial_ticks(trials):
        parts.append(_text(x(trial), HEIGHT - BOTTOM + 18, str(trial), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "trial", "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">time, microseconds</text>'
    )
    for line in lines:
        title = f"<title>{html.escape(line.label)}: {significant(line.us)} us</title>"
        parts.append(
            f'<path class="{line.style}" d="M{LEFT} {y(line.us):.1f}H{WIDTH - RIGHT}">{title}</path>'
        )
    best = _best_so_far(points)
    if best:
        steps = f"M{x(best[0].trial):.1f} {y(best[0].us):.1f}"
        steps += "".join(f"H{x(point.trial):.1f}V{y(point.us):.1f}" for point in best[1:])
        parts.append(f'<path class="best" d="{steps}H{WIDTH - RIGHT}"/>')
    radius = RADIUS if len(points) < MANY else SMALL_RADIUS
    for point in points:
        place = f'cx="{x(point.trial):.1f}" cy="{y(point.us):.1f}"'
        title = f"<title>{html.escape(point.title)}</title>"
        parts.append(f'<circle class="{point.style}" {place} r="{radius}">{title}</circle>')
    return "".join((*parts, "</svg>"))


def bar_chart(values: Mapping[str, float], *, name: str, unit: str) -> str:
    """Return a horizontal bar for each value, with its number at the end.

    Args:
        values: Values by label, at least 0.
        name: Accessible name of the chart.
        unit: Unit after each number, with its space.
    """
    most = max(values.values(), default=0.0) or 1.0
    height = BAR_ROW * len(values) + 8
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(name)}">']
    for row, (label, value) in enumerate(values.items()):
        top = 4 + row * BAR_ROW
        length = value / most * (WIDTH - BAR_LEFT - 100)
        parts.append(_text(BAR_LEFT - 8, top + 16, label if len(label) < 28 else f"…{label[-26:]}", "end"))
        parts.append(
            f'<rect class="bar" x="{BAR_LEFT}" y="{top + 3}" width="{max(1.0, length):.1f}" height="18"/>'
        )
        parts.append(_text(BAR_LEFT + length + 8, top + 16, f"{significant(value, 3)}{unit}", "start"))
    return "".join((*parts, "</svg>"))


def _best_so_far(points: Sequence[Point]) -> list[Point]:
    best: list[Point] = []
    for point in points:
        if point.style != "aborted" and (not best or point.us < best[-1].us):
            best.append(point)
    return best


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round values on a logarithmic axis, three to eight of them."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks: list[float] = []
    for digits in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
        ticks = [d * 10.0**e for e in range(first, last + 1) for d in digits if low <= d * 10.0**e <= high]
        if len(ticks) >= 3:
            return ticks
    return sorted({*ticks, float(significant(low * MARGIN, 3))})


def _trial_ticks(trials: int) -> list[int]:
    step = max(1, trials // 8)
    size = 10 ** int(math.log10(step))
    step = next(size * digit for digit in (1, 2, 5, 10) if size * digit >= step)
    return list(range(step, trials + 1, step))
