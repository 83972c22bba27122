"""Output of commands: one JSON value with `--json`, otherwise tables and text."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import numbers
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tunebench._console import console, is_quiet, is_verbose, printable, table
from tunebench._figure import duration
from tunebench.workload import Workload

if TYPE_CHECKING:  # JSON output needs no rich
    from rich.console import Console

__all__ = [
    "console",
    "duration",
    "emit",
    "json_stdout",
    "note",
    "phases",
    "plain",
    "printable",
    "progress",
    "table",
]

_reserved: list[TextIO] = []
"""The stream of stdout while it is reserved for JSON."""


@contextlib.contextmanager
def json_stdout() -> Iterator[None]:
    """Reserve stdout for `emit` within the context; anything else that is written to stdout goes to stderr.

    A kernel's Python code, and the libraries it calls, may print.
    """
    stream: TextIO = sys.stdout
    stream.flush()
    with contextlib.ExitStack() as stack:
        if _is_standard(stream):
            stdout_copy = os.dup(1)
            stream = stack.enter_context(
                os.fdopen(stdout_copy, "w", encoding=stream.encoding, errors=stream.errors)
            )
            os.dup2(2, 1)
            stack.callback(os.dup2, stdout_copy, 1)
        _reserved.append(stream)
        stack.callback(_reserved.pop)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _is_standard(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):  # no file, such as in tests
        return False


def emit(as_json: bool, data: Any, render: Callable[[Console], None]) -> None:
    """Print the result of a command.

    Args:
        as_json: Whether to print `data` as JSON, on one line unless stdout is a terminal.
        data: The result: any value that `plain` supports.
        render: Prints the result as text.
    """
    if as_json:
        to = _reserved[-1] if _reserved else sys.stdout
        indent = 2 if to.isatty() else None
        to.write(json.dumps(plain(data), indent=indent, allow_nan=False) + "\n")
        to.flush()
    else:
        render(console())


def plain(value: Any) -> Any:
    """Return a value in the types of JSON.

    Dataclasses become objects of their fields, a workload its text, NumPy numbers Python numbers, and sets
    sorted lists.

    Raises:
        TypeError: if the type is not supported.
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Workload() | PurePath():
            return str(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case set() | frozenset():
            return sorted(plain(item) for item in value)
        case Iterable():
            return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form")


def note(text: str) -> None:
    """Print a remark on stderr, unless the command is quiet."""
    if not is_quiet():
        console(stderr=True).print(text, soft_wrap=True)


@contextlib.contextmanager
def phases(to: Console) -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows the current phase of a long command: live, or with -v as lines."""
    if is_verbose():
        yield lambda message: to.print(message, soft_wrap=True)
        return
    if is_quiet() or not to.is_terminal:
        yield lambda message: None
        return
    from rich.text import Text

    with to.status("") as status:
        yield lambda message: status.update(Text(printable(message)))


class Watcher(Protocol):
    """Progress callback: amount done, total amount, and a description if it changes."""

    def __call__(self, done: int, total: int, label: str = "") -> None:
        """Show the progress."""


def _progress_lines(to: Console, subject: str) -> Watcher:
    """Return a callback that prints a line for each tenth."""
    shown: set[tuple[str, int]] = set()

    def show(done: int, total: int, label: str = subject) -> None:
        tenth = 10 * done // max(1, total)
        if (label, tenth) not in shown:
            shown.add((label, tenth))
            to.print(f"{label} {10 * tenth} %", soft_wrap=True)

    return show


@contextlib.contextmanager
def progress(to: Console, label: str) -> Iterator[Watcher]:
    """Show a progress bar on a terminal, or with -v lines, and yield the callback that updates it."""

    def nothing(done: int, total: int, label: str = "") -> None:
        """Show nothing."""

    if is_verbose():
        yield _progress_lines(to, label)
        return
    if is_quiet() or not to.is_terminal:
        yield nothing
        return
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=to, transient=True) as bar:
        task = bar.add_task(escape(printable(label)), total=None)

        def show(done: int, total: int, label: str = label) -> None:
            bar.update(task, completed=done, total=total, description=escape(printable(label)))

        yield show
