"""Self-contained HTML pages of search histories and comparisons.

Every text of a database is escaped: names, configurations and reasons may come from imported files.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from tunebench._figure import significant
from tunebench._version import __version__
from tunebench.db.record import Record
from tunebench.outcome import time_us
from tunebench.report.chart import Line, Point, bar_chart, history_chart
from tunebench.report.comparison import DatabaseComparison
from tunebench.report.history import SearchHistory, best_records
from tunebench.report.style import script, style_sheet

__all__ = ["comparison_page", "data_table", "history_page", "page"]

MOST_POINTS = 3000
"""Most trials in a chart; of a longer history, evenly spaced trials and every new best one are drawn."""
MOST_ROWS = 50
"""Most configurations in a table."""
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def page(title: str, body: str) -> str:
    """Return a page that loads nothing from elsewhere.

    Args:
        title: Title as plain text.
        body: HTML of the page.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{_safe(title)}</title>\n<style>{style_sheet()}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{_safe(title)}</h1>\n{body}"
        f"<footer>tunebench {_safe(__version__)}</footer>\n</main>\n"
        f"<script>{script()}</script>\n</body>\n</html>\n"
    )


def history_page(histories: Sequence[SearchHistory], *, database: str) -> str:
    """Return the report of search histories as one HTML page.

    Args:
        histories: The search histories.
        database: Path of the database, or URL without password.
    """
    rows = []
    for place, history in enumerate(histories):
        best = history.best
        rows.append(
            (
                f'<a href="#history{place}">{_safe(history.workload)}</a>',
                _safe(history.device),
                len(history.records),
                _best_us(best),
                _safe(best.result.outcome.kind if best else ""),
                _speedup(history),
                _gap(history),
            )
        )
    columns = (
        "workload",
        "device",
        ">records",
        ">best, us",
        "how",
        ">speedup over default",
        ">best / bound",
    )
    parts = [f"<p>Database: {_safe(database)}</p>", data_table(columns, rows)]
    parts += [_section(place, history) for place, history in enumerate(histories)]
    return page("Tuning report", "\n".join(parts))


def comparison_page(comparison: DatabaseComparison) -> str:
    """Return the comparison of two databases as one HTML page, with regressions marked.

    Args:
        comparison: The comparison.
    """
    rows = (
        (
            _safe(time.workload),
            _safe(time.after_device)
            if time.before_device == time.after_device
            else f"{_safe(time.before_device)} → {_safe(time.after_device)}",
            time.kind,
            significant(time.before_us),
            significant(time.after_us),
            f"{time.speedup:.3f}",
            f'<span class="{time.verdict}">{time.verdict}</span>',
        )
        for time in comparison.times
    )
    columns = ("workload", "device", "how", ">A, us", ">B, us", ">A / B (higher is better)", "verdict")
    counts = f"{len(comparison.times)} times compared, {len(comparison.regressions)} regressions."
    parts = [
        f"<p>A: {_safe(comparison.before)}<br>B: {_safe(comparison.after)}</p><p>{counts}</p>",
        data_table(columns, rows),
    ]
    for title, workloads in (("Only in A", comparison.missing), ("Only in B", comparison.new)):
        if workloads:
            items = "".join(f"<li>{_safe(workload)}</li>" for workload in workloads)
            parts.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return page("Comparison of best times", "\n".join(parts))


def data_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a sortable table; a column whose header starts with ``>`` is aligned right.

    Args:
        columns: Headers as plain text.
        rows: Cells as HTML: the caller escapes them.
    """
    right = [' class="right"' if column.startswith(">") else "" for column in columns]
    head = "".join(
        f'<th scope="col"{style}><button type="button">{_safe(column.lstrip(">"))}</button></th>'
        for column, style in zip(columns, right, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{style}>{cell}</td>" for cell, style in zip(row, right, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# -- parts of a search history -------------------------------------------------------------------------------


def _section(place: int, history: SearchHistory) -> str:
    best = history.best
    parts = [
        f'<section id="history{place}"><h2>{_safe(history.workload)}</h2><p>{_safe(history.device)}</p>',
        _tiles(history),
    ]
    if best is not None:
        parts += ["<h3>Search history</h3>", _chart(history), _baselines(history)]
    effects = history.effects
    if effects:
        several = len({effect.variant for effect in effects}) > 1
        named = {
            f"{effect.variant.split('/')[-1]}: {effect.name}" if several else effect.name: effect.importance
            for effect in effects
        }
        parts += [
            "<h3>Parameter importance</h3>",
            "<p>Share of the variance of log time that a parameter alone explains.</p>",
            _figure(
                bar_chart(
                    {name: 100 * share for name, share in named.items()},
                    name="Parameter importance",
                    unit=" %",
                )
            ),
            "<details><summary>Median time by parameter value</summary>",
            data_table(
                ("variant", "parameter", "value", ">median, us"),
                (
                    (_safe(effect.variant), _safe(effect.name), _safe(value), significant(us))
                    for effect in effects
                    for value, us in effect.medians_us.items()
                ),
            ),
            "</details>",
        ]
    parts += [_configurations(history), _failures(history), _effort(history), _environment(history)]
    return "\n".join((*parts, "</section>"))


def _tiles(history: SearchHistory) -> str:
    best = history.best
    kind = best.result.outcome.kind if best else "best"
    facts = (
        (f"best time, {kind}", f"{_best_us(best)} us"),
        ("speedup over default", _speedup(history)),
        ("best / lowest bound", _gap(history)),
        ("records", str(len(history.records))),
    )
    return (
        '<dl class="tiles">'
        + "".join(f"<div><dt>{_safe(name)}</dt><dd>{_safe(value)}</dd></div>" for name, value in facts)
        + "</dl>"
    )


def _chart(history: SearchHistory) -> str:
    points = list(_points(history.records))
    step, best_us, drawn = -(-len(points) // MOST_POINTS), float("inf"), []
    for place, point in enumerate(points):
        new_best = point.style != "aborted" and point.us < best_us
        if new_best:
            best_us = point.us
        if new_best or place % step == 0:
            drawn.append(point)
    lines = []
    if history.bound_us is not None:
        lines.append(Line(style="bound", label="lowest bound of the trials", us=history.bound_us))
    default = history.default
    if default is not None:
        lines.append(Line(style="default", label="default configuration", us=_time_us(default)))
    best_us = _time_us(history.best)
    for name, ratio in history.baselines.items():
        if name != "default":
            lines.append(Line(style="library", label=name, us=best_us * ratio["ratio"]))
    styles = [
        *dict.fromkeys(point.style for point in drawn),
    ]
    marks = [
        *((style, style) for style in styles),
        ("best", "best so far"),
        *((line.style, line.label) for line in lines),
    ]
    legend = "".join(f'<li><span class="key {style}"></span>{_safe(name)}</li>' for style, name in marks)
    shown = f"<p>{len(drawn)} of {len(points)} trials with a time are drawn.</p>" if step > 1 else ""
    svg = history_chart(drawn, lines, trials=len(history.records), name="Time of each trial")
    return f'{_figure(svg)}<ul class="legend">{legend}</ul>{shown}'


def _baselines(history: SearchHistory) -> str:
    if not history.baselines:
        return ""
    rows = (
        (_safe(name), f"{found['ratio']:.2f}", _interval(found["low"], found["high"]))
        for name, found in history.baselines.items()
    )
    columns = ("baseline", ">speedup of best over this (higher is better)", ">95 % interval")
    return f"<h3>Best time against default and libraries</h3>{data_table(columns, rows)}"


def _points(records: Sequence[Record]) -> Iterator[Point]:
    for trial, record in enumerate(records, start=1):
        outcome = record.result.outcome
        us = time_us(outcome)
        style = "finalist" if record.purpose == "finalist" else outcome.kind
        if us is None and outcome.kind == "aborted":
            us = min(record.result.outcome.samples_us)  # type: ignore[union-attr]
        if us is not None:
            title = f"{trial}: {significant(us)} us, {style}, {record.key.variant} {record.key.config}"
            yield Point(trial=trial, us=us, style=style, title=title)


def _configurations(history: SearchHistory) -> str:
    best = best_records(history.records)
    if not best:
        return ""
    shown = best[:MOST_ROWS]
    registers = any(record.result.resources.registers is not None for record in shown)
    stale = any(record.stale for record in shown)
    rows = (
        (
            significant(time_us(record.result.outcome) or 0.0),
            record.result.outcome.kind,
            _safe(record.key.variant),
            f"<code>{_safe(str(record.key.config))}</code>",
            significant(record.bound_us) if record.bound_us else "",
            *([record.result.resources.registers or ""] * registers),
            *(["stale" if record.stale else "current"] * stale),
        )
        for record in shown
    )
    columns = [">time, us", "how", "variant", "configuration", ">lower bound, us"]
    columns += [">registers"] * registers + ["source"] * stale
    more = f"<p>The fastest {MOST_ROWS} of {len(best)}.</p>" if len(best) > MOST_ROWS else ""
    return f"<h3>Fastest configurations</h3>{more}{data_table(columns, rows)}"


def _failures(history: SearchHistory) -> str:
    outcomes = ", ".join(f"{count} {_safe(kind)}" for kind, count in sorted(history.outcomes.items()))
    found = f"<h3>Outcomes</h3><p>{outcomes}</p>"
    if history.failures:
        rows = ((count, _safe(kind), _safe(reason)) for kind, reason, count in history.failures)
        found += data_table((">times", "failure", "reason"), rows)
    return found


def _effort(history: SearchHistory) -> str:
    effort = history.effort
    shares = {"compile": effort.compile_s, "verify": effort.verify_s, "measure": effort.measure_s}
    if not any(shares.values()):
        return ""
    return f"<h3>Time spent</h3>{_figure(bar_chart(shares, name='Time spent', unit=' s'))}"


def _environment(history: SearchHistory) -> str:
    best = history.best
    conditions = dict(best.result.conditions) if best else {}
    conditions |= dict(getattr(best.result.outcome, "conditions", {})) if best else {}
    rows = [("version", name, value) for name, value in history.versions.items()]
    rows += [("condition", name, value) for name, value in conditions.items()]
    if not rows:
        return ""
    cells = ((what, _safe(str(name)), _safe(str(value))) for what, name, value in rows)
    table = data_table(("of", "name", "value"), cells)
    return (
        f"<details><summary>Environment of the newest run and of the best record</summary>{table}</details>"
    )


# -- text ----------------------------------------------------------------------------------------------------


def _figure(svg: str) -> str:
    return f'<div class="wide" tabindex="0"><figure>{svg}</figure></div>'


def _safe(text: str) -> str:
    return html.escape(text)


def _interval(low: float, high: float | None) -> str:
    return f"at least {low:.2f}" if high is None else f"{low:.2f} to {high:.2f}"


def _best_us(best: Record | None) -> str:
    us = time_us(best.result.outcome) if best is not None else None
    return "-" if us is None else significant(us)


def _speedup(history: SearchHistory) -> str:
    """Return the ratio measured in the same rounds, or else that of the two times."""
    best, default = history.best, history.default
    if "default" in history.baselines:
        return f"{history.baselines['default']['ratio']:.2f}x"
    if best is None or default is None:
        return "-"
    return f"{_time_us(default) / _time_us(best):.2f}x"


def _time_us(record: Record | None) -> float:
    us = time_us(record.result.outcome) if record is not None else None
    return float("nan") if us is None else us


def _gap(history: SearchHistory) -> str:
    best = history.best
    us = time_us(best.result.outcome) if best is not None else None
    return "-" if us is None or history.bound_us is None else f"{us / history.bound_us:.2f}"
