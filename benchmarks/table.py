"""Tables of benchmarks in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = ["write_table"]


def write_table(
    header: str, rows: Iterable[str], out: Path | None, footer: Callable[[], Iterable[str]] = tuple
) -> None:
    """Print a table row by row, and keep a file up to date, so that an interrupted run loses no rows.

    Args:
        header: First lines of the table.
        rows: The other lines.
        out: File for the table, if any.
        footer: Returns the lines after the table, for the rows so far.
    """
    lines = [header]
    print(header, flush=True)
    for row in rows:
        print(row, flush=True)
        lines.append(row)
        if out is not None:
            out.write_text("\n".join([*lines, *footer()]) + "\n", encoding="utf-8")
    for line in footer():
        print(line, flush=True)
