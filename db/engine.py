"""Connections: how SQLite is opened so that a commit lasts, and what is said when a database refuses."""

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
from tunebench.db.sqlite_file import explain_sqlite, open_read_only
from tunebench.errors import DatabaseError, InputError, MissingDependency

__all__ = ["BUSY_S", "create_engine", "translate_decode_errors", "translate_errors", "write"]

BUSY_S = 30.0
"""How long a writer waits for another one before it gives up."""

_KEEPALIVE = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""How a server that vanished without a word is noticed within a minute, in libpq's words (the last in ms)."""


def create_engine(location: Location, *, read_only: bool = False, foreign_keys: bool = True) -> sa.Engine:
    """Return an engine; nothing is opened yet.

    Args:
        location: Where the database is.
        read_only: Open SQLite so that nothing is written, not even beside the file.
        foreign_keys: Whether SQLite checks them at once (a migration that rebuilds tables does at its end).

    Raises:
        InputError: if the URL is malformed or of a kind of database that is not supported.
        MissingDependency: if the driver of a server is not installed.
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
            raise InputError(f"database {location}: SQLite and PostgreSQL are supported, this is neither")
        if url.drivername == "postgresql":  # psycopg 3 is the driver our extra installs
            url = url.set(drivername="postgresql+psycopg")
        patient = {name: value for name, value in _KEEPALIVE.items() if name not in url.query}
        return sa.create_engine(url, pool_pre_ping=True, connect_args=patient, **common)
    except (sa.exc.ArgumentError, ValueError) as error:  # make_url leaves a bad port to int()
        raise InputError(f"database {location} is not the URL of a database: {error}") from error
    except ModuleNotFoundError as error:
        raise MissingDependency(error.name or "psycopg", "postgres") from error


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:  # PostgreSQL reads no NaN, and nobody reads a repr
        raise DatabaseError(f"a record must be plain finite data: {error}") from error


def _plain(value: Any) -> Any:
    """Turn a NumPy scalar into a number; anything else has no place in a record."""
    if callable(getattr(value, "item", None)):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored")


class FileConnection(sqlite3.Connection):
    """A connection that writes; it knows its file from another one that takes its name.

    Attributes:
        path: Where the file is.
        file: Its `disk.identity`.
    """

    path: Path
    file: tuple[int, int] | None = None


def _sqlite_connector(path: Path, read_only: bool, foreign_keys: bool) -> Callable[[], sqlite3.Connection]:
    told = False

    def connect() -> sqlite3.Connection:
        nonlocal told
        if read_only:
            return open_read_only(path)
        if path == default_path():
            path.parent.mkdir(parents=True, exist_ok=True)
        disk.refuse_hard_links(path)
        # Autocommit in the driver's words: transactions begin and end where SQLAlchemy says so.
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, factory=FileConnection
        )
        try:
            connection.path, connection.file = path, disk.file_identity(path)
            unlike = _configure_durability(connection)
            if unlike and not told:
                told = True
                warnings.warn(unlike, RuntimeWarning, stacklevel=2)
            connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        except BaseException:
            connection.close()
            raise
        return connection

    return connect


def _configure_durability(connection: FileConnection) -> str | None:
    """See to it that what is committed outlives a power cut; return what must be said of how, if anything."""
    if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'measurement'").fetchone():
        # Fresh, so that readers must not see it before it has its tables; or another program's, whose way of
        # keeping a journal is none of our business.
        connection.execute("PRAGMA synchronous = EXTRA")
        return None
    system = disk.network_file_system(connection.path)
    found = _set_journal_mode(connection, "wal" if system is None else "delete")
    # Without the log, what ends a transaction is that a file is gone: its folder must be flushed as well.
    connection.execute(f"PRAGMA synchronous = {'FULL' if found == 'wal' else 'EXTRA'}")
    if found == "wal":
        return None
    where = f"is on a network file system ({system})" if system else "cannot share memory beside it"
    return (
        f"database {connection.path} {where}: it has no write-ahead log there, so that readers wait for "
        "writers; many machines are served better by a PostgreSQL server"
    )


def _set_journal_mode(connection: sqlite3.Connection, wanted: str) -> str:
    """Switch the file to a kind of journal unless it has it, and return the one it has.

    The switch does not wait for others by itself, so we do.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        found = str(connection.execute("PRAGMA journal_mode").fetchone()[0])
        if found == wanted:
            return found
        try:
            return str(connection.execute(f"PRAGMA journal_mode = {wanted}").fetchone()[0])
        except sqlite3.OperationalError as error:
            if "readonly" in str(error):
                return wanted  # it may be read as it is; the first write will say what is wrong
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads before it writes fails at once if another wrote in between, whatever the
    # timeout; one that takes the write lock first waits.
    writes = connection.get_execution_options().get("tunebench_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
    opened = connection.connection.dbapi_connection
    if isinstance(opened, FileConnection) and opened.file != disk.file_identity(opened.path):
        raise DatabaseError(
            f"database {opened.path} was deleted, or another file took its place, while it was in use; put "
            "it back, or run the same command again to begin with the one that is there now"
        )


@contextlib.contextmanager
def write(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a transaction that writes: committed at the end, rolled back if an exception leaves it."""
    with engine.connect().execution_options(tunebench_write=True) as connection, connection.begin():
        yield connection


@contextlib.contextmanager
def translate_errors(location: Location) -> Iterator[None]:
    """Turn what the driver says into one line that says what to do.

    Raises:
        DatabaseError: in place of any error of SQLAlchemy or of SQLite.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError, UnicodeDecodeError) as error:
        raise DatabaseError(_explain(location, error)) from error


@contextlib.contextmanager
def translate_decode_errors(location: Location) -> Iterator[None]:
    """Say what to do about a record that does not read as it was written: a bit of it has changed.

    Raises:
        DatabaseError: in place of what decoding raises.
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
    if location.path is not None and isinstance(reason, (sqlite3.Error, OSError, UnicodeDecodeError)):
        return explain_sqlite(location.path, reason)
    said = " ".join(str(reason).split())
    if isinstance(error, sa.exc.OperationalError):
        said = (
            f"{said}. Check the URL and the server; what was recorded is kept, so run the same command again"
        )
    return f"database {location}: {said}"
