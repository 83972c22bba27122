"""Import of many measurements in one transaction: which are new, and bulk inserts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tunebench.db.record import MAX_FAULTS, ImportResult, NewMeasurement, RunStart, SpaceKey, TrialKey
from tunebench.db.schema import DONE, TRIAL_KEY
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import trial_table as _trial
from tunebench.device import Device

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql, sqlite

    from tunebench.cache_file import RejectedEntry

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
"""Progress callback: receives the number done and the total."""

CHUNK = 500
"""Measurements that are compared and inserted at a time; more are never held in memory."""

IDENTITY = ("purpose", "kind", "median_us", "predicted_us", "reason", "samples_us")
"""Columns that distinguish the measurements of one trial."""

_Trial = tuple[str, str, str]


@dataclass(slots=True)
class _TrialMeasurements:
    """Stored measurements of one trial: their `identity`, with and without metrics, and the newest time."""

    measurements: set[tuple[Any, ...]] = field(default_factory=set)
    with_metrics: set[tuple[Any, ...]] = field(default_factory=set)
    newest: datetime | None = None

    def add(self, values: tuple[Any, ...], metrics: tuple[tuple[str, float], ...]) -> None:
        """Add a measurement."""
        self.measurements.add((values,))
        self.with_metrics.add((values, *metrics))


@dataclass(slots=True)
class BulkInsert:
    """State of one bulk insert.

    Attributes:
        count: Number of measurements inserted.
        spaces: Id and description of the device of each search space.
        runs: Start and id of the last run of each device and workload.
        run_ids: Ids of the runs that this insert started.
    """

    count: int = 0
    spaces: dict[SpaceKey, tuple[int, Device]] = field(default_factory=dict)
    runs: dict[tuple[str, str], tuple[RunStart, str]] = field(default_factory=dict)
    run_ids: set[str] = field(default_factory=set)


CLOCK_TOLERANCE = timedelta(days=1)
"""Times further in the future come from a wrong clock."""


def new_measurements(
    connection: sa.Connection,
    device_id: int,
    measurements: Sequence[NewMeasurement],
    now: datetime,
    now_adding: Collection[str] = (),
) -> list[NewMeasurement]:
    """Return the measurements that their trials do not have yet, each once.

    A measurement that is older than the newest one of its trial is skipped: the newest measurement counts.
    Stored times in the future are ignored.

    Args:
        connection: Open transaction.
        device_id: Id of the device.
        measurements: At most `CHUNK`, of one workload.
        now: Current time.
        now_adding: Ids of runs of this insert: their measurements count in their order, whatever their times.
    """
    if not measurements:
        return []
    trials = _stored_trials(connection, device_id, measurements, now + CLOCK_TOLERANCE, now_adding)
    fresh = []
    for measurement in measurements:
        key = measurement.key
        trial = trials.setdefault((key.variant, str(key.config), key.revision), _TrialMeasurements())
        outcome = measurement.result.outcome
        values = identity(
            {name: getattr(outcome, name, None) for name in IDENTITY} | {"purpose": measurement.purpose}
        )
        late = measurement.recorded_at and trial.newest and measurement.recorded_at < trial.newest
        metrics = _items(getattr(outcome, "metrics", None))
        # An import of an earlier version dropped the metrics of a file: importing it again adds them.
        present = trial.with_metrics if metrics else trial.measurements
        if (values, *metrics) not in present and not late:
            trial.add(values, metrics)
            fresh.append(measurement)
    return fresh


def _items(metrics: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """Return metrics as a key; empty without any."""
    return tuple(sorted((metrics or {}).items()))


def _stored_trials(
    connection: sa.Connection,
    device_id: int,
    measurements: Sequence[NewMeasurement],
    until: datetime,
    now_adding: Collection[str],
) -> dict[_Trial, _TrialMeasurements]:
    columns = (_measurement.c[name] for name in IDENTITY)
    query = (
        sa.select(*_TRIAL, *columns, *(_measurement.c[name] for name in ("metrics", "recorded_at", "run_id")))
        .join(_trial, _trial.c.id == _measurement.c.trial_id)
        .where(*_of_configs(device_id, measurements[0].key.workload, (a.key for a in measurements)))
    )
    trials: dict[_Trial, _TrialMeasurements] = {}
    for row in connection.execute(query).mappings():
        trial = trials.setdefault((row["variant"], row["config"], row["revision"]), _TrialMeasurements())
        trial.add(identity(row), _items(row["metrics"]))
        if row["run_id"] not in now_adding and row["recorded_at"] <= until:
            trial.newest = max(filter(None, (trial.newest, row["recorded_at"])))
    return trials


_TRIAL = (_trial.c.variant, _trial.c.config, _trial.c.revision)


def _of_configs(
    device_id: int, workload: str, keys: Iterable[TrialKey]
) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions that select the trials of some configurations, of any variant and revision."""
    configs = {str(key.config) for key in keys}
    at = _trial.c
    return (at.device_id == device_id, at.workload == workload, at.config.in_(configs))


def identity(row: Mapping[Any, Any], names: Sequence[str] = IDENTITY) -> tuple[Any, ...]:
    """Return the values of some columns of a measurement, hashable.

    Args:
        row: The measurement.
        names: The columns.
    """
    return tuple(tuple(value) if isinstance(value := row[name], list) else value for name in names)


def insert_trials(
    connection: sa.Connection,
    insert: postgresql.Insert | sqlite.Insert,
    device_id: int,
    measurements: Sequence[NewMeasurement],
) -> dict[TrialKey, int]:
    """Insert the missing trials of measurements of one workload, and return the id of each trial.

    Args:
        connection: Open write transaction.
        insert: INSERT into `trial` of the dialect.
        device_id: Id of the device.
        measurements: The measurements.
    """
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
    """Rows of an imported file.

    Attributes:
        path: The file.
        spaces: Search spaces of its rows.
        good: Number of usable rows.
        refused: Number of rejected rows.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.spaces: dict[SpaceKey, None] = {}
        self.good = self.refused = 0
        self._rejected: list[RejectedEntry] = []

    def reject(self, row: RejectedEntry) -> None:
        """Count a rejected row, and keep the first `MAX_FAULTS`."""
        self.refused += 1
        self._rejected += [row] if self.refused <= MAX_FAULTS else []

    def result(self, added: int) -> ImportResult:
        """Return the result of the import, given the number of new rows."""
        return ImportResult(
            file=self.path,
            spaces=tuple(self.spaces),
            added=added,
            known=self.good - added,
            faults=tuple(self._rejected),
            refused=self.refused,
        )
