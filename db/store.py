"""The store: claims trials and records their outcomes.

`record` commits one transaction per trial and returns when it is on disk. Several tuners may share a
database: a tuner claims a trial before it measures it. A claim expires, so that trials of a dead tuner are
measured by others; if the tuner died on this machine, the claim is free at once. Expiry is a stored time. A
clock that is set back makes others wait longer for a dead tuner's claims, at most a day, and has no other
effect. PostgreSQL servers use their own clock, not those of the clients.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tunebench.db.bulk import CHUNK, BulkInsert, ProgressCallback, insert_trials, new_measurements
from tunebench.db.claim import CLAIM_S, claimable, lock_configs, release_dead, take_over_dead
from tunebench.db.demand import add_demand
from tunebench.db.location import locate
from tunebench.db.reader import Reader
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
from tunebench.db.retry import RetryPolicy
from tunebench.db.schema import DONE, TRIAL_KEY
from tunebench.db.schema import demand_table as _demand
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import measurement_table as _measurement
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.device import Device
from tunebench.errors import InputError
from tunebench.outcome import Result
from tunebench.space import Config

if TYPE_CHECKING:
    from tunebench.db.staleness import StoredTrial

__all__ = ["CLAIM_S", "Store", "open_store"]


def open_store(
    db: str | Path | None = None,
    *,
    read_only: bool = False,
    retry_policy: RetryPolicy | None = None,
    hasty: bool = False,
) -> Store:
    """Open a database, and create it if it does not exist.

    Args:
        db: Path, SQLAlchemy URL (SQLite or PostgreSQL), or None: `TUNEBENCH_DB`, or else the file in the
            user's data folder.
        read_only: Write nothing, not even files next to the database, which must exist.
        retry_policy: How long to wait for a database that becomes unavailable after it was opened.
        hasty: Whether to wait at most two seconds for a server to accept a connection, and for a table lock.

    Raises:
        InputError: if `db` names neither a file nor a supported server.
        DatabaseError: if it cannot be opened, is not a database, or (with `read_only`) does not exist.
        SchemaError: if its schema is older or newer than this version's.
        MissingDependency: if the driver of the server is not installed.
    """
    location = locate(db)
    if read_only:
        location.require()
    return Store(location, read_only=read_only, retry_policy=retry_policy, hasty=hasty)


class Store(Reader):
    """One open database; thread-safe; a context manager.

    Methods raise `DatabaseError` with one line that says what to do; records committed before are kept.

    Attributes:
        location: Path or URL.
        retry_policy: How long claims, records and queries of a search wait for a database that becomes
            unavailable.
    """

    # -- runs ----------------------------------------------------------------------------------------

    def begin_run(self, start: RunStart) -> str:
        """Store the start of a run and its device, and release the claims of dead tuners of this host.

        Returns:
            Id of the run, for `record` and `finish_run`.
        """
        run_id = uuid.uuid4().hex

        def begin(connection: sa.Connection, is_retry: bool) -> int:
            device_id = self._describe(connection, start.device)
            if not (is_retry and _is_begun(connection, run_id)):
                self._begin(connection, device_id, start, run_id)
            release_dead(connection)
            return device_id

        self._device_ids[start.device.key] = self._lasting(begin)
        return run_id

    def finish_run(self, run_id: str, summary: RunSummary, continued: Sequence[str] = ()) -> None:
        """Store the end of a run and its summary; a killed run has none.

        Args:
            run_id: From `begin_run`.
            summary: What the run did.
            continued: Ids of interrupted runs whose search it continued: they have ended with it.
        """

        def finish(connection: sa.Connection, is_retry: bool) -> None:
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
            newest = sa.select(sa.func.max(_measurement.c.recorded_at)).where(
                _measurement.c.run_id == _run.c.id
            )
            ended = _run.update().where(_run.c.id.in_(continued), _run.c.finished_at.is_(None))
            connection.execute(ended.values(finished_at=newest.scalar_subquery()))

        self._lasting(finish)

    # -- claims --------------------------------------------------------------------------------------

    def claim(self, key: TrialKey, owner: str, ttl_s: float = CLAIM_S) -> bool:
        """Claim a trial for `owner`, so that no other tuner measures it; claiming it again renews the claim.

        Args:
            key: The trial; `begin_run` must have been called for its device.
            owner: Owner of the claim (see `tunebench.db.new_owner`).
            ttl_s: Seconds until another tuner may take the claim.

        Returns:
            Whether `owner` has the claim now: False if the trial is measured, or another owner's claim has
            not expired and its process has not ended as far as this machine can determine.
        """

        def take(connection: sa.Connection, is_retry: bool) -> bool:
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
        """Release a claimed trial that was not measured; no effect if `owner` no longer has the claim."""
        with self.writing() as connection:
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
        """Store one measurement of a trial and end its claim; it is on disk when this returns.

        Other revisions of the same configuration become stale.

        Args:
            key: The trial; `begin_run` must have been called for its device.
            result: Outcome, resources, effort and conditions.
            purpose: Reason for the measurement.
            bound_us: Lower bound when it was measured, in microseconds.
            run_id: The run it belongs to.
            seed: Seed of the inputs.
            verdict: Comparison with other configurations.

        Returns:
            Id of the measurement; ids ascend.
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
        """Store several measurements in one transaction, each as `record` does.

        Args:
            measurements: The measurements; their `recorded_at` is ignored.
            run_id: The run they belong to.

        Returns:
            Ids of the measurements.
        """
        rows = [
            measurement_row(measurement, run_id) for measurement in measurements
        ]  # before other writers have to wait
        moment: datetime | None = None

        def store(connection: sa.Connection, is_retry: bool) -> list[int]:
            nonlocal moment
            moment = moment or self._now()
            lock_configs(connection, measurements)
            ids = []
            for measurement, columns in zip(measurements, rows, strict=True):
                trial_id = self._end(connection, measurement.key)
                row = {**columns, "trial_id": trial_id, "recorded_at": moment}
                ids.append((_recorded(connection, row) if is_retry else None) or _insert(connection, row))
            return ids

        return self._lasting(store)

    def recheck(self, device: str, workload: str, variant: str, revision: Callable[[Config], str]) -> int:
        """Mark the trials whose source has changed as stale, and the others as current.

        `lookup` returns a stale trial only if there is no other; stale trials are never deleted.

        Args:
            device: `Device.key`.
            workload: Canonical text.
            variant: `Variant.key`.
            revision: Returns the current revision of a configuration, or raises `ConfigError`, which counts
                as stale.

        Returns:
            Number of stale trials of the space.
        """
        from tunebench.db.staleness import mark_stale, staleness_changes, stored_trials

        space = SpaceKey(device=device, workload=workload, variant=variant)

        def look(is_retry: bool) -> list[StoredTrial]:
            with self.reading() as connection:
                return stored_trials(connection, device, space)

        changed, count = staleness_changes(self._retry(look), revision)
        if any(changed.values()):
            self._lasting(lambda connection, is_retry: mark_stale(connection, changed))
        return count

    def add(
        self,
        batches: Iterable[MeasurementBatch],
        watcher: ProgressCallback | None = None,
        *,
        recheck: bool = False,
    ) -> int:
        """Store many measurements from elsewhere in one transaction.

        A measurement is skipped if its trial has one with the same purpose, outcome, times and samples:
        adding the same ones again adds nothing. Batches may be generated lazily; consecutive batches with
        equal `start` share a run.

        Args:
            batches: The measurements.
            watcher: Progress callback: measurements of the batch stored, and their total.
            recheck: Mark trials whose source differs from the installed variants as stale.

        Returns:
            Number of new measurements.
        """
        watcher = watcher or (lambda done, total: None)
        with self.writing() as connection:
            adding = BulkInsert()
            for batch in batches:
                # A device that exists keeps its description. The upsert locks its row: concurrent imports
                # wait here.
                device_id = self._describe(connection, batch.start.device, update=False)
                watcher(0, len(batch.measurements))
                for start in range(0, len(batch.measurements), CHUNK):
                    few = batch.measurements[start : start + CHUNK]
                    self._add(connection, device_id, batch.start, few, adding)
                    watcher(start + len(few), len(batch.measurements))
            for run_id in adding.run_ids:
                finished = {"finished_at": self._now()}
                connection.execute(_run.update().where(_run.c.id == run_id), finished)
            if recheck:
                _recheck(connection, adding)
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
        begun, run_id = adding.runs.get((start.device.key, start.workload), (None, ""))
        if begun != start:
            run_id = self._begin(connection, device_id, start, uuid.uuid4().hex)
            adding.runs[start.device.key, start.workload] = (start, run_id)
            adding.run_ids.add(run_id)
        trial_ids = insert_trials(connection, self._insert(_trial), device_id, fresh)
        rows = [
            {
                **measurement_row(measurement, run_id),
                "trial_id": trial_ids[measurement.key],
                "recorded_at": measurement.recorded_at or self._now(),
            }
            for measurement in fresh
        ]
        connection.execute(_measurement.insert(), rows)
        adding.count += len(fresh)
        adding.spaces |= dict.fromkeys(
            (measurement.key.space for measurement in fresh), (device_id, start.device)
        )

    def add_demand(self, device: Device, demands: Iterable[Demand]) -> None:
        """Add to the time that programs spent on workloads; several programs may add at the same time.

        Args:
            device: Device that ran them; stored if it is missing.
            demands: Counts since the last call, one per workload.
        """
        with self.writing() as connection:
            # The upsert locks the device's row, so that two writers cannot deadlock.
            device_id = self._describe(connection, device, update=False)
            add_demand(connection, self._insert(_demand), device_id, demands, self._now())

    # -- rows that several methods write -------------------------------------------------------------

    def _describe(self, connection: sa.Connection, device: Device, *, update: bool = True) -> int:
        """Store a device and return its id; `update` updates an existing description. Locks its row."""
        described: dict[str, Any] = {
            "kind": device.kind,
            "architecture": device.architecture,
            "product": device.name,
            "sm_count": device.sm_count,
            "power_limit_w": device.power_limit_w,
            "descriptor": dataclasses.asdict(device),
        }
        insert = self._insert(_device).values(key=device.key, **described)
        changes = described if update else {"key": device.key}
        insert = insert.on_conflict_do_update(index_elements=["key"], set_=changes)
        return int(connection.execute(insert.returning(_device.c.id)).scalar_one())

    def _begin(self, connection: sa.Connection, device_id: int, start: RunStart, run_id: str) -> str:
        row = {
            "id": run_id,
            "device_id": device_id,
            "workload": start.workload,
            "sampler": start.sampler,
            "seed": start.seed,
            "host": start.host,
            "versions": dict(start.versions),
            "started_at": self._now(),
            "budget_trials": start.budget_trials,
            "options": None if start.options is None else dict(start.options),
        }
        connection.execute(_run.insert(), row)
        return run_id

    def _end(self, connection: sa.Connection, key: TrialKey) -> int:
        """Mark a trial as measured and its other revisions as stale, and return its id."""
        done = {**DONE, "stale": False}
        columns = self._columns(connection, key)
        insert = self._insert(_trial).values(**columns | done)
        insert = insert.on_conflict_do_update(index_elements=TRIAL_KEY, set_=done)
        trial_id = int(connection.execute(insert.returning(_trial.c.id)).scalar_one())
        other_revisions = (
            *(_trial.c[name] == columns[name] for name in TRIAL_KEY[:-1]),
            _trial.c.revision != key.revision,
        )
        connection.execute(_trial.update().where(*other_revisions).values(stale=True))
        return trial_id

    def _identity(self, connection: sa.Connection, key: TrialKey) -> dict[str, Any]:
        """Return the columns that identify a trial.

        Raises:
            InputError: if `begin_run` was never called for its device.
        """
        if key.device not in self._device_ids:
            device_id = connection.execute(
                sa.select(_device.c.id).where(_device.c.key == key.device)
            ).scalar()
            if device_id is None:
                raise InputError(
                    f"device {key.device!r} is not in database {self.location}: call begin_run for it first"
                )
            self._device_ids[key.device] = device_id
        return {
            "device_id": self._device_ids[key.device],
            "workload": key.workload,
            "variant": key.variant,
            "config": str(key.config),
            "revision": key.revision,
        }

    def _columns(self, connection: sa.Connection, key: TrialKey) -> dict[str, Any]:
        return {**self._identity(connection, key), "config_values": dict(key.config), "stale": False}


def _insert(connection: sa.Connection, row: Mapping[str, Any]) -> int:
    return int(connection.execute(_measurement.insert().returning(_measurement.c.id), dict(row)).scalar_one())


def _recorded(connection: sa.Connection, row: Mapping[str, Any]) -> int | None:
    """Return the id of a measurement that an earlier attempt committed; None if none did."""
    names = ("trial_id", "purpose", "recorded_at")
    query = sa.select(_measurement.c.id).where(*(_measurement.c[name] == row[name] for name in names))
    return connection.execute(query).scalar()


def _is_begun(connection: sa.Connection, run_id: str) -> bool:
    return connection.execute(sa.select(_run.c.id).where(_run.c.id == run_id)).first() is not None


def _recheck(connection: sa.Connection, added: BulkInsert) -> None:
    """Mark the trials of the spaces that an import changed as stale or current."""
    from tunebench.db.staleness import update_staleness

    for space, (device_id, device) in added.spaces.items():
        update_staleness(connection, device_id, space, device)
