"""Tuning spaces that were measured whole: Kernel Tuner's cache files and the T4 format, read and written.

    log, faults = scan(path)       what a file holds, and the rows of it that cannot be used
    recording = read(path)         the same as columns, to search in; one bad row and it is refused
    write(log, path, "t4")

Nothing of a file is executed or trusted beyond its schema; it may be compressed by gzip. `scan` passes over
bad rows because whoever collects measurements wants the good ones; `read` does not, because a space that lost
rows in silence is another space, with another optimum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunebench.errors import InputError, UnknownName
from tunebench.recording import _kernel_tuner, _t4
from tunebench.recording._file import MAX_BYTES, load, opened, replacing
from tunebench.recording._row import Fault, Log, Recording, Row, value_of

__all__ = [
    "FORMATS",
    "MAX_BYTES",
    "Fault",
    "Log",
    "Recording",
    "Row",
    "opened",
    "read",
    "replacing",
    "scan",
    "value_of",
    "write",
]

_DUMP: Mapping[str, Callable[[Log], dict[str, Any]]] = {"t4": _t4.dump, "kernel-tuner": _kernel_tuner.dump}

FORMATS = tuple(_DUMP)
"""Formats that `write` knows; `scan` and `read` tell them apart by what they hold."""


def scan(path: Path) -> tuple[Log, tuple[Fault, ...]]:
    """Return what a file holds, and the rows of it that cannot be used.

    Raises:
        InputError: if the file cannot be read, is of another format, or has no parameters.
    """
    data = load(path)
    try:
        if isinstance(data, dict) and isinstance(data.get("cache"), dict):
            log, faults = _kernel_tuner.parse(data)
        elif isinstance(data, dict) and isinstance(data.get("results"), list):
            log, faults = _t4.parse(data)
        else:
            raise InputError(
                "it is neither a Kernel Tuner cache file nor in T4 format: it has no cache, no results"
            )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return log, faults


def read(path: Path) -> Recording:
    """Read a recorded space.

    Raises:
        InputError: if the file cannot be read, is of another format, or contradicts itself in any row.
    """
    log, faults = scan(path)
    if faults:
        more = f" ({len(faults) - 1} more rows cannot be used either)" if len(faults) > 1 else ""
        raise InputError(f"{path}: {faults[0]}{more}")
    try:
        return log.recording()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def write(log: Log, path: Path, form: str) -> None:
    """Write a file that other tuners read; one of that name is replaced when all is written.

    Args:
        log: What to write.
        path: Where; compressed by gzip if it ends in ``.gz``.
        form: One of `FORMATS`.

    Raises:
        UnknownName: if there is no such format.
        InputError: if the file cannot be written.
    """
    if form not in _DUMP:
        raise UnknownName("format", form, FORMATS)
    with replacing(path) as file:
        json.dump(_DUMP[form](log), file, allow_nan=False)
