"""Files that somebody else may have written: models, devices, clusters, suites, plans and graphs.

One reader for all of them. It waits for no pipe, reads no device, and limits size, depth, numbers and text.
What interprets the content then meets nothing unexpected but wrong names and types; `interpreting` turns
these into errors that name the file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tunebench.errors import InputError, quoted

__all__ = ["LARGEST_BYTES", "interpreting", "read_bytes", "read_table", "read_text"]

LARGEST_BYTES = 4 << 20
"""Largest size of a file by default; configurations have kilobytes."""

DEEPEST = 32
"""Deepest nesting of tables and lists."""

LONGEST_TEXT = 1000
"""Longest name and text by default, in characters."""

LARGEST_NUMBER = 2**63 - 1
"""Largest magnitude of a whole number."""

_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code raises that meets a value of another type or range than it expects."""


def read_bytes(path: str | Path, what: str = "", largest_bytes: int = LARGEST_BYTES) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: The file.
        what: What it is, before its name in messages, such as ``"cluster file "``.
        largest_bytes: Largest size, in bytes.

    Raises:
        InputError: if the file cannot be read, is not a regular one, or is too large.
    """
    name = f"{what}{path}"
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputError(f"{name} is not a regular file")
            content = file.read(largest_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InputError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > largest_bytes:
        raise InputError(f"{name} is larger than {largest_bytes >> 20} MiB")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def read_text(path: str | Path, what: str = "", largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the text of a regular file in UTF-8; arguments and errors are those of `read_bytes`."""
    try:
        return read_bytes(path, what, largest_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what}{path} is not text in UTF-8: {error}") from None


def read_table(
    path: str | Path, what: str = "", largest_bytes: int = LARGEST_BYTES, longest_text: int = LONGEST_TEXT
) -> dict[str, Any]:
    """Return the names and values of a JSON file (``.json``) or of a TOML file (any other suffix).

    Args:
        path: The file.
        what: What it is, before its name in messages.
        largest_bytes: Largest size, in bytes.
        longest_text: Longest name and text in it, in characters.

    Raises:
        InputError: if the file cannot be read, is no object or table, is nested too deeply, has a number that
            is not finite or too large, or too long a text.
    """
    form = "JSON" if Path(path).suffix.lower() == ".json" else "TOML"
    text = read_text(path, what, largest_bytes)
    try:
        content = json.loads(text) if form == "JSON" else tomllib.loads(text)
        fault = _fault_of(content, longest_text)
    except RecursionError:
        fault = f"is nested more than {DEEPEST} levels deep"
    except ValueError as error:
        raise InputError(f"{what}{path} is not valid {form}: {error}") from None
    if fault is None and not isinstance(content, dict):
        fault = f"must be an object of names and values, got {type(content).__name__}"
    if fault is not None:
        raise InputError(f"{what}{path} {fault}")
    return dict(content)


def _fault_of(content: Any, longest_text: int) -> str | None:
    """Return why parsed data are refused, or None."""
    level = [content]
    for _ in range(DEEPEST):
        for value in level:
            if isinstance(value, str) and len(value) > longest_text:
                return f"has a text of {len(value)} characters, more than {longest_text}"
            if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
                return f"has the number {quoted(value)}, larger than {LARGEST_NUMBER}"
            if isinstance(value, float) and not math.isfinite(value):
                return f"has the number {value}, which is not finite"
        containers = [value for value in level if isinstance(value, dict | list)]
        if not containers:
            return None
        level = [inner for value in containers for inner in _elements(value)]
    return f"is nested more than {DEEPEST} levels deep"


def _elements(container: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    return (*container, *container.values()) if isinstance(container, dict) else container


@contextlib.contextmanager
def interpreting(name: str) -> Iterator[None]:
    """Translate what code raises within the context when content has other names or types than it expects.

    Args:
        name: What the content is of, at the beginning of messages.

    Raises:
        InputError: in place of an arithmetic, attribute, lookup, recursion, type or value error.
    """
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{name}: {error} is missing") from error
    except _WRONG as error:
        reason = quoted(str(error))[1:-1] or type(error).__name__
        raise InputError(f"{name}: {reason}") from error
