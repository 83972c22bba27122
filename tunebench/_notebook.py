"""Tables that Jupyter notebooks show in place of the representation of an object."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["SHOWN_ROWS", "folded_text", "html_grid", "html_table"]

SHOWN_ROWS = 20
"""Most rows of a table that may be long."""

_LEFT, _RIGHT = ' style="text-align:left"', ' style="text-align:right"'


def html_table(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return an HTML table of names and values, escaped.

    Args:
        caption: Caption of the table.
        rows: Names and values; a row whose value is None is left out.
    """
    lines = (
        f"<tr><th{_LEFT}>{_safe(name)}</th><td{_LEFT}>{_safe(value)}</td></tr>"
        for name, value in rows
        if value is not None
    )
    return f"<table><caption>{_safe(caption)}</caption>{''.join(lines)}</table>"


def html_grid(*columns: str, rows: Iterable[Iterable[object]], caption: str = "") -> str:
    """Return an HTML table with headers, escaped; a column whose header starts with ``>`` is aligned right.

    Args:
        columns: Headers.
        rows: Cells; None is an empty cell.
        caption: Caption of the table; empty for none.
    """
    styles = [_RIGHT if column.startswith(">") else _LEFT for column in columns]
    head = "".join(
        f"<th{style}>{_safe(column.lstrip('>'))}</th>" for style, column in zip(styles, columns, strict=True)
    )
    lines = (
        "".join(
            f"<td{style}>{'' if cell is None else _safe(cell)}</td>"
            for style, cell in zip(styles, row, strict=True)
        )
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    above = f"<caption>{_safe(caption)}</caption>" if caption else ""
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded_text(title: str, text: str) -> str:
    """Return a text that a click on its title opens, escaped.

    Args:
        title: Title.
        text: Text with its lines as they are.
    """
    return f"<details><summary>{_safe(title)}</summary><pre>{_safe(text)}</pre></details>"


def _safe(value: object) -> str:
    import html  # notebooks only: lookups import as little as possible

    return html.escape(str(value))
