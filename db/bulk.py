"""Many measurements at once: which of them are new, and rows by the thousand in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunebench.db.reader import measurement_table as _measurement
from tunebench.db.reader import trial_table as _trial
from tunebench.db.record import Addition, TrialKey, columns_of

__all__ = ["AddWatcher", "insert_measurements", "insert_trials", "unknown"]

AddWatcher = Callable[[int, int], None]
"""Is told how many measurements are stored, and of how many."""

CHUNK = 1000
"""Rows of one statement."""

_TELLING = ("purpose", "kind", "median_us", "predicted_us", "reason", "samples_us")
"""Columns by which a measurement of a trial is told from another one."""


def unknown(connection: sa.Connection, device_id: int, additions: Iterable[Addition]) -> list[Addition]:
    """Return the measurements that their trials do not have yet, each once."""
    seen: dict[tuple[str, str], set[tuple[Any, ...]]] = {}
    fresh = []
    for addition in additions:
        place = (addition.key.workload, addition.key.variant)
        if place not in seen:
            seen[place] = _stored(connection, device_id, *place)
        row = {"purpose": addition.purpose, **columns_of(addition.result)}
        told = _told(str(addition.key.config), addition.key.revision, row)
        if told not in seen[place]:
            seen[place].add(told)
            fresh.append(addition)
    return fresh


def _stored(connection: sa.Connection, device_id: int, workload: str, variant: str) -> set[tuple[Any, ...]]:
    query = (
        sa.select(_trial.c.config, _trial.c.revision, *(_measurement.c[name] for name in _TELLING))
        .join(_trial, _trial.c.id == _measurement.c.trial_id)
        .where(_trial.c.device_id == device_id, _trial.c.workload == workload, _trial.c.variant == variant)
    )
    rows = connection.execute(query).mappings()
    return {_told(row["config"], row["revision"], row) for row in rows}


def _told(config: str, revision: str, row: Mapping[Any, Any]) -> tuple[Any, ...]:
    values = (row[name] for name in _TELLING)
    return (config, revision, *(tuple(value) if isinstance(value, list) else value for value in values))


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
