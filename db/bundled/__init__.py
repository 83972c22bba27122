"""Records bundled with the package: one text file per architecture in `db/bundled`.

The first line contains format and architecture. Then follow the devices and the answers, one per line in a
fixed order, so that a changed record changes one line. A lookup reads an SQLite index of the file, which is
created in the cache folder at first use; the files are never written. Only `export_bundled` needs more than
the standard library.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench import _environment
from tunebench._deprecation import renamed
from tunebench._private_file import is_private
from tunebench.db import lookup_index
from tunebench.errors import DatabaseError

if TYPE_CHECKING:
    from tunebench.db.reader import Reader

__all__ = ["FOLDER", "FORMAT", "BundledRecords", "export_bundled", "files", "index_of", "read"]

FORMAT = 1
"""Format of a file; files of other formats are skipped."""

FOLDER = Path(__file__).parent
"""Folder of the files."""

_Key = tuple[str, str, str, str]


@dataclass(slots=True)
class BundledRecords:
    """Records of one file.

    Attributes:
        architecture: Architecture of all its devices.
        devices: Fields of each device, by key.
        records: Answers, by workload, device, variant and cache state.
    """

    architecture: str
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    records: dict[_Key, dict[str, Any]] = field(default_factory=dict)

    def add(self, record: dict[str, Any]) -> None:
        """Add a record; it replaces an older one with the same key."""
        key = (record["workload"], record["device"], record["variant"], record["cache"])
        before = self.records.get(key)
        if before is None or before["recorded_at"] <= record["recorded_at"]:
            self.records[key] = record

    def answers(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of a lookup index (see `Reader.answers`)."""
        for number, (_, record) in enumerate(sorted(self.records.items()), start=1):
            moment = datetime.fromisoformat(record["recorded_at"]).astimezone(UTC)
            yield {**record, "measurement_id": number, "stale": False, "recorded_at": moment}


# -- reading ---------------------------------------------------------------------------------------


def files() -> list[Path]:
    """Return the files, one per architecture."""
    return sorted(FOLDER.glob("*.jsonl"))


def read(path: Path) -> BundledRecords:
    """Read a file.

    Args:
        path: The file.

    Raises:
        DatabaseError: if it has another format, or is damaged.
    """
    try:
        with path.open(encoding="utf-8") as file:
            head = json.loads(file.readline())
            if head["format"] != FORMAT:
                raise DatabaseError(
                    f"{path} is skipped: it has format {head['format']}, and this version reads {FORMAT}"
                )
            bundle = BundledRecords(head["architecture"])
            for line in file:
                data = json.loads(line)
                if data.pop("what") == "device":
                    bundle.devices[data.pop("key")] = data
                else:
                    bundle.add(data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatabaseError(f"{path} is skipped: it cannot be read: {error!r}") from error
    return bundle


def index_of(path: Path) -> Path:
    """Return the index of a file; create it if there is none for the file's contents.

    Raises:
        DatabaseError: if the file cannot be read, or the cache folder cannot be written.
    """
    try:
        status = path.stat()
        digest = _digest(path, status.st_mtime_ns, status.st_size)
        index = (
            _environment.cache_folder() / "answers" / f"bundled-{path.stem}-{digest}.{lookup_index.FORMAT}.db"
        )
        if not is_private(index):
            bundle = read(path)
            lookup_index.replace_index(index, digest, bundle.answers(), dict(sorted(bundle.devices.items())))
    except (OSError, sqlite3.Error, KeyError, TypeError, ValueError) as error:
        raise DatabaseError(f"{path} is skipped: {error!r}") from error
    return index


def indexes(architecture: str | None = None) -> list[Path]:
    """Return the index of each file of bundled records; a lookup reads them after the user's database.

    Files that cannot be read are skipped; `tunebench doctor` reports why.

    Args:
        architecture: The only architecture; None for all.
    """
    paths = []
    for path in files():
        if architecture in (None, path.stem):
            with contextlib.suppress(DatabaseError):
                paths.append(index_of(path))
    return paths


@functools.lru_cache(maxsize=64)
def _digest(path: Path, modified_ns: int, size: int) -> str:
    """Return a hash of a file, computed once per process unless the file changes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# -- writing ---------------------------------------------------------------------------------------


def export_bundled(store: Reader, folder: Path) -> list[tuple[Path, int]]:
    """Write the records that may be bundled: measured answers, verified against the reference.

    Only records of the package's own variants with their current source are written. They are added to
    existing files; of two records of one variant, workload and device the newer one is kept.

    Args:
        store: Database to export from.
        folder: Folder of the files; created if it is missing.

    Returns:
        Each written file with its number of records.

    Raises:
        DatabaseError: if an existing file cannot be read, or a file cannot be written.
    """
    bundle: dict[str, BundledRecords] = {}
    descriptors = store.descriptors()
    for answer in store.answers():
        if not _may_be_bundled(answer):
            continue
        architecture = answer["architecture"]
        path = folder / f"{architecture}.jsonl"
        if architecture not in bundle:
            bundle[architecture] = read(path) if path.exists() else BundledRecords(architecture)
        record = {name: value for name, value in answer.items() if name not in ("measurement_id", "stale")}
        bundle[architecture].add(record | {"recorded_at": answer["recorded_at"].isoformat()})
        bundle[architecture].devices[answer["device"]] = dict(descriptors[answer["device"]])
    return [(_write(records, folder), len(records.records)) for records in bundle.values()]


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
    is_ours = type(variant).__module__.startswith("tunebench.kernels.")
    return is_ours and revision == answer["revision"]


def _write(bundle: BundledRecords, folder: Path) -> Path:
    from tunebench.cache_file import replacing

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{bundle.architecture}.jsonl"
    lines: list[dict[str, Any]] = [{"what": "shipped", "format": FORMAT, "architecture": bundle.architecture}]
    lines += [{"what": "device", "key": key, **fields} for key, fields in sorted(bundle.devices.items())]
    lines += [{"what": "answer", **record} for _, record in sorted(bundle.records.items())]
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
