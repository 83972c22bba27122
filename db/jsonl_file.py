"""JSON Lines export and import of all measurements of a database.

Each line is an object, and its ``what`` is ``device`` or ``measurement``. A device has the fields of
`tunebench.device.Device` and comes before its measurements. A measurement has the fields of its trial's key,
its outcome, and all other stored columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tunebench._version import __version__
from tunebench.cache_file import LimitedFile, RejectedEntry, open_limited
from tunebench.db.bulk import CHUNK, ProgressCallback, RowImport
from tunebench.db.jsonl_codec import device_from_json, measurement_from_json, refuse_constant
from tunebench.db.reader import Reader
from tunebench.db.record import ImportResult, MeasurementBatch, NewMeasurement, Record, RunStart, SpaceKey
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.outcome import to_json

__all__ = ["import_jsonl", "is_jsonl", "jsonl_records"]

MAX_LINE_BYTES = 1 << 24
"""Largest size of one line."""
MAX_FILE_BYTES = 1 << 34
"""Largest size of a decompressed file; only a few lines are in memory at a time."""
MAX_REFUSED = 100_000
"""Largest number of blank or unusable lines; a file with more is not an export."""
MAX_DEVICES = 1000
MAX_SPACES = 100_000


# -- out -------------------------------------------------------------------------------------------


def jsonl_records(
    store: Reader, spaces: Iterable[SpaceKey], only: Collection[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a line per device, then a line per measurement, space by space and oldest first.

    Args:
        store: Database to export from.
        spaces: Search spaces to export.
        only: Ids of the only measurements; None for all.
    """
    chosen = list(spaces)
    keys = {space.device for space in chosen}
    for key, fields in store.descriptors().items():
        if key in keys:
            yield {"what": "device", "tunebench": __version__, "key": key, **fields}
    for space in chosen:
        for entry in store.history(space.workload, space.device, space.variant):
            if only is None or entry.id in only:
                yield _measurement_line(entry)


def _measurement_line(entry: Record) -> dict[str, Any]:
    result = entry.result
    return {
        "what": "measurement",
        **{field.name: getattr(entry.key, field.name) for field in dataclasses.fields(entry.key)},
        "config": dict(entry.key.config),
        "purpose": entry.purpose,
        "outcome": to_json(result.outcome),
        "resources": {name: v for name, v in dataclasses.asdict(result.resources).items() if v is not None},
        "effort": dataclasses.asdict(result.effort),
        "conditions": result.conditions,
        "bound_us": entry.bound_us,
        "seed": entry.seed,
        "recorded_at": entry.recorded_at.isoformat(),
        "versus_default": entry.verdict.versus_default,
        "comparison": entry.verdict.comparison,
    }


# -- in --------------------------------------------------------------------------------------------


def is_jsonl(path: Path) -> bool:
    """Return whether a file is JSON Lines, by its first ten lines; some of them may be damaged.

    Raises:
        InputError: if the file cannot be read.
    """
    with open_limited(path, "") as file:
        first = itertools.islice(_numbered(file), 10)
        return any(isinstance(_read_line(line), dict) and b'"what"' in line for _, line in first if line)


def _read_line(line: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)


def _numbered(file: LimitedFile) -> Iterator[tuple[int, bytes | None]]:
    """Yield each line with its number; None for a line that is too long."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE_BYTES)
        if not line:
            return
        whole = line.endswith(b"\n") or len(line) < MAX_LINE_BYTES
        yield number, line if whole else None
        while not whole:
            rest = file.readline(MAX_LINE_BYTES)
            whole = not rest or rest.endswith(b"\n")


def import_jsonl(store: Store, path: Path, watcher: ProgressCallback | None = None) -> ImportResult:
    """Import a JSON Lines export: all usable lines in one transaction.

    A measurement is skipped if its trial already has it or has a newer one. Trials whose source differs from
    the installed variant become stale. Only a few lines are in memory at a time.

    Args:
        store: Database to import into.
        path: The file.
        watcher: Progress callback: bytes read, and size of the file.

    Raises:
        InputError: if the file cannot be read.
        DatabaseError: if the database cannot be written.
    """
    lines = _JsonlImport(path)
    added = store.add(lines.batches(watcher or (lambda done, total: None)), recheck=True)
    return lines.result(added)


class _JsonlImport(RowImport):
    """Import of one file: devices so far, and rejected lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._devices: dict[str, Device] = {}
        self._blank = 0

    def batches(self, watcher: ProgressCallback) -> Iterator[MeasurementBatch]:
        """Yield batches of measurements of one device and workload.

        Args:
            watcher: Progress callback.

        Raises:
            InputError: if the file cannot be read to its end, or is too large.
        """
        few: list[NewMeasurement] = []
        size = 0
        with open_limited(self.path, "", MAX_FILE_BYTES) as file:
            for number, line in _numbered(file):
                measurement = self._take(number, line)
                if measurement is not None:
                    few.append(measurement)
                    size += len(line or b"")
                if len(few) >= CHUNK or size > MAX_LINE_BYTES:
                    yield from self._batched(few)
                    few, size = [], 0
                if number % CHUNK == 0:
                    watcher(file.done_bytes, file.total_bytes)
            yield from self._batched(few)
            watcher(file.done_bytes, file.total_bytes)

    def _take(self, number: int, line: bytes | None) -> NewMeasurement | None:
        """Parse one line; return its measurement, or None for a device, a blank line or an unusable line."""
        try:
            if line is None:
                raise InputError(f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
            if line.strip():
                return self._read(line)
            self._blank += 1
            reason = ""
        except RecursionError:
            reason = "it is nested too deeply"
        except InputError as error:
            reason = str(error)
        except ValueError as error:
            reason = f"it is not valid JSON: {error}"
        if self.refused + self._blank >= MAX_REFUSED:
            raise InputError(f"{self.path} has more than {MAX_REFUSED} blank or unusable lines")
        if reason:
            self.reject(RejectedEntry(f"line {number}", reason))
        return None

    def _read(self, line: bytes) -> NewMeasurement | None:
        data = json.loads(line, parse_constant=refuse_constant, object_pairs_hook=_unique_names)
        kind = data.get("what") if isinstance(data, dict) else None
        if kind == "device":
            device = device_from_json(data)
            if len(self._devices) >= MAX_DEVICES and device.key not in self._devices:
                raise InputError(f"a file may contain at most {MAX_DEVICES} devices; import it in parts")
            self._devices[device.key] = device
            return None
        if kind != "measurement":
            raise InputError("it must be an object with what: device or measurement")
        measurement = measurement_from_json(data, self._devices)
        if len(self.spaces) >= MAX_SPACES and measurement.key.space not in self.spaces:
            raise InputError(f"a file may contain at most {MAX_SPACES} spaces; import it in parts")
        self.spaces[measurement.key.space] = None
        self.good += 1
        return measurement

    def _batched(self, measurements: Iterable[NewMeasurement]) -> Iterator[MeasurementBatch]:
        groups: dict[tuple[str, str], list[NewMeasurement]] = {}
        for measurement in measurements:
            groups.setdefault((measurement.key.device, measurement.key.workload), []).append(measurement)
        for (device, workload), group in groups.items():
            start = RunStart(
                device=self._devices[device],
                workload=workload,
                sampler="import",
                seed=0,
                versions={"tunebench": __version__, "file": ascii(self.path.name)[1:-1]},
            )
            yield MeasurementBatch(start=start, measurements=tuple(group))


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise InputError("it contains a name twice")
    return values
