"""Stale trials: their source has changed since they were measured, and `lookup` returns them last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from tunebench import kernels, workloads
from tunebench.db.record import SpaceKey
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import trial_table as _trial
from tunebench.device import Device
from tunebench.errors import ConfigError, InputError
from tunebench.space import Config
from tunebench.task import revision_of

__all__ = [
    "Revision",
    "StoredTrial",
    "installed_revision",
    "mark_stale",
    "staleness_changes",
    "stored_trials",
    "update_staleness",
]

Revision = Callable[[Config], str]
"""Returns a configuration's current revision; raises `ConfigError` if the space no longer contains it."""


class StoredTrial(NamedTuple):
    """A trial with its stored revision and stale flag."""

    id: int
    config: Config
    revision: str
    stale: bool


_CHUNK = 500  # SQLite allows 32766 variables in a statement


def installed_revision(space: SpaceKey, device: Device) -> Revision | None:
    """Return a function for the installed variant's revisions; None if the variant is not installed.

    Args:
        space: Search space of the trials.
        device: The space's device.
    """
    try:
        variant, workload = kernels.variant(space.variant), workloads.parse(space.workload)
    except InputError:
        return None
    refused = variant.refuses(workload, device)

    def revision(config: Config) -> str:
        if refused is not None:
            raise ConfigError(refused)
        # Refuses configurations that only another version of the space contains: they have no source.
        checked = variant.space.check(config, workload=workload, device=device)
        return revision_of(variant, workload, checked)

    return revision


def stored_trials(connection: sa.Connection, device: int | str, space: SpaceKey) -> list[StoredTrial]:
    """Return the trials of a space.

    Args:
        connection: Open connection.
        device: Id or key of the space's device.
        space: The search space.
    """
    at = _trial.c
    query = sa.select(at.id, at.config_values, at.revision, at.stale).where(
        (at.device_id == device) if isinstance(device, int) else (_device.c.key == device),
        at.workload == space.workload,
        at.variant == space.variant,
    )
    if isinstance(device, str):
        query = query.join(_device)
    rows = connection.execute(query).mappings()
    return [
        StoredTrial(row["id"], Config(row["config_values"]), row["revision"], row["stale"]) for row in rows
    ]


def staleness_changes(trials: Iterable[StoredTrial], revision: Revision) -> tuple[dict[bool, list[int]], int]:
    """Return the trials to mark as stale (True) and as current (False), and the number of stale trials.

    Args:
        trials: All trials of a space.
        revision: Current revision of a configuration.
    """
    changed: dict[bool, list[int]] = {True: [], False: []}
    count = 0
    for trial in trials:
        try:
            stale = revision(trial.config) != trial.revision
        except ConfigError:
            stale = True
        count += stale
        if stale != trial.stale:
            changed[stale].append(trial.id)
    return changed, count


def update_staleness(connection: sa.Connection, device_id: int, space: SpaceKey, device: Device) -> None:
    """Mark the trials of a space by the installed variant; no effect if it is not installed.

    Args:
        connection: Open write transaction.
        device_id: Id of the space's device.
        space: The search space.
        device: The space's device.
    """
    revision = installed_revision(space, device)
    if revision is not None:
        mark_stale(connection, staleness_changes(stored_trials(connection, device_id, space), revision)[0])


def mark_stale(connection: sa.Connection, changed: Mapping[bool, Sequence[int]]) -> None:
    """Mark trials as stale or as current.

    Args:
        connection: Open write transaction.
        changed: Ids of trials by their new flag.
    """
    for stale, trials in changed.items():
        for start in range(0, len(trials), _CHUNK):
            chosen = _trial.c.id.in_(trials[start : start + _CHUNK])
            connection.execute(_trial.update().where(chosen).values(stale=stale))
