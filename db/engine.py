"""Connections: how SQLite is opened so that a commit lasts, and what is said when a database refuses."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from tunebench.db.index import explain_sqlite, open_read_only
from tunebench.db.location import Location, default_path
from tunebench.errors import DatabaseError, InputError, MissingDependency

__all__ = ["BUSY_S", "create_engine", "explained", "write"]

BUSY_S = 30.0
"""How long a writer waits for another one before it gives up."""


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
        return sa.create_engine(url, pool_pre_ping=True, **common)
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


def _sqlite_connector(path: Path, read_only: bool, foreign_keys: bool) -> Callable[[], sqlite3.Connection]:
    def connect() -> sqlite3.Connection:
        if read_only:
            return open_read_only(path)
        if path == default_path():
            path.parent.mkdir(parents=True, exist_ok=True)
        # Autocommit in the driver's words: transactions begin and end where SQLAlchemy says so.
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        _use_write_ahead_log(connection)
        connection.execute("PRAGMA synchronous = FULL")  # a committed result outlives a power cut
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        return connection

    return connect


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL unless it is; the switch does not wait for others by itself, so we do."""
    deadline = time.monotonic() + BUSY_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "readonly" in str(error):
                return  # it may be read as it is; the first write will say what is wrong
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads before it writes fails at once if another wrote in between, whatever the
    # timeout; one that takes the write lock first waits.
    writes = connection.get_execution_options().get("tunebench_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextlib.contextmanager
def write(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a transaction that writes: committed at the end, rolled back if an exception leaves it."""
    with engine.connect().execution_options(tunebench_write=True) as connection, connection.begin():
        yield connection


@contextlib.contextmanager
def explained(location: Location) -> Iterator[None]:
    """Turn what the driver says into one line that says what to do.

    Raises:
        DatabaseError: in place of any error of SQLAlchemy or of SQLite.
    """
    try:
        yield
    except (SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise DatabaseError(_explain(location, error)) from error


def _explain(location: Location, error: Exception) -> str:
    reason = getattr(error, "orig", None) or error
    if location.path is not None and isinstance(reason, (sqlite3.Error, OSError)):
        return explain_sqlite(location.path, reason)
    said = " ".join(str(reason).split())
    if isinstance(error, sa.exc.OperationalError):
        said = (
            f"{said}. Check the URL and the server; what was recorded is kept, so run the same command again"
        )
    return f"database {location}: {said}"
