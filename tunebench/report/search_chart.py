"""Chart of a search in two panels: near the best time, and the whole range down to the lower bound.

Over the whole range the times of good configurations are one line. The panel near the best has a linear axis,
and marks trials and lines outside of it at its edges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tunebench._figure import duration
from tunebench.report.label import LEADER_PX, Label, label_svg, place_labels
from tunebench.report.svg import Axis, Box, linked, log_axis, safe, time_unit, titled, trial_axis, trial_ticks

__all__ = [
    "LEGEND",
    "Curve",
    "Point",
    "TimeLine",
    "best_so_far",
    "convergence_chart",
    "near_range",
    "search_chart",
]

PANEL = Box(width=500, height=320, left=62, right=148, top=12, bottom=40)
"""Size of a panel; its right margin holds the labels."""
PAD = 6
"""Width of a strip around the plot in which points at its edges are drawn, in pixels."""
MANY, RADIUS, SMALL_RADIUS = 300, 3.2, 1.9
"""Number of points above which they are small."""
NEAR, LEAST_NEAR = 2.0, 1.15
"""Most and least ratio of the upper end of the panel near the best to the best time, for the trials."""
SLOWER, FASTER = 2.5, 1.5
"""Ratio of the slowest line that the panel includes to the best time, and of the best time to the fastest."""
FAR = 5.0
"""`SLOWER` of a comparison, in whose panel near the best both curves should end."""
MOST_LINES = 4
"""Most lines that are all labelled in the whole range; of more, those outside of the other."""
SHARE = 0.75
"""Share of the trials that the panel near the best includes, within these limits."""
BELOW = 0.1
"""Room below the best time, as a share of the room above it."""

LEGEND = {
    "served": "configuration that lookup returns",
    "served, default": "configuration that lookup returns, the default",
    "best": "best configuration",
}
"""Meaning of the mark of a point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A trial in a search chart.

    Attributes:
        trial: Number of the trial, from 1.
        us: Time, in microseconds.
        style: Class of the point: ``measured``, ``predicted``, ``finalist`` or ``aborted``.
        title: Text that a pointer on the point shows.
        href: URL that the point leads to; empty for none.
        mark: Label of a point that is marked, a key of `LEGEND`; empty for others.
    """

    trial: int
    us: float
    style: str
    title: str
    href: str = ""
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """A horizontal line in a search chart.

    Attributes:
        style: Class of the line.
        label: Label in the chart.
        us: Time, in microseconds.
        meaning: Name in the legend; empty if it is the label.
    """

    style: str
    label: str
    us: float
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Best time so far of a search: class and label of the curve, and each new best as trial and time."""

    style: str
    label: str
    steps: tuple[tuple[int, float], ...]


_Mark = TypeVar("_Mark", Point, TimeLine)


def search_chart(points: Sequence[Point], lines: Sequence[TimeLine], *, trials: int, name: str) -> str:
    """Return the time of each trial, the best time so far, and horizontal lines, as HTML of two panels.

    Args:
        points: The trials with a time, in order; those with a mark are labelled.
        lines: The lower bound, the default and baselines, the most important first; each is optional.
        trials: Number of trials, failures included.
        name: Accessible name of the chart.

    Returns:
        The panels; empty without a point.
    """
    points, lines = list(_drawable(points)), list(_drawable(lines))
    if not points:
        return ""
    steps = best_so_far(points)
    curve = Curve(style="best", label="best so far", steps=steps)
    best_us = steps[-1][1] if steps else min(point.us for point in points)
    marked_us = [point.us for point in points if point.mark]
    times = [point.us for point in points if point.style != "aborted"] or [best_us]
    near = near_range(best_us, times, [line.us for line in lines], marked_us)
    return _panels(points, lines, [curve], near=near, trials=trials, name=name)


def convergence_chart(curves: Sequence[Curve], *, trials: int, name: str) -> str:
    """Return the best times so far of several searches as HTML of two panels.

    Args:
        curves: The searches; those without a time are left out.
        trials: Number of trials of the longest search, failures included.
        name: Accessible name of the chart.

    Returns:
        The panels; empty without a curve.
    """
    curves = [curve for curve in curves if curve.steps]
    if not curves:
        return ""
    final_us = [curve.steps[-1][1] for curve in curves]
    times = [us for curve in curves for _, us in curve.steps]
    near = near_range(min(final_us), times, final_us, slower=FAR)
    return _panels((), (), curves, near=near, trials=trials, name=name)


def near_range(
    best_us: float,
    times_us: Iterable[float],
    lines_us: Iterable[float],
    marked_us: Sequence[float] = (),
    *,
    slower: float = SLOWER,
) -> tuple[float, float]:
    """Return the range of the panel near the best, in microseconds.

    Args:
        best_us: The best time.
        times_us: Times of the trials; most of them are included.
        lines_us: Times of lines, which are included if they are near.
        marked_us: Times that are included, near or not: on a busy machine, what `lookup` returns may be much
            slower than the fastest sample of the search.
        slower: Ratio of the slowest line that is near to the best time.
    """
    ordered = sorted(times_us)
    typical_us = ordered[min(len(ordered) - 1, int(SHARE * len(ordered)))] if ordered else best_us
    included = [us for us in lines_us if best_us / FASTER <= us <= best_us * slower] + [*marked_us]
    high = max(LEAST_NEAR * best_us, *(1.03 * us for us in (min(typical_us, NEAR * best_us), *included)))
    low = min([best_us, *included])
    return low - BELOW * (high - low), high


def best_so_far(points: Iterable[Point]) -> tuple[tuple[int, float], ...]:
    """Return trial and time of each new best; an aborted trial is none."""
    steps: list[tuple[int, float]] = []
    for point in points:
        if point.style != "aborted" and (not steps or point.us < steps[-1][1]):
            steps.append((point.trial, point.us))
    return tuple(steps)


def _drawable(marks: Iterable[_Mark]) -> Iterator[_Mark]:
    """Yield what a logarithmic axis can show: a database may contain any number as a time."""
    return (mark for mark in marks if 0 < mark.us < math.inf)


# -- panels --------------------------------------------------------------------------------------------------


def _panels(
    points: Sequence[Point],
    lines: Sequence[TimeLine],
    curves: Sequence[Curve],
    *,
    near: tuple[float, float],
    trials: int,
    name: str,
) -> str:
    values = [
        *(point.us for point in points),
        *(line.us for line in lines),
        *(us for curve in curves for _, us in curve.steps),
    ]
    close = Axis(low=near[0], high=near[1], start=PANEL.y_end, end=PANEL.top, log=False)
    whole = log_axis(values, PANEL.y_end, PANEL.top)
    focus = f'<path class="focus" d="{_band(whole, near)}"/>'
    figures = (
        ("Near the best, linear", _panel(points, lines, curves, y=close, trials=trials, name=name)),
        (
            "Whole range, logarithmic",
            _panel(
                points,
                lines,
                curves,
                y=whole,
                trials=trials,
                name=f"{name}, whole range",
                labelled=_most_apart(lines, near),
                under=focus,
            ),
        ),
    )
    drawn = "".join(
        f"<figure><figcaption>{caption}</figcaption>{panel}</figure>" for caption, panel in figures
    )
    return f'<div class="panels">{drawn}</div>'


def _most_apart(lines: Sequence[TimeLine], near: tuple[float, float]) -> Sequence[TimeLine]:
    """Return the lines to label in the whole range: of many, only those that the other panel cannot show."""
    outside = [line for line in lines if not near[0] <= line.us <= near[1]]
    return lines if len(lines) <= MOST_LINES else outside


def _band(y: Axis, near: tuple[float, float]) -> str:
    """Return the path of the range of the other panel."""
    top, bottom = (y(min(max(us, y.low), y.high)) for us in (near[1], near[0]))
    return f"M{PANEL.left} {top:.1f}H{PANEL.x_end}V{bottom:.1f}H{PANEL.left}Z"


def _panel(
    points: Sequence[Point],
    lines: Sequence[TimeLine],
    curves: Sequence[Curve],
    *,
    y: Axis,
    trials: int,
    name: str,
    labelled: Sequence[TimeLine] | None = None,
    under: str = "",
) -> str:
    box, x = PANEL, trial_axis(PANEL, trials)
    unit, scale = time_unit(math.sqrt(y.low * y.high) if y.log else y.high)
    inside = [point for point in points if y.low <= point.us <= y.high]
    drawn = [under]
    drawn += [_line(line, y) for line in lines if y.low <= line.us <= y.high]
    drawn += [_curve(curve, x, y) for curve in curves]
    if len(inside) < len(points):
        drawn.append(_beyond(x, y, [point for point in points if point.us > y.high]))
    radius = RADIUS if len(points) < MANY else SMALL_RADIUS
    drawn += [_mark(point, x, y, radius) for point in inside]
    labels = place_labels(
        list(_labels(points, lines if labelled is None else labelled, curves, y)),
        left=box.x_end + LEADER_PX,
        width=box.right - LEADER_PX - 2,
        top=2,
        bottom=box.y_end + 6,
    )
    head = f'<svg viewBox="0 0 {box.width:.0f} {box.height:.0f}" role="img" aria-label="{safe(name)}"'
    axes = f'data-x="{x.low} {x.high}" data-y="{y.low!r} {y.high!r} {scale} {"log" if y.log else "linear"}"'
    x_min, top = box.left - PAD, box.top - PAD
    size = f"{box.x_end - box.left + 2 * PAD} {box.y_end - box.top + 2 * PAD}"
    width, height = size.split()
    area = f'x="{x_min}" y="{top}" width="{width}" height="{height}" viewBox="{x_min} {top} {size}"'
    return "".join(
        (
            f'{head} class="panel" {axes}>',
            f'<g class="ticks">{box.horizontal_grid(y, scale)}{trial_ticks(box, x, trials)}</g>',
            box.frame(x="trial", y=f"time, {unit}"),
            f'<svg class="plot" {area}>{"".join(drawn)}</svg>',
            f'<g class="labels">{label_svg(labels)}</g></svg>',
        )
    )


def _line(line: TimeLine, y: Axis) -> str:
    path = f'class="{line.style}" d="M{PANEL.left} {y(line.us):.1f}H{PANEL.x_end}"'
    return titled("path", path, f"{line.label}: {duration(line.us)}")


def _curve(curve: Curve, x: Axis, y: Axis) -> str:
    if not curve.steps:
        return ""
    (first, first_us), *later = ((trial, _clamped(us, y)) for trial, us in curve.steps)
    path = f"M{x(first):.1f} {first_us:.1f}" + "".join(f"H{x(trial):.1f}V{us:.1f}" for trial, us in later)
    title = f"{curve.label}: {duration(curve.steps[-1][1])}"
    return titled("path", f'class="{curve.style}" d="{path}H{PANEL.x_end}"', title)


def _clamped(us: float, y: Axis) -> float:
    """Return the place of a time; a time outside of the axis is a little outside of the plot."""
    return min(max(y(us), PANEL.top - 2 * PAD), PANEL.y_end + 2 * PAD)


def _beyond(x: Axis, y: Axis, points: Sequence[Point]) -> str:
    """Return marks at the upper edge for trials that are slower than the axis."""
    marks = "".join(f"M{x(point.trial):.1f} {PANEL.top + 1}l-3 5h6z" for point in points)
    title = f"{len(points)} trials are slower than {duration(y.high)}"
    return titled("path", f'class="beyond" d="{marks}"', title) if points else ""


def _mark(point: Point, x: Axis, y: Axis, radius: float) -> str:
    """Return a point: shapes differ, so that they do not depend on colours."""
    attributes = f'class="{point.style}" transform="translate({x(point.trial):.1f} {y(point.us):.1f})"'
    if point.style == "finalist":
        size = round(radius + 1.4, 1)
        diamond = f"M0 -{size}L{size} 0L0 {size}L-{size} 0Z"
        mark = titled("path", f'{attributes} d="{diamond}"', point.title)
    elif point.style == "aborted":
        size = round(radius - 0.4, 1)
        cross = f"M-{size} -{size}L{size} {size}M-{size} {size}L{size} -{size}"
        mark = titled("path", f'{attributes} d="{cross}"', point.title)
    else:
        mark = titled("circle", f'{attributes} r="{radius}"', point.title)
    mark = linked(mark, point.href) if point.href else mark
    if not point.mark:
        return mark
    guide = f'<path class="guide" d="M{x(point.trial):.1f} {y(point.us):.1f}H{PANEL.x_end}"/>'
    ring = f'<circle class="served" transform="translate({x(point.trial):.1f} {y(point.us):.1f})" r="7.5"/>'
    return guide + mark + ring


def _labels(
    points: Sequence[Point], lines: Sequence[TimeLine], curves: Sequence[Curve], y: Axis
) -> Iterator[Label]:
    """Yield the labels, the most important first."""
    shown = [(point.mark, point.us, "served") for point in points if point.mark]
    if len(curves) > 1:
        shown += [(curve.label, curve.steps[-1][1], curve.style) for curve in curves]
    shown += [(line.label, line.us, line.style) for line in lines]
    for name, us, style in shown:
        arrow = "↑ " if us > y.high else "↓ " if us < y.low else ""
        middle = min(max(y(us), PANEL.top), PANEL.y_end)
        yield Label(
            name=arrow + name, value=duration(us), y=middle, style=style, rank=-us, is_outside=bool(arrow)
        )
