"""Many measurements at once: which of them are new, and rows by the thousand in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunebench.db.reader import measurement_table as _measurement
from tunebench.db.reader import trial_table as _trial
from tunebench.db.record import Addition, TrialKey

__all__ = ["AddWatcher", "insert_measurements", "insert_trials", "unknown"]

AddWatcher = Callable[[int, int], None]
"""Is told how many measurements are stored, and of how many."""

CHUNK = 1000
"""Rows of one statement."""

_TELLING = ("purpose", "kind", "median_us", "predicted_us", "reason", "samples_us")
"""Columns by which a measurement of a trial is told from another one."""


@dataclass(slots=True)
class _Seen:
    """What is there of a trial: its measurements, by what tells them apart, and the newest one's time."""

    measurements: set[tuple[Any, ...]] = field(default_factory=set)
    newest: datetime | None = None


def unknown(connection: sa.Connection, device_id: int, additions: Iterable[Addition]) -> list[Addition]:
    """Return the measurements that their trials do not have yet, each once.

    One that is older than what its trial has is left out, too: what was measured last is what is known.
    """
    spaces: dict[tuple[str, str], dict[tuple[str, str], _Seen]] = {}
    fresh = []
    for addition in additions:
        key = addition.key
        space = (key.workload, key.variant)
        if space not in spaces:
            spaces[space] = _stored(connection, device_id, *space)
        trial = spaces[space].setdefault((str(key.config), key.revision), _Seen())
        outcome = addition.result.outcome
        told = _told(
            {name: getattr(outcome, name, None) for name in _TELLING} | {"purpose": addition.purpose}
        )
        late = addition.recorded_at and trial.newest and addition.recorded_at < trial.newest
        if told not in trial.measurements and not late:
            trial.measurements.add(told)
            fresh.append(addition)
    return fresh


def _stored(
    connection: sa.Connection, device_id: int, workload: str, variant: str
) -> dict[tuple[str, str], _Seen]:
    columns = (*(_measurement.c[name] for name in _TELLING), _measurement.c.recorded_at)
    query = (
        sa.select(_trial.c.config, _trial.c.revision, *columns)
        .join(_trial, _trial.c.id == _measurement.c.trial_id)
        .where(_trial.c.device_id == device_id, _trial.c.workload == workload, _trial.c.variant == variant)
    )
    found: dict[tuple[str, str], _Seen] = {}
    for row in connection.execute(query).mappings():
        trial = found.setdefault((row["config"], row["revision"]), _Seen())
        trial.measurements.add(_told(row))
        trial.newest = max(filter(None, (trial.newest, row["recorded_at"])))
    return found


def _told(row: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(tuple(value) if isinstance(value := row[name], list) else value for name in _TELLING)


def insert_trials(
    connection: sa.Connection,
    insert: postgresql.Insert | sqlite.Insert,
    device_id: int,
    additions: Iterable[Addition],
) -> dict[TrialKey, int]:
    """Store the trials of measurements unless they are there, and return the id of each."""
    keys = list(dict.fromkeys(addition.key for addition in additions))
    done = {"state": "done", "claim_owner": None, "claim_expires_at": None}
    rows = [
        {
            "device_id": device_id,
            "workload": key.workload,
            "variant": key.variant,
            "revision": key.revision,
            "config": str(key.config),
            "config_values": dict(key.config),
            "stale": False,
            **done,
        }
        for key in keys
    ]
    identity = ("device_id", "workload", "variant", "config", "revision")
    connection.execute(insert.on_conflict_do_update(index_elements=identity, set_=done), rows)
    ids: dict[tuple[str, ...], int] = {}
    for workload, variant in {(key.workload, key.variant) for key in keys}:
        query = sa.select(_trial.c.id, _trial.c.config, _trial.c.revision).where(
            _trial.c.device_id == device_id, _trial.c.workload == workload, _trial.c.variant == variant
        )
        for trial_id, config, revision in connection.execute(query):
            ids[workload, variant, config, revision] = trial_id
    return {key: ids[key.workload, key.variant, str(key.config), key.revision] for key in keys}


def insert_measurements(
    connection: sa.Connection, rows: Sequence[Mapping[str, Any]], watcher: AddWatcher
) -> None:
    """Store measurements, in their order."""
    for start in range(0, len(rows), CHUNK):
        watcher(start, len(rows))
        connection.execute(_measurement.insert(), rows[start : start + CHUNK])
    watcher(len(rows), len(rows))
