"""Prediction of every workload in a CSV file. One chunk of rows is in memory at a time."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tunebench._private_file import replaceable
from tunebench.device import Device
from tunebench.errors import InputError, TunebenchError
from tunebench.forecast.library import predict_fitting
from tunebench.forecast.prediction import Predictions
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["ADDED", "RejectedRow", "TableResult", "TargetFile", "predict_table"]

COLUMN = "workload"
"""Name of the column that holds the workload text."""
ADDED = ("predicted_us", "low_us", "high_us", "bound_us", "basis", "error")
"""Columns added to the file. A rejected row has only the last one filled, any other row all but the last one.
"""
CHUNK = 4096
"""Number of rows that are read, predicted and written together."""
KEPT = 1000
"""Most rejected rows whose reason is kept in memory; the output file has all of them."""


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be predicted.

    Attributes:
        line: Line of the file where the row begins, counted from 1.
        reason: Why the row was rejected.
    """

    line: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.reason}"


@dataclass(slots=True)
class TableResult:
    """Summary of a predicted table.

    Attributes:
        rows: Number of rows written.
        rejected: Number of rows that could not be predicted.
        faults: The first rejected rows.
        interrupted: Whether Ctrl-C stopped the run; the rows predicted before are written.
    """

    rows: int = 0
    rejected: int = 0
    faults: list[RejectedRow] = field(default_factory=list)
    interrupted: bool = False


@dataclass(slots=True)
class _Row:
    """One row: its line number, its cells, and its workload or the reason for its rejection."""

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
    """Predict every row of a CSV file and write the file again with the columns of `ADDED` appended.

    The header must have a column ``workload``; other columns are copied unchanged. In a file with only that
    column, workloads need no quotes. A rejected row keeps its place and has the reason in column `error`. The
    output file is written completely or not at all; after Ctrl-C it has the rows predicted so far.

    Args:
        source: File to read, in UTF-8, separated by tabs if its name ends in ``.tsv`` and by commas
            otherwise.
        device: The device.
        out: File to write; its separator follows from its own name.
        watcher: Progress callback. It receives the summary and the share of the file read after every chunk.

    Raises:
        InputError: if a file cannot be read or written, the header has no column ``workload``, or it already
            has one of the columns to add.
    """
    source, out = Path(source), Path(out)
    if out.exists() and source.exists() and out.samefile(source):
        raise InputError(f"--out must differ from the file that is read, got {out} for both")
    result = TableResult()
    try:
        size = max(1, source.stat().st_size)
        with source.open("rb") as raw, _replacing(out) as target:
            # Bytes that are not valid UTF-8 are copied unchanged.
            text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
            reader = csv.reader(text, delimiter=_delimiter(source))
            header = _header(reader, source)
            target.write(_text([[*header, *ADDED]], out))
            target.settle()
            column = header.index(COLUMN)
            try:
                for rows in _chunks(_rows(reader, header, source), CHUNK):
                    target.write(_text(_done(rows, len(header), column, device, result), out))
                    target.settle()
                    result.rows += len(rows)
                    watcher(result, min(1.0, raw.tell() / size))
            except KeyboardInterrupt:
                result.interrupted = True
    except OSError as error:
        place_of = source if error.filename == str(source) else out
        raise InputError(f"{place_of}: {error.strerror or error}") from error
    return result


# -- reading -------------------------------------------------------------------------------------------


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _header(reader: Any, source: Path) -> list[str]:
    header = [name.strip() for name in next(reader, [])]
    if COLUMN not in header:
        raise InputError(
            f"{source}: the first line must name the columns, one of them {COLUMN}; got {header}"
        )
    taken = sorted({*ADDED} & {*header})
    if taken:
        raise InputError(
            f"{source}: rename these columns, the output adds columns with the same names: {', '.join(taken)}"
        )
    return header


def _rows(reader: Any, header: Sequence[str], source: Path) -> Iterator[_Row]:
    """Yield the rows, padded to the length of the header. Blank lines are skipped."""
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
    while chunk := list(itertools.islice(rows, size)):
        yield chunk


# -- predicting ----------------------------------------------------------------------------------------


def _done(rows: list[_Row], width: int, column: int, device: Device, result: TableResult) -> list[list[str]]:
    """Return the output cells of the rows, and count rejected rows."""
    for row in rows:
        _read(row, width, column)
    # A row has either a workload or an error after `_read`, so figures and rows without error correspond.
    figure_rows = iter(_figures(rows, device))
    cells = []
    for row in rows:
        figures = next(figure_rows) if not row.error else None
        if isinstance(figures, str):
            row.error = figures
        if figures is None or isinstance(figures, str):
            figures = [""] * (len(ADDED) - 1)
            result.rejected += 1
            if len(result.faults) < KEPT:
                result.faults.append(RejectedRow(row.line, row.error))
        # Cells beyond the header go behind the added columns, so that every column keeps its meaning.
        cells.append([*row.cells[:width], *figures, row.error, *row.cells[width:]])
    return cells


def _read(row: _Row, width: int, column: int) -> None:
    if len(row.cells) > width:
        fields = f"{len(row.cells)} fields where the header has {width}"
        row.error = f"{fields}: put double quotes around the workload text"
        return
    try:
        row.workload = parse(row.cells[column])
    except TunebenchError as error:
        row.error = " ".join(str(error).split())


def _figures(rows: Sequence[_Row], device: Device) -> Iterator[list[str] | str]:
    """Yield the added cells of each row that has a workload, or the reason why it cannot be predicted."""
    workloads = [row.workload for row in rows if row.workload is not None]
    if not workloads:
        return
    try:
        # The list is complete before its first row is yielded: an error cannot follow a part of the rows.
        yield from _formatted(predict_fitting(workloads, device))
    except TunebenchError:  # at least one cannot be predicted: try them one by one
        for workload in workloads:
            try:
                yield from _formatted(predict_fitting([workload], device))
            except TunebenchError as error:
                yield " ".join(str(error).split())


def _formatted(predictions: Predictions) -> list[list[str]]:
    columns = zip(
        predictions.time_us,
        predictions.low_us,
        predictions.high_us,
        predictions.bound_us,
        predictions.basis,
        strict=True,
    )
    return [
        [f"{time:.6g}", f"{low:.6g}", f"{high:.6g}", f"{bound:.6g}", basis]
        for time, low, high, bound, basis in columns
    ]


# -- writing -------------------------------------------------------------------------------------------


def _text(rows: Sequence[Sequence[str]], out: Path) -> bytes:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=_delimiter(out), lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode("utf-8", "surrogateescape")


class TargetFile:
    """An output file that can be cut back to its last complete chunk."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._settled = file, 0

    def write(self, data: bytes) -> None:
        """Append data."""
        self._file.write(data)

    def settle(self) -> None:
        """Mark the end of a complete chunk."""
        self._settled = self._file.tell()

    def cut(self) -> None:
        """Drop the data behind the last complete chunk."""
        self._file.flush()
        self._file.truncate(self._settled)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[TargetFile]:
    """Yield a temporary file that replaces `path` at the end; after an error `path` is unchanged."""
    path, temporary = replaceable(path), None
    try:
        # In the same folder, because a file replaces another atomically only within a file system.
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            target = TargetFile(file)
            yield target
            target.cut()
        # A temporary file is private to its user. The umask can only be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
        temporary = None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
