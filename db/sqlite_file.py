"""Reading an SQLite file with the standard library alone, and messages for its errors."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path

__all__ = ["FrozenConnection", "explain_sqlite", "has_wal", "open_read_only"]

_LOCK_FAILURES = ("unable to open", "readonly", "disk i/o", "is full")
"""What SQLite says where the shared memory beside a file in WAL mode cannot be made, or just goes away."""

_ATTEMPTS = 3
_PAUSE_S = 0.01


class FrozenConnection(sqlite3.Connection):
    """A connection that takes its file for unchanging: it sees nothing written after it was opened."""


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open an SQLite file so that nothing is ever written to it.

    Where a folder may not be written, or its disk is full, a file in WAL mode cannot be opened as usual, for
    want of the shared memory beside it. A `FrozenConnection` reads it then: the file itself where there is no
    log, since nobody is writing; else a copy in memory, with what stands in the log.

    Raises:
        sqlite3.Error: as SQLite says it (`explain_sqlite` says what to do).
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


def _opened(path: Path) -> sqlite3.Connection:
    """Open a file as usual. The last of its writers may just be taking log and shared memory away."""
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
    """Return a copy in memory of a file and the log that was left beside it.

    Whoever writes may be at it, on another machine. While the head of the log stays the same, the log holds
    all that is being moved into the file, so that the two are whole together.
    """
    log = Path(f"{path}-wal")
    with tempfile.TemporaryDirectory(prefix="tunebench-") as folder:
        copy = Path(folder) / "copy.db"
        for _ in range(_ATTEMPTS):
            head = _wal_header(log)
            # By SQLite, not by a file of our own: to close that would end this process's locks on the other.
            with contextlib.closing(_probed(_uri(path, immutable=True), FrozenConnection)) as raw:
                copy.write_bytes(raw.serialize())
            shutil.copyfile(log, f"{copy}-wal")
            if _wal_header(log) == head == _wal_header(Path(f"{copy}-wal")):
                break
        else:
            raise sqlite3.OperationalError("unable to open database file: it does not stand still")
        with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as merging:
            merging.execute("PRAGMA journal_mode = DELETE").fetchone()
            whole = merging.serialize()
    connection = sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=FrozenConnection
    )
    connection.deserialize(whole)
    connection.execute("PRAGMA query_only = ON")
    return connection


def _wal_header(log: Path) -> bytes:
    """Return the head of a log: another one whenever it begins anew."""
    with log.open("rb") as file:
        return file.read(32)


def _probed(uri: str, factory: type[sqlite3.Connection]) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=30.0, isolation_level=None, check_same_thread=False, factory=factory
    )
    try:
        connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def has_wal(path: Path) -> bool:
    """Tell whether a write-ahead log with something in it stands beside the file."""
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except OSError:
        return False


_DAMAGED = "is damaged. Restore a copy, or save what can be read: sqlite3 FILE .recover | sqlite3 NEW_FILE"
_CHANGED = "is damaged, or was changed by hand: its tables are not as they were made. Restore a copy"
_REMEDIES = (
    (
        "not a database",
        "is not an SQLite database, or its first page is damaged; give another path by --db, or move that "
        "file away and restore a copy",
    ),
    (
        "disk is full",
        "cannot grow: the disk is full. What was recorded is kept; free space and run the same command again",
    ),
    ("readonly", "cannot be written: make the file and its folder writable, or give another path by --db"),
    ("permission denied", "cannot be opened: its folder must be readable and writable for this user"),
    ("unable to open", "cannot be opened: its folder must exist and be readable and writable for this user"),
    ("locked", "is in use by another program that does not let go; wait for it, or end it, and try again"),
    *((sign, _DAMAGED) for sign in ("malformed", "could not decode", "unsupported file format")),
    *((sign, _CHANGED) for sign in ("no such", "no column named")),
    (
        "disk i/o",
        "cannot be read or written: check the disk and its quota, then run the same command again",
    ),
)


def explain_sqlite(path: Path, error: BaseException) -> str:
    """Return one line that says what is wrong with an SQLite file and what to do."""
    if os.path.isdir(path):  # noqa: PTH112 (the method of a path raises where its folder is closed)
        return f"database {path} is a folder; name a file in it"
    said = str(error)
    if isinstance(error, ValueError | KeyError | TypeError):  # of a record that is not as it was written
        return f"database {path} {_DAMAGED} ({type(error).__name__}: {said})"
    for sign, remedy in _REMEDIES:
        if sign in said.lower():
            return f"database {path} {remedy} ({said})"
    return f"database {path}: {said}"
