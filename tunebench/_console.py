"""Text for people: tables, and consoles that escape control characters."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

from tunebench import _environment

if TYPE_CHECKING:  # importing tunebench needs no rich
    from rich.console import Console
    from rich.table import Table

__all__ = ["WIDTH", "as_text", "console", "printable", "table"]

WIDTH = 160
"""Width of tables in columns if stdout is not a terminal and `COLUMNS` is not set."""


_UNPRINTABLE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff\\ufeff]"
)
"""Characters that a terminal obeys or that reorder its text, and half characters that it cannot print."""


def printable(text: str) -> str:
    r"""Return a text with control characters escaped, such as ``\x1b``; lines and tabulators are kept.

    Names, reasons and file names come from imported files, databases and compilers. Printed as they are, they
    could clear the screen, forge lines or set the title of the terminal.
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr: no markup, no guessed colours, control characters escaped."""
    stream = sys.stderr if stderr else sys.stdout
    found = _console_class()(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not (stream.isatty() or found.is_jupyter):
        found.width = _environment.columns() or WIDTH
    return found


def as_text(render: Callable[[Console], None]) -> str:
    """Return what a function prints on the console of stdout, without colours.

    Args:
        render: Prints text.
    """
    file = StringIO()
    to = _console_class()(file=file, width=console().width, highlight=False, markup=False, emoji=False)
    render(to)
    return file.getvalue().rstrip("\n")


@functools.cache
def _console_class() -> type[Console]:
    from rich.console import Console
    from rich.text import Text

    class EscapingConsole(Console):
        """A console that escapes control characters of all strings, also in the cells of tables."""

        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(printable(text), **how)

    return EscapingConsole


def table(*columns: str, rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """Return a table; a column whose header starts with ``>`` is aligned right.

    Args:
        columns: Headers.
        rows: Cells, converted by `str`; None is shown as ``-``.
        title: Title above the table.
    """
    from rich.table import Table

    found = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        found.add_column(column.lstrip(">"), justify=justify, overflow="fold")
    for row in rows:
        found.add_row(*("-" if cell is None else str(cell) for cell in row))
    return found
