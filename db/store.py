"""The store: claims trials, records what became of them, and tells what is known.

One transaction a recorded trial: what `record` returned from is on the disk. Several tuners may use one
database at once; a trial is theirs by a claim, which expires, so that the trials of a tuner that died are
taken over. Expiry is a stored moment: a clock that is set back makes others wait longer for a dead tuner's
claims and breaks nothing (times of a PostgreSQL server are its own, whatever the clients' clocks say).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunebench.db.bulk import AddWatcher, insert_measurements, insert_trials, unknown
from tunebench.db.engine import explained, write
from tunebench.db.location import Location, locate
from tunebench.db.migrate import prepare
from tunebench.db.owner import is_dead
from tunebench.db.reader import Reader, config_of, of
from tunebench.db.reader import device_table as _device
from tunebench.db.reader import measurement_table as _measurement
from tunebench.db.reader import run_table as _run
from tunebench.db.reader import trial_table as _trial
from tunebench.db.record import (
    Addition,
    Batch,
    Purpose,
    RunStart,
    RunSummary,
    TrialKey,
    Verdict,
    columns_of,
    verdict_columns,
)
from tunebench.device import Device
from tunebench.errors import ConfigError, DatabaseError, InputError
from tunebench.outcome import Result
from tunebench.space import Config

__all__ = ["CLAIM_S", "Store", "open_store"]

CLAIM_S = 600.0
"""How long a claim lasts unless it is renewed: longer than any one trial should take."""

_KEY = ("device_id", "workload", "variant", "config", "revision")


def open_store(db: str | Path | None = None, *, read_only: bool = False) -> Store:
    """Open a database; a fresh one is made if there is none.

    Args:
        db: A path, an SQLAlchemy URL (SQLite or PostgreSQL), or None: what `TUNEBENCH_DB` says, else the
            file in the user's data folder.
        read_only: Write nothing, not even beside the file; there must be a database.

    Raises:
        InputError: if `db` names no file and no supported server.
        DatabaseError: if it cannot be opened, is no database, or (`read_only`) does not exist.
        SchemaError: if its schema is older or newer than this version's.
        MissingDependency: if the driver of a server is not installed.
    """
    location = locate(db)
    if read_only and location.path is not None and not location.path.exists():
        raise DatabaseError(f"database {location} does not exist: nothing has been tuned into it yet")
    return Store(location, read_only=read_only)


class Store(Reader):
    """One open database; safe among threads; a context manager.

    Methods raise `DatabaseError`, with one line that says what to do, where the database refuses; what was
    recorded before is kept.

    Attributes:
        location: Where it is.
    """

    def __init__(
        self,
        location: Location,
        *,
        read_only: bool = False,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        super().__init__(location, read_only=read_only)
        self._clock = clock
        self._clock_is_behind = timedelta()
        self._device_ids: dict[str, int] = {}
        try:
            with explained(location):
                prepare(self._engine, location, read_only=read_only)
                self._compare_clocks()
        except BaseException:
            self.close()
            raise

    # -- runs -------------------------------------------------------------------------------------

    def begin_run(self, start: RunStart) -> str:
        """Store that a tuner starts, with its device; claims of dead tuners of this host are released.

        Returns:
            The run's id, for `record` and `finish_run`.
        """
        with self._write() as connection:
            device_id = self._describe(connection, start.device)
            run_id = self._begin(connection, device_id, start)
            _release_dead(connection)
        self._device_ids[start.device.key] = device_id
        return run_id

    def finish_run(self, run_id: str, summary: RunSummary) -> None:
        """Store that a run ended, and its summary; a run that was killed has none."""
        with self._write() as connection:
            connection.execute(
                _run.update().where(_run.c.id == run_id),
                {
                    "finished_at": self._now(),
                    "masked": summary.masked,
                    "cached": summary.cached,
                    "wall_s": summary.wall_s,
                    "overhead_s": summary.overhead_s,
                    **dataclasses.asdict(summary.effort),
                },
            )

    # -- claims -----------------------------------------------------------------------------------

    def claim(self, key: TrialKey, owner: str, ttl_s: float = CLAIM_S) -> bool:
        """Take a trial for `owner`, so that no other tuner measures it; claiming it again renews the claim.

        Args:
            key: The trial; its device must have been in a `begin_run`.
            owner: Who takes it (see `tunebench.db.new_owner`).
            ttl_s: Seconds until another tuner may take it over.

        Returns:
            Whether `owner` now has it: False if it is done, or another's claim has not expired.
        """
        now = self._now()
        claim = {"claim_owner": owner, "claim_expires_at": now + timedelta(seconds=ttl_s)}
        with self._write() as connection:
            insert = self._insert(_trial).values(**self._columns(connection, key), state="claimed", **claim)
            insert = insert.on_conflict_do_update(
                index_elements=_KEY,
                set_=claim,
                where=(_trial.c.state == "claimed")
                & ((_trial.c.claim_expires_at <= now) | (_trial.c.claim_owner == owner)),
            )
            return connection.execute(insert.returning(_trial.c.id)).first() is not None

    def release(self, key: TrialKey, owner: str) -> None:
        """Give a trial back that was claimed and not measured; nothing happens if `owner` has it no more."""
        with self._write() as connection:
            connection.execute(
                _trial.delete().where(
                    *(_trial.c[name] == value for name, value in self._identity(connection, key).items()),
                    _trial.c.state == "claimed",
                    _trial.c.claim_owner == owner,
                )
            )

    # -- recording --------------------------------------------------------------------------------

    def record(
        self,
        key: TrialKey,
        result: Result,
        *,
        purpose: Purpose = "search",
        bound_us: float | None = None,
        run_id: str | None = None,
        seed: int | None = None,
        verdict: Verdict | None = None,
    ) -> int:
        """Store one measurement of a trial and end its claim; it is on the disk when this returns.

        Other revisions of the same configuration are marked stale.

        Args:
            key: The trial; its device must have been in a `begin_run`.
            result: What became of it.
            purpose: Why it was measured.
            bound_us: Its bound at the time.
            run_id: The run it belongs to.
            seed: Seed of its inputs.
            verdict: How it compared with others.

        Returns:
            The measurement's id; ids ascend.
        """
        done = {"state": "done", "claim_owner": None, "claim_expires_at": None, "stale": False}
        with self._write() as connection:
            columns = self._columns(connection, key)
            insert = self._insert(_trial).values(**columns | done)
            insert = insert.on_conflict_do_update(index_elements=_KEY, set_=done)
            trial_id = connection.execute(insert.returning(_trial.c.id)).scalar_one()
            connection.execute(
                _trial.update()
                .where(
                    *(_trial.c[name] == columns[name] for name in _KEY[:-1]),
                    _trial.c.revision != key.revision,
                )
                .values(stale=True)
            )
            row = {
                "trial_id": trial_id,
                "run_id": run_id,
                "purpose": purpose,
                "bound_us": bound_us,
                "seed": seed,
                "recorded_at": self._now(),
                **verdict_columns(verdict),
                **columns_of(result),
            }
            stored = connection.execute(_measurement.insert().returning(_measurement.c.id), row)
            return int(stored.scalar_one())

    def recheck(self, device: str, workload: str, variant: str, revision: Callable[[Config], str]) -> int:
        """Mark the trials whose source has changed since as stale, and the others as standing.

        A stale trial is served only where nothing else is known; it is never deleted.

        Args:
            device: `Device.key`.
            workload: Canonical text.
            variant: `Variant.key`.
            revision: Returns today's revision of a configuration; one it refuses with `ConfigError` is stale.

        Returns:
            How many of them are stale now.
        """
        columns = (_trial.c.id, _trial.c.config_values, _trial.c.revision, _trial.c.stale)
        query = sa.select(*columns).join(_device).where(*of(device, workload, variant))
        with self._read() as connection:
            rows = connection.execute(query).mappings().all()
        count = 0
        changed: dict[bool, list[int]] = {True: [], False: []}
        for row in rows:
            stale = _current(revision, config_of(row)) != row["revision"]
            count += stale
            if stale != row["stale"]:
                changed[stale].append(row["id"])
        with self._write() as connection:
            for stale, ids in changed.items():
                for start in range(0, len(ids), 500):  # of at most 32766 variables in a statement of SQLite
                    chosen = _trial.c.id.in_(ids[start : start + 500])
                    connection.execute(_trial.update().where(chosen).values(stale=stale))
        return count

    def add(self, batches: Iterable[Batch], watcher: AddWatcher | None = None) -> int:
        """Store many measurements that were made elsewhere: all of them, or none if it is interrupted.

        A measurement that its trial has already (of the same purpose, with the same outcome, times and
        samples) is left out, so that adding the same ones again adds nothing.

        Args:
            batches: What to store.
            watcher: Is told how many are stored, and of how many.

        Returns:
            How many were not there yet.
        """
        count = 0
        with self._write() as connection:
            for batch in batches:
                # A device that is there stays as it is described; others who add to it wait here.
                device_id = self._describe(connection, batch.start.device, again=False)
                fresh = unknown(connection, device_id, batch.additions)
                if fresh:
                    run_id = self._begin(connection, device_id, batch.start)
                    trial_ids = insert_trials(connection, self._insert(_trial), device_id, fresh)
                    rows = [self._row(each, trial_ids[each.key], run_id) for each in fresh]
                    insert_measurements(connection, rows, watcher or (lambda done, total: None))
                    finished = {"finished_at": self._now()}
                    connection.execute(_run.update().where(_run.c.id == run_id), finished)
                    count += len(fresh)
        return count

    # -- within a transaction ---------------------------------------------------------------------

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        with explained(self.location), write(self._own_engine()) as connection:
            yield connection

    def _now(self) -> datetime:
        return self._clock() + self._clock_is_behind

    def _compare_clocks(self) -> None:
        """Tell time by the server, if there is one: claims of different machines must agree on it."""
        if self.location.url is not None:
            with self._engine.connect() as connection:
                theirs = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
            self._clock_is_behind = theirs - self._clock()

    def _insert(self, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
        """Return an INSERT that can say ON CONFLICT, which both kinds of database spell alike."""
        if self._engine.dialect.name == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)

    def _row(self, addition: Addition, trial_id: int, run_id: str) -> dict[str, Any]:
        return {
            "trial_id": trial_id,
            "run_id": run_id,
            "purpose": addition.purpose,
            "bound_us": addition.bound_us,
            "seed": addition.seed,
            "recorded_at": addition.recorded_at or self._now(),
            **verdict_columns(addition.verdict),
            **columns_of(addition.result),
        }

    def _describe(self, connection: sa.Connection, device: Device, *, again: bool = True) -> int:
        """Store a device, or describe one that is there `again`, and return its id; its row is locked."""
        described: dict[str, Any] = {
            "kind": device.kind,
            "architecture": device.architecture,
            "product": device.name,
            "sm_count": device.sm_count,
            "power_limit_w": device.power_limit_w,
            "descriptor": dataclasses.asdict(device),
        }
        insert = self._insert(_device).values(key=device.key, **described)
        changes = described if again else {"key": device.key}
        insert = insert.on_conflict_do_update(index_elements=["key"], set_=changes)
        return int(connection.execute(insert.returning(_device.c.id)).scalar_one())

    def _begin(self, connection: sa.Connection, device_id: int, start: RunStart) -> str:
        run_id = uuid.uuid4().hex
        row = {
            "id": run_id,
            "device_id": device_id,
            "workload": start.workload,
            "sampler": start.sampler,
            "seed": start.seed,
            "host": start.host,
            "versions": dict(start.versions),
            "started_at": self._now(),
        }
        connection.execute(_run.insert(), row)
        return run_id

    def _identity(self, connection: sa.Connection, key: TrialKey) -> dict[str, Any]:
        """Return the columns that make a trial unique.

        Raises:
            InputError: if no run was ever begun on its device.
        """
        if key.device not in self._device_ids:
            found = connection.execute(sa.select(_device.c.id).where(_device.c.key == key.device)).scalar()
            if found is None:
                raise InputError(
                    f"device {key.device!r} is not in database {self.location}: begin a run on it first"
                )
            self._device_ids[key.device] = found
        return {
            "device_id": self._device_ids[key.device],
            "workload": key.workload,
            "variant": key.variant,
            "config": str(key.config),
            "revision": key.revision,
        }

    def _columns(self, connection: sa.Connection, key: TrialKey) -> dict[str, Any]:
        return {**self._identity(connection, key), "config_values": dict(key.config), "stale": False}


def _current(revision: Callable[[Config], str], config: Config) -> str | None:
    try:
        return revision(config)
    except ConfigError:
        return None


def _release_dead(connection: sa.Connection) -> None:
    """Drop the claims of processes of this host that ended without releasing them."""
    owners = sa.select(_trial.c.claim_owner).where(_trial.c.state == "claimed").distinct()
    dead = [owner for owner in connection.execute(owners).scalars() if is_dead(owner)]
    if dead:
        connection.execute(_trial.delete().where(_trial.c.state == "claimed", _trial.c.claim_owner.in_(dead)))
