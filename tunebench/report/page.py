"""Self-contained HTML pages and their parts: tables that sort, tiles, charts with legends.

Every text of a database is escaped: names, configurations and reasons may come from imported files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tunebench._figure import duration, ratio, significant
from tunebench._version import __version__
from tunebench.report.style import script, style_sheet
from tunebench.report.svg import safe
from tunebench.report.unit import ColumnUnit, unit_of
from tunebench.space import Config

__all__ = [
    "breakable",
    "config_cell",
    "count_cell",
    "data_table",
    "figure",
    "folded",
    "legend",
    "number_cell",
    "page",
    "ratio_cell",
    "safe",
    "tiles",
    "time_cell",
]

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
        f"<title>{safe(title)}</title>\n<style>{style_sheet()}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{safe(title)}</h1>\n{body}"
        f"<footer>tunebench {safe(__version__)}</footer>\n</main>\n"
        f"<script>{script()}</script>\n</body>\n</html>\n"
    )


def data_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a sortable table; a column whose header starts with ``>`` is aligned right.

    Times of a column, from `time_cell`, have one unit, which its header names.

    Args:
        columns: Headers as plain text.
        rows: Cells as HTML: the caller escapes them. A cell with a ``<data>`` element is sorted by its value.
    """
    rows = [list(row) for row in rows]
    units = [_unit(cells) for cells in zip(*rows, strict=True)] if rows else [None] * len(columns)
    columns = [
        column if unit is None else f"{column}, {unit.name}"
        for column, unit in zip(columns, units, strict=True)
    ]
    right = [' class="right"' if column.startswith(">") else "" for column in columns]
    head = "".join(
        f'<th scope="col"{style}><button type="button">{safe(column.lstrip(">"))}</button></th>'
        for column, style in zip(columns, right, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{style}>{_in_unit(cell, unit)}</td>"
            for cell, style, unit in zip(row, right, units, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _unit(cells: Sequence[object]) -> ColumnUnit | None:
    """Return the unit of a column of times; None for other columns."""
    filled = [cell for cell in cells if cell]
    times = [cell.us for cell in filled if isinstance(cell, _TimeCell)]
    return unit_of(times) if times and len(times) == len(filled) else None


def _in_unit(cell: object, unit: ColumnUnit | None) -> object:
    """Return a cell; a time in the unit of its column."""
    if unit is None or not isinstance(cell, _TimeCell):
        return cell
    return f'<data value="{cell.us!r}">{unit.text(cell.us)}</data>'


def tiles(facts: Mapping[str, str]) -> str:
    """Return large figures with their names.

    Args:
        facts: Values by name, as plain text.
    """
    figures = "".join(
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd></div>" for name, value in facts.items()
    )
    return f'<dl class="tiles">{figures}</dl>'


def figure(svg: str) -> str:
    """Return a chart that scrolls on a narrow screen."""
    return f'<div class="wide" tabindex="0"><figure>{svg}</figure></div>' if svg else ""


def legend(marks: Iterable[tuple[str, str]]) -> str:
    """Return the legend of a chart.

    Args:
        marks: Class of each mark and its meaning as plain text.
    """
    entries = "".join(f'<li><span class="key {style}"></span>{safe(name)}</li>' for style, name in marks)
    return f'<ul class="legend">{entries}</ul>'


def folded(title: str, content: str, *, opened: bool = False) -> str:
    """Return content that a click on its title opens.

    Args:
        title: Title as plain text.
        content: HTML.
        opened: Whether it is open at first.
    """
    return f"<details{' open' * opened}><summary>{safe(title)}</summary>{content}</details>"


class _TimeCell(str):
    """A time with its unit, as HTML, and its microseconds."""

    __slots__ = ("us",)

    def __new__(cls, us: float) -> _TimeCell:
        cell = super().__new__(cls, f'<data value="{us!r}">{duration(us)}</data>')
        cell.us = us
        return cell

    us: float


def time_cell(us: float | None) -> str:
    """Return a time which sorts by its microseconds; empty without a time.

    `data_table` shows the times of a column in one unit.
    """
    return "" if us is None else _TimeCell(us)


def count_cell(number: int) -> str:
    """Return a count with separators of thousands, which sorts by its value."""
    return f'<data value="{number}">{number:,}</data>'


def ratio_cell(value: float | None, unit: str = "x") -> str:
    """Return a ratio as other commands print it, which sorts by its value; empty without one.

    Args:
        value: The ratio.
        unit: Unit after it.
    """
    return "" if value is None else f'<data value="{value!r}">{ratio(value)}{unit}</data>'


def number_cell(value: float | None, digits: int = 4, unit: str = "") -> str:
    """Return a number that sorts by its value; empty without one.

    Args:
        value: The number.
        digits: Significant digits.
        unit: Unit after it, with its space.
    """
    return "" if value is None else f'<data value="{value!r}">{significant(value, digits)}{unit}</data>'


def config_cell(config: Config) -> str:
    """Return a configuration whose lines break only between parameters."""
    tokens = (f"<span>{safe(f'{name}={value}')}</span>" for name, value in config.items())
    return f"<code>{', <wbr>'.join(tokens)}</code>"


def breakable(text: str) -> str:
    """Return a workload or the key of a device, whose lines break only after a comma."""
    return ",<wbr>".join(f'<span class="token">{safe(part)}</span>' for part in text.split(","))
