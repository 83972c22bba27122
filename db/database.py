"""One open database: its engine, its clock, transactions, and their retry while the server is unavailable."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from tunebench._deprecation import warn_renamed
from tunebench.db.engine import create_engine, translate_decode_errors, translate_errors, write
from tunebench.db.location import Location
from tunebench.db.migrate import prepare
from tunebench.db.retry import RetryPolicy, retry
from tunebench.db.server_watch import ServerWatch
from tunebench.db.write_count import count_write

__all__ = ["Database", "retrying"]

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="Database")


_RENAMED = {
    "fastest": "fastest_samples",
    "known": "trial_outcomes",
    "places": "measured_spaces",
    "times": "config_times",
}


class Database:
    """Connection pool and transactions of one database; base of `Reader` and `Store`.

    Attributes:
        location: Path or URL.
        retry_policy: How long transactions of a search wait for a database that becomes unavailable; None
            raises at once.
    """

    def __init__(
        self,
        location: Location,
        *,
        read_only: bool = False,
        clock: Callable[[], datetime] | None = None,
        retry_policy: RetryPolicy | None = None,
        hasty: bool = False,
    ) -> None:
        self.location, self.retry_policy = location, retry_policy
        self._engine = create_engine(location, read_only=read_only, hasty=hasty)
        self._server = ServerWatch(self._report_waiting)
        self._server.watch(self._engine)
        self._pid = os.getpid()
        self._clock = clock or (_system_time if location.url is None else _time_since_boot)
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

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def hurry(self) -> None:
        """After an interrupt: wait at most a second for a silent server from now on, and retry nothing."""
        self._server.hurry()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.location}>"

    if not TYPE_CHECKING:  # type checkers must report unknown methods

        def __getattr__(self, name: str) -> Any:
            """Return a renamed method by its old name."""
            if name not in _RENAMED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn_renamed(f"Store.{name}", f"Store.{_RENAMED[name]}")
            return getattr(self, _RENAMED[name])

    def _report_waiting(self, line: str) -> None:
        if self.retry_policy is not None:
            self.retry_policy.notify(line)
        elif line:
            warnings.warn(line, RuntimeWarning, stacklevel=2)

    def _own_engine(self) -> sa.Engine:
        """Return the engine; after a fork, without the connections of the parent process."""
        if os.getpid() != self._pid:
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """Yield a connection to read by; an error of the database is raised as `DatabaseError`."""
        with (
            translate_errors(self.location),
            translate_decode_errors(self.location),
            self._server.giving_up_at_ctrl_c(),
            self._own_engine().connect() as connection,
        ):
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Yield a connection in a write transaction, which is committed unless an error is raised.

        `retry_policy` does not apply to it.
        """
        try:
            with (
                translate_errors(self.location),
                self._server.giving_up_at_ctrl_c(),
                write(self._own_engine()) as connection,
            ):
                yield connection
        finally:
            count_write()

    def _lasting(self, work: Callable[[sa.Connection, bool], T]) -> T:
        """Run `work` in a write transaction, and retry it as `retry_policy` allows.

        Args:
            work: Receives the connection, and whether an earlier attempt may have been committed.
        """

        def attempt(is_retry: bool) -> T:
            with self.writing() as connection:
                return work(connection, is_retry)

        return self._retry(attempt)

    def _retry(self, attempt: Callable[[bool], T]) -> T:
        """Retry a transaction as `retry_policy` allows; not at all after the run was interrupted."""
        policy = None if self._server.hurried else self.retry_policy
        with self._server.giving_up_at_ctrl_c():
            return retry(policy, self.location, attempt)

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


def retrying(method: Callable[Concatenate[D, P], T]) -> Callable[Concatenate[D, P], T]:
    """Retry a read method while the database is unavailable, as `Database.retry_policy` allows."""

    def outlasting(self: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._retry(lambda is_retry: method(self, *args, **kwargs))

    functools.update_wrapper(outlasting, method)
    return outlasting


def _system_time() -> datetime:
    return datetime.now(UTC)


def _time_since_boot() -> datetime:
    """Return the time of a clock that cannot be set, so that its offset to the server's stays constant."""
    steady = getattr(time, "CLOCK_BOOTTIME", None)  # also counts while the machine sleeps
    seconds = time.monotonic() if steady is None else time.clock_gettime(steady)
    return datetime.fromtimestamp(seconds, UTC)
