"""Import and export of files: recorded tuning spaces of other tuners, and JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tunebench import device as devices
from tunebench.cache_file import FORMATS as TUNERS
from tunebench.cache_file import replacing, write
from tunebench.db.bulk import ProgressCallback
from tunebench.db.jsonl_file import import_jsonl, is_jsonl, jsonl_records
from tunebench.db.reader import Reader
from tunebench.db.record import RECORDED, ImportResult, SpaceKey
from tunebench.db.recorded_space import ImportOverrides, import_recorded_space, recorded_space_log
from tunebench.db.store import Store
from tunebench.errors import InputError, UnknownName
from tunebench.outcome import CacheState
from tunebench.workloads import parse

__all__ = [
    "FORMATS",
    "Selection",
    "device_keys",
    "export_to",
    "import_file",
    "workload_text",
    "write_jsonl",
]

FORMATS = (*TUNERS, "jsonl")
"""Formats of `export_to`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Filter of records; None selects all.

    Attributes:
        workload: Text of a workload.
        device: Name, architecture or key of a device.
        variant: Key of a variant.
        cache: Cache state of the times.
    """

    workload: str | None = None
    device: str | None = None
    variant: str | None = None
    cache: CacheState | None = None


def import_file(
    store: Store, path: Path, naming: ImportOverrides | None = None, watcher: ProgressCallback | None = None
) -> ImportResult:
    """Import a file of any supported format: all usable rows in one transaction.

    Args:
        store: Database to import into.
        path: JSON Lines written by `export_to`, a Kernel Tuner cache file, or a file in T4 format.
        naming: Kernel, device and problem size that override those of a recorded tuning space.
        watcher: Progress callback: bytes read, and size of the file.

    Raises:
        InputError: if the file cannot be read, or does not name its kernel or device.
        DatabaseError: if the database cannot be written.
    """
    if not is_jsonl(path):
        return import_recorded_space(store, path, naming, watcher)
    if naming not in (None, ImportOverrides()):
        raise InputError(
            f"{path} is JSON Lines and names its devices itself: remove --device, --kernel and --problem"
        )
    return import_jsonl(store, path, watcher)


def export_to(store: Reader, path: Path, form: str, selection: Selection) -> int:
    """Write records to a file, and return the number of rows.

    Args:
        store: Database to export from.
        path: File to write; compressed by gzip if it ends in ``.gz``.
        form: One of `FORMATS`.
        selection: Records to export. Formats of other tuners need one variant, workload and device.

    Raises:
        UnknownName: if the format does not exist.
        InputError: if no record is selected, several spaces are selected for the format, or the file cannot
            be written.
    """
    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    spaces = select(store, selection)
    if form == "jsonl":
        if selection.cache is not None:
            raise InputError("--cache applies to t4 and kernel-tuner only: jsonl contains every measurement")
        return write_jsonl(store, path, spaces)
    if len(spaces) > 1:
        listed = "; ".join(map(str, spaces[:8])) + ("; …" if len(spaces) > 8 else "")
        raise InputError(
            f"{form} contains one space; select it by --workload, --device and --variant: {listed}"
        )
    log = recorded_space_log(store, spaces[0], cache=selection.cache)
    write(log, path, form)
    return len(log.rows)


def write_jsonl(
    store: Reader, path: Path, spaces: Iterable[SpaceKey], only: Collection[int] | None = None
) -> int:
    """Write measurements as JSON Lines, and return their number; see `jsonl_records`.

    Args:
        store: Database to export from.
        path: File to write; compressed by gzip if it ends in ``.gz``.
        spaces: Search spaces to export.
        only: Ids of the only measurements; None for all.

    Raises:
        InputError: if the file cannot be written.
    """
    count = 0
    with replacing(path) as file:
        for line in jsonl_records(store, spaces, only):
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
            count += line["what"] == "measurement"
    return count


def select(store: Reader, selection: Selection) -> list[SpaceKey]:
    """Return the selected search spaces.

    Args:
        store: Database to select from.
        selection: The filter.

    Raises:
        InputError: if there are none.
    """
    spaces = list(store.spaces())
    text = selection.workload
    for attribute, value in (
        ("workload", None if text is None else workload_text(text, {space.workload for space in spaces})),
        ("variant", selection.variant),
    ):
        if value is not None:
            _known(attribute, value, {getattr(space, attribute) for space in spaces})
            spaces = [space for space in spaces if getattr(space, attribute) == value]
    if selection.device is not None:
        keys = device_keys(selection.device, {space.device for space in spaces})
        spaces = [space for space in spaces if space.device in keys]
    if not spaces:
        raise InputError(f"database {store.location} has no trials to export")
    return spaces


def workload_text(text: str, stored: Collection[str]) -> str:
    """Return the canonical text of a workload; a stored one may belong to an operator that is not loaded.

    Args:
        text: What the user wrote.
        stored: Texts of the stored workloads.

    Raises:
        InputError: if it is not stored and cannot be parsed.
    """
    return text if text in stored or text.startswith(RECORDED) else str(parse(text))


def _known(kind: str, name: str, names: set[str]) -> None:
    if name not in names:
        raise UnknownName(kind, name, names)


def device_keys(name: str, stored_keys: Collection[str]) -> set[str]:
    """Return the stored keys that a name, an architecture or a key selects.

    Args:
        name: What the user wrote, such as ``cpu``, ``H100 SXM`` or ``sm_90``; an ambiguous product selects
            all that it may mean.
        stored_keys: Stored keys.

    Raises:
        UnknownName: if it selects none.
    """
    if name.lower() == "cpu" or name.lower().startswith("cuda"):
        name = devices.find(name).key
    keys = {key for key in stored_keys if devices.selects(name, key)}
    if not keys:
        raise UnknownName("device", name, stored_keys)
    return keys
