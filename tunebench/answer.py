"""Serving what is known: the best variant and configuration for a problem on a device.

Reading costs a serving process the standard library's `sqlite3` and one view of the database, `answer_v1`;
no NumPy, SQLAlchemy, Optuna, Numba or CUDA is imported. A process keeps its answers and asks SQLite at each
lookup whether anything was committed since, so that new records are served without a restart.

What is served, the first that exists: measured on this device; measured on another device of this
architecture; the same two from sources that have changed since (`Answer.stale`); predicted for this device;
predicted for this architecture. Times with cold caches come before times with warm ones, and never compare.
"""

from __future__ import annotations

import functools
import json
import os
import sqlite3
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tunebench import device as devices
from tunebench.db.index import FrozenConnection, explain_sqlite, has_log, open_read_only, refresh
from tunebench.db.location import Location, locate
from tunebench.device import Device
from tunebench.errors import DatabaseError, LookupMiss, SchemaError, TunebenchError
from tunebench.outcome import CacheState
from tunebench.space import Config
from tunebench.workload import Workload
from tunebench.workloads import parse, workload

__all__ = ["Answer", "How", "lookup", "lookup_workload"]

How = Literal["measured here", "same architecture", "predicted"]
"""How an answer is known: timed on this device, on another of its architecture, or believed by a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best that is known for one problem on one device, and how it is known.

    Attributes:
        workload: Canonical text of the problem.
        device: Key of the device it was measured on or predicted for.
        how: How it is known.
        variant: `Variant.key` of the implementation; `tunebench.kernels.variant` finds it.
        config: Its configuration.
        expected_us: Median that was measured, or the time that was predicted.
        ci_us: 95 % confidence interval of the median; None for a prediction.
        interval_us: What nine of ten times lie between, of a prediction whose record tells; None otherwise.
        bound_us: The bound it was held against, if there was one.
        cache: Cache state it was timed in; None for a prediction.
        verification: How its result was proved right; a prediction may be ``"not verified"``.
        revision: Source it was compiled from.
        stale: Whether that source was found changed when the problem was last tuned: time it again.
        recorded_at: When it was recorded, UTC.
        database: Where it stands: a path, or a URL without password.
    """

    workload: str
    device: str
    how: How
    variant: str
    config: Config
    expected_us: float
    ci_us: tuple[float, float] | None
    bound_us: float | None
    cache: CacheState | None
    verification: str
    revision: str
    stale: bool
    recorded_at: datetime
    database: str
    interval_us: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        data = {name: getattr(self, name) for name in self.__slots__}
        return {**data, "config": dict(self.config), "recorded_at": self.recorded_at.isoformat()}

    def outdated(self) -> str | None:
        """Return why this answer stands no more (variant, value or source gone), or None if it does.

        This imports every variant, though neither NumPy, Numba nor CUDA; `lookup` goes by `stale` instead.
        """
        from tunebench.kernels import variant as find_variant

        try:
            variant = find_variant(self.variant)
            variant.space.ordinals(self.config)
            today = variant.revision(parse(self.workload), self.config)
        except TunebenchError as error:
            return str(error)
        return (
            None if today == self.revision else f"the source of {self.variant} has changed since it was timed"
        )


def lookup(
    operator: str, *, device: Device | str | None = None, db: str | Path | None = None, **dimensions: Any
) -> Answer:
    """Return the best that is known: `lookup("gemm", m=64, n=64, k=64, dtype="f16", device="h100-sxm")`.

    Args:
        operator: Name of the operator.
        device: A device, its name (see `tunebench.device.find`), its stored key, or None: the first GPU, or
            the CPU if there is none.
        db: A path, a URL, or None: what `TUNEBENCH_DB` says, else the user's database. A server is read
            through a local index, at most a minute old.
        dimensions: Of the operator; those with defaults may be left out.

    Raises:
        InputError: if the operator, a dimension or the device is unknown, missing or out of range.
        LookupMiss: if nothing is known; the message names the command that would tune it.
        DatabaseError: if the database cannot be read.
    """
    try:
        text = _canonical(operator, **dimensions)
    except TypeError:  # a dimension that cannot be hashed cannot be right either: have it named
        text = str(workload(operator, **dimensions))
    return _lookup(text, device, db)


def lookup_workload(
    problem: Workload | str,
    *,
    device: Device | str | None = None,
    db: str | Path | None = None,
    variant: str | None = None,
) -> Answer:
    """Return the best that is known for a workload, given as such or as text; otherwise as `lookup`.

    Args:
        problem: What to compute.
        device: As for `lookup`.
        db: As for `lookup`.
        variant: Key of the only variant to consider.
    """
    return _lookup(str(problem if isinstance(problem, Workload) else parse(problem)), device, db, variant)


@functools.lru_cache(maxsize=4096, typed=True)
def _canonical(operator: str, **dimensions: Any) -> str:
    return str(workload(operator, **dimensions))


def _lookup(
    text: str, device: Device | str | None, db: str | Path | None, variant: str | None = None
) -> Answer:
    location = locate(db)
    target = _target(device)
    path = refresh(location) if location.path is None else location.path
    found = _reader(path).answer(text, target, location, variant)
    if found is None:
        raise LookupMiss(_miss(text, target, location, tell_database=db is not None))
    return found


@dataclass(frozen=True, slots=True)
class _Target:
    """What of a device decides which rows serve it."""

    key: str
    architecture: str
    product: str
    sm_count: int


def _target(device: Device | str | None) -> _Target:
    if isinstance(device, Device):
        return _Target(device.key, device.architecture, device.name, device.sm_count)
    return _named_target(device)


@functools.lru_cache(maxsize=256)
def _named_target(name: str | None) -> _Target:
    if name is not None and ",sm=" in name:  # a key, as results are stored under
        architecture, _, rest = name.partition(":")
        product, *facts = rest.split(",")
        counts = [fact.removeprefix("sm=") for fact in facts if fact.startswith("sm=")]
        if product and counts and counts[0].isdecimal():
            return _Target(name, architecture, product, int(counts[0]))
    return _target(devices.find(name))


def _miss(text: str, target: _Target, location: Location, *, tell_database: bool) -> str:
    local = {device.key: device for device in (devices.local_cpu(), *devices.local_gpus())}
    device = f"--device offline --arch {target.architecture}"
    if target.key in local:
        device = "--device cpu" if local[target.key].kind == "cpu" else f"--device {target.product}"
    database = f" --db {location}" if tell_database else ""
    empty = location.path is not None and not location.path.exists()
    where = f"database {location}" + (", which does not exist yet" if empty else "")
    return (
        f"nothing is known for {text} on {target.key}, nor on any {target.architecture}, in {where}; "
        f"run: tunebench tune --workload {text} {device}{database}"
    )


# -- reading the view ------------------------------------------------------------------------------

# The order is that of the module's docstring. Of other devices the nearest one answers: the same product
# (with another power limit, say), else the one with the most similar number of SMs.
_QUERY = """
SELECT device, variant, config_values, revision, kind, cache, verification, time_us, ci_low_us, ci_high_us,
       bound_us, stale, recorded_at, measurement_id
FROM answer_v1
WHERE workload = :workload AND architecture = :architecture AND (:variant IS NULL OR variant = :variant)
ORDER BY kind = 'predicted', stale, device <> :key, product <> :product, ABS(sm_count - :sm_count), device,
         cache = 'warm', verification = 'not verified', time_us, measurement_id
LIMIT 1
"""


class _Reader:
    """One thread's connection to one file, with the answers it gave since the file last changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, ...] = ()
        self._version = -1
        self._answers: dict[tuple[str, _Target, str | None], Answer | None] = {}

    def answer(self, text: str, target: _Target, location: Location, variant: str | None) -> Answer | None:
        """Return the best row for a workload and a device, or None if there is none.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        try:
            connection = self._current()
            if connection is None:
                return None
            version = connection.execute("PRAGMA data_version").fetchone()[0]
            if version != self._version:
                self._answers.clear()
                self._version = version
            asked = (text, target, variant)
            if asked not in self._answers:
                self._answers[asked] = _query(connection, text, target, location, variant)
            return self._answers[asked]
        except (sqlite3.Error, OSError) as error:
            self._forget()
            raise _explained(location, self._path, error) from error

    def _current(self) -> sqlite3.Connection | None:
        """Return a connection to the file that is there now; None if there is none, or nothing in it."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._forget()
            return None
        # A file that took this one's place, and a process after a fork, need a connection of their own. A
        # frozen connection sees no change at all: it serves one lookup.
        file = (os.getpid(), status.st_dev, status.st_ino)
        if file != self._file or isinstance(self._connection, FrozenConnection):
            self._forget()
        if self._connection is None:
            if status.st_size == 0 and not has_log(self._path):
                return None
            self._connection, self._file = open_read_only(self._path), file
        return self._connection

    def _forget(self) -> None:
        if self._connection is not None and self._file[0] != os.getpid():
            _inherited.append(self._connection)  # the parent's: SQLite must not close it here
        elif self._connection is not None:
            self._connection.close()
        self._connection, self._version = None, -1
        self._answers.clear()


_inherited: list[sqlite3.Connection] = []
_local = threading.local()


def _reader(path: Path) -> _Reader:
    """Return this thread's reader of a file."""
    readers: dict[Path, _Reader] = _local.__dict__.setdefault("readers", {})
    if path not in readers:
        readers[path] = _Reader(path)
    return readers[path]


def _query(
    connection: sqlite3.Connection, text: str, target: _Target, location: Location, variant: str | None
) -> Answer | None:
    row = connection.execute(
        _QUERY,
        {
            "workload": text,
            "variant": variant,
            "key": target.key,
            "architecture": target.architecture,
            "product": target.product,
            "sm_count": target.sm_count,
        },
    ).fetchone()
    if row is None:
        return None
    (
        device,
        variant,
        values,
        revision,
        kind,
        cache,
        verification,
        time_us,
        low,
        high,
        bound,
        stale,
        at,
        id_,
    ) = row
    how: How = "measured here" if device == target.key else "same architecture"
    return Answer(
        workload=text,
        device=device,
        how="predicted" if kind == "predicted" else how,
        variant=variant,
        config=Config(json.loads(values)),
        expected_us=time_us,
        ci_us=None if low is None else (low, high),
        bound_us=bound,
        cache=cache,
        verification=verification,
        revision=revision,
        stale=bool(stale),
        recorded_at=datetime.fromisoformat(at).replace(tzinfo=UTC),
        database=str(location),
        interval_us=_interval(connection, id_) if kind == "predicted" else None,
    )


def _interval(connection: sqlite3.Connection, measurement_id: int) -> tuple[float, float] | None:
    """Return the interval of a prediction; None in records that have none."""
    row = connection.execute("SELECT detail FROM measurement WHERE id = ?", (measurement_id,)).fetchone()
    detail = json.loads(row[0]) if row is not None else {}
    low_us, high_us = detail.get("low_us"), detail.get("high_us")
    return None if low_us is None or high_us is None else (low_us, high_us)


def _explained(location: Location, path: Path, error: Exception) -> DatabaseError:
    if "no such table" in str(error):
        return SchemaError(
            f"database {location} has no view answer_v1: it is not one of tunebench's, or of another version "
            "of it; `tunebench db upgrade` tells which"
        )
    return DatabaseError(explain_sqlite(path, error))
