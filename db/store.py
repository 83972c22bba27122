"""The store: claims trials, records what became of them, and tells what is known.

One transaction a recorded trial: what `record` returned from is on the disk. Several tuners may use one
database at once; a trial is theirs by a claim, which expires, so that the trials of a tuner that died are
taken over; at once, if it died on this machine. Expiry is a stored moment: a clock that is set back makes
others wait longer for a dead tuner's claims, up to a day, and breaks nothing (times of a PostgreSQL server
are its own, whatever the clients' clocks say).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tunebench.db.bulk import (
    CHUNK,
    BulkInsert,
    ProgressCallback,
    insert_trials,
    new_measurements,
)
from tunebench.db.claim import CLAIM_S, claimable, lock_configs, release_dead, take_over_dead
from tunebench.db.demand import add_demand
from tunebench.db.location import locate
from tunebench.db.record import (
    Demand,
    MeasurementBatch,
    NewMeasurement,
    Purpose,
    RunStart,
    RunSummary,
    SpaceKey,
    TrialKey,
    Verdict,
    measurement_row,
)
from tunebench.db.retry import RetryPolicy, retry
from tunebench.db.schema import TRIAL_KEY
from tunebench.db.schema import demand_table as _demand
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.db.staleness import StoredTrial, mark_stale, staleness_changes, stored_trials, update_staleness
from tunebench.db.writer import Writer
from tunebench.device import Device
from tunebench.errors import DatabaseError
from tunebench.outcome import Result
from tunebench.space import Config

__all__ = ["CLAIM_S", "Store", "open_store"]


def open_store(
    db: str | Path | None = None, *, read_only: bool = False, retry_policy: RetryPolicy | None = None
) -> Store:
    """Open a database; a fresh one is made if there is none.

    Args:
        db: A path, an SQLAlchemy URL (SQLite or PostgreSQL), or None: what `TUNEBENCH_DB` says, else the
            file in the user's data folder.
        read_only: Write nothing, not even beside the file; there must be a database.
        retry_policy: How long a tuner waits for a database that goes away once it is open.

    Raises:
        InputError: if `db` names no file and no supported server.
        DatabaseError: if it cannot be opened, is no database, or (`read_only`) does not exist.
        SchemaError: if its schema is older or newer than this version's.
        MissingDependency: if the driver of a server is not installed.
    """
    location = locate(db)
    if read_only and location.path is not None and not location.path.exists():
        raise DatabaseError(f"database {location} does not exist: nothing has been tuned into it yet")
    return Store(location, read_only=read_only, retry_policy=retry_policy)


class Store(Writer):
    """One open database; safe among threads; a context manager.

    Methods raise `DatabaseError`, with one line that says what to do, where the database refuses; what was
    recorded before is kept.

    Attributes:
        location: Where it is.
        retry_policy: How long claiming, recording, and what a tuner asks wait for it, once it is open.
    """

    # -- runs ----------------------------------------------------------------------------------------

    def begin_run(self, start: RunStart) -> str:
        """Store that a tuner starts, with its device; claims of dead tuners of this host are released.

        Returns:
            The run's id, for `record` and `finish_run`.
        """
        run_id = uuid.uuid4().hex

        def begin(connection: sa.Connection, again: bool) -> int:
            device_id = self._describe(connection, start.device)
            if not (again and _is_begun(connection, run_id)):
                self._begin(connection, device_id, start, run_id)
            release_dead(connection)
            return device_id

        self._device_ids[start.device.key] = self._lasting(begin)
        return run_id

    def finish_run(self, run_id: str, summary: RunSummary) -> None:
        """Store that a run ended, and its summary; a run that was killed has none."""

        def finish(connection: sa.Connection, again: bool) -> None:
            figures = {
                "masked": summary.masked,
                "cached": summary.cached,
                "wall_s": summary.wall_s,
                "overhead_s": summary.overhead_s,
                **dataclasses.asdict(summary.effort),
            }
            connection.execute(
                _run.update().where(_run.c.id == run_id), {"finished_at": self._now(), **figures}
            )

        self._lasting(finish)

    # -- claims --------------------------------------------------------------------------------------

    def claim(self, key: TrialKey, owner: str, ttl_s: float = CLAIM_S) -> bool:
        """Take a trial for `owner`, so that no other tuner measures it; claiming it again renews the claim.

        Args:
            key: The trial; its device must have been in a `begin_run`.
            owner: Who takes it (see `tunebench.db.new_owner`).
            ttl_s: Seconds until another tuner may take it over.

        Returns:
            Whether `owner` now has it: False if it is done, or another's claim has not expired and its
            process has not ended, as far as this machine can tell.
        """

        def take(connection: sa.Connection, again: bool) -> bool:
            now = self._now()
            claim = {"claim_owner": owner, "claim_expires_at": now + timedelta(seconds=ttl_s)}
            columns = self._columns(connection, key)
            insert = self._insert(_trial).values(**columns, state="claimed", **claim)
            insert = insert.on_conflict_do_update(
                index_elements=TRIAL_KEY,
                set_=claim,
                where=claimable(owner, now),
            )
            if connection.execute(insert.returning(_trial.c.id)).first() is not None:
                return True
            return take_over_dead(connection, [_trial.c[name] == columns[name] for name in TRIAL_KEY], claim)

        return self._lasting(take)

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

    # -- recording -----------------------------------------------------------------------------------

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
        measurement = NewMeasurement(
            key=key,
            result=result,
            purpose=purpose,
            bound_us=bound_us,
            seed=seed,
            verdict=verdict or Verdict(),
        )
        return self.record_together([measurement], run_id=run_id)[0]

    def record_together(
        self, measurements: Sequence[NewMeasurement], *, run_id: str | None = None
    ) -> list[int]:
        """Store measurements that say something only together, each as `record` does: all of them or none.

        Args:
            measurements: What to store, now: their `recorded_at` is not looked at.
            run_id: The run they belong to.

        Returns:
            Their ids.
        """
        rows = [measurement_row(each, run_id) for each in measurements]  # before other writers have to wait
        moment: datetime | None = None

        def store(connection: sa.Connection, again: bool) -> list[int]:
            nonlocal moment
            moment = moment or self._now()
            lock_configs(connection, measurements)
            ids = []
            for measurement, columns in zip(measurements, rows, strict=True):
                trial_id = self._end(connection, measurement.key)
                row = {**columns, "trial_id": trial_id, "recorded_at": moment}
                ids.append((_recorded(connection, row) if again else None) or _insert(connection, row))
            return ids

        return self._lasting(store)

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
        space = SpaceKey(device=device, workload=workload, variant=variant)

        def look(again: bool) -> list[StoredTrial]:
            with self._read() as connection:
                return stored_trials(connection, device, space)

        changed, count = staleness_changes(retry(self.retry_policy, self.location, look), revision)
        if any(changed.values()):
            self._lasting(lambda connection, again: mark_stale(connection, changed))
        return count

    def add(
        self,
        batches: Iterable[MeasurementBatch],
        watcher: ProgressCallback | None = None,
        *,
        recheck: bool = False,
    ) -> int:
        """Store many measurements that were made elsewhere: all of them, or none if it is interrupted.

        A measurement that its trial has already (of the same purpose, with the same outcome, times and
        samples) is left out, so that adding the same ones again adds nothing. Batches may be made as they are
        asked for; those that begin with the same run are stored under one.

        Args:
            batches: What to store.
            watcher: Is told how many of a batch are stored, and of how many.
            recheck: Mark what is not of the installed variants' sources as stale.

        Returns:
            How many were not there yet.
        """
        watcher = watcher or (lambda done, total: None)
        with self._write() as connection:
            adding = BulkInsert()
            for batch in batches:
                # A device that is there stays as it is described; others who add to it wait here.
                device_id = self._describe(connection, batch.start.device, again=False)
                watcher(0, len(batch.measurements))
                for start in range(0, len(batch.measurements), CHUNK):
                    few = batch.measurements[start : start + CHUNK]
                    self._add(connection, device_id, batch.start, few, adding)
                    watcher(start + len(few), len(batch.measurements))
            for run_id in adding.run_ids:
                finished = {"finished_at": self._now()}
                connection.execute(_run.update().where(_run.c.id == run_id), finished)
            for space, (device_id, device) in adding.spaces.items() if recheck else ():
                update_staleness(connection, device_id, space, device)
            return adding.count

    def _add(
        self,
        connection: sa.Connection,
        device_id: int,
        start: RunStart,
        measurements: Sequence[NewMeasurement],
        adding: BulkInsert,
    ) -> None:
        fresh = new_measurements(connection, device_id, measurements, self._now(), adding.run_ids)
        if not fresh:
            return
        run_id = adding.run_of(start) or adding.begun(
            start, self._begin(connection, device_id, start, uuid.uuid4().hex)
        )
        trial_ids = insert_trials(connection, self._insert(_trial), device_id, fresh)
        rows = [
            {
                **measurement_row(each, run_id),
                "trial_id": trial_ids[each.key],
                "recorded_at": each.recorded_at or self._now(),
            }
            for each in fresh
        ]
        connection.execute(_measurement.insert(), rows)
        adding.count += len(fresh)
        on = (device_id, start.device)
        adding.spaces.update(dict.fromkeys((each.key.space for each in fresh), on))

    def add_demand(self, device: Device, demands: Iterable[Demand]) -> None:
        """Add to what programs spent on workloads; many may add at once.

        Args:
            device: Where they ran; it is described if it is not there yet.
            demands: What was spent since it was last told, a workload each.
        """
        with self._write() as connection:
            # Others who add to the device wait at its row, so no two can wait for each other.
            device_id = self._describe(connection, device, again=False)
            add_demand(connection, self._insert(_demand), device_id, demands, self._now())


def _insert(connection: sa.Connection, row: Mapping[str, Any]) -> int:
    return int(connection.execute(_measurement.insert().returning(_measurement.c.id), dict(row)).scalar_one())


def _recorded(connection: sa.Connection, row: Mapping[str, Any]) -> int | None:
    """Return the id of a measurement if it was stored though nobody was told."""
    names = ("trial_id", "purpose", "recorded_at")
    query = sa.select(_measurement.c.id).where(*(_measurement.c[name] == row[name] for name in names))
    return connection.execute(query).scalar()


def _is_begun(connection: sa.Connection, run_id: str) -> bool:
    return connection.execute(sa.select(_run.c.id).where(_run.c.id == run_id)).first() is not None
