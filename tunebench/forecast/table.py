"""A table of workloads as CSV, predicted row by row: of any length, with a chunk in memory at a time."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tunebench.device import Device
from tunebench.errors import InputError, TunebenchError
from tunebench.forecast.library import predict_all
from tunebench.forecast.prediction import Predictions
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["ADDED", "RejectedRow", "TableResult", "predict_table"]

COLUMN = "workload"
"""The column that holds the text of a workload."""
ADDED = ("predicted_us", "low_us", "high_us", "bound_us", "basis", "error")
"""Columns that are added; of a row that cannot be used all but the last are empty, of any other the last."""
CHUNK = 4096
"""Rows that are read, predicted and written together."""
KEPT = 1000
"""Refused rows of which the reason is kept; the file has them all."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be used.

    Attributes:
        line: Of the file, counted from 1, at which the row begins.
        reason: Why.
    """

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(slots=True)
class TableResult:
    """What was done with a table.

    Attributes:
        rows: Rows that were written.
        rejected: How many of them cannot be used.
        faults: The first of those.
        interrupted: Whether it was stopped before its end: then the rows done so far are written.
    """

    rows: int = 0
    rejected: int = 0
    faults: list[RejectedRow] = field(default_factory=list)
    interrupted: bool = False


@dataclass(slots=True)
class _Row:
    """One row: where it begins, its cells, and its workload or what is wrong with it."""

    line: int
    cells: list[str]
    workload: Workload | None = None
    error: str = ""


def predict_table(
    source: str | Path,
    device: Device,
    out: str | Path,
    *,
    watcher: Callable[[TableResult, float], None] = lambda result, share: None,
) -> TableResult:
    """Predict every row of a CSV file, and write it again with the columns of `ADDED` behind its own.

    The file has a header with a column ``workload``; other columns are kept as they are. A file of that
    column alone needs no quotes around workloads. A row that cannot be used keeps its place, with the reason
    as `error`. `out` appears whole, or not at all, and after Ctrl-C with the rows done so far.

    Args:
        source: File to read, in UTF-8; ``.tsv`` is parted by tabs, anything else by commas.
        device: Where the workloads would run.
        out: File to write, parted likewise by its own name.
        watcher: Is told after every chunk what was done, and which share of the file was read.

    Raises:
        InputError: if a file cannot be read or written, or the header has no column ``workload``, or one of
            those that are added.
    """
    source, out = Path(source), Path(out)
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"{out} is what is read: write to another file")
    result = TableResult()
    try:
        size = max(1, source.stat().st_size)
        with source.open("rb") as raw, _replacing(out) as target:
            # What is not UTF-8 passes through as it is.
            text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
            reader = csv.reader(text, delimiter=_delimiter(source))
            header = _header(reader, source)
            target.write(_text([[*header, *ADDED]], out))
            target.settle()
            place = header.index(COLUMN)
            try:
                for rows in _chunks(_rows(reader, header, source), CHUNK):
                    target.write(_text(_done(rows, len(header), place, device, result), out))
                    target.settle()
                    result.rows += len(rows)
                    watcher(result, min(1.0, raw.tell() / size))
            except KeyboardInterrupt:
                result.interrupted = True
    except OSError as error:
        place_of = error.filename or source
        raise InputError(f"{place_of}: {error.strerror or error}") from error
    return result


# -- reading -------------------------------------------------------------------------------------------


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _header(reader: Any, source: Path) -> list[str]:
    header = [name.strip() for name in next(reader, [])]
    if COLUMN not in header:
        raise InputError(f"{source}: the first line must name columns, one of them {COLUMN}; got {header}")
    taken = sorted({*ADDED} & {*header})
    if taken:
        raise InputError(f"{source}: has columns that are to be added, rename them: {', '.join(taken)}")
    return header


def _rows(reader: Any, header: Sequence[str], source: Path) -> Iterator[_Row]:
    """Yield the rows, as long as the header unless they are longer; blank lines are no rows."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(f"{source}, line {line}: {error}") from error
        if not cells:
            continue
        if len(header) == 1:
            cells = [",".join(cells)]
        yield _Row(line=line, cells=cells + [""] * (len(header) - len(cells)))


def _chunks(rows: Iterator[_Row], size: int) -> Iterator[list[_Row]]:
    chunk: list[_Row] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


# -- predicting ----------------------------------------------------------------------------------------


def _done(rows: list[_Row], width: int, place: int, device: Device, result: TableResult) -> list[list[str]]:
    """Return the cells of rows as they are written, and count what cannot be used."""
    for row in rows:
        _read(row, width, place)
    found = iter(_figures(rows, device))
    cells = []
    for row in rows:
        figures = next(found) if not row.error else None
        if isinstance(figures, str):
            row.error = figures
        if figures is None or isinstance(figures, str):
            figures = [""] * (len(ADDED) - 1)
            result.rejected += 1
            if len(result.faults) < KEPT:
                result.faults.append(RejectedRow(row.line, row.error))
        # Cells beyond the header stay, behind all columns: nothing is lost, and each column holds its own.
        cells.append([*row.cells[:width], *figures, row.error, *row.cells[width:]])
    return cells


def _read(row: _Row, width: int, place: int) -> None:
    if len(row.cells) > width:
        fields = f"{len(row.cells)} fields where the header has {width}"
        row.error = f"{fields}: put double quotes around a workload's text"
        return
    try:
        row.workload = parse(row.cells[place])
    except TunebenchError as error:
        row.error = " ".join(str(error).split())


def _figures(rows: Sequence[_Row], device: Device) -> Iterator[list[str] | str]:
    """Yield what is added to each row that could be read: its figures, or why it has none."""
    workloads = [row.workload for row in rows if row.workload is not None]
    if not workloads:
        return
    try:
        yield from _formatted(predict_all(workloads, device))
    except TunebenchError:  # one of them cannot be predicted: find out which
        for workload in workloads:
            try:
                yield from _formatted(predict_all([workload], device))
            except TunebenchError as error:
                yield " ".join(str(error).split())


def _formatted(found: Predictions) -> list[list[str]]:
    columns = zip(found.time_us, found.low_us, found.high_us, found.bound_us, found.basis, strict=True)
    return [
        [f"{time:.6g}", f"{low:.6g}", f"{high:.6g}", f"{bound:.6g}", basis]
        for time, low, high, bound, basis in columns
    ]


# -- writing -------------------------------------------------------------------------------------------


def _text(rows: Sequence[Sequence[str]], out: Path) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=_delimiter(out), lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode("utf-8", "surrogateescape")


class _Target:
    """A file in the making, of which whole chunks count."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._settled = file, 0

    def write(self, data: bytes) -> None:
        """Add to it."""
        self._file.write(data)

    def settle(self) -> None:
        """Remember that what was written so far is whole."""
        self._settled = self._file.tell()

    def cut(self) -> None:
        """Drop what has been written since."""
        self._file.flush()
        self._file.truncate(self._settled)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[_Target]:
    """Give a file that takes the place of `path` once it is done; an error leaves `path` as it was."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            target = _Target(file)
            yield target
            target.cut()
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
        temporary = None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
