"""Files in and out of a database: spaces of other tuners and for them, and everything as lines of JSON."""

from __future__ import annotations

import json
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

__all__ = ["FORMATS", "Selection", "export_to", "import_file"]

FORMATS = (*TUNERS, "jsonl")
"""What `export_to` writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is wanted of a database; None is anything.

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
    """Store what a file holds, whichever it is: all its good rows, or nothing if it is interrupted.

    Args:
        store: Where to.
        path: JSON Lines of `export_to`, a Kernel Tuner cache file, or a file in T4 format.
        naming: What a file of another tuner does not tell, or tells wrong.
        watcher: Is told how many rows are stored, and of how many.

    Raises:
        InputError: if the file cannot be read, or what it holds cannot be told.
        DatabaseError: if the database cannot be written.
    """
    if not is_jsonl(path):
        return import_recorded_space(store, path, naming, watcher)
    if naming not in (None, ImportOverrides()):
        raise InputError(
            f"{path} tells what it is of: --device, --kernel and --problem are for other tuners' files"
        )
    return import_jsonl(store, path, watcher)


def export_to(store: Reader, path: Path, form: str, selection: Selection) -> int:
    """Write a file, and return how many rows are in it.

    Args:
        store: Where from.
        path: Where to; compressed by gzip if it ends in ``.gz``.
        form: One of `FORMATS`.
        selection: Which trials. For other tuners it must leave one variant, workload and device.

    Raises:
        UnknownName: if there is no such format.
        InputError: if nothing is selected, or too much for the format, or the file cannot be written.
    """
    if form not in FORMATS:
        raise UnknownName("format", form, FORMATS)
    spaces = select(store, selection)
    if form == "jsonl":
        if selection.cache is not None:
            raise InputError("--cache goes with t4 and kernel-tuner: jsonl has every measurement")
        with replacing(path) as file:
            count = 0
            for line in jsonl_records(store, spaces):
                file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
                count += line["what"] == "measurement"
        return count
    if len(spaces) > 1:
        listed = "; ".join(map(str, spaces[:8])) + ("; …" if len(spaces) > 8 else "")
        raise InputError(f"{form} holds one space; choose by --workload, --device and --variant: {listed}")
    log = recorded_space_log(store, spaces[0], cache=selection.cache)
    write(log, path, form)
    return len(log.rows)


def select(store: Reader, selection: Selection) -> list[SpaceKey]:
    """Return the spaces that are wanted.

    Raises:
        InputError: if there are none.
    """
    found = list(store.spaces())
    for attribute, wanted in (
        ("workload", _workload(selection.workload, {space.workload for space in found})),
        ("variant", selection.variant),
    ):
        if wanted is not None:
            _known(attribute, wanted, {getattr(space, attribute) for space in found})
            found = [space for space in found if getattr(space, attribute) == wanted]
    if selection.device is not None:
        keys = _device_keys(selection.device, {space.device for space in found})
        found = [space for space in found if space.device in keys]
    if not found:
        raise InputError(f"database {store.location} has no trials to export")
    return found


def _workload(text: str | None, known: set[str]) -> str | None:
    """Return the canonical text; one that is in the database as it stands need be of no loaded operator."""
    if text is None or text in known or text.startswith(RECORDED):
        return text
    return str(parse(text))


def _known(kind: str, name: str, known: set[str]) -> None:
    if name not in known:
        raise UnknownName(kind, name, known)


def _device_keys(name: str, known: set[str]) -> set[str]:
    """Return the keys of the devices that a name, an architecture or a key stands for."""
    if name == "cpu" or name.startswith("cuda"):
        name = devices.find(name).key
    keys = {key for key in known if name in (key, key.partition(":")[0], _product(key))}
    if not keys:
        raise UnknownName("device", name, known)
    return keys


def _product(key: str) -> str:
    return key.partition(":")[2].partition(",")[0]
