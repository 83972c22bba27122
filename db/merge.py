"""Merge of databases: every measurement once, in the order of recording, with its runs, devices and demand.

    merge(["a.db", "b.db"], into="all.db")

- All measurements are kept, each once. The view `answer_v1` ranks them as in any database: the newest
  measurement of a trial counts, and a wrong result excludes its trial.
- The installed sources decide which trials are stale. Where a variant is not installed, the flag of the
  database with the newest measurement is kept, and only the newest revision of a configuration stays current.
- If two databases describe a device differently, the description of the latest run is kept.
- Runs keep their ids and store their database under ``database`` in their versions. Claims are not merged.
- Measurements whose figures contradict one another are refused, as by an import.
- Demand is kept by the database that counted it (see `tunebench.db.schema.demand_table`).

Each source is merged in one transaction. Merging it again adds nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tunebench._command import command_line
from tunebench._deprecation import renamed
from tunebench.db import schema
from tunebench.db.location import Location, locate
from tunebench.db.merge_trials import MergeGroup, MergeTarget, chunks, merge_group
from tunebench.db.reader import Reader
from tunebench.db.record import MAX_FAULTS
from tunebench.db.schema import demand_table, device_table, measurement_table, run_table, trial_table
from tunebench.db.store import Store, open_store
from tunebench.device import Device
from tunebench.errors import DatabaseError, InputError

__all__ = ["MergeResult", "merge"]

MergeWatcher = Callable[[str, int, int], None]
"""Progress callback: name of the source, measurements merged, and their total."""


@dataclass(slots=True, kw_only=True)
class MergeResult:
    """Result of merging one source.

    Attributes:
        database: Path, or URL without password.
        added: Number of new measurements.
        known: Number of measurements that the target already contained.
        refused: Number of measurements that are not merged, because their figures contradict one another.
        faults: The first `MAX_FAULTS` reasons.
        runs: Number of new runs.
        devices: Number of new devices.
        described: Keys of devices that the target describes differently; the later description is kept.
        demand: Number of new or greater demand counts.
    """

    database: str
    added: int = 0
    known: int = 0
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    runs: int = 0
    devices: int = 0
    described: list[str] = field(default_factory=list)
    demand: int = 0


def merge(
    sources: Sequence[str | Path],
    *,
    into: str | Path | None = None,
    watcher: MergeWatcher = lambda source, done, total: None,
    done: Callable[[MergeResult], None] = lambda merged: None,
) -> list[MergeResult]:
    """Merge databases into one, which is created if it does not exist.

    Args:
        sources: Paths or URLs; opened for reading only.
        into: Path or URL, or None for the default database.
        watcher: Progress callback.
        done: Called with the result of each source after its commit.

    Raises:
        InputError: if a source is the target, or there are no sources.
        SchemaError: if a database has another schema than this version.
        DatabaseError: if a source cannot be read or the target cannot be written; earlier sources stay
            merged.
    """
    if not sources:
        raise InputError("expected at least one database to merge")
    target = locate(into)
    for location in map(locate, sources):
        if _same(location, target):
            raise InputError(
                f"database {location} cannot be merged into itself; choose another target by --into"
            )
        # All sources must be readable before the first is merged.
        open_store(_named(location), read_only=True).close()
    merged = []
    with open_store(_named(target)) as store:
        for location in map(locate, sources):
            with open_store(_named(location), read_only=True) as source:
                merged.append(_merge_one(store, source, watcher))
            done(merged[-1])
    return merged


def _named(location: Location) -> str | Path | None:
    return location.url or location.path


def _same(location: Location, compared: Location) -> bool:
    if location.path is None or compared.path is None:
        return location == compared
    exist = location.path.exists() and compared.path.exists()
    return (
        location.path.samefile(compared.path)
        if exist
        else location.path.absolute() == compared.path.absolute()
    )


def _merge_one(store: Store, source: Reader, watcher: MergeWatcher) -> MergeResult:
    merged = MergeResult(database=str(source.location))
    with store.writing() as target_connection, _snapshot(source) as source_connection:
        total = source_connection.execute(
            sa.select(sa.func.count()).select_from(measurement_table)
        ).scalar_one()
        looked = functools.partial(watcher, merged.database)
        target = MergeTarget(target_connection, store._insert, store._now(), lambda done: looked(done, total))
        target.lock()
        devices = _merge_devices(source_connection, target, merged)
        _merge_runs(source_connection, target, devices, merged)
        for group in _groups(source_connection):
            added, present, refused = merge_group(
                source_connection,
                target,
                group,
                devices[group.device_id],
                _described(target_connection, devices[group.device_id]),
            )
            merged.added += added
            merged.known += present
            merged.refused += len(refused)
            merged.faults += refused[: MAX_FAULTS - len(merged.faults)]
        _merge_demand(source_connection, target, devices, merged)
        target.unlock()
    return merged


@contextmanager
def _snapshot(source: Reader) -> Iterator[sa.Connection]:
    """Open a transaction that sees one state of a source, whatever is written to it meanwhile."""
    engine = source._own_engine()
    level = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
    try:
        with closing(engine.connect().execution_options(**level)) as connection, connection.begin():
            yield connection
    except (ValueError, TypeError) as error:  # from JSON, times and texts that cannot be decoded
        fault = f"database {source.location} contains rows that cannot be read ({error})"
        verify = command_line("db verify", db=source.location.option)
        raise DatabaseError(f"{fault}; {verify} lists them") from error


def _groups(source: sa.Connection) -> list[MergeGroup]:
    at = trial_table.c
    query = sa.select(at.device_id, at.workload).where(at.state == "done").distinct()
    return [MergeGroup(*row) for row in source.execute(query.order_by(at.device_id, at.workload))]


# -- devices ---------------------------------------------------------------------------------------


def _merge_devices(source: sa.Connection, target: MergeTarget, merged: MergeResult) -> dict[int, int]:
    """Merge the devices, and return the target's id of each source id."""
    connection = target.connection
    newest_there, newest_here = _newest(source), _newest(connection)
    ids = {}
    for row in source.execute(sa.select(device_table).order_by(device_table.c.id)).mappings():
        described = {name: value for name, value in row.items() if name != "id"}
        query = sa.select(device_table).where(device_table.c.key == row["key"])
        present = connection.execute(query).mappings().first()
        if present is None:
            insert = device_table.insert().values(described).returning(device_table.c.id)
            ids[row["id"]] = connection.execute(insert).scalar_one()
            merged.devices += 1
            continue
        ids[row["id"]] = present["id"]
        if present["descriptor"] != row["descriptor"]:
            merged.described.append(row["key"])
            if newest_there.get(row["key"], _NEVER) > newest_here.get(row["key"], _NEVER):
                connection.execute(
                    device_table.update().where(device_table.c.id == present["id"]).values(described)
                )
    return ids


_NEVER = datetime.min.replace(tzinfo=UTC)


def _newest(connection: sa.Connection) -> dict[str, Any]:
    """Return the latest run start of each device, which updated its description; imports do not."""
    newest = sa.func.max(run_table.c.started_at, type_=schema.UtcTime())
    query = sa.select(device_table.c.key, newest.label("newest")).join_from(run_table, device_table)
    query = query.where(run_table.c.sampler != "import").group_by(device_table.c.key)
    return {row.key: row.newest for row in connection.execute(query)}


def _described(connection: sa.Connection, device_id: int) -> Device | None:
    """Return a device as the target describes it; None if this version cannot decode it."""
    query = sa.select(device_table.c.descriptor).where(device_table.c.id == device_id)
    try:
        return Device(**connection.execute(query).scalar_one())
    except (TypeError, InputError):
        return None


# -- runs and demand --------------------------------------------------------------------------------


def _merge_runs(
    source: sa.Connection, target: MergeTarget, devices: Mapping[int, int], merged: MergeResult
) -> None:
    """Merge the runs under their ids; a run that was still active in an earlier merge is updated."""
    count = sa.select(sa.func.count()).select_from(run_table)
    before = target.connection.execute(count).scalar_one()
    insert = target.insert(run_table)
    end_columns = (
        "finished_at",
        "masked",
        "cached",
        "wall_s",
        "compile_s",
        "verify_s",
        "measure_s",
        "overhead_s",
    )
    insert = insert.on_conflict_do_update(
        index_elements=["id"],
        set_={name: insert.excluded[name] for name in end_columns},
        where=run_table.c.finished_at.is_(None) & insert.excluded.finished_at.is_not(None),
    )
    for chunk in chunks(source, sa.select(run_table).order_by(run_table.c.id)):
        target.connection.execute(
            insert,
            [
                {
                    **row,
                    "device_id": devices[row["device_id"]],
                    "versions": {"database": merged.database, **row["versions"]},
                }
                for row in chunk
            ],
        )
    merged.runs = target.connection.execute(count).scalar_one() - before


def _merge_demand(
    source: sa.Connection, target: MergeTarget, devices: Mapping[int, int], merged: MergeResult
) -> None:
    """Merge the demand; of two counts of one origin the greater is the later one, since counts only grow."""
    insert = target.insert(demand_table)
    grown = ("calls", "time_us", "first_noted_at", "last_noted_at")
    upsert = insert.on_conflict_do_update(
        index_elements=("device_id", "workload", "origin"),
        set_={name: insert.excluded[name] for name in grown},
        where=insert.excluded.calls > demand_table.c.calls,
    ).returning(demand_table.c.id)
    rows = chunks(source, sa.select(demand_table).order_by(demand_table.c.id))
    for row in itertools.chain.from_iterable(rows):
        values = {name: value for name, value in row.items() if name != "id"}
        changed = target.connection.execute(upsert, {**values, "device_id": devices[row["device_id"]]})
        merged.demand += len(changed.all())


__getattr__ = renamed(
    __name__,
    {
        "Merged": "MergeResult",
    },
)
