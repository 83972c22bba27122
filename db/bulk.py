"""Many measurements at once: which of them are new, and rows by the thousand in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunebench.cache_file import RejectedRow
from tunebench.db.record import MAX_FAULTS, ImportResult, NewMeasurement, RunStart, SpaceKey, TrialKey
from tunebench.db.schema import DONE, TRIAL_KEY
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import trial_table as _trial
from tunebench.device import Device

__all__ = [
    "CHUNK",
    "IDENTITY",
    "BulkInsert",
    "ProgressCallback",
    "RowImport",
    "identity",
    "insert_trials",
    "new_measurements",
]

ProgressCallback = Callable[[int, int], None]
"""Is told how many measurements are stored, and of how many."""

CHUNK = 500
"""Measurements that are looked at and stored at a time: a longer list is never held."""

IDENTITY = ("purpose", "kind", "median_us", "predicted_us", "reason", "samples_us")
"""Columns by which a measurement of a trial is told from another one."""

_Trial = tuple[str, str, str]


@dataclass(slots=True)
class _TrialMeasurements:
    """What is there of a trial: its measurements, by what tells them apart, and the newest one's time."""

    measurements: set[tuple[Any, ...]] = field(default_factory=set)
    newest: datetime | None = None


class BulkInsert:
    """What is added in one transaction.

    Attributes:
        count: Measurements.
        spaces: What they are of, with the id of its device, and the device.
    """

    def __init__(self) -> None:
        self.count = 0
        self.spaces: dict[SpaceKey, tuple[int, Device]] = {}
        self._runs: dict[tuple[str, str], tuple[RunStart, str]] = {}
        self.run_ids: set[str] = set()
        """Of the runs that were begun."""

    def run_of(self, start: RunStart) -> str | None:
        """Return the run that was begun last on this workload and device, if it began alike."""
        begun = self._runs.get((start.device.key, start.workload))
        return begun[1] if begun is not None and begun[0] == start else None

    def begun(self, start: RunStart, run_id: str) -> str:
        """Note a run."""
        self._runs[start.device.key, start.workload] = (start, run_id)
        self.run_ids.add(run_id)
        return run_id


CLOCK_TOLERANCE = timedelta(days=1)
"""A moment further ahead than that was told by a clock that was wrong."""


def new_measurements(
    connection: sa.Connection,
    device_id: int,
    measurements: Sequence[NewMeasurement],
    now: datetime,
    now_adding: Collection[str] = (),
) -> list[NewMeasurement]:
    """Return the measurements that their trials do not have yet, each once.

    One that is older than what its trial has is left out, too: what was measured last is what is known. What
    is dated in the future shuts nothing out.

    Args:
        connection: Within a transaction.
        device_id: Their device.
        measurements: At most `CHUNK`, of one workload.
        now: The time.
        now_adding: Runs that are being added: among theirs, the order they come in counts, and no clock.
    """
    if not measurements:
        return []
    trials = _stored_trials(connection, device_id, measurements, now + CLOCK_TOLERANCE, now_adding)
    fresh = []
    for measurement in measurements:
        key = measurement.key
        trial = trials.setdefault((key.variant, str(key.config), key.revision), _TrialMeasurements())
        outcome = measurement.result.outcome
        told = identity(
            {name: getattr(outcome, name, None) for name in IDENTITY} | {"purpose": measurement.purpose}
        )
        late = measurement.recorded_at and trial.newest and measurement.recorded_at < trial.newest
        if told not in trial.measurements and not late:
            trial.measurements.add(told)
            fresh.append(measurement)
    return fresh


def _stored_trials(
    connection: sa.Connection,
    device_id: int,
    measurements: Sequence[NewMeasurement],
    until: datetime,
    now_adding: Collection[str],
) -> dict[_Trial, _TrialMeasurements]:
    told = (_measurement.c[name] for name in IDENTITY)
    query = (
        sa.select(*_TRIAL, *told, _measurement.c.recorded_at, _measurement.c.run_id)
        .join(_trial, _trial.c.id == _measurement.c.trial_id)
        .where(*_of_configs(device_id, measurements[0].key.workload, (a.key for a in measurements)))
    )
    found: dict[_Trial, _TrialMeasurements] = {}
    for row in connection.execute(query).mappings():
        trial = found.setdefault((row["variant"], row["config"], row["revision"]), _TrialMeasurements())
        trial.measurements.add(identity(row))
        if row["run_id"] not in now_adding and row["recorded_at"] <= until:
            trial.newest = max(filter(None, (trial.newest, row["recorded_at"])))
    return found


_TRIAL = (_trial.c.variant, _trial.c.config, _trial.c.revision)


def _of_configs(
    device_id: int, workload: str, keys: Iterable[TrialKey]
) -> tuple[sa.ColumnElement[bool], ...]:
    """Return what selects the trials of some configurations, whatever their variant and revision."""
    configs = {str(key.config) for key in keys}
    at = _trial.c
    return (at.device_id == device_id, at.workload == workload, at.config.in_(configs))


def identity(row: Mapping[Any, Any], names: Sequence[str] = IDENTITY) -> tuple[Any, ...]:
    """Return the values of some columns of a measurement, hashable."""
    return tuple(tuple(value) if isinstance(value := row[name], list) else value for name in names)


def insert_trials(
    connection: sa.Connection,
    insert: postgresql.Insert | sqlite.Insert,
    device_id: int,
    measurements: Sequence[NewMeasurement],
) -> dict[TrialKey, int]:
    """Store the trials of measurements of one workload unless they are there, and return the id of each."""
    keys = list(dict.fromkeys(measurement.key for measurement in measurements))
    rows = [
        {
            "device_id": device_id,
            "workload": key.workload,
            "variant": key.variant,
            "revision": key.revision,
            "config": str(key.config),
            "config_values": dict(key.config),
            "stale": False,
            **DONE,
        }
        for key in keys
    ]
    connection.execute(insert.on_conflict_do_update(index_elements=TRIAL_KEY, set_=DONE), rows)
    query = sa.select(*_TRIAL, _trial.c.id).where(*_of_configs(device_id, keys[0].workload, keys))
    ids = {tuple(trial): id_ for *trial, id_ in connection.execute(query)}
    return {key: ids[key.variant, str(key.config), key.revision] for key in keys}


class RowImport:
    """Rows of a file that is imported: which spaces they belong to, and which cannot be used.

    Attributes:
        path: The file.
        spaces: Spaces of its rows.
        good: Number of rows that can be used.
        refused: Number of rows that cannot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spaces: dict[SpaceKey, None] = {}
        self.good = self.refused = 0
        self._rejected: list[RejectedRow] = []

    def reject(self, row: RejectedRow) -> None:
        """Count a row that cannot be used, and keep the first `MAX_FAULTS` of them."""
        self.refused += 1
        self._rejected += [row] if self.refused <= MAX_FAULTS else []

    def result(self, added: int) -> ImportResult:
        """Return the result of the import, of which `added` rows were new."""
        return ImportResult(
            file=self.path,
            spaces=tuple(self.spaces),
            added=added,
            known=self.good - added,
            faults=tuple(self._rejected),
            refused=self.refused,
        )
