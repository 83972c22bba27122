"""Baseline files: the best records of a database, with which later results are compared.

A baseline is JSON Lines (see `tunebench.db.jsonl_file`), sorted, so that a changed record changes one line in
version control. Every export of `tunebench db export --format jsonl`, and every database, is a baseline too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tunebench.db.exchange import import_file, write_jsonl
from tunebench.db.jsonl_file import is_jsonl
from tunebench.db.location import locate
from tunebench.db.reader import Reader
from tunebench.db.record import MeasurementBatch, NewMeasurement, RunStart, SpaceKey
from tunebench.db.store import Store, open_store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.report.comparison import best_answers
from tunebench.tuning import Plan, Progress, Report, tune_all
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["open_baseline", "tune_afresh", "write_baseline"]

EARLIER = "baseline"
"""Revision under which `tune_afresh` copies records: no source has it, so that they are measured again."""


def write_baseline(
    reader: Reader, path: Path, *, workloads: Collection[str] = (), devices: Collection[str] = ()
) -> int:
    """Write the best current record of each workload and device to a file, and return their number.

    Args:
        reader: The database.
        path: File to write; compressed by gzip if it ends in ``.gz``.
        workloads: Canonical texts of the only workloads; empty for all.
        devices: Keys of the only devices; empty for all.

    Raises:
        InputError: there is no current record, or the file cannot be written.
    """
    rows = best_answers(reader, workloads=workloads, devices=devices)
    if not rows:
        raise InputError(f"{reader.location} has no current record for a baseline: tune the workloads first")
    spaces = dict.fromkeys(
        SpaceKey(device=row["device"], workload=row["workload"], variant=row["variant"]) for row in rows
    )
    return write_jsonl(reader, path, spaces, only={row["measurement_id"] for row in rows})


@contextlib.contextmanager
def open_baseline(place: str) -> Iterator[Reader]:
    """Yield the database of a baseline.

    Args:
        place: Path of a file of JSON Lines, or path or URL of a database.

    Raises:
        InputError: the file does not exist, or a line of it cannot be used.
        DatabaseError: the database does not exist or cannot be read.
    """
    file = None if "://" in place else Path(place)
    if file is None or _is_database(file):
        locate(place).require()
        with open_store(place, read_only=True) as store:
            yield store
        return
    if not file.exists():
        raise InputError(f"there is no baseline {file}: write it by --update, and commit it")
    if not is_jsonl(file):
        raise InputError(f"expected JSON Lines or a database as the baseline, got {file}")
    with (
        tempfile.TemporaryDirectory(prefix="tunebench-") as folder,
        open_store(Path(folder, "b.db")) as store,
    ):
        result = import_file(store, file)
        if result.refused:
            first = f"{result.faults[0]}" if result.faults else "unknown"
            raise InputError(f"{file}: {result.refused} lines cannot be used, the first of them {first}")
        yield store


def _is_database(file: Path) -> bool:
    with contextlib.suppress(OSError):
        if file.is_file():  # opening a pipe would wait for its writer
            with file.open("rb") as opened:
                return opened.read(16).startswith(b"SQLite format 3")
    return False


@contextlib.contextmanager
def tune_afresh(
    baseline: Reader,
    device: Device,
    plan: Plan,
    *,
    workloads: Collection[str] = (),
    watcher: Callable[[Workload, Progress], None] | None = None,
) -> Iterator[tuple[Reader, list[Report]]]:
    """Measure the workloads of a baseline again in a temporary database, and yield it with the reports.

    Records of the baseline are a warm start: their configurations are tried first.

    Args:
        baseline: The baseline.
        device: Device to measure on.
        plan: How to tune each workload.
        workloads: Canonical texts of the only workloads; empty for all.
        watcher: Progress callback, called with the workload after every trial.

    Raises:
        InputError: the baseline has no record of the device.
    """
    texts = _workloads_on(baseline, device, workloads)
    with tempfile.TemporaryDirectory(prefix="tunebench-") as folder:
        path = Path(folder, "fresh.db")
        with open_store(path) as store:
            _copy_as_earlier(baseline, store, device, texts)
        listed = [parse(text) for text in texts]
        reports = list(tune_all(listed, device=device, db=path, plan=plan, watcher=watcher))
        with open_store(path, read_only=True) as store:
            yield store, reports


def _workloads_on(baseline: Reader, device: Device, workloads: Collection[str]) -> list[str]:
    recorded = {space.workload for space in baseline.spaces() if space.device == device.key}
    if not recorded:
        keys = ", ".join(sorted({space.device for space in baseline.spaces()})) or "none"
        raise InputError(
            f"the baseline has no record of this device, {device.key}; it has records of: {keys}"
        )
    return sorted(text for text in recorded if not workloads or text in workloads)


def _copy_as_earlier(baseline: Reader, store: Store, device: Device, workloads: Collection[str]) -> None:
    """Copy records as those of an earlier source: they only warm-start a search."""
    for workload in workloads:
        measurements = tuple(
            NewMeasurement(
                key=dataclasses.replace(record.key, revision=EARLIER),
                result=record.result,
                purpose=record.purpose,
                bound_us=record.bound_us,
                seed=record.seed,
                recorded_at=record.recorded_at,
            )
            for record in baseline.history(workload, device.key)
        )
        start = RunStart(device=device, workload=workload, sampler="import", seed=0)
        store.add([MeasurementBatch(start=start, measurements=measurements)], recheck=True)
