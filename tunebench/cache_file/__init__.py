"""Tuning spaces that were measured whole: Kernel Tuner's cache files and the T4 format, read and written.

    log, faults = scan(path)       what a file holds, and the rows of it that cannot be used
    recording = read(path)         the same as columns, to search in; one bad row and it is refused
    write(log, path, "t4")

A file is read in pieces: `read_header` tells of which space it is, and then yields its rows one by one.

Nothing of a file is executed or trusted beyond its schema; it may be compressed by gzip. `scan` passes over
bad rows because whoever collects measurements wants the good ones; `read` does not, because a space that lost
rows in silence is another space, with another optimum.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebench._deprecation import renamed
from tunebench.cache_file import _kernel_tuner, _t4
from tunebench.cache_file._file import MAX_BYTES, LimitedFile, open_limited, replacing
from tunebench.cache_file._row import (
    MAX_ROWS,
    DuplicateCheck,
    RecordedSpace,
    RecordedTrial,
    RejectedRow,
    TuningLog,
    value_of,
)
from tunebench.cache_file._stream import members
from tunebench.errors import InputError, UnknownName

__all__ = [
    "FORMATS",
    "MAX_BYTES",
    "CacheFileHeader",
    "LimitedFile",
    "RecordedSpace",
    "RecordedTrial",
    "RejectedRow",
    "TuningLog",
    "open_limited",
    "read",
    "read_header",
    "replacing",
    "scan",
    "value_of",
    "write",
]

_WRITERS: Mapping[str, Callable[[TuningLog], dict[str, Any]]] = {
    "t4": _t4.dump,
    "kernel-tuner": _kernel_tuner.dump,
}

FORMATS = tuple(_WRITERS)
"""Formats that `write` knows; `scan` and `read` tell them apart by what they hold."""


MAX_MEMBERS = 100
"""Members of a file that are kept; the formats have a dozen."""

AS_JSON = " as JSON"
_UNFINISHED = "cache"
_ROWS = (_UNFINISHED, "results")


@dataclass(frozen=True, slots=True)
class CacheFileHeader:
    """What a file tells besides its rows, which are read one after the other when they are asked for.

    Attributes:
        path: The file.
        log: What it tells; without rows.
    """

    path: Path
    log: TuningLog
    _form: Any
    _told: Mapping[str, Any]

    def rows(
        self, watcher: Callable[[int, int], None] | None = None
    ) -> Iterator[RecordedTrial | RejectedRow]:
        """Yield every row, or why it cannot be used.

        Args:
            watcher: Is told how many bytes of the file were read, and of how many.

        Raises:
            InputError: if the file cannot be read to its end.
        """
        make, once, number = self._form.row_parser(self._told, self.log), DuplicateCheck(), 0
        with open_limited(self.path, AS_JSON) as file:
            for member in members(file, _ROWS, _UNFINISHED):
                if member.key is None:
                    continue
                number += 1
                try:
                    row = make(member.value)
                    once.check(row.config)
                except InputError as error:
                    yield RejectedRow(self._form.location(number, member.key), str(error))
                else:
                    yield row
                if watcher is not None and number % 1000 == 0:
                    watcher(file.done_bytes, file.total_bytes)
            if watcher is not None:
                watcher(file.done_bytes, file.total_bytes)


def read_header(path: Path) -> CacheFileHeader:
    """Return what a file holds besides its rows; it is read to its end, and its rows forgotten.

    Raises:
        InputError: if the file cannot be read, is of another format, or has no parameters.
    """
    told: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    rows = 0
    with open_limited(path, AS_JSON) as file:
        for member in members(file, _ROWS, _UNFINISHED):
            if member.key is not None:
                names = names or _t4.names_of(member.value)
                rows += 1
                if rows > MAX_ROWS:
                    raise InputError(f"{path} has more than {MAX_ROWS} rows; import it in parts")
            elif member.name in told:
                raise InputError(f"{path} has {member.name[:100]!r} twice")
            elif len(told) < MAX_MEMBERS:
                told[member.name] = member.value
    try:
        if isinstance(told.get("cache"), dict):
            return CacheFileHeader(path, _kernel_tuner.read_header(told), _kernel_tuner, told)
        if isinstance(told.get("results"), list):
            return CacheFileHeader(path, _t4.read_header(told, names), _t4, told)
        raise InputError(
            "it is neither a Kernel Tuner cache file nor in T4 format: it has no cache, no results"
        )
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def scan(path: Path) -> tuple[TuningLog, tuple[RejectedRow, ...]]:
    """Return what a file holds, and the rows of it that cannot be used.

    Raises:
        InputError: if the file cannot be read, is of another format, or has no parameters.
    """
    found = read_header(path)
    rows: list[RecordedTrial] = []
    faults: list[RejectedRow] = []
    for row in found.rows():
        if isinstance(row, RejectedRow):
            faults.append(row)
        else:
            rows.append(row)
    return dataclasses.replace(found.log, rows=tuple(rows)), tuple(faults)


def read(path: Path) -> RecordedSpace:
    """Read a recorded space.

    Raises:
        InputError: if the file cannot be read, is of another format, or contradicts itself in any row.
    """
    log, faults = scan(path)
    if faults:
        more = f" ({len(faults) - 1} more rows cannot be used either)" if len(faults) > 1 else ""
        raise InputError(f"{path}: {faults[0]}{more}")
    try:
        return log.recorded_space()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def write(log: TuningLog, path: Path, form: str) -> None:
    """Write a file that other tuners read; one of that name is replaced when all is written.

    Args:
        log: What to write.
        path: Where; compressed by gzip if it ends in ``.gz``.
        form: One of `FORMATS`.

    Raises:
        UnknownName: if there is no such format.
        InputError: if the file cannot be written.
    """
    if form not in _WRITERS:
        raise UnknownName("format", form, FORMATS)
    with replacing(path) as file:
        json.dump(_WRITERS[form](log), file, allow_nan=False)


__getattr__ = renamed(
    __name__,
    {
        "Fault": "RejectedRow",
        "Head": "CacheFileHeader",
        "Log": "TuningLog",
        "Opened": "LimitedFile",
        "Recording": "RecordedSpace",
        "Row": "RecordedTrial",
        "head": "read_header",
        "opened": "open_limited",
    },
)
