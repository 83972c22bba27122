"""Reading an SQLite file with the standard library alone, and messages for its errors."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import TypeVar

__all__ = [
    "COPY_BYTES",
    "FrozenConnection",
    "distrust_file",
    "explain_sqlite",
    "file_stamp",
    "has_wal",
    "is_locked",
    "open_copy",
    "open_read_only",
    "refuse_special_file",
]

BUSY_S = 30.0
"""Seconds that a reader waits for a lock, unless it says otherwise."""

COPY_BYTES = 64 << 20
"""Largest file that is copied in place of waiting for a lock."""

_LOG_COST = 3
"""Time per byte of copying a file with a log, relative to one without: it needs a folder."""

_LOCK_FAILURES = ("unable to open", "readonly", "disk i/o", "is full")
"""Messages of SQLite if the shared memory of a file in WAL mode cannot be created, or is being removed."""

_ATTEMPTS = 3
_PAUSE_S = 0.01

_TICK_S = 0.02
"""Longest step of the clock of file times: a later change than this gives a file another time."""

_LOGS = ("-wal", "-journal")


class FrozenConnection(sqlite3.Connection):
    """A connection to an immutable file or a copy: it never sees later commits."""


def open_read_only(path: Path, *, busy_s: float = BUSY_S) -> sqlite3.Connection:
    """Open an SQLite file for reading only; nothing is written next to it.

    If the folder is read-only or the disk is full, a file in WAL mode cannot be opened normally, because its
    shared memory cannot be created. A file whose writer died in a transaction cannot be read before its
    rollback journal is applied. Then a `FrozenConnection` is returned: on the file itself if it has no log,
    because no writer is active; else on a copy in memory that includes the log.

    Args:
        path: The file.
        busy_s: Longest wait for a lock, in seconds.

    Raises:
        sqlite3.Error: as SQLite raises it; `explain_sqlite` returns a message with a remedy.
    """
    refuse_special_file(path)
    try:
        return _opened(path, busy_s)
    except sqlite3.OperationalError as error:
        if not _is_lock_failure(error) or not path.is_file():
            raise
        try:
            return _copy(path) if _logs(path) else _probed(_uri(path, immutable=True), FrozenConnection)
        except (sqlite3.Error, OSError):
            raise error from None


def open_copy(path: Path) -> FrozenConnection:
    """Return a copy in memory of a file that another program has locked, as of its last commit.

    No lock is taken: the copy is valid because nothing changed while it was made, or because its log, which
    is applied to the copy, has everything that changed.

    Raises:
        sqlite3.OperationalError: if the file is larger than `COPY_BYTES`, or keeps changing.
    """
    logs = _logs(path)
    size = sum(name.stat().st_size for name in (path, *logs))
    if size * (_LOG_COST if logs else 1) > COPY_BYTES:
        raise sqlite3.OperationalError("database is locked, and too large to be copied")
    try:
        return _copy(path, attempts=1)
    except (sqlite3.Error, OSError) as error:
        raise sqlite3.OperationalError(f"database is locked, and cannot be copied: {error}") from error


def refuse_special_file(path: Path) -> None:
    """Refuse a pipe, socket or device: opening or reading one may wait for ever.

    Raises:
        sqlite3.DatabaseError: if it is one.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return  # SQLite says what is wrong
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise sqlite3.DatabaseError("not a regular file")


def is_locked(error: BaseException) -> bool:
    """Return whether SQLite waited for a lock in vain."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


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


def _opened(path: Path, busy_s: float) -> sqlite3.Connection:
    """Open a file normally; retry while its last writer removes the log and the shared memory."""
    attempts = _ATTEMPTS if os.access(path.parent, os.W_OK) else 1
    for attempt in range(1, attempts + 1):
        try:
            return _probed(_uri(path), sqlite3.Connection, busy_s)
        except sqlite3.OperationalError as error:
            if attempt == attempts or not _is_lock_failure(error) or not path.is_file():
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("unreachable")


def _is_lock_failure(error: sqlite3.Error) -> bool:
    return any(sign in str(error).lower() for sign in _LOCK_FAILURES)


def _uri(path: Path, *, immutable: bool = False) -> str:
    return f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if immutable else "")


def _copy(path: Path, attempts: int = _ATTEMPTS) -> FrozenConnection:
    """Return a copy in memory of a file with its write-ahead log or rollback journal.

    A writer may be active, or may have died. While the header of a write-ahead log does not change, the log
    contains everything that a checkpoint moves to the file, so that both together are consistent. Without
    such a log, neither the file nor its journal may change while they are read; the journal restores what an
    unfinished transaction has overwritten.

    Pages are read through SQLite: closing a file object would release this process's POSIX locks on the
    database. They are not mapped into memory, because a writer may truncate the file.
    """
    for _ in range(attempts):
        logs = _logs(path)
        has_only_wal = [log.name for log in logs] == [f"{path.name}-wal"]
        state_before: object = _wal_header(logs[0]) if has_only_wal else _settled_stamp(path)
        with tempfile.TemporaryDirectory(prefix="tunebench-") as folder:
            copy = Path(folder) / "copy.db" if logs else None
            connection = _memory()
            with contextlib.closing(sqlite3.connect(_uri(path, immutable=True), uri=True)) as raw:
                if copy is None:
                    raw.backup(connection)
                elif has_only_wal:
                    copy.write_bytes(raw.serialize())
                else:
                    _backup_to_file(raw, copy)
            copied = [Path(f"{copy}{log.name.removeprefix(path.name)}") for log in logs]
            for log, target in zip(logs, copied, strict=True):
                shutil.copyfile(log, target)
            states_after = (
                [_wal_header(log) for log in (*logs, *copied)] if has_only_wal else [file_stamp(path)]
            )
            if _logs(path) == logs and all(state == state_before for state in states_after):
                if copy is not None:
                    _merge(copy, connection)
                distrust_file(connection)
                connection.execute("PRAGMA query_only = ON")
                return connection
            connection.close()
    raise sqlite3.OperationalError("database is locked, and keeps changing")


def _memory() -> FrozenConnection:
    return sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=FrozenConnection
    )


def _backup_to_file(raw: sqlite3.Connection, copy: Path) -> None:
    """Write the pages of a file without its rollback journal to another file, consistent or not.

    A backup, unlike `serialize`, reads no schema, which an unfinished transaction may have overwritten.
    """
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as target:
        target.execute("PRAGMA synchronous = OFF")
        target.execute("PRAGMA journal_mode = OFF").fetchone()
        raw.backup(target)


def _merge(copy: Path, connection: sqlite3.Connection) -> None:
    """Read a copied file with its logs into memory."""
    with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as merged:
        distrust_file(merged)
        merged.execute("PRAGMA synchronous = OFF")
        merged.execute(f"PRAGMA mmap_size = {2 * COPY_BYTES}")  # nobody else can truncate the copy
        merged.backup(connection)


def _logs(path: Path) -> list[Path]:
    """Return the logs of a file that are not empty: its write-ahead log, its rollback journal."""
    stamp = file_stamp(path)[2::2]
    return [Path(f"{path}{ending}") for ending, size in zip(_LOGS, stamp, strict=True) if size > 0]


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return size and time of a file and of each of its logs; -1 for each that is missing."""
    stamp: list[int] = []
    for ending in ("", *_LOGS):
        try:
            status = Path(f"{path}{ending}").stat()
        except OSError:
            stamp += (-1, -1)
        else:
            stamp += (status.st_size, status.st_mtime_ns)
    return tuple(stamp)


def _settled_stamp(path: Path) -> tuple[int, ...]:
    """Return the stamp of a file, after a pause if it has just changed, so that a later change differs."""
    stamp = file_stamp(path)
    age_s = time.time() - max(stamp[1::2]) / 1e9
    if 0 <= age_s < _TICK_S:
        time.sleep(_TICK_S)
        stamp = file_stamp(path)
    return stamp


def _wal_header(log: Path) -> bytes:
    """Return the header of a log, which changes whenever the log restarts."""
    with log.open("rb") as file:
        return file.read(32)


C = TypeVar("C", bound=sqlite3.Connection)


def _probed(uri: str, factory: type[C], busy_s: float = BUSY_S) -> C:
    connection = sqlite3.connect(
        uri, uri=True, timeout=busy_s, isolation_level=None, check_same_thread=False, factory=factory
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
    ("not a regular file", "is a pipe, a socket or a device; name a regular file by --db"),
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
    message = " ".join(str(error).split())  # SQLite quotes damaged definitions of tables whole
    message = message if len(message) <= _LONGEST_REASON else f"{message[:_LONGEST_REASON]} …"
    if isinstance(error, MemoryError):  # of SQLite, for a damaged row that claims a size of gigabytes
        return f"database {path} {_DAMAGED} (a row does not fit into memory)"
    if isinstance(error, ValueError | KeyError | TypeError):  # raised by decoding a record
        return f"database {path} {_DAMAGED} ({type(error).__name__}: {message})"
    for sign, remedy in _REMEDIES:
        if sign in message.lower():
            return f"database {path} {remedy} ({message})"
    return f"database {path}: {message}"
