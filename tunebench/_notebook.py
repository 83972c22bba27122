"""Tables that Jupyter notebooks show in place of the representation of an object."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["html_table"]


def html_table(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    """Return an HTML table of names and values, escaped.

    Args:
        caption: Caption of the table.
        rows: Names and values; a row whose value is None is left out.
    """
    import html  # notebooks only: lookups import as little as possible

    lines = (
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(str(value))}</td></tr>'
        for name, value in rows
        if value is not None
    )
    return f"<table><caption>{html.escape(caption)}</caption>{''.join(lines)}</table>"
