"""Import and export of recorded tuning spaces: measurements of other tuners in the database.

A kernel of another tuner is not a variant of tunebench, and its problem size is not a workload of tunebench.
Its results are stored under ``recorded:kernel=Xgemm,problem=4096x4096`` and ``recorded/Xgemm``, which no
operator uses. They count as not verified, so that `lookup` never returns them. Other tuners measure with warm
caches.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunebench import device as devices
from tunebench._deprecation import renamed
from tunebench._version import __version__
from tunebench.cache_file import CacheFileHeader, RecordedTrial, RejectedEntry, TuningLog, read_header
from tunebench.db.bulk import CHUNK, ProgressCallback, RowImport
from tunebench.db.reader import Reader
from tunebench.db.record import (
    RECORDED,
    ImportResult,
    MeasurementBatch,
    NewMeasurement,
    Record,
    RunStart,
    SpaceKey,
    TrialKey,
)
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.outcome import CacheState, Measured, Predicted, Pruned, WrongResult
from tunebench.space import Config, Value

__all__ = ["ImportOverrides", "import_recorded_space", "names_of", "recorded_space_log", "workload_of"]

_VARIANT = "recorded/"
_REVISION = "recorded"
_KERNEL = re.compile(r"[A-Za-z0-9_.+/-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOverrides:
    """Values that a user gives for a file; they override those in the file.

    Attributes:
        device: Name of a device (see `tunebench.device.find`).
        kernel: Name of the kernel.
        problem: Kernel Tuner's problem size.
    """

    device: str | None = None
    kernel: str | None = None
    problem: tuple[int, ...] | None = None


def workload_of(kernel: str, problem: Sequence[int] = ()) -> str:
    """Return the workload text of a recorded tuning space.

    Args:
        kernel: Name of the kernel.
        problem: Problem size; empty if unknown.

    Raises:
        InputError: if the kernel's name is missing or contains other characters than the text allows.
    """
    if not _KERNEL.fullmatch(kernel):
        reason = f"its kernel is named {kernel[:100]!r}" if kernel else "it does not name its kernel"
        raise InputError(f"{reason}; give --kernel with letters, digits, and any of _ . + - /")
    return f"{RECORDED}kernel={kernel}" + (f",problem={'x'.join(map(str, problem))}" if problem else "")


def names_of(workload: str) -> tuple[str, tuple[int, ...]]:
    """Return the kernel and the problem size of a workload text made by `workload_of`."""
    kernel, _, problem = workload.removeprefix(f"{RECORDED}kernel=").partition(",problem=")
    return kernel, tuple(int(size) for size in problem.split("x")) if problem else ()


def import_recorded_space(
    store: Store, path: Path, naming: ImportOverrides | None = None, watcher: ProgressCallback | None = None
) -> ImportResult:
    """Import a recorded tuning space: all usable rows in one transaction.

    Rows that the database already contains are skipped: importing a file again adds only its new rows.

    Args:
        store: Database to import into.
        path: A Kernel Tuner cache file, or a file in T4 format.
        naming: Values that override those in the file.
        watcher: Progress callback: bytes read, and size of the file.

    Raises:
        InputError: if the file cannot be read, a space with other parameters is stored under its name, or
            neither the file nor `naming` gives the kernel and the device.
        DatabaseError: if the database cannot be written.
    """
    naming = naming or ImportOverrides()
    named = None if naming.device is None else devices.find(naming.device)
    header = read_header(path)
    log = header.log
    try:
        if log.workload and naming.kernel is None:
            raise InputError(
                f"it records tunebench's own {log.kernel} for {log.workload}, but not their verification; "
                "give --kernel NAME to import it as a kernel of another tuner"
            )
        kernel = naming.kernel or log.kernel
        workload = workload_of(kernel, log.problem if naming.problem is None else naming.problem)
        device = named or _device_of(log.device)
        space = SpaceKey(device=device.key, workload=workload, variant=_VARIANT + kernel)
        names = _order(log, store.parameters(space), space)
        origin = _origin(log, path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    rows = _SpaceImport(header, names, space)
    start = RunStart(device=device, workload=workload, sampler="import", seed=0, versions=origin)
    added = store.add(rows.batches(start, watcher))
    return rows.result(added)


class _SpaceImport(RowImport):
    """Import of the rows of one recorded space, a few at a time."""

    def __init__(self, header: CacheFileHeader, names: Sequence[str], space: SpaceKey) -> None:
        super().__init__(header.path)
        self._header, self._names, self.spaces = header, names, {space: None}

    def batches(self, start: RunStart, watcher: ProgressCallback | None) -> Iterator[MeasurementBatch]:
        """Yield the measurements of the file in batches; rejected rows are noted."""
        few: list[NewMeasurement] = []
        (space,) = self.spaces
        for row in self._header.rows(watcher):
            if isinstance(row, RejectedEntry):
                self.reject(row)
                continue
            self.good += 1
            few.append(NewMeasurement(key=_trial_of(row, self._names, space), result=row.result))
            if len(few) == CHUNK:
                yield MeasurementBatch(start=start, measurements=tuple(few))
                few = []
        yield MeasurementBatch(start=start, measurements=tuple(few))


def _device_of(name: str) -> Device:
    if not name:
        raise InputError("it does not name its device; give --device")
    try:
        return devices.find_product(name[:100])
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}; give --device") from None


def _order(log: TuningLog, stored: tuple[str, ...] | None, space: SpaceKey) -> tuple[str, ...]:
    """Return the order of the parameters: that of stored configurations, if there are any."""
    if stored is not None and set(stored) != set(log.names):
        raise InputError(
            f"{space} is stored with other parameters ({', '.join(stored)}) than this file has "
            f"({', '.join(log.names)}); give this kernel another name by --kernel"
        )
    return stored or log.names


def _trial_of(row: RecordedTrial, names: Sequence[str], space: SpaceKey) -> TrialKey:
    return TrialKey(
        device=space.device,
        workload=space.workload,
        variant=space.variant,
        revision=_REVISION,
        config=Config({name: row.config[name] for name in names}),
    )


def _origin(log: TuningLog, path: Path) -> dict[str, str]:
    """Return the values, stored with the run, from which an export restores the file's header."""
    origin = {"tunebench": __version__, "file": ascii(path.name)[1:-1], "device_name": log.device}
    if log.values:
        origin["values"] = json.dumps(dict(log.values), separators=(",", ":"))
    if log.units:
        origin["units"] = json.dumps(dict(log.units), separators=(",", ":"))
    return origin


def recorded_space_log(store: Reader, space: SpaceKey, *, cache: CacheState | None = None) -> TuningLog:
    """Return the measurements of one search space as a tuning log, for other tuners.

    Each configuration has its newest measurement, or a wrong result if it ever had one. Predictions and stale
    trials are left out.

    Args:
        store: Database to export from.
        space: The search space.
        cache: Cache state of the times; None if there is only one.

    Raises:
        InputError: if there is no measurement, or both cache states were measured and `cache` is None.
    """
    entries = _speaking(_comparable(store, space, cache))
    if not entries:
        raise InputError(f"{space} has no measurement" + (f" with {cache} caches" if cache else ""))
    foreign = space.workload.startswith(RECORDED)
    kernel = space.variant
    problem: tuple[int, ...] = ()
    values: dict[str, list[Value]] = {}
    units: dict[str, str] = {}
    product = space.device.partition(":")[2].partition(",")[0]
    if foreign:
        kernel, problem = names_of(space.workload)
        origins = store.versions(space.workload, space.device)
        product = next((origin["device_name"] for origin in origins if origin.get("device_name")), product)
        values = next((json.loads(origin["values"]) for origin in origins if "values" in origin), {})
        units = next((json.loads(origin["units"]) for origin in origins if "units" in origin), {})
    names = tuple(entries[0].key.config)
    if any(set(entry.key.config) != set(names) for entry in entries):
        raise InputError(f"{space}: its parameters have changed over time; export it as jsonl")
    return TuningLog(
        kernel=kernel,
        device=product,
        problem=problem,
        workload="" if foreign else space.workload,
        names=names,
        values={name: tuple(order) for name, order in values.items()},
        rows=tuple(_row(entry, names, foreign) for entry in entries),
        units=units,
    )


def _comparable(store: Reader, space: SpaceKey, cache: CacheState | None) -> list[Record]:
    """Return the current measurements with times of one cache state."""
    entries = [
        entry
        for entry in store.history(space.workload, space.device, space.variant)
        if not entry.stale and not isinstance(entry.result.outcome, Predicted | Pruned)
    ]
    states = {o.cache for entry in entries if isinstance(o := entry.result.outcome, Measured)}
    if cache is None and len(states) > 1:
        raise InputError(f"{space} was measured with cold and with warm caches; select one by --cache")
    state = cache or next(iter(states), None)
    return [e for e in entries if getattr(e.result.outcome, "cache", state) == state]


def _speaking(entries: Iterable[Record]) -> list[Record]:
    """Return the newest measurement of each trial, or its wrong result if it ever had one."""
    chosen: dict[TrialKey, Record] = {}
    for entry in entries:
        before = chosen.get(entry.key)
        if before is None or not isinstance(before.result.outcome, WrongResult):
            chosen[entry.key] = entry
    return list(chosen.values())


def _row(entry: Record, names: Sequence[str], foreign: bool) -> RecordedTrial:
    config = Config({name: entry.key.config[name] for name in names})
    if foreign:  # its conditions contain the time of the measurement, if the file recorded it
        return RecordedTrial(config=config, result=entry.result)
    conditions = {**entry.result.conditions, "timestamp": entry.recorded_at.isoformat(sep=" ")}
    return RecordedTrial(config=config, result=dataclasses.replace(entry.result, conditions=conditions))


__getattr__ = renamed(
    __name__,
    {
        "Naming": "ImportOverrides",
        "import_recording": "import_recorded_space",
        "log_of": "recorded_space_log",
    },
)
