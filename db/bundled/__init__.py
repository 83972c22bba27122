"""Records that come with the package: a file of text an architecture, in `db/shipped`, and what reads it.

The first line says which format it is and of which architecture; then come the devices, a line each, then the
answers, a line each, in a fixed order, so that a change of one record is a change of one line. Looking up
reads an SQLite index of it, which is made in the cache folder when a file is first asked for; the files are
never written to. Nothing here but `export_bundled` needs more than the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench import _environment
from tunebench._deprecation import renamed
from tunebench.db import lookup_index
from tunebench.errors import DatabaseError

if TYPE_CHECKING:
    from tunebench.db.reader import Reader

__all__ = ["FOLDER", "FORMAT", "BundledRecords", "export_bundled", "files", "index_of", "read"]

FORMAT = 1
"""Of a file; one of another format is passed over."""

FOLDER = Path(__file__).parent
"""Where the files of the package are."""

_Key = tuple[str, str, str, str]


@dataclass(slots=True)
class BundledRecords:
    """What a file holds.

    Attributes:
        architecture: Of all its devices.
        devices: The fields of each device, by its key.
        records: Each answer, by device, workload, variant and cache state.
    """

    architecture: str
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: dict[_Key, dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Take a record, in place of an older one of its kind."""
        key = (record["workload"], record["device"], record["variant"], record["cache"])
        before = self.records.get(key)
        if before is None or before["recorded_at"] <= record["recorded_at"]:
            self.records[key] = record

    # What an index is made of has these three, as a `Reader` does.

    def answers(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of `answer_v1`."""
        for number, (_, record) in enumerate(sorted(self.records.items()), start=1):
            moment = datetime.fromisoformat(record["recorded_at"]).astimezone(UTC)
            yield {**record, "measurement_id": number, "stale": False, "recorded_at": moment}

    def answer_details(
        self, measurements: Sequence[int]
    ) -> Iterable[tuple[int, Mapping[str, Any], Mapping[str, Any] | None]]:
        """Return what a lookup tells besides of answers, by their ids."""
        records = [record for _, record in sorted(self.records.items())]
        for number in measurements:
            record = records[number - 1]
            yield number, record["detail"], record["comparison"]

    def descriptors(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the devices."""
        return dict(sorted(self.devices.items()))


# -- reading ---------------------------------------------------------------------------------------


def files() -> list[Path]:
    """Return the files that are there, one an architecture."""
    return sorted(FOLDER.glob("*.jsonl"))


def read(path: Path) -> BundledRecords:
    """Read a file.

    Raises:
        DatabaseError: if it is of another format, or damaged.
    """
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
            if head["format"] != FORMAT:
                raise DatabaseError(
                    f"{path} is passed over: it is of format {head['format']}, this version reads {FORMAT}"
                )
            shipped = BundledRecords(head["architecture"])
            for line in file:
                data = json.loads(line)
                if data.pop("what") == "device":
                    shipped.devices[data.pop("key")] = data
                else:
                    shipped.add(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatabaseError(f"{path} cannot be read, and is passed over: {error!r}") from error
    return shipped


def index_of(path: Path) -> Path:
    """Return an index that holds what a file does, made anew if there is none of this file yet.

    Raises:
        DatabaseError: if the file cannot be used, or the cache folder cannot be written.
    """
    try:
        status = path.stat()
        digest = _digest(path, status.st_mtime_ns, status.st_size)
        found = (
            _environment.cache_folder() / "answers" / f"bundled-{path.stem}-{digest}.{lookup_index.FORMAT}.db"
        )
        if not found.exists():
            lookup_index.replace_index(found, digest, read(path))
    except (OSError, sqlite3.Error, KeyError, TypeError, ValueError) as error:
        raise DatabaseError(f"{path} cannot be used, and is passed over: {error!r}") from error
    return found


def indexes(architecture: str | None = None) -> list[Path]:
    """Return the index of each file of bundled records; a lookup reads them after the user's database.

    Files that cannot be read are skipped; `tunebench doctor` reports why.

    Args:
        architecture: The only architecture; None for all.
    """
    found = []
    for path in files():
        if architecture in (None, path.stem):
            with contextlib.suppress(DatabaseError):
                found.append(index_of(path))
    return found


@functools.lru_cache(maxsize=64)
def _digest(path: Path, modified_ns: int, size: int) -> str:
    """Return a hash of a file, read once a process unless it changes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# -- writing ---------------------------------------------------------------------------------------

_FIELDS = (
    *("device", "device_kind", "architecture", "product", "sm_count", "workload", "variant", "revision"),
    *("config", "config_values", "kind", "cache", "verification", "time_us", "ci_low_us", "ci_high_us"),
    *("bound_us", "recorded_at"),
)


def export_bundled(store: Reader, folder: Path) -> list[tuple[Path, int]]:
    """Write what may come with the package: answers that were timed, and proved right where they were timed.

    Records of the package's own variants with today's sources alone are taken. A file that is there is added
    to: of two records of one variant for one problem on one device the newer one stays.

    Args:
        store: Where from.
        folder: Where to; made if it is not there.

    Returns:
        The files that were written, and how many records each has.

    Raises:
        DatabaseError: if a file that is there cannot be read, or one cannot be written.
    """
    shipped: dict[str, BundledRecords] = {}
    answers = store.answers()
    said = {
        id_: (detail, comparison)
        for id_, detail, comparison in store.answer_details([answer["measurement_id"] for answer in answers])
    }
    descriptors = store.descriptors()
    for answer in answers:
        if not _may_be_bundled(answer):
            continue
        architecture = answer["architecture"]
        path = folder / f"{architecture}.jsonl"
        if architecture not in shipped:
            shipped[architecture] = read(path) if path.exists() else BundledRecords(architecture)
        detail, comparison = said[answer["measurement_id"]]
        record = {name: answer[name] for name in _FIELDS}
        record |= {
            "recorded_at": answer["recorded_at"].isoformat(),
            "detail": detail,
            "comparison": comparison,
        }
        shipped[architecture].add(record)
        shipped[architecture].devices[answer["device"]] = dict(descriptors[answer["device"]])
    return [(_write(each, folder), len(each.records)) for each in shipped.values()]


def _may_be_bundled(answer: Mapping[str, Any]) -> bool:
    from tunebench import kernels
    from tunebench.errors import TunebenchError
    from tunebench.space import Config
    from tunebench.workloads import parse

    if answer["kind"] != "measured" or answer["verification"] != "reference" or answer["stale"]:
        return False
    try:
        variant, workload = kernels.variant(answer["variant"]), parse(answer["workload"])
        revision = variant.revision(workload, Config(answer["config_values"]))
    except TunebenchError:
        return False
    own = type(variant).__module__.startswith("tunebench.kernels.")
    return own and revision == answer["revision"]


def _write(shipped: BundledRecords, folder: Path) -> Path:
    from tunebench.cache_file import replacing

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{shipped.architecture}.jsonl"
    lines: list[dict[str, Any]] = [
        {"what": "shipped", "format": FORMAT, "architecture": shipped.architecture}
    ]
    lines += [{"what": "device", "key": key, **fields} for key, fields in sorted(shipped.devices.items())]
    lines += [{"what": "answer", **record} for _, record in sorted(shipped.records.items())]
    with replacing(path) as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
    return path


__getattr__ = renamed(
    __name__,
    {
        "ship": "export_bundled",
    },
)
