"""Charts as SVG without scripts. Colours come from the page, so that one chart fits light and dark."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunebench._figure import duration, significant
from tunebench.report.svg import (
    Axis,
    Box,
    log_axis,
    svg,
    text,
    time_unit,
    titled,
    trial_axis,
    trial_ticks,
)

__all__ = [
    "Bar",
    "bar_chart",
    "gap_chart",
    "interval_chart",
    "ratio_chart",
    "slice_chart",
    "stacked_bar",
]

BAR_ROW, BAR_LEFT, BAR_RIGHT = 26, 190, 190
RADIUS = 2.0
"""Radius of a point of a trial."""
LONGEST = 28
"""Most characters of a label next to a bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a chart.

    Attributes:
        label: Label before the bar.
        value: Length.
        note: Text after the bar.
        style: Class of the bar.
        low: Lower end of an interval; None without one.
        high: Upper end.
    """

    label: str
    value: float
    note: str
    style: str = "bar"
    low: float | None = None
    high: float | None = None


def gap_chart(gaps: Sequence[float | None], *, name: str) -> str:
    """Return the optimality gap after each trial, on a logarithmic axis; the grid line 1 is the proof.

    Args:
        gaps: Gap after each trial; None before the first time, or without a bound.
        name: Accessible name of the chart.
    """
    points = [(trial, gap) for trial, gap in enumerate(gaps, start=1) if gap is not None]
    if not points:
        return ""
    box = Box(height=200)
    x = trial_axis(box, len(gaps))
    y = Axis(low=0.98, high=max(gap for _, gap in points) * 1.1, start=box.y_end, end=box.top)
    steps = f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"
    for (_, before), (trial, gap) in itertools.pairwise(points):
        if gap != before:
            steps += f"H{x(trial):.1f}V{y(gap):.1f}"
    steps += f"H{box.x_end}"
    start = f"V{y(1.0):.1f}H{x(points[0][0]):.1f}Z"
    last = points[-1][1]
    return svg(
        box,
        name,
        box.horizontal_grid(y),
        trial_ticks(box, x, len(gaps)),
        box.frame(x="trial", y="best / lowest open bound"),
        f'<path class="area" d="{steps}{start}"/>',
        titled("path", f'class="best" d="{steps}"', f"after {len(gaps)} trials: {significant(last)}"),
    )


def bar_chart(values: Mapping[str, float], *, name: str, unit: str) -> str:
    """Return a horizontal bar for each value, with its number at the end.

    Args:
        values: Values by label, at least 0.
        name: Accessible name of the chart.
        unit: Unit after each number, with its space.
    """
    bars = [
        Bar(label=label, value=value, note=f"{significant(value, 3)}{unit}")
        for label, value in values.items()
    ]
    return interval_chart(bars, name=name)


def interval_chart(bars: Sequence[Bar], *, name: str, line: Bar | None = None) -> str:
    """Return horizontal bars with intervals.

    Args:
        bars: The bars, the first one at the top.
        name: Accessible name of the chart.
        line: A vertical line at a value; None for none.
    """
    box = Box(height=BAR_ROW * len(bars) + 8 + (16 if line is not None else 0))
    maximum = max((max(bar.value, bar.high or 0.0) for bar in bars), default=0.0) or 1.0
    x = Axis(low=0.0, high=maximum, start=BAR_LEFT, end=box.width - BAR_RIGHT, log=False)
    parts = []
    for row, bar in enumerate(bars):
        top = 4 + row * BAR_ROW
        label = bar.label if len(bar.label) < LONGEST else f"…{bar.label[-(LONGEST - 2) :]}"
        length = max(1.0, x(bar.value) - BAR_LEFT)
        shape = f'class="{bar.style}" x="{BAR_LEFT}" y="{top + 3}" width="{length:.1f}" height="18" rx="3"'
        end = x(max(bar.value, bar.high or 0.0))
        parts += [
            text(BAR_LEFT - 8, top + 16, label, "end"),
            titled("rect", shape, f"{bar.label}: {bar.note}"),
            text(end + 8, top + 16, bar.note, "start"),
        ]
        if bar.low is not None and bar.high is not None:
            low, high, y = x(bar.low), x(bar.high), top + 12
            whisker = f"M{low:.1f} {y - 4}v8m0 -4H{high:.1f}m0 -4v8"
            parts.append(f'<path class="whisker" d="{whisker}"/>')
    if line is not None:
        line_x = x(min(line.value, maximum))
        parts.append(f'<path class="{line.style}" d="M{line_x:.1f} 2V{box.height - 14}"/>')
        parts.append(text(line_x, box.height - 2, line.note))
    return svg(box, name, *parts)


def ratio_chart(ratios: Mapping[str, tuple[float, str]], *, name: str) -> str:
    """Return bars to the right of 1 for higher ratios and to the left for lower ones, on a logarithmic axis.

    Args:
        ratios: Ratio above 0 and class of the bar, by label.
        name: Accessible name of the chart.
    """
    plot_left = 330
    box = Box(height=BAR_ROW * len(ratios) + 30, left=plot_left)
    far = max([1.1, *(max(ratio, 1 / ratio) for ratio, _ in ratios.values())])
    x = Axis(low=1 / far, high=far, start=plot_left, end=box.width - 60)
    parts = [
        f'<path class="grid" d="M{x(tick):.1f} 2V{box.height - 24}"/>'
        + text(x(tick), box.height - 8, f"{significant(tick)}x")
        for tick in sorted({1.0, *(tick for tick in x.ticks() if tick)})
    ]
    for row, (label, (ratio, style)) in enumerate(ratios.items()):
        top = 4 + row * BAR_ROW
        start, end = sorted((x(1.0), x(ratio)))
        shape = f'class="fill-{style}" x="{start:.1f}" y="{top + 3}" height="18" rx="3"'
        shown = label if len(label) < 46 else f"{label[:44]}…"
        parts += [
            text(plot_left - 34, top + 16, shown, "end"),
            titled("rect", f'{shape} width="{max(1.0, end - start):.1f}"', f"{label}: {ratio:.3f}x"),
            text(end + 6, top + 16, f"{ratio:.2f}x", "start"),
        ]
    return svg(box, name, *parts)


def slice_chart(groups: Mapping[str, Sequence[float]], *, name: str, title: str) -> str:
    """Return the times of each group as points above its label, with the median as a bar.

    Args:
        groups: Times in microseconds, by label; no group is empty.
        name: Accessible name of the chart.
        title: Title of the horizontal axis.
    """
    box = Box(width=380, height=230, left=62, right=10)
    times = [us for group in groups.values() for us in group]
    y = log_axis(times, box.y_end, box.top)
    unit, scale = time_unit(math.sqrt(min(times) * max(times)))
    step = (box.x_end - box.left) / len(groups)
    every = max(1, math.ceil(len(groups) * 34 / (box.x_end - box.left)))
    parts = [box.horizontal_grid(y, scale), box.frame(x=title, y=unit)]
    for index, (label, group) in enumerate(groups.items()):
        middle, spread = box.left + (index + 0.5) * step, min(step * 0.3, 14)
        if index % every == 0:
            parts.append(text(middle, box.y_end + 18, label[:8] + "…" * (len(label) > 8)))
        for count, us in enumerate(group):
            aside = spread * (((count * 0.618) % 1) * 2 - 1)  # evenly spread, in no visible order
            shown = f"{title} {label}: {duration(us)}"
            parts.append(_dot(middle + aside, y(us), RADIUS, "measured", shown))
        center = sorted(group)[len(group) // 2]
        bar = f'class="median" d="M{middle - spread - 3:.1f} {y(center):.1f}H{middle + spread + 3:.1f}"'
        parts.append(titled("path", bar, f"median of {title} {label}: {duration(center)}"))
    return svg(box, name, *parts)


def stacked_bar(parts: Mapping[str, float], *, name: str, unit: str) -> str:
    """Return one bar divided into parts; the style sheet colours them in turn.

    Args:
        parts: Length of each part, by label; at least one is above 0.
        name: Accessible name of the chart.
        unit: Unit of the lengths, with its space.
    """
    box, whole, at = Box(height=34, left=0, right=0), math.fsum(parts.values()), 0.0
    drawn = []
    for index, (label, value) in enumerate(parts.items()):
        length = value / whole * box.width
        shape = f'class="part{index}" x="{at:.1f}" y="2" width="{length:.1f}" height="30"'
        drawn.append(titled("rect", shape, f"{label}: {significant(value, 3)}{unit}"))
        if length > 74:
            drawn.append(
                f'<text class="inside" x="{at + length / 2:.1f}" y="22" text-anchor="middle">'
                f"{value / whole:.0%}</text>"
            )
        at += length
    return svg(box, name, *drawn)


def _dot(x: float, y: float, radius: float, style: str, title: str) -> str:
    return titled("circle", f'class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"', title)
