"""Engines and transactions: durable SQLite connections, and translation of driver errors."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from tunebench.db import disk
from tunebench.db.location import Location, default_path
from tunebench.db.sqlite_file import distrust_file, explain_sqlite, open_read_only, refuse_special_file
from tunebench.errors import DatabaseError, InputError, MissingDependency

__all__ = [
    "BUSY_S",
    "KEEPALIVE",
    "configure_durability",
    "create_engine",
    "translate_decode_errors",
    "translate_errors",
    "write",
]

BUSY_S = 30.0
"""Seconds that a writer waits for another one."""

KEEPALIVE = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""libpq options that detect a vanished server within a minute; `tcp_user_timeout` is in milliseconds."""

_HASTY = {"connect_timeout": 2, "options": "-c lock_timeout=2000 -c statement_timeout=60000"}
"""libpq options of a reader that does not wait for a silent server or a locked table; 2 s is its minimum."""


def create_engine(
    location: Location, *, read_only: bool = False, foreign_keys: bool = True, hasty: bool = False
) -> sa.Engine:
    """Return an engine; no connection is opened yet.

    Args:
        location: Path or URL.
        read_only: Refuse to write; with SQLite, write nothing next to the file either.
        foreign_keys: Whether SQLite enforces foreign keys (a migration that rebuilds tables checks them at
            its end).
        hasty: Whether to wait at most two seconds for a server to accept a connection, and for a table lock.

    Raises:
        InputError: if the URL is malformed, or its kind of database is not supported.
        MissingDependency: if the driver of the server is not installed.
    """
    common: dict[str, Any] = {"json_serializer": _to_json, "hide_parameters": True}
    if location.path is not None:
        connect = _sqlite_connector(location.path, read_only, foreign_keys)
        engine = sa.create_engine("sqlite://", creator=connect, poolclass=sa.QueuePool, **common)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine
    try:
        url = sa.make_url(str(location.url))
        if url.get_backend_name() != "postgresql":
            raise InputError(f"database {location}: only SQLite and PostgreSQL are supported")
        if url.drivername == "postgresql":  # the extra `postgres` installs psycopg 3
            url = url.set(drivername="postgresql+psycopg")
        limits = {**KEEPALIVE, **(_HASTY if hasty else {})}
        limits = {name: value for name, value in limits.items() if name not in url.query}
        engine = sa.create_engine(url, pool_pre_ping=True, connect_args=limits, **common)
        return engine.execution_options(postgresql_readonly=True) if read_only else engine
    except (sa.exc.ArgumentError, ValueError):  # the message would quote a bad port: it may be a password
        raise InputError(f"database {location}: cannot parse the URL") from None
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "psycopg", "postgres") from error


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:  # PostgreSQL rejects NaN, and a repr could not be read back
        raise DatabaseError(f"a record must contain only JSON data with finite numbers: {error}") from error


def _plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number; refuse other types."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored")


class FileConnection(sqlite3.Connection):
    """A connection that writes, and remembers which file it opened.

    Attributes:
        path: Path of the file.
        file: Its `disk.file_identity`.
    """

    path: Path
    file: tuple[int, int] | None = None


def _sqlite_connector(path: Path, read_only: bool, foreign_keys: bool) -> Callable[[], sqlite3.Connection]:
    warned = False

    def connect() -> sqlite3.Connection:
        nonlocal warned
        if read_only:
            return open_read_only(path)
        with contextlib.suppress(InputError):  # of a user without a home folder, who has no default
            if path == default_path():
                path.parent.mkdir(parents=True, exist_ok=True)
        refuse_special_file(path)
        disk.refuse_hard_links(path)
        # Autocommit mode of the driver: SQLAlchemy begins and ends transactions.
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, factory=FileConnection
        )
        try:
            connection.path, connection.file = path, disk.file_identity(path)
            distrust_file(connection)
            warning = configure_durability(connection)
            if warning and not warned:
                warned = True
                warnings.warn(warning, RuntimeWarning, stacklevel=2)
            connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


def configure_durability(connection: FileConnection) -> str | None:
    """Make commits survive a power cut; return a warning if the file cannot have a write-ahead log."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'measurement'").fetchone():
        # A new file: readers must not see it before it has its tables. Or another program's file, whose
        # journal mode is not changed.
        connection.execute("PRAGMA synchronous = EXTRA")
        return None
    system = disk.network_file_system(connection.path)
    mode = _set_journal_mode(connection, "wal" if system is None else "delete")
    # Without a write-ahead log, deleting the journal ends a transaction: EXTRA also syncs the folder.
    connection.execute(f"PRAGMA synchronous = {'FULL' if mode == 'wal' else 'EXTRA'}")
    if mode == "wal":
        return None
    where = f"is on a network file system ({system})" if system else "cannot have shared memory next to it"
    return (
        f"database {connection.path} {where} and therefore has no write-ahead log: readers wait for "
        "writers; for several machines use a PostgreSQL server"
    )


def _set_journal_mode(connection: sqlite3.Connection, mode: str) -> str:
    """Switch the journal mode if needed, and return the mode of the file.

    SQLite does not wait for other connections when it switches the mode, so this waits.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        current = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
        if current == mode:
            return current
        try:
            return str(connection.execute(f"PRAGMA journal_mode = {mode}").fetchone()[0])
        except sqlite3.OperationalError as error:
            if "readonly" in str(error):
                return mode  # reading works; the first write reports the error
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads before it writes fails at once if another connection wrote in between, whatever
    # the timeout. One that takes the write lock first waits.
    writes = connection.get_execution_options().get("tunebench_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
    opened = connection.connection.dbapi_connection
    if isinstance(opened, FileConnection) and opened.file != disk.file_identity(opened.path):
        raise DatabaseError(
            f"database {opened.path} was deleted or replaced by another file while in use; restore it, "
            "or run the same command again to use the new file"
        )


@contextlib.contextmanager
def write(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a write transaction: committed at the end, rolled back on an exception."""
    with engine.connect().execution_options(tunebench_write=True) as connection, connection.begin():
        yield connection


@contextlib.contextmanager
def translate_errors(location: Location) -> Iterator[None]:
    """Translate errors of SQLAlchemy, SQLite and the file system to one line with the remedy.

    Raises:
        DatabaseError: in place of those errors.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError, UnicodeDecodeError, MemoryError) as error:
        raise DatabaseError(_explain(location, error)) from error


@contextlib.contextmanager
def translate_decode_errors(location: Location) -> Iterator[None]:
    """Translate errors of decoding a record, which is damaged then.

    Raises:
        DatabaseError: in place of those errors.
    """
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise DatabaseError(
            f"database {location} is damaged: a record cannot be read ({type(error).__name__}: {error}); "
            "restore a copy of it"
        ) from error


def _explain(location: Location, error: Exception) -> str:
    reason = getattr(error, "orig", None) or error
    if location.path is not None and isinstance(
        reason, (sqlite3.Error, OSError, UnicodeDecodeError, MemoryError)
    ):
        return explain_sqlite(location.path, reason)
    message = " ".join(str(reason).split())
    if isinstance(error, sa.exc.OperationalError):
        message = (
            f"{message}. Check the URL and the server, then run the command again; committed records are kept"
        )
    return f"database {location}: {message}"
