"""Merging the trials of one workload on one device, with their measurements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunebench.db.bulk import IDENTITY, identity
from tunebench.db.record import RECORDED, SpaceKey
from tunebench.db.schema import DONE, TRIAL_KEY
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import trial_table as _trial
from tunebench.db.sequence import IncomingMeasurement, interleave
from tunebench.db.staleness import installed_revision, mark_stale, update_staleness
from tunebench.device import Device

__all__ = ["MergeGroup", "MergeTarget", "chunks", "merge_group"]

CHUNK = 500

Insert = postgresql.Insert | sqlite.Insert


@dataclass(frozen=True, slots=True)
class MergeGroup:
    """What is merged at a time: a workload on a device, by its id there.

    Measurements of all variants stand in one order, since finalists of one silence the search of another.
    """

    device_id: int
    workload: str


class MergeTarget:
    """The database that is merged into, within a transaction that writes."""

    def __init__(
        self,
        connection: sa.Connection,
        insert: Callable[[sa.Table], Insert],
        now: datetime,
        watcher: Callable[[int], None],
    ) -> None:
        self.connection, self.insert, self.now = connection, insert, now
        self._watcher, self._looked_at = watcher, 0
        self._on_server = connection.dialect.name == "postgresql"
        self._free = 0

    def lock(self) -> None:
        """Keep others from recording meanwhile, as SQLite does: ids must ascend in the order of recording."""
        if self._on_server:
            names = f"{_trial.name}, {_measurement.name}"
            self.connection.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")
        self._free = (self.connection.execute(sa.select(sa.func.max(_measurement.c.id))).scalar() or 0) + 1
        if self._on_server:  # ids that were given out and rolled back are higher than any that is there
            sequence = "SELECT nextval(pg_get_serial_sequence('measurement', 'id'))"
            self._free = max(self._free, self.connection.exec_driver_sql(sequence).scalar_one())

    def unlock(self) -> None:
        """Let ids of others begin after those that were given out; the lock goes with the transaction."""
        if self._on_server:
            sequence = "SELECT setval(pg_get_serial_sequence('measurement', 'id'), %s, false)"
            self.connection.exec_driver_sql(sequence, (self._free,))

    def looked_at(self, count: int) -> None:
        """Tell that some more measurements of the source were looked at."""
        self._looked_at += count
        self._watcher(self._looked_at)

    @property
    def free(self) -> int:
        """The first id of a measurement that is free."""
        return self._free

    def take(self, count: int) -> None:
        """Give out so many of the free ids."""
        self._free += count


def merge_group(
    there: sa.Connection, target: MergeTarget, group: MergeGroup, device_id: int, device: Device | None
) -> tuple[int, int]:
    """Bring one workload's trials on one device in.

    Args:
        there: Where from.
        target: Where to.
        group: Which.
        device_id: Id of the device here.
        device: The device; None if it cannot be made of what describes it.

    Returns:
        How many measurements were not there yet, and how many were.
    """
    here = target.connection
    trials = _merge_trials(there, target, group, device_id)
    arrivals, known = _arrivals(there, target, group, trials)
    if not arrivals:
        return 0, known
    at = _measurement.c
    standing = sa.select(at.id, at.recorded_at).join(_trial).where(*_of_group(device_id, group.workload))
    standing = standing.order_by(at.id)
    present = [(row.id, row.recorded_at) for row in here.execute(standing)]
    order = interleave(present, arrivals, target.free, target.now)
    target.take(len(order.moved) + len(order.arrived))
    _move(here, order.moved)
    _insert_measurements(there, here, group, trials, order.arrived)
    _update_staleness(here, group, device_id, device, trials, set(order.arrived.values()))
    return len(arrivals), known


def _of_group(device_id: int, workload: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (_trial.c.device_id == device_id, _trial.c.workload == workload, _trial.c.state == "done")


def chunks(there: sa.Connection, query: sa.Select[Any]) -> Iterator[Sequence[sa.RowMapping]]:
    yield from there.execution_options(yield_per=CHUNK).execute(query).mappings().partitions()


# -- trials ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MergedTrials:
    """Trials of a group.

    Attributes:
        ids: Their ids here, by those there.
        flags: Of those that were here, too: whether they are stale there, by their ids here.
    """

    ids: dict[int, int]
    flags: dict[int, bool]


_Key = tuple[str, str, str]


def _merge_trials(
    there: sa.Connection, target: MergeTarget, group: MergeGroup, device_id: int
) -> _MergedTrials:
    trials = _MergedTrials({}, {})
    query = sa.select(_trial).where(*_of_group(group.device_id, group.workload)).order_by(_trial.c.id)
    for chunk in chunks(there, query):
        before = _ids(target.connection, device_id, group.workload, chunk)
        _insert_trials(target, device_id, chunk)
        ids = _ids(target.connection, device_id, group.workload, chunk)
        for row in chunk:
            key = _key(row)
            trials.ids[row["id"]] = ids[key]
            if key in before:
                trials.flags[ids[key]] = row["stale"]
    return trials


def _key(row: Mapping[Any, Any]) -> _Key:
    return (row["variant"], row["config"], row["revision"])


def _ids(
    here: sa.Connection, device_id: int, workload: str, rows: Sequence[Mapping[Any, Any]]
) -> dict[_Key, int]:
    at = _trial.c
    query = sa.select(at.id, at.variant, at.config, at.revision).where(
        *_of_group(device_id, workload), at.config.in_({row["config"] for row in rows})
    )
    return {_key(row): row["id"] for row in here.execute(query).mappings()}


def _insert_trials(target: MergeTarget, device_id: int, rows: Sequence[Mapping[Any, Any]]) -> None:
    """Store trials; one that is claimed here is done now, as when it is recorded."""
    insert = target.insert(_trial)
    stale = sa.case((_trial.c.state == "claimed", insert.excluded.stale), else_=_trial.c.stale)
    insert = insert.on_conflict_do_update(
        index_elements=TRIAL_KEY,
        set_={**DONE, "stale": stale},
    )
    own = [{name: value for name, value in row.items() if name != "id"} for row in rows]
    target.connection.execute(insert, [{**row, "device_id": device_id, **DONE} for row in own])


# -- measurements ----------------------------------------------------------------------------------

_Identity = tuple[Any, ...]


def _identity(row: Mapping[Any, Any], trial_id: int, names: Sequence[str]) -> _Identity:
    return (trial_id, *identity(row, names))


def _arrivals(
    there: sa.Connection, target: MergeTarget, group: MergeGroup, trials: _MergedTrials
) -> tuple[list[IncomingMeasurement], int]:
    """Return the measurements that are not here yet, in their order, and how many are."""
    # When another tuner's file was imported is no part of what it tells.
    names = IDENTITY if group.workload.startswith(RECORDED) else (*IDENTITY, "recorded_at")
    at = _measurement.c
    columns = {at.id, at.trial_id, at.recorded_at, *(at[name] for name in names)}
    query = (
        sa.select(*columns).join(_trial).where(*_of_group(group.device_id, group.workload)).order_by(at.id)
    )
    arrivals: list[IncomingMeasurement] = []
    known = after = 0
    for chunk in chunks(there, query):
        ids = {trials.ids[row["trial_id"]] for row in chunk} & set(trials.flags)
        found = _present(target.connection, sorted(ids), names)
        for row in chunk:
            id_ = found.get(_identity(row, trials.ids[row["trial_id"]], names))
            if id_ is None:
                arrivals.append(IncomingMeasurement(row["id"], row["recorded_at"], after))
            else:
                known += 1
                after = max(after, id_)
        target.looked_at(len(chunk))
    return arrivals, known


def _present(here: sa.Connection, trial_ids: Sequence[int], names: Sequence[str]) -> dict[_Identity, int]:
    """Return the measurements of some trials here, by what tells them apart."""
    if not trial_ids:
        return {}
    at = _measurement.c
    query = sa.select(at.id, at.trial_id, *(at[name] for name in names)).where(at.trial_id.in_(trial_ids))
    return {_identity(row, row["trial_id"], names): row["id"] for row in here.execute(query).mappings()}


def _move(here: sa.Connection, moved: Mapping[int, int]) -> None:
    """Give measurements ids that nobody has yet."""
    moving = _measurement.update().where(_measurement.c.id == sa.bindparam("old"))
    if moved:
        rows = [{"old": old, "new": new} for old, new in moved.items()]
        here.execute(moving.values(id=sa.bindparam("new")), rows)


def _insert_measurements(
    there: sa.Connection,
    here: sa.Connection,
    group: MergeGroup,
    trials: _MergedTrials,
    arrived: Mapping[int, int],
) -> None:
    if not arrived:
        return
    at = _measurement.c
    query = (
        sa.select(_measurement)
        .join(_trial)
        .where(*_of_group(group.device_id, group.workload))
        .order_by(at.id)
    )
    for chunk in chunks(there, query):
        rows = [
            {**row, "id": arrived[row["id"]], "trial_id": trials.ids[row["trial_id"]]}
            for row in chunk
            if row["id"] in arrived
        ]
        if rows:
            here.execute(_measurement.insert(), rows)


# -- what is stale ---------------------------------------------------------------------------------


def _update_staleness(
    here: sa.Connection,
    group: MergeGroup,
    device_id: int,
    device: Device | None,
    trials: _MergedTrials,
    arrived: set[int],
) -> None:
    """Mark what is stale: by the sources that are installed, and without them by what was measured last."""
    at = _trial.c
    newest = sa.func.max(_measurement.c.id).label("newest")
    query = (
        sa.select(at.id, at.variant, at.config, at.stale, newest)
        .join(_measurement, _measurement.c.trial_id == at.id)
        .where(*_of_group(device_id, group.workload))
        .group_by(at.id, at.variant, at.config, at.stale)
        .order_by(at.variant, newest.desc())
    )
    for variant, rows in itertools.groupby(
        here.execute(query).mappings().all(), key=lambda row: str(row["variant"])
    ):
        space = SpaceKey(device=device.key if device else "", workload=group.workload, variant=variant)
        if device is not None and installed_revision(space, device) is not None:
            update_staleness(here, device_id, space, device)
        else:
            mark_stale(here, _staleness_by_newest(rows, trials.flags, arrived))


def _staleness_by_newest(
    rows: Iterable[Mapping[Any, Any]], flags: Mapping[int, bool], arrived: Collection[int]
) -> dict[bool, list[int]]:
    """Return which trials of one variant must be marked as stale (True), and which as standing.

    Args:
        rows: Trials, the one that was measured last first.
        flags: Whether those that both sides have are stale there.
        arrived: Ids of the measurements that came from there.
    """
    standing: set[str] = set()
    changed: dict[bool, list[int]] = {True: [], False: []}
    for row in rows:
        stale = row["stale"]
        if row["id"] in flags:
            # The side that measured it last knows whether its source has changed since.
            stale = flags[row["id"]] if row["newest"] in arrived else stale
        stale = stale or row["config"] in standing
        if not stale:
            standing.add(row["config"])
        if stale != row["stale"]:
            changed[stale].append(row["id"])
    return changed
