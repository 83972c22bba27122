"""Recorded tuning spaces: reading and writing of Kernel Tuner cache files and the T4 format.

    log, faults = scan(path)       contents of a file, and its rejected rows
    space = read(path)             the same as columns, to search in; a rejected row is an error
    write(log, path, "t4")

Files are streamed: `read_header` returns the metadata, and then yields the rows one by one.

Nothing in a file is executed, and every value is checked; files may be compressed by gzip. `scan` skips
rejected rows, because an import needs the usable ones. `read` does not, because a space without them would
have another optimum.
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
    RejectedEntry,
    TuningLog,
    metrics_of,
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
    "RejectedEntry",
    "TuningLog",
    "metrics_of",
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
"""Formats of `write`; `scan` and `read` detect the format by its contents."""


MAX_MEMBERS = 100
"""Largest number of members of a file; the formats have a dozen."""

AS_JSON = " as JSON"
_UNFINISHED = "cache"
_ROWS = (_UNFINISHED, "results")


@dataclass(frozen=True, slots=True)
class CacheFileHeader:
    """Metadata of a cache file; its rows are read on demand.

    Attributes:
        path: The file.
        log: The metadata, as a log without rows.
    """

    path: Path
    log: TuningLog
    _form: Any
    _metadata: Mapping[str, Any]

    def rows(
        self, watcher: Callable[[int, int], None] | None = None
    ) -> Iterator[RecordedTrial | RejectedEntry]:
        """Yield every row, or the reason for its rejection.

        Args:
            watcher: Progress callback: bytes read, and size of the file.

        Raises:
            InputError: if the file cannot be read to its end.
        """
        make, once, number = self._form.row_parser(self._metadata, self.log), DuplicateCheck(), 0
        with open_limited(self.path, AS_JSON) as file:
            for member in members(file, _ROWS, _UNFINISHED):
                if member.key is None:
                    continue
                number += 1
                try:
                    row = make(member.value)
                    once.check(row.config)
                except InputError as error:
                    yield RejectedEntry(self._form.location(number, member.key), str(error))
                else:
                    yield row
                if watcher is not None and number % 1000 == 0:
                    watcher(file.done_bytes, file.total_bytes)
            if watcher is not None:
                watcher(file.done_bytes, file.total_bytes)


def read_header(path: Path) -> CacheFileHeader:
    """Return the metadata of a file; reads it to its end without keeping the rows.

    Args:
        path: The file.

    Raises:
        InputError: if the file cannot be read, has another format, or has no parameters.
    """
    metadata: dict[str, Any] = {}
    names: tuple[str, ...] = ()
    units: dict[str, str] = {}
    rows = 0
    with open_limited(path, AS_JSON) as file:
        for member in members(file, _ROWS, _UNFINISHED):
            if member.key is not None:
                names = names or _t4.names_of(member.value)
                units = units or _t4.units_of(member.value)
                rows += 1
                if rows > MAX_ROWS:
                    raise InputError(f"{path} has more than {MAX_ROWS} rows; import it in parts")
            elif member.name in metadata:
                raise InputError(f"{path} contains {member.name[:100]!r} twice")
            elif len(metadata) < MAX_MEMBERS:
                metadata[member.name] = member.value
    try:
        if isinstance(metadata.get("cache"), dict):
            return CacheFileHeader(path, _kernel_tuner.read_header(metadata), _kernel_tuner, metadata)
        if isinstance(metadata.get("results"), list):
            return CacheFileHeader(path, _t4.read_header(metadata, names, units), _t4, metadata)
        raise InputError("expected a Kernel Tuner cache file or T4: an object with a member cache or results")
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def scan(path: Path) -> tuple[TuningLog, tuple[RejectedEntry, ...]]:
    """Return the contents of a file, and its rejected rows.

    Args:
        path: The file.

    Raises:
        InputError: if the file cannot be read, has another format, or has no parameters.
    """
    header = read_header(path)
    rows: list[RecordedTrial] = []
    faults: list[RejectedEntry] = []
    for row in header.rows():
        if isinstance(row, RejectedEntry):
            faults.append(row)
        else:
            rows.append(row)
    return dataclasses.replace(header.log, rows=tuple(rows)), tuple(faults)


def read(path: Path) -> RecordedSpace:
    """Return a recorded tuning space.

    Args:
        path: The file.

    Raises:
        InputError: if the file cannot be read, has another format, or any row is rejected.
    """
    log, faults = scan(path)
    if faults:
        more = f" ({len(faults) - 1} more rows are rejected)" if len(faults) > 1 else ""
        raise InputError(f"{path}: {faults[0]}{more}")
    try:
        return log.recorded_space()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def write(log: TuningLog, path: Path, form: str) -> None:
    """Write a recorded tuning space; an existing file is replaced when all is written.

    Args:
        log: The contents.
        path: File to write; compressed by gzip if it ends in ``.gz``.
        form: One of `FORMATS`.

    Raises:
        UnknownName: if the format does not exist.
        InputError: if the file cannot be written.
    """
    if form not in _WRITERS:
        raise UnknownName("format", form, FORMATS)
    with replacing(path) as file:
        json.dump(_WRITERS[form](log), file, allow_nan=False)


__getattr__ = renamed(
    __name__,
    {
        "Fault": "RejectedEntry",
        "Head": "CacheFileHeader",
        "Log": "TuningLog",
        "Opened": "LimitedFile",
        "Recording": "RecordedSpace",
        "Row": "RecordedTrial",
        "head": "read_header",
        "opened": "open_limited",
    },
)
