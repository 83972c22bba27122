"""Section of a report about other objectives than the time: the best of them, or the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tunebench._figure import duration, significant
from tunebench.objective import TIME, Goal, Objective
from tunebench.outcome import Outcome
from tunebench.report.history import SearchHistory
from tunebench.report.page import config_cell, data_table, figure, legend, safe
from tunebench.report.svg import Axis, Box, svg, text, titled

__all__ = ["front_chart", "front_section", "metric_text"]

MOST_DOTS = 3000
"""Most configurations in the chart; the front is always drawn."""

AROUND = 1.5
"""How far the chart goes beyond the front, as a multiple of its extent."""

SPREAD = 20.0
"""Ratio of the greatest to the least value from which an axis is logarithmic."""


def front_section(history: SearchHistory, heading: str = "h3") -> str:
    """Return the goal of the newest run, and the configurations that no other one dominates.

    It is empty if the run minimised the time without requirements.

    Args:
        history: The search history.
        heading: Element of its heading.
    """
    goal = history.goal
    if not goal.is_asked:
        return ""
    front = history.front
    objectives = ", ".join(map(str, goal.chosen))
    required = f" Required: {', '.join(map(str, goal.requirements))}." if goal.requirements else ""
    section = f"<{heading}>Objectives</{heading}><p>{safe(objectives)}.{safe(required)}</p>"
    if not front:
        return section + "<p>No configuration has all of this.</p>"
    several = len(goal.chosen) > 1
    if several:
        shown, outcomes = history.completed, [record.result.outcome for record in front]
        section += figure(front_chart(goal, [record.result.outcome for record in shown], outcomes))
        section += legend([("measured", "configuration"), ("finalist", "Pareto front")])
        first_two = " of the first two objectives" if len(goal.chosen) > 2 else ""
        section += f"<p>The chart shows the surroundings of the front{first_two}.</p>"
    names = [objective.name for objective in goal.chosen]
    rows = (
        (
            *(safe(metric_text(name, value)) for name, value in zip(names, values, strict=True)),
            safe(record.key.variant),
            config_cell(record.key.config),
        )
        for record in front
        if (values := goal.values(record.result.outcome)) is not None
    )
    return section + data_table((*(f">{safe(name)}" for name in names), "variant", "configuration"), rows)


def metric_text(name: str, value: float) -> str:
    """Return the value of a metric; a time has its unit."""
    return duration(value) if name == TIME else significant(value)


def front_chart(goal: Goal, outcomes: Sequence[Outcome], front: Sequence[Outcome]) -> str:
    """Return the configurations by their first two objectives, with the Pareto front.

    Args:
        goal: At least two objectives.
        outcomes: Completed outcomes of the configurations.
        front: Those of the front, the best of the first objective first.
    """
    values = [value for outcome in outcomes if (value := goal.values(outcome)) is not None]
    on_front = [value for outcome in front if (value := goal.values(outcome)) is not None]
    step = -(-len(values) // MOST_DOTS)
    first, second = goal.chosen[:2]
    box = Box(height=360, left=90)
    x = _axis(*_around([v[0] for v in on_front], [v[0] for v in values]), box.left, box.x_end)
    y = _axis(*_around([v[1] for v in on_front], [v[1] for v in values]), box.y_end, box.top)
    x_power, y_power = _power(x), _power(y)
    parts = [
        box.horizontal_grid(y, 10.0**-y_power),
        *(text(x(tick), box.y_end + 18, significant(tick * 10.0**-x_power)) for tick in x.ticks()),
        box.frame(x=_title(first, x_power), y=_title(second, y_power)),
    ]
    for value in values[::step]:
        if not (x.low <= value[0] <= x.high and y.low <= value[1] <= y.high):
            continue
        parts.append(f'<circle class="measured" cx="{x(value[0]):.1f}" cy="{y(value[1]):.1f}" r="2.5"/>')
    if len(goal.chosen) == 2:
        boundary = _steps(x, y, on_front, maximize=first.maximize)
        parts.append(f'<path class="best" d="{boundary}"/>')
    for value in on_front:
        named = zip(goal.chosen, value, strict=True)
        title = ", ".join(f"{item.name} {metric_text(item.name, number)}" for item, number in named)
        parts.append(_diamond(x(value[0]), y(value[1]), title))
    return svg(box, "Pareto front of the objectives", *parts)


def _power(axis: Axis) -> int:
    """Return the power of ten, a multiple of 3, that the labels of an axis leave out to be short."""
    largest = max(abs(axis.low), abs(axis.high))
    power = 3 * math.floor(math.log10(largest) / 3) if largest else 0
    return power if power < -3 or power > 3 else 0


def _title(objective: Objective, power: int) -> str:
    unit = "time, microseconds" if objective.name == TIME else objective.name
    factor = f", in 1e{power}" if power else ""
    return f"{unit}{factor} ({'more' if objective.maximize else 'less'} is better)"


def _around(front: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the range of an objective around its front: slow configurations would squeeze it."""
    low, high = min(front), max(front)
    reach = max(AROUND * (high - low), 0.25 * abs(high))
    return max(min(values), low - reach), min(max(values), high + reach)


def _axis(low: float, high: float, start: float, end: float) -> Axis:
    """Return an axis with a margin; logarithmic if the values are positive and differ much."""
    if low > 0 and high > SPREAD * low:
        return Axis(low=low / 1.1, high=high * 1.1, start=start, end=end)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return Axis(low=low - margin, high=high + margin, start=start, end=end, log=False)


def _steps(x: Axis, y: Axis, front: Sequence[Sequence[float]], *, maximize: bool) -> str:
    """Return the boundary of what the front dominates, as a path of steps.

    Args:
        x: Axis of the first objective.
        y: Axis of the second one.
        front: Values of the front.
        maximize: Whether more of the first objective is better: the next point then dominates up to the last.
    """
    ordered = sorted(front, key=lambda value: value[0])
    path = f"M{x(ordered[0][0]):.1f} {y(ordered[0][1]):.1f}"
    for value in ordered[1:]:
        across, along = f"H{x(value[0]):.1f}", f"V{y(value[1]):.1f}"
        path += along + across if maximize else across + along
    return path


def _diamond(x: float, y: float, title: str) -> str:
    r = 5.0 * math.sqrt(1.2)
    shape = f"M{x - r:.1f} {y:.1f}L{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}Z"
    return titled("path", f'class="finalist" d="{shape}"', title)
