"""Deletion of recorded outcomes, so that their configurations are tried again and no longer looked up.

Nothing marks what was deleted: a merge or an import from where the outcomes still are brings them back
(`docs/decisions/0081`). Runs, devices and demand are kept, and so are trials that a tuner has claimed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from tunebench.db import lookup_index
from tunebench.db.exchange import device_keys, workload_text
from tunebench.db.reader import Reader
from tunebench.db.record import SpaceKey
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import trial_table as _trial
from tunebench.db.store import Store
from tunebench.errors import InputError, UnknownName

__all__ = ["ForgetSelection", "Forgotten", "find", "forget"]

CHUNK = 500
"""Trials whose rows one statement deletes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetSelection:
    """The trials of one workload to forget; None selects all.

    Attributes:
        workload: Text of the workload.
        device: Name, architecture or key of a device.
        variants: Names or keys of variants.
        configs: Values of parameters, by name and as text; a configuration with all values of any of them is
            selected.
    """

    workload: str
    device: str | None = None
    variants: Collection[str] | None = None
    configs: Sequence[Mapping[str, str]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """Trials of one search space that are forgotten.

    Attributes:
        space: The search space.
        trials: Number of trials.
        outcomes: Number of measurements of each outcome class.
    """

    space: SpaceKey
    trials: int
    outcomes: Mapping[str, int]


def find(store: Reader, selection: ForgetSelection) -> list[Forgotten]:
    """Return what `forget` would delete.

    Args:
        store: The database.
        selection: The trials.

    Raises:
        InputError: if no trial is selected, or the workload is invalid.
        UnknownName: if there are no trials of a variant or a device.
    """
    with store.reading() as connection:
        return _described(connection, _selected(connection, selection))


def forget(store: Store, selection: ForgetSelection) -> list[Forgotten]:
    """Delete trials with all their measurements, in one transaction, and return what was deleted.

    Args:
        store: The database.
        selection: The trials.

    Raises:
        InputError: as `find`.
        DatabaseError: if the database cannot be written; nothing is deleted then.
    """
    with store.writing() as connection:
        if connection.dialect.name == "postgresql":  # a tuner may be recording one of the trials
            names = f"{_trial.name}, {_measurement.name}"
            connection.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")
        ids = _selected(connection, selection)
        deleted = _described(connection, ids)
        for start in range(0, len(ids), CHUNK):
            chosen = ids[start : start + CHUNK]
            connection.execute(_measurement.delete().where(_measurement.c.trial_id.in_(chosen)))
            connection.execute(_trial.delete().where(_trial.c.id.in_(chosen)))
    if store.location.url is not None:  # a lookup on this machine must not return them for another minute
        lookup_index.export_index(store, lookup_index.index_path(store.location))
    return deleted


def _selected(connection: sa.Connection, selection: ForgetSelection) -> list[int]:
    """Return the ids of the selected trials."""
    workloads = set(connection.execute(sa.select(_trial.c.workload).distinct()).scalars())
    text = workload_text(selection.workload, workloads)
    query = (
        sa.select(_trial.c.id, _device.c.key, _trial.c.variant, _trial.c.config)
        .join(_device, _device.c.id == _trial.c.device_id)
        .where(_trial.c.workload == text, _trial.c.state == "done")
    )
    trials = connection.execute(query).all()
    if not trials:
        raise InputError(f"no outcome of {text} is recorded: there is nothing to forget")
    if selection.device is not None:
        keys = device_keys(selection.device, {trial.key for trial in trials})
        trials = [trial for trial in trials if trial.key in keys]
    if selection.variants is not None:
        variants = _variant_keys(selection.variants, {trial.variant for trial in trials})
        trials = [trial for trial in trials if trial.variant in variants]
    if selection.configs is not None:
        trials = [trial for trial in trials if _has_values(trial.config, selection.configs)]
    if not trials:
        raise InputError(f"no recorded configuration of {text} is selected: leave out a filter")
    return [trial.id for trial in trials]


def _variant_keys(names: Collection[str], recorded: Collection[str]) -> set[str]:
    """Return the recorded keys of variants that are given by name or key."""
    keys: set[str] = set()
    for name in names:
        chosen = {key for key in recorded if name in (key, key.rpartition("/")[2])}
        if not chosen:
            raise UnknownName("variant with records", name, recorded)
        keys |= chosen
    return keys


def _has_values(config: str, alternatives: Sequence[Mapping[str, str]]) -> bool:
    values_by_name = dict(part.partition("=")[::2] for part in config.split(","))
    return any(required.items() <= values_by_name.items() for required in alternatives)


def _described(connection: sa.Connection, ids: Sequence[int]) -> list[Forgotten]:
    trials: dict[SpaceKey, set[int]] = {}
    outcomes: dict[SpaceKey, dict[str, int]] = {}
    for start in range(0, len(ids), CHUNK):
        query = (
            sa.select(
                *(_device.c.key, _trial.c.workload, _trial.c.variant, _trial.c.id, _measurement.c.kind),
                sa.func.count(_measurement.c.id).label("count"),
            )
            .join_from(_trial, _device)
            .join(_measurement, _measurement.c.trial_id == _trial.c.id, isouter=True)
            .where(_trial.c.id.in_(ids[start : start + CHUNK]))
            .group_by(_device.c.key, _trial.c.workload, _trial.c.variant, _trial.c.id, _measurement.c.kind)
        )
        for row in connection.execute(query).mappings():
            space = SpaceKey(device=row["key"], workload=row["workload"], variant=row["variant"])
            trials.setdefault(space, set()).add(row["id"])
            counts = outcomes.setdefault(space, {})
            if row["kind"] is not None:
                counts[row["kind"]] = counts.get(row["kind"], 0) + row["count"]
    return [
        Forgotten(space=space, trials=len(trials[space]), outcomes=outcomes[space])
        for space in sorted(trials, key=str)
    ]
