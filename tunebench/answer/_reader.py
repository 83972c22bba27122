"""Queries of one SQLite database or lookup index with the standard library alone."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tunebench._command import command_line
from tunebench._figure import significant
from tunebench.answer._target import LookupTarget
from tunebench.db.figures import Figures
from tunebench.db.location import Location
from tunebench.db.migrations import REVISIONS, newer_schema
from tunebench.db.sqlite_file import (
    FrozenConnection,
    explain_sqlite,
    file_stamp,
    has_wal,
    is_locked,
    open_copy,
    open_read_only,
    refuse_special_file,
)
from tunebench.errors import DatabaseError, DatabaseUnavailable, SchemaError
from tunebench.outcome import VARIANT_FILE
from tunebench.space import Config

if TYPE_CHECKING:
    from tunebench.outcome import CacheState

__all__ = ["BUSY_S", "QUERY_S", "AnswerReader", "AnswerRow", "RecordDetails"]

QUERY_S = 5.0
"""Time limit of a query, in seconds."""

BUSY_S = 0.03
"""Longest wait for the lock of another program, in seconds; then a copy of the file is read."""

ANSWER_S = 0.08
"""Time in seconds after which no other attempt is made to read a locked file."""

LOCKED_S = 0.25
"""Time in seconds after which a lookup waits again for a lock that it did not get."""

COPY_S = 5.0
"""Time in seconds for which the copy of a locked file is read, although the file has changed since."""


class AnswerRow(NamedTuple):
    """One row of `answer_v1`: the best configuration of a variant for a workload, device and cache state."""

    device: str
    architecture: str
    workload: str
    variant: str
    config: Config
    revision: str
    predicted: bool
    cache: CacheState | None
    verification: str
    time_us: float
    ci_us: tuple[float, float] | None
    bound_us: float | None
    recorded_at: datetime
    measurement_id: int


_COLUMNS = (
    "device, architecture, workload, variant, config_values, revision, kind, cache, verification, time_us, "
    "ci_low_us, ci_high_us, bound_us, recorded_at, measurement_id"
)

# The order of `tunebench.db.figures.answer_order`, for several devices.
# Order of other devices: the same product (with another power limit) first, then the nearest number of SMs.
_ROWS = f"""
SELECT {_COLUMNS}
FROM answer_v1
WHERE workload = :workload AND NOT stale AND (:variant IS NULL OR variant = :variant)
  AND (:elsewhere OR architecture = :architecture)
ORDER BY kind = 'predicted', architecture <> :architecture, device <> :key, product <> :product,
         ABS(sm_count - :sm_count), device, cache = 'warm', verification = 'not verified', time_us,
         measurement_id
"""  # noqa: S608 (no outside text)

# List the distinct workloads of an operator on a device by one index step each, so that the time does not
# grow with the number of trials.
_WORKLOADS = """
WITH RECURSIVE found (workload) AS (
    SELECT MIN(workload) FROM trial
    WHERE device_id = :device_id AND workload >= :first AND workload < :last
    UNION ALL
    SELECT (SELECT MIN(trial.workload) FROM trial
            WHERE device_id = :device_id AND trial.workload > found.workload AND trial.workload < :last)
    FROM found WHERE found.workload IS NOT NULL
)
SELECT workload FROM found WHERE workload IS NOT NULL
"""


# The same for the operators of all devices of an architecture. ';' follows ':', which ends a name.
_OPERATORS = """
WITH RECURSIVE found (device_id, workload) AS (
    SELECT id, (SELECT MIN(workload) FROM trial WHERE device_id = device.id)
    FROM device WHERE substr(key, 1, instr(key, ':') - 1) = :architecture
    UNION ALL
    SELECT device_id, (SELECT MIN(trial.workload) FROM trial WHERE trial.device_id = found.device_id
                       AND trial.workload > substr(found.workload, 1, instr(found.workload, ':') - 1) || ';')
    FROM found WHERE found.workload IS NOT NULL
)
SELECT DISTINCT substr(workload, 1, instr(workload, ':') - 1) FROM found WHERE workload IS NOT NULL
"""


_WRONG = """
SELECT EXISTS (
    SELECT 1 FROM trial
    JOIN device ON device.id = trial.device_id
    JOIN measurement ON measurement.trial_id = trial.id
    WHERE device.key = :device AND trial.workload = :workload AND trial.variant = :variant
      AND trial.config = :config AND NOT trial.stale AND measurement.kind = 'wrong_result'
)
"""


_DETAILS = """
SELECT measurement.detail, measurement.comparison, run.sampler, run.versions
FROM measurement LEFT JOIN run ON run.id = measurement.run_id
WHERE measurement.id = ?
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordDetails:
    """Details of the record of an answer that are not columns of `AnswerRow`.

    Attributes:
        outcome: Stored fields of the outcome.
        figures: Comparison with the default and with baselines; empty if there is none.
        imported_from: Name of the file from which the record was imported; None if it was not imported.
    """

    outcome: Mapping[str, Any]
    figures: Figures
    imported_from: str | None

    @property
    def _conditions(self) -> Mapping[str, Any]:
        return self.outcome.get("conditions") or {}

    @property
    def interval_us(self) -> tuple[float, float] | None:
        """90 % prediction interval of a prediction, in microseconds; None if it has none."""
        low_us, high_us = self.outcome.get("low_us"), self.outcome.get("high_us")
        return None if low_us is None or high_us is None else (low_us, high_us)

    @property
    def variant_file(self) -> str | None:
        """The user's file that defined the variant; None for other variants."""
        path = self._conditions.get(VARIANT_FILE)
        return path if isinstance(path, str) else None

    @property
    def noise(self) -> str:
        """What made the measured time unreliable, to append to `Answer.because`; may be empty."""
        busy, search_us = self._conditions.get("busy_elsewhere"), self._conditions.get("search_us")
        text = f", while other programs used {100 * busy:.0f} % of the processor" if busy else ""
        return text + (f"; the search measured {significant(search_us)} us" if search_us else "")


class AnswerReader:
    """One open file; callers hold a lock.

    While another program has locked the file, a copy is read, as of the last commit.

    Args:
        path: The file; may not exist yet.
        location: Location in messages: the file, or the server of the index.

    Attributes:
        is_copy: Whether a copy is read, because the file is locked.
    """

    def __init__(self, path: Path, location: Location) -> None:
        self.path, self.location = path, location
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, ...] = ()
        self._version = -1
        self._holds = self.is_copy = False
        self._deadline = self._copied_at = 0.0
        self._locked_at = -LOCKED_S

    def close(self) -> None:
        """Close the file; the next query opens it again."""
        self._forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def changed(self) -> bool:
        """Return whether anything was committed since the last call, or the file was replaced.

        It neither waits for a lock nor copies the file.

        Raises:
            DatabaseUnavailable: if the file is locked now; what was read before stays valid.
            DatabaseError: if the file cannot be read.
        """
        before = (self._file, self._version)
        if self.is_copy:
            self._reopen()
        with self._reading(busy_s=0.0) as connection:
            self._version = connection.execute("PRAGMA data_version").fetchone()[0] if connection else -1
            changed = (self._file, self._version) != before
            if connection is not None and changed and self._file == before[0]:  # a new connection was checked
                self._check_schema(connection)
            return changed

    def _reopen(self) -> None:
        """Replace the copy of a locked file by the file, if the lock has ended."""
        try:
            connection = self._opened(busy_s=0.0)
        except (sqlite3.Error, OSError) as error:
            if is_locked(error):
                return
            raise self._explained(error) from error
        self._forget()
        connection.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Read one state of one file within the context, whatever is committed meanwhile.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        with self._reading() as connection:
            connection = None if connection is None else self._begun(connection)
            self._holds = connection is not None
            try:
                yield
            finally:
                self._holds = False
                if connection is not None and connection is self._connection:  # else closed
                    connection.execute("COMMIT")

    def _begun(self, connection: sqlite3.Connection) -> sqlite3.Connection | None:
        """Return a connection with a transaction that has its lock; that of a copy if the file is locked."""
        try:
            _begin(connection)
        except sqlite3.OperationalError as error:
            if not is_locked(error):
                raise
            self._forget()
            self._locked_at = monotonic()
            copy = self._current()
            if copy is not None:
                _begin(copy)
            return copy
        return connection

    def rows(
        self, workload: str, target: LookupTarget, variant: str | None, *, elsewhere: bool = False
    ) -> list[AnswerRow]:
        """Return the rows of a workload, best first.

        Args:
            workload: Canonical text.
            target: Device of the lookup.
            variant: Key of the only variant; None for all.
            elsewhere: Include other architectures.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        asked = {
            "workload": workload,
            "variant": variant,
            "elsewhere": elsewhere,
            "architecture": target.architecture,
            "key": target.key,
            "product": target.product,
            "sm_count": target.sm_count,
        }
        with self._reading() as connection:
            return [_answer_row(values) for values in connection.execute(_ROWS, asked)] if connection else []

    def is_wrong(self, workload: str, device: str, variant: str, config: Config) -> bool:
        """Return whether a configuration had a wrong result; False for a server, whose index has no failures.

        Args:
            workload: Canonical text.
            device: Key of the device.
            variant: Key of the variant.
            config: The configuration.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        asked = {"workload": workload, "device": device, "variant": variant, "config": str(config)}
        with self._reading() as connection:
            if connection is None or self.location.path is None:
                return False
            return bool(connection.execute(_WRONG, asked).fetchone()[0])

    def workloads(self, operator: str) -> list[tuple[str, str]]:
        """Return every workload of an operator that has trials, with the key of their device.

        Args:
            operator: Name of the operator.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        names = {"first": f"{operator}:", "last": f"{operator};"}  # ';' follows ':'
        with self._reading() as connection:
            if connection is None:
                return []
            devices = connection.execute("SELECT id, key FROM device").fetchall()
            return [
                (key, workload)
                for id_, key in devices
                for (workload,) in connection.execute(_WORKLOADS, {"device_id": id_, **names})
            ]

    def operators(self, architecture: str) -> set[str]:
        """Return the operators with trials on devices of an architecture, however many trials there are.

        Args:
            architecture: Such as ``"sm_90"``.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        with self._reading() as connection:
            if connection is None:
                return set()
            return {name for (name,) in connection.execute(_OPERATORS, {"architecture": architecture})}

    def state(self) -> str:
        """Return a text that differs when a result was recorded since; the same in every process.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        newest = "SELECT MAX(id) FROM measurement" if self.location.path else "SELECT fingerprint FROM source"
        with self._reading() as connection:
            return f"{self.location} {connection.execute(newest).fetchone()[0] if connection else 'no file'}"

    def descriptor(self, key: str) -> Mapping[str, Any] | None:
        """Return the stored fields of a device, or None.

        Args:
            key: Key of the device.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        with self._reading() as connection:
            query = "SELECT descriptor FROM device WHERE key = ?"
            row = connection.execute(query, (key,)).fetchone() if connection else None
            return json.loads(row[0]) if row else None

    def details(self, row: AnswerRow) -> RecordDetails:
        """Return the details of the record of a row.

        Args:
            row: A row of this file.

        Raises:
            DatabaseError: if the file cannot be read.
        """
        with self._reading() as connection:
            values = connection.execute(_DETAILS, (row.measurement_id,)).fetchone() if connection else None
            detail, comparison, sampler, versions = values or (None, None, None, "{}")
            imported = (
                str(json.loads(versions).get("file", "an unknown file")) if sampler == "import" else None
            )
            return RecordDetails(
                outcome=json.loads(detail or "{}"),
                figures=Figures.of(json.loads(comparison or "null"), row.time_us),
                imported_from=imported,
            )

    # -- the connection ---------------------------------------------------------------------------

    @contextmanager
    def _reading(self, busy_s: float | None = None) -> Iterator[sqlite3.Connection | None]:
        self._deadline = monotonic() + QUERY_S
        try:
            yield self._current(busy_s)
        except (sqlite3.Error, OSError, ValueError, KeyError, TypeError, MemoryError) as error:
            if not is_locked(error):
                self._forget()
            raise self._explained(error) from error

    def _current(self, busy_s: float | None = None) -> sqlite3.Connection | None:
        """Return a connection to the current file; None if it is missing or empty.

        Args:
            busy_s: Longest wait for a lock, in seconds, after which no copy is made. By default, one is.
        """
        if self._holds:
            return self._connection
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._forget()
            return None
        # A replaced file, and a process after a fork, need a new connection. A frozen connection, which sees
        # no commits, is replaced when the file or its log has changed; the copy of a locked file not at once,
        # because its writer may change it all the time.
        file: tuple[int, ...] = (os.getpid(), status.st_dev, status.st_ino)
        is_recent_copy = self.is_copy and monotonic() - self._copied_at < COPY_S
        if isinstance(self._connection, FrozenConnection) and not is_recent_copy:
            file += file_stamp(self.path)
        if file != (self._file[:3] if is_recent_copy else self._file):
            self._forget()
        if self._connection is None:
            refuse_special_file(self.path)
            if status.st_size == 0 and not has_wal(self.path):
                return None
            stamp = file_stamp(self.path)
            self._connection = self._opened(busy_s) if busy_s is not None else self._opened_or_copied()
            self._connection.set_progress_handler(lambda: monotonic() > self._deadline, 100_000)
            frozen = isinstance(self._connection, FrozenConnection)
            self._file = (*file[:3], *stamp) if frozen else file[:3]
            self._check_schema(self._connection)
        elif not self.is_copy and not isinstance(self._connection, FrozenConnection):
            _wait_at_most(self._connection, self._busy_s() if busy_s is None else busy_s)
        return self._connection

    def _opened(self, busy_s: float) -> sqlite3.Connection:
        return open_read_only(self.path, busy_s=busy_s)

    def _opened_or_copied(self) -> sqlite3.Connection:
        """Return a connection to the file, or to a copy if it is locked.

        A copy fails while a writer changes the file, which often ends its transaction meanwhile.
        """
        until = monotonic() + ANSWER_S
        while True:
            try:
                return self._opened(self._busy_s())
            except sqlite3.OperationalError as error:
                if not is_locked(error):
                    raise
            self._locked_at = monotonic()
            try:
                copy = open_copy(self.path)
            except sqlite3.OperationalError:
                if monotonic() > until:
                    raise
            else:
                self.is_copy, self._copied_at = True, monotonic()
                return copy

    def _busy_s(self) -> float:
        """Return the longest wait for a lock: none if the file was locked just now."""
        return 0.0 if monotonic() - self._locked_at < LOCKED_S else BUSY_S

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Refuse a newer schema, in which the columns may mean something else; an index has no revision."""
        query = "SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'"
        if connection.execute(query).fetchone():
            for (revision,) in connection.execute("SELECT version_num FROM alembic_version"):
                if revision not in REVISIONS:
                    self._forget()
                    raise SchemaError(newer_schema(self.location, revision))

    def _forget(self) -> None:
        if self._connection is not None and self._file[0] != os.getpid():
            _inherited_connections.append(self._connection)  # the parent's: must not be closed here
        elif self._connection is not None:
            self._connection.close()
        self._connection, self._file, self._version, self.is_copy = None, (), -1, False

    def _explained(self, error: Exception) -> DatabaseError:
        if str(error) == "interrupted":
            return DatabaseError(
                f"database {self.location} did not answer a query within {QUERY_S:.0f} s: its tables are too "
                f"large or were edited; `{command_line('db verify', db=self.location.option)}` checks them"
            )
        if "no such table" in str(error) or "no such column" in str(error):
            return SchemaError(
                f"database {self.location} has no view answer_v1 of this version: another program's, or "
                f"has another schema; `{command_line('db upgrade', db=self.location.option)}` says which"
            )
        kind = DatabaseUnavailable if is_locked(error) else DatabaseError
        return kind(explain_sqlite(self.path, error))


_inherited_connections: list[sqlite3.Connection] = []


def _begin(connection: sqlite3.Connection) -> None:
    """Begin a transaction with its lock, which SQLite would take at the first read."""
    connection.execute("BEGIN")
    connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()


def _wait_at_most(connection: sqlite3.Connection, busy_s: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {1000 * busy_s:.0f}")


def _answer_row(columns: tuple[Any, ...]) -> AnswerRow:
    device, architecture, workload, variant, values, revision, kind, *rest = columns
    cache, verification, time_us, low_us, high_us, bound_us, recorded_at, measurement_id = rest
    return AnswerRow(
        device=device,
        architecture=architecture,
        workload=workload,
        variant=variant,
        config=Config(json.loads(values)),
        revision=revision,
        predicted=kind == "predicted",
        cache=cache,
        verification=verification,
        time_us=time_us,
        ci_us=None if low_us is None else (low_us, high_us),
        bound_us=bound_us,
        recorded_at=datetime.fromisoformat(recorded_at).replace(tzinfo=UTC),
        measurement_id=measurement_id,
    )
