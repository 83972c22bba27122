"""Write transactions of a database, the server's time, and the rows that several methods write."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunebench.db.engine import translate_errors, write
from tunebench.db.location import Location
from tunebench.db.migrate import prepare
from tunebench.db.reader import Reader
from tunebench.db.record import RunStart, TrialKey
from tunebench.db.retry import RetryPolicy, retry
from tunebench.db.schema import DONE, TRIAL_KEY
from tunebench.db.schema import device_table as _device
from tunebench.db.schema import run_table as _run
from tunebench.db.schema import trial_table as _trial
from tunebench.db.write_count import count_write
from tunebench.device import Device
from tunebench.errors import InputError

__all__ = ["Writer"]

T = TypeVar("T")


class Writer(Reader):
    """Base of `Store`: write transactions and the rows that they share."""

    def __init__(
        self,
        location: Location,
        *,
        read_only: bool = False,
        clock: Callable[[], datetime] | None = None,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        super().__init__(location, read_only=read_only, retry_policy=retry_policy)
        self._clock = clock or (_today if location.url is None else _since_start)
        self._clock_is_behind = timedelta()
        self._device_ids: dict[str, int] = {}
        try:
            with translate_errors(location):
                prepare(self._engine, location, read_only=read_only)
                self._engine.dispose()  # a new file has its tables now: open it again, with a write-ahead log
                self._compare_clocks()
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        try:
            with translate_errors(self.location), write(self._own_engine()) as connection:
                yield connection
        finally:
            count_write()

    def _lasting(self, work: Callable[[sa.Connection, bool], T]) -> T:
        """Run `work` in a write transaction, and retry it as `retry_policy` allows.

        Args:
            work: Receives the connection, and whether an earlier attempt may have been committed.
        """

        def attempt(again: bool) -> T:
            with self._write() as connection:
                return work(connection, again)

        return retry(self.retry_policy, self.location, attempt)

    def _now(self) -> datetime:
        return self._clock() + self._clock_is_behind

    def _compare_clocks(self) -> None:
        """Use the server's time, if there is a server: claims of all machines must agree on it."""
        if self.location.url is not None:
            with self._engine.connect() as connection:
                theirs = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
            self._clock_is_behind = theirs - self._clock()

    def _insert(self, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
        """Return an INSERT of the dialect, with its `on_conflict_do_update`."""
        if self._engine.dialect.name == "postgresql":
            return postgresql.insert(table)
        return sqlite.insert(table)

    def _describe(self, connection: sa.Connection, device: Device, *, again: bool = True) -> int:
        """Store a device and return its id; `again` updates an existing description. Locks its row."""
        described: dict[str, Any] = {
            "kind": device.kind,
            "architecture": device.architecture,
            "product": device.name,
            "sm_count": device.sm_count,
            "power_limit_w": device.power_limit_w,
            "descriptor": dataclasses.asdict(device),
        }
        insert = self._insert(_device).values(key=device.key, **described)
        staleness_changes = described if again else {"key": device.key}
        insert = insert.on_conflict_do_update(index_elements=["key"], set_=staleness_changes)
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
        others = (
            *(_trial.c[name] == columns[name] for name in TRIAL_KEY[:-1]),
            _trial.c.revision != key.revision,
        )
        connection.execute(_trial.update().where(*others).values(stale=True))
        return trial_id

    def _identity(self, connection: sa.Connection, key: TrialKey) -> dict[str, Any]:
        """Return the columns that identify a trial.

        Raises:
            InputError: if `begin_run` was never called for its device.
        """
        if key.device not in self._device_ids:
            found = connection.execute(sa.select(_device.c.id).where(_device.c.key == key.device)).scalar()
            if found is None:
                raise InputError(
                    f"device {key.device!r} is not in database {self.location}: call begin_run for it first"
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


def _today() -> datetime:
    return datetime.now(UTC)


def _since_start() -> datetime:
    """Return the time of a clock that cannot be set, so that its offset to the server's stays constant."""
    steady = getattr(time, "CLOCK_BOOTTIME", None)  # also counts while the machine sleeps
    seconds = time.monotonic() if steady is None else time.clock_gettime(steady)
    return datetime.fromtimestamp(seconds, UTC)
