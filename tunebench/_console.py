"""Text for people: tables, and consoles that escape control characters."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

from tunebench import _environment

if TYPE_CHECKING:  # importing tunebench needs no rich
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "WIDTH",
    "as_text",
    "console",
    "console_class",
    "is_quiet",
    "is_verbose",
    "printable",
    "table",
    "verbosity",
]

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
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def console(*, stderr: bool = False, notebook: bool = True) -> Console:
    """Return a console for stdout or stderr: no markup, no guessed colours, control characters escaped.

    Args:
        stderr: Whether to print on stderr.
        notebook: Whether to print as HTML in a notebook.
    """
    stream = sys.stderr if stderr else sys.stdout
    jupyter = None if notebook else False
    created = console_class()(
        stderr=stderr, highlight=False, markup=False, emoji=False, force_jupyter=jupyter
    )
    if not (stream.isatty() or created.is_jupyter):
        created.width = _environment.columns() or WIDTH
    return created


_level = 0
"""Detail of progress: -1 for none, 0 for live lines on a terminal, 1 for a line per step."""


@contextlib.contextmanager
def verbosity(level: int) -> Iterator[None]:
    """Show less or more progress within the context.

    Args:
        level: -1 for none, 0 for the default, 1 for a line per step.
    """
    global _level
    before, _level = _level, level
    try:
        yield
    finally:
        _level = before


def is_quiet() -> bool:
    """Return whether no progress is shown."""
    return _level < 0


def is_verbose() -> bool:
    """Return whether each step of the progress is a line."""
    return _level > 0


def as_text(render: Callable[[Console], None]) -> str:
    """Return what a function prints on the console of stdout, without colours.

    Args:
        render: Prints text.
    """
    file = StringIO()
    to = console_class()(
        file=file,
        width=console().width,
        force_jupyter=False,
        force_terminal=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    render(to)
    return file.getvalue().rstrip("\n")


@functools.cache
def console_class() -> type[Console]:
    """Return the class of consoles that escape control characters."""
    from rich.console import Console
    from rich.text import Text

    class EscapingConsole(Console):
        """A console that escapes control characters of all strings, also in the cells of tables."""

        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

        def print(self, *objects: Any, crop: bool = False, **options: Any) -> None:
            super().print(*objects, crop=crop, **options)  # a word longer than a line is not cut

    return EscapingConsole


def table(*columns: str, rows: Iterable[Iterable[object]], title: str | None = None) -> Table:
    """Return a table; a column whose header starts with ``>`` is aligned right.

    Cells are wrapped at spaces only. Where the console is too narrow for that, each row is printed as lines
    with a header and a cell, so that a configuration can always be copied.

    Args:
        columns: Headers.
        rows: Cells, converted by `str`; None is shown as ``-``.
        title: Title above the table.
    """
    grid = _table_class()(
        title=title, title_justify="left", title_style="bold", box=None, header_style="bold"
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        grid.add_column(column.lstrip(">"), justify=justify, overflow="fold")
    for row in rows:
        grid.add_row(*("-" if cell is None else str(cell) for cell in row))
    return grid


@functools.cache
def _table_class() -> type[Table]:
    from rich.console import ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

    class UnbrokenTable(Table):
        """A table that breaks no word."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            texts = [
                [console.render_str(str(cell)) for cell in (column.header, *column.cells)]
                for column in self.columns
            ]
            measured = [[text.__rich_measure__(console, options) for text in column] for column in texts]
            least = [max(cell.minimum for cell in column) for column in measured]
            widest = [max(cell.maximum for cell in column) for column in measured]
            widths = _widths(
                least, widest, options.max_width - sum(sum(self.padding[1::2]) for _ in self.columns)
            )
            if widths is None:
                yield from self._lines(texts)
                return
            for column, width in zip(self.columns, widths, strict=True):
                column.width = width
            yield from super().__rich_console__(console, options)

        def _lines(self, texts: list[list[Text]]) -> Iterator[Text]:
            """Yield each row as lines with a header and a cell."""
            if self.title:
                yield Text(str(self.title), style="bold")
            headers = [str(column.header) for column in self.columns]
            indent = max(map(len, headers)) + 2
            for row in range(1, len(texts[0]) if texts else 0):
                if row > 1:
                    yield Text()
                for header, column in zip(headers, texts, strict=True):
                    cell = column[row].plain
                    if cell not in ("", "-"):
                        yield Text(f"{header:<{indent}}{cell}", no_wrap=True, overflow="ignore", end="\n")

    return UnbrokenTable


def _widths(least: list[int], widest: list[int], space: int) -> list[int] | None:
    """Return widths of columns between `least` and `widest` that fill a space; None if they do not fit."""
    room = space - sum(least)
    if room < 0:
        return None
    widths = list(least)
    while room > 0 and (growing := [i for i, width in enumerate(widths) if width < widest[i]]):
        share = max(1, room // len(growing))
        for i in growing:
            added = min(share, widest[i] - widths[i], room)
            widths[i] += added
            room -= added
    return widths
