"""Sections of a report about the search: its history, the optimality gap, and the effects of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tunebench._figure import duration
from tunebench.db.record import RECORDED
from tunebench.outcome import Aborted, Measured, time_us
from tunebench.report.best_kernel import BestKernel
from tunebench.report.chart import bar_chart, gap_chart, slice_chart
from tunebench.report.history import ParameterEffect, SearchHistory, record_us
from tunebench.report.page import data_table, figure, folded, legend, safe, time_cell
from tunebench.report.search_chart import LEGEND, Point, TimeLine, search_chart

__all__ = ["effects_section", "search_section"]

MOST_POINTS = 2000
"""Most trials in a chart; of a longer history, evenly spaced trials and every new best one are drawn."""
MOST_SLICES, MOST_SLICE_POINTS = 8, 60
"""Most parameters with a chart of their values, and most points of each value."""


def search_section(history: SearchHistory, kernel: BestKernel) -> str:
    """Return the time of each trial, and the optimality gap after it."""
    points = list(_points(history))
    drawn = _thinned(points)
    lines = list(_lines(history))
    chart = search_chart(drawn, lines, trials=len(history.records), name="Time of each trial")
    if not chart:
        return ""
    styles = dict.fromkeys(point.style for point in drawn)
    marks = [(style, style) for style in styles]
    marks.append(("best", "best so far"))
    marks += [("served", LEGEND[point.mark]) for point in drawn if point.mark]
    marks += [(line.style, f"{line.meaning or line.label}: {duration(line.us)}") for line in lines]
    section = f"<h3>Search history</h3>{chart}{legend(marks)}"
    if len(drawn) < len(points):
        section += f"<p>{len(drawn)} of {len(points)} trials with a time are drawn.</p>"
    return section + _gaps(history, kernel)


def _gaps(history: SearchHistory, kernel: BestKernel) -> str:
    chart = figure(gap_chart(kernel.gaps, name="Best time over lowest open bound after each trial"))
    if not chart:
        return ""
    meaning = "Best time so far over the lowest lower bound of a configuration that may still be faster."
    if history.best is not None and isinstance(history.best.result.outcome, Measured):
        proof = "At 1 the best is proved optimal in its search space."
        if history.described is not None and history.described.assumed:
            proof = "The bounds rest on measured rates of the processor, which prove nothing."
        return f"<h3>Optimality gap</h3><p>{meaning} {proof}</p>{chart}"
    return f"<h3>Predicted time over lower bound</h3><p>{meaning} A predicted time proves nothing.</p>{chart}"


def _points(history: SearchHistory) -> Iterator[Point]:
    best = history.best
    for trial, record in enumerate(history.records, start=1):
        outcome = record.result.outcome
        us = min(outcome.samples_us) if isinstance(outcome, Aborted) else time_us(outcome)
        style = "finalist" if record.purpose == "finalist" else outcome.kind
        if us is not None:
            title = f"{trial}: {duration(us)}, {style}, {record.key.variant} {record.key.config}"
            mark = _mark(history) if record is best else ""
            yield Point(trial=trial, us=us, style=style, title=title, mark=mark)


def _mark(history: SearchHistory) -> str:
    """Return the label of the best record: lookup never returns a recorded tuning space."""
    if history.workload.startswith(RECORDED) or history.optimum_us is not None:
        return "best"
    return "served, default" if history.default is history.best else "served"


def _thinned(points: list[Point]) -> list[Point]:
    step, best_us, drawn = -(-len(points) // MOST_POINTS), float("inf"), []
    for index, point in enumerate(points):
        new_best = point.style != "aborted" and point.us < best_us
        if new_best:
            best_us = point.us
        if new_best or point.mark or index % step == 0:
            drawn.append(point)
    return drawn


def _lines(history: SearchHistory) -> Iterator[TimeLine]:
    if history.bound_us is not None:
        yield TimeLine(
            style="bound",
            label="lowest bound",
            us=history.bound_us,
            meaning="lowest bound of the trials",
        )
    if history.default is not None and history.default is not history.best:
        yield TimeLine(
            style="default",
            label="default",
            us=record_us(history.default),
            meaning="default configuration",
        )
    if history.optimum_us is not None:
        yield TimeLine(
            style="library",
            label="optimum",
            us=history.optimum_us,
            meaning="optimum of the recording",
        )
    for name, us in history.library_times_us.items():
        yield TimeLine(style="library", label=name, us=us)


def effects_section(effects: Sequence[ParameterEffect]) -> str:
    """Return the importance of parameters, and the times by their values."""
    if not effects:
        return ""
    several = len({effect.variant for effect in effects}) > 1
    named = {
        f"{effect.variant.split('/')[-1]}: {effect.name}" if several else effect.name: effect
        for effect in effects
    }
    shares = {name: 100 * effect.importance for name, effect in named.items()}
    most_important = sorted(named.items(), key=lambda item: -item[1].importance)[:MOST_SLICES]
    slices = "".join(
        f"<figure>{slice_chart(_sampled(effect.times_us), name=f'Times by {name}', title=name)}</figure>"
        for name, effect in most_important
    )
    rows = (
        (
            safe(effect.variant),
            safe(effect.name),
            safe(value),
            str(len(effect.times_us[value])),
            time_cell(us),
        )
        for effect in effects
        for value, us in effect.medians_us.items()
    )
    table = data_table(("variant", "parameter", "value", ">trials", ">median"), rows)
    return (
        "<h3>Parameter importance</h3>"
        "<p>Share of the variance of log time that a parameter alone explains.</p>"
        + figure(bar_chart(shares, name="Parameter importance", unit=" %"))
        + "<h3>Times by parameter value</h3><p>A point is a trial, a bar the median.</p>"
        + f'<div class="slices">{slices}</div>'
        + folded("Median time by parameter value", table)
    )


def _sampled(groups: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return at most so many times of each group, evenly spaced in their order, the extremes included."""
    sampled = {}
    for label, times in groups.items():
        ordered = sorted(times)
        count = min(len(ordered), MOST_SLICE_POINTS)
        sampled[label] = [ordered[round(n * (len(ordered) - 1) / max(1, count - 1))] for n in range(count)]
    return sampled
