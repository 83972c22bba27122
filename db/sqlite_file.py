"""Reading an SQLite file with the standard library alone, and messages for its errors."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["FrozenConnection", "distrust_file", "explain_sqlite", "has_wal", "open_read_only"]

_LOCK_FAILURES = ("unable to open", "readonly", "disk i/o", "is full")
"""Messages of SQLite if the shared memory of a file in WAL mode cannot be created, or is being removed."""

_ATTEMPTS = 3
_PAUSE_S = 0.01


class FrozenConnection(sqlite3.Connection):
    """A connection to an immutable file or a copy: it never sees later commits."""


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open an SQLite file for reading only; nothing is written next to it.

    If the folder is read-only or the disk is full, a file in WAL mode cannot be opened normally, because its
    shared memory cannot be created. Then a `FrozenConnection` is returned: on the file itself if it has no
    write-ahead log, because no writer is active; else on a copy in memory that includes the log.

    Raises:
        sqlite3.Error: as SQLite raises it; `explain_sqlite` returns a message with a remedy.
    """
    try:
        return _opened(path)
    except sqlite3.OperationalError as error:
        if not _is_lock_failure(error) or not path.is_file():
            raise
        try:
            return (
                _copy_with_wal(path)
                if has_wal(path)
                else _probed(_uri(path, immutable=True), FrozenConnection)
            )
        except (sqlite3.Error, OSError):
            raise error from None


def distrust_file(connection: sqlite3.Connection) -> None:
    """Let nothing in a file run code or corrupt memory: it may come from anyone.

    Views and triggers may call only functions that have no side effects, and damaged pages are detected when
    they are read. Where Python supports it (3.12), SQL cannot damage the file either.
    Source: https://sqlite.org/security.html
    """
    if sys.version_info >= (3, 12):
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DEFENSIVE, True)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")


def _opened(path: Path) -> sqlite3.Connection:
    """Open a file normally; retry while its last writer removes the log and the shared memory."""
    attempts = _ATTEMPTS if os.access(path.parent, os.W_OK) else 1
    for attempt in range(1, attempts + 1):
        try:
            return _probed(_uri(path), sqlite3.Connection)
        except sqlite3.OperationalError as error:
            if attempt == attempts or not _is_lock_failure(error) or not path.is_file():
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("unreachable")


def _is_lock_failure(error: sqlite3.Error) -> bool:
    return any(sign in str(error).lower() for sign in _LOCK_FAILURES)


def _uri(path: Path, *, immutable: bool = False) -> str:
    return f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if immutable else "")


def _copy_with_wal(path: Path) -> FrozenConnection:
    """Return a copy in memory of a file and its write-ahead log.

    A writer on another machine may be active. While the header of the log does not change, the log contains
    everything that a checkpoint moves to the file, so that both together are consistent.
    """
    log = Path(f"{path}-wal")
    with tempfile.TemporaryDirectory(prefix="tunebench-") as folder:
        copy = Path(folder) / "copy.db"
        for _ in range(_ATTEMPTS):
            head = _wal_header(log)
            # Read through SQLite: closing a file object would release this process's POSIX locks on the
            # database.
            with contextlib.closing(_probed(_uri(path, immutable=True), FrozenConnection)) as raw:
                copy.write_bytes(raw.serialize())
            shutil.copyfile(log, f"{copy}-wal")
            if _wal_header(log) == head == _wal_header(Path(f"{copy}-wal")):
                break
        else:
            raise sqlite3.OperationalError("unable to open database file: it keeps changing")
        with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as merging:
            distrust_file(merging)
            merging.execute("PRAGMA journal_mode = DELETE").fetchone()
            whole = merging.serialize()
    connection = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=FrozenConnection
    )
    connection.deserialize(whole)
    distrust_file(connection)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _wal_header(log: Path) -> bytes:
    """Return the header of a log, which changes whenever the log restarts."""
    with log.open("rb") as file:
        return file.read(32)


def _probed(uri: str, factory: type[sqlite3.Connection]) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=30.0, isolation_level=None, check_same_thread=False, factory=factory
    )
    try:
        distrust_file(connection)
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def has_wal(path: Path) -> bool:
    """Return whether a non-empty write-ahead log exists next to the file."""
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except OSError:
        return False


_LONGEST_REASON = 300
_DAMAGED = "is damaged. Restore a copy, or recover what is readable: sqlite3 FILE .recover | sqlite3 NEW_FILE"
_CHANGED = "is damaged or was edited: its tables differ from the schema. Restore a copy"
_REMEDIES = (
    (
        "not a database",
        "is not an SQLite database, or its first page is damaged; name another path by --db, or move the "
        "file away and restore a copy",
    ),
    (
        "disk is full",
        "cannot grow: the disk is full. Committed records are kept; free space and run the command again",
    ),
    ("readonly", "cannot be written: make the file and its folder writable, or name another path by --db"),
    ("permission denied", "cannot be opened: its folder must be readable and writable for this user"),
    ("unable to open", "cannot be opened: its folder must exist and be readable and writable for this user"),
    ("locked", "is locked by another program; wait for that program or end it, then try again"),
    *((sign, _DAMAGED) for sign in ("malformed", "could not decode", "unsupported file format")),
    *((sign, _CHANGED) for sign in ("no such", "no column named")),
    (
        "disk i/o",
        "cannot be read or written: check the disk and its quota, then run the command again",
    ),
)


def explain_sqlite(path: Path, error: BaseException) -> str:
    """Return one line that names the fault of an SQLite file and its remedy.

    Args:
        path: The file.
        error: The error that SQLite, the file system or the decoder raised.
    """
    if os.path.isdir(path):  # noqa: PTH112 (the method of a path raises where its folder is closed)
        return f"database {path} is a folder; name a file in it"
    said = " ".join(str(error).split())  # SQLite quotes damaged definitions of tables whole
    said = said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]} …"
    if isinstance(error, MemoryError):  # of SQLite, for a damaged row that claims a size of gigabytes
        return f"database {path} {_DAMAGED} (a row does not fit into memory)"
    if isinstance(error, ValueError | KeyError | TypeError):  # raised by decoding a record
        return f"database {path} {_DAMAGED} ({type(error).__name__}: {said})"
    for sign, remedy in _REMEDIES:
        if sign in said.lower():
            return f"database {path} {remedy} ({said})"
    return f"database {path}: {said}"
