"""Merge of the trials and measurements of one workload on one device."""

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
from tunebench.db.row_checks import refusal
from tunebench.db.schema import DONE, TRIAL_KEY
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import trial_table as _trial
from tunebench.db.sequence import IncomingMeasurement, interleave
from tunebench.db.staleness import installed_revision, mark_stale, update_staleness
from tunebench.device import Device

__all__ = ["MergeGroup", "MergeTarget", "RefusedRows", "chunks", "merge_group"]

CHUNK = 500

Insert = postgresql.Insert | sqlite.Insert


@dataclass(frozen=True, slots=True)
class MergeGroup:
    """Trials that are merged together: one workload on one device, by its id in the source.

    Measurements of all variants share one order, because finalists of one variant supersede searches of
    others.
    """

    device_id: int
    workload: str


class MergeTarget:
    """Target database of a merge, within a write transaction.

    Attributes:
        free: First unused measurement id.
    """

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
        self.free = 0

    def lock(self) -> None:
        """Block other writers, as SQLite does: measurement ids must ascend in the order of recording."""
        if self._on_server:
            names = f"{_trial.name}, {_measurement.name}"
            self.connection.exec_driver_sql(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE")
        self.free = (self.connection.execute(sa.select(sa.func.max(_measurement.c.id))).scalar() or 0) + 1
        if self._on_server:  # ids that were used and rolled back are greater than any stored id
            sequence = "SELECT nextval(pg_get_serial_sequence('measurement', 'id'))"
            self.free = max(self.free, self.connection.exec_driver_sql(sequence).scalar_one())

    def unlock(self) -> None:
        """Set the server's id sequence after the used ids; the lock ends with the transaction."""
        if self._on_server:
            sequence = "SELECT setval(pg_get_serial_sequence('measurement', 'id'), %s, false)"
            self.connection.exec_driver_sql(sequence, (self.free,))

    def looked_at(self, count: int) -> None:
        """Report that more measurements of the source were processed."""
        self._looked_at += count
        self._watcher(self._looked_at)


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """Rows of a source that are not merged, because their figures contradict one another.

    Attributes:
        measurements: Why each measurement is refused, by its id.
        trials: Ids of the trials that have no other measurement.
    """

    measurements: Mapping[int, str]
    trials: Collection[int]

    @classmethod
    def find(cls, source: sa.Connection, group: MergeGroup) -> RefusedRows:
        """Check the measurements of a group by the rules of an import."""
        query = sa.select(_measurement).join(_trial).where(*_of_group(group.device_id, group.workload))
        reasons: dict[int, str] = {}
        refused: set[int] = set()
        accepted: set[int] = set()
        for row in itertools.chain.from_iterable(chunks(source, query)):
            reason = refusal(dict(row))
            (accepted if reason is None else refused).add(row["trial_id"])
            if reason is not None:
                reasons[row["id"]] = reason
        return cls(reasons, refused - accepted)


def merge_group(
    source: sa.Connection, target: MergeTarget, group: MergeGroup, device_id: int, device: Device | None
) -> tuple[int, int, list[str]]:
    """Merge the trials of one workload on one device.

    Args:
        source: Connection to the source.
        target: The target.
        group: Workload and device.
        device_id: Id of the device in the target.
        device: The device; None if this version cannot decode its description.

    Returns:
        Number of new measurements, number of measurements that the target already contained, and why
        measurements are refused.
    """
    connection = target.connection
    refused = RefusedRows.find(source, group)
    reasons = list(refused.measurements.values())
    trials = _merge_trials(source, target, group, device_id, refused.trials)
    arrivals, present_count = _arrivals(source, target, group, trials, refused.measurements)
    if not arrivals:
        return 0, present_count, reasons
    at = _measurement.c
    standing = sa.select(at.id, at.recorded_at).join(_trial).where(*_of_group(device_id, group.workload))
    standing = standing.order_by(at.id)
    present = [(row.id, row.recorded_at) for row in connection.execute(standing)]
    order = interleave(present, arrivals, target.free, target.now)
    target.free += len(order.moved) + len(order.arrived)
    _move(connection, order.moved)
    _insert_measurements(source, connection, group, trials, order.arrived)
    _update_staleness(connection, group, device_id, device, trials, set(order.arrived.values()))
    return len(arrivals), present_count, reasons


def _of_group(device_id: int, workload: str) -> tuple[sa.ColumnElement[bool], ...]:
    return (_trial.c.device_id == device_id, _trial.c.workload == workload, _trial.c.state == "done")


def chunks(connection: sa.Connection, query: sa.Select[Any]) -> Iterator[Sequence[sa.RowMapping]]:
    """Yield the rows of a query, `CHUNK` at a time.

    Args:
        connection: Connection to the source.
        query: The query.
    """
    yield from connection.execution_options(yield_per=CHUNK).execute(query).mappings().partitions()


# -- trials ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MergedTrials:
    """Trials of a group.

    Attributes:
        ids: Target id of each source id.
        flags: Stale flag in the source of each trial that both databases have, by target id.
    """

    ids: dict[int, int]
    flags: dict[int, bool]


_Key = tuple[str, str, str]


def _merge_trials(
    source: sa.Connection, target: MergeTarget, group: MergeGroup, device_id: int, refused: Collection[int]
) -> _MergedTrials:
    trials = _MergedTrials({}, {})
    query = sa.select(_trial).where(*_of_group(group.device_id, group.workload)).order_by(_trial.c.id)
    for rows in chunks(source, query):
        chunk = [row for row in rows if row["id"] not in refused]
        if not chunk:
            continue
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
    connection: sa.Connection, device_id: int, workload: str, rows: Sequence[Mapping[Any, Any]]
) -> dict[_Key, int]:
    at = _trial.c
    query = sa.select(at.id, at.variant, at.config, at.revision).where(
        *_of_group(device_id, workload), at.config.in_({row["config"] for row in rows})
    )
    return {_key(row): row["id"] for row in connection.execute(query).mappings()}


def _insert_trials(target: MergeTarget, device_id: int, rows: Sequence[Mapping[Any, Any]]) -> None:
    """Insert trials; one that is claimed in the target becomes measured, as `record` does."""
    insert = target.insert(_trial)
    stale = sa.case((_trial.c.state == "claimed", insert.excluded.stale), else_=_trial.c.stale)
    insert = insert.on_conflict_do_update(
        index_elements=TRIAL_KEY,
        set_={**DONE, "stale": stale},
    )
    values = [{name: value for name, value in row.items() if name != "id"} for row in rows]
    target.connection.execute(insert, [{**row, "device_id": device_id, **DONE} for row in values])


# -- measurements ----------------------------------------------------------------------------------

_Identity = tuple[Any, ...]


def _identity(row: Mapping[Any, Any], trial_id: int, names: Sequence[str]) -> _Identity:
    return (trial_id, *identity(row, names))


def _arrivals(
    source: sa.Connection,
    target: MergeTarget,
    group: MergeGroup,
    trials: _MergedTrials,
    refused: Collection[int],
) -> tuple[list[IncomingMeasurement], int]:
    """Return the new measurements in their order, and the number that the target already contains."""
    # Import times of recorded tuning spaces do not distinguish measurements.
    names = IDENTITY if group.workload.startswith(RECORDED) else (*IDENTITY, "recorded_at")
    at = _measurement.c
    columns = {at.id, at.trial_id, at.recorded_at, *(at[name] for name in names)}
    query = (
        sa.select(*columns).join(_trial).where(*_of_group(group.device_id, group.workload)).order_by(at.id)
    )
    arrivals: list[IncomingMeasurement] = []
    present_count = after = 0
    for found_there in chunks(source, query):
        chunk = [row for row in found_there if row["id"] not in refused]
        ids = {trials.ids[row["trial_id"]] for row in chunk} & set(trials.flags)
        present = _present(target.connection, sorted(ids), names)
        for row in chunk:
            id_ = present.get(_identity(row, trials.ids[row["trial_id"]], names))
            if id_ is None:
                arrivals.append(IncomingMeasurement(row["id"], row["recorded_at"], after))
            else:
                present_count += 1
                after = max(after, id_)
        target.looked_at(len(found_there))
    return arrivals, present_count


def _present(
    connection: sa.Connection, trial_ids: Sequence[int], names: Sequence[str]
) -> dict[_Identity, int]:
    """Return the target's measurements of some trials, by identity."""
    if not trial_ids:
        return {}
    at = _measurement.c
    query = sa.select(at.id, at.trial_id, *(at[name] for name in names)).where(at.trial_id.in_(trial_ids))
    return {_identity(row, row["trial_id"], names): row["id"] for row in connection.execute(query).mappings()}


def _move(connection: sa.Connection, moved: Mapping[int, int]) -> None:
    """Give measurements new ids, which must be unused."""
    moving = _measurement.update().where(_measurement.c.id == sa.bindparam("old"))
    if moved:
        rows = [{"old": old, "new": new} for old, new in moved.items()]
        connection.execute(moving.values(id=sa.bindparam("new")), rows)


def _insert_measurements(
    source: sa.Connection,
    connection: sa.Connection,
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
    for chunk in chunks(source, query):
        rows = [
            {**row, "id": arrived[row["id"]], "trial_id": trials.ids[row["trial_id"]]}
            for row in chunk
            if row["id"] in arrived
        ]
        if rows:
            connection.execute(_measurement.insert(), rows)


# -- staleness -------------------------------------------------------------------------------------


def _update_staleness(
    connection: sa.Connection,
    group: MergeGroup,
    device_id: int,
    device: Device | None,
    trials: _MergedTrials,
    arrived: set[int],
) -> None:
    """Update which trials are stale: by the installed sources, or else by the newest measurement."""
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
        connection.execute(query).mappings().all(), key=lambda row: str(row["variant"])
    ):
        space = SpaceKey(device=device.key if device else "", workload=group.workload, variant=variant)
        if device is not None and installed_revision(space, device) is not None:
            update_staleness(connection, device_id, space, device)
        else:
            mark_stale(connection, _staleness_by_newest(rows, trials.flags, arrived))


def _staleness_by_newest(
    rows: Iterable[Mapping[Any, Any]], flags: Mapping[int, bool], arrived: Collection[int]
) -> dict[bool, list[int]]:
    """Return the trials of one variant to mark as stale (True) and as current (False).

    Args:
        rows: Trials, latest measurement first.
        flags: Stale flag in the source of each trial that both databases have.
        arrived: Ids of the measurements that were merged.
    """
    standing: set[str] = set()
    changed: dict[bool, list[int]] = {True: [], False: []}
    for row in rows:
        stale = row["stale"]
        if row["id"] in flags:
            # The database with the latest measurement knows whether the source has changed since.
            stale = flags[row["id"]] if row["newest"] in arrived else stale
        stale = stale or row["config"] in standing
        if not stale:
            standing.add(row["config"])
        if stale != row["stale"]:
            changed[stale].append(row["id"])
    return changed
