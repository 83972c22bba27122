"""Reading answers with the standard library alone: an SQLite file, or a local index of a server's.

Serving code must not pay for SQLAlchemy. A file is read as it is, through its view `answer_v1`; of a server
the rows of that view are exported to an SQLite file in the cache folder, which has a table of that name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench import _environment
from tunebench.db.location import Location
from tunebench.errors import DatabaseError

if TYPE_CHECKING:
    from tunebench.db.store import Store

__all__ = [
    "COLUMNS",
    "REFRESH_S",
    "explain_sqlite",
    "export",
    "has_log",
    "index_path",
    "open_read_only",
    "refresh",
]

REFRESH_S = 60.0
"""Age at which an index asks its server whether anything is new."""


class FrozenConnection(sqlite3.Connection):
    """A connection that takes its file for unchanging: it sees nothing written after it was opened."""


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open an SQLite file so that nothing is ever written to it.

    In a folder that may not be written, a file in WAL mode cannot be opened as usual, for want of the
    shared memory beside it. If there is no log either, then nobody is writing and the file is all there is:
    a `FrozenConnection` reads it.

    Raises:
        sqlite3.Error: as SQLite says it (`explain_sqlite` says what to do).
    """
    base = path.absolute().as_uri()
    try:
        return _probed(f"{base}?mode=ro", sqlite3.Connection)
    except sqlite3.OperationalError as error:
        refused = "unable to open" in str(error) or "readonly" in str(error)
        if not refused or not path.is_file() or has_log(path):
            raise
        return _probed(f"{base}?mode=ro&immutable=1", FrozenConnection)


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


def has_log(path: Path) -> bool:
    """Tell whether a write-ahead log with something in it stands beside the file."""
    try:
        return Path(f"{path}-wal").stat().st_size > 0
    except OSError:
        return False


_REMEDIES = (
    ("not a database", "is not an SQLite database; give another path by --db, or move that file away"),
    (
        "disk is full",
        "cannot grow: the disk is full. What was recorded is kept; free space and run the same command again",
    ),
    ("readonly", "cannot be written: make the file and its folder writable, or give another path by --db"),
    ("permission denied", "cannot be opened: its folder must be readable and writable for this user"),
    ("unable to open", "cannot be opened: its folder must exist and be readable and writable for this user"),
    ("locked", "is in use by another program that does not let go; wait for it, or end it, and try again"),
    (
        "malformed",
        "is damaged. Restore a copy, or save what can be read: sqlite3 FILE .recover | sqlite3 NEW_FILE",
    ),
    (
        "disk i/o",
        "cannot be read or written: check the disk and its quota, then run the same command again",
    ),
)


def explain_sqlite(path: Path, error: BaseException) -> str:
    """Return one line that says what is wrong with an SQLite file and what to do."""
    if path.is_dir():
        return f"database {path} is a folder; name a file in it"
    said = str(error)
    for sign, remedy in _REMEDIES:
        if sign in said.lower():
            return f"database {path} {remedy} ({said})"
    return f"database {path}: {said}"


# -- an index of a server --------------------------------------------------------------------------

COLUMNS = (
    *("device", "device_kind", "architecture", "product", "sm_count", "workload", "variant", "revision"),
    *("config", "config_values", "stale", "measurement_id", "kind", "cache", "verification", "time_us"),
    *("ci_low_us", "ci_high_us", "bound_us", "recorded_at"),
)
"""Columns of `answer_v1`, in its order."""

FORMAT = 2
"""Of an index file; another one has another name. 2 has `measurement`, with the intervals of predictions."""

_asked: dict[Path, float] = {}
"""When this process last asked each server for news: one that is down is not asked at every lookup."""


def index_path(location: Location) -> Path:
    """Return where the index of a server is kept."""
    name = hashlib.sha256(str(location.url).encode()).hexdigest()[:16]
    return _environment.cache_folder() / "answers" / f"{name}.{FORMAT}.db"


def refresh(location: Location) -> Path:
    """Bring the index of a server up to date if it is older than `REFRESH_S`, and return its path.

    A server that cannot be reached costs a warning, not the answers: the index serves on as it is.

    Raises:
        DatabaseError: if the server cannot be reached and there is no index yet, or it cannot be written.
    """
    path = index_path(location)
    age = time.time() - path.stat().st_mtime if path.exists() else None
    asked_ago = time.monotonic() - _asked.get(path, -REFRESH_S)
    if age is not None and (0 <= age < REFRESH_S or asked_ago < REFRESH_S):
        return path
    _asked[path] = time.monotonic()
    from tunebench.db.store import open_store

    try:
        with open_store(location.url, read_only=True) as store:
            export(store, path)
    except DatabaseError as error:
        if age is None:
            raise
        warnings.warn(f"answers are as of {age:.0f} s ago: {error}", RuntimeWarning, stacklevel=3)
    return path


def export(store: Store, path: Path) -> None:
    """Write the answers of a store to an index file, unless it has them already.

    The file is made beside its final name and renamed, so that readers see the old one or the new one.

    Raises:
        DatabaseError: if the store cannot be read or the file cannot be written.
    """
    fingerprint = store.fingerprint()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _fingerprint(path) == fingerprint:
            os.utime(path)
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
        os.close(handle)
        fresh = Path(name)
        try:
            _write(fresh, fingerprint, store.answers(), store.details())
            fresh.replace(path)
        except BaseException:
            fresh.unlink()
            raise
    except (sqlite3.Error, OSError) as error:
        raise DatabaseError(explain_sqlite(path, error)) from error


def _fingerprint(path: Path) -> str | None:
    try:
        connection = open_read_only(path)
    except sqlite3.Error:
        return None
    with contextlib.closing(connection):
        row = connection.execute("SELECT fingerprint FROM source").fetchone()
    return str(row[0]) if row else None


def _write(
    path: Path,
    fingerprint: str,
    answers: Iterable[Mapping[str, Any]],
    details: Iterable[tuple[int, Mapping[str, Any]]],
) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute(f"CREATE TABLE answer_v1 ({', '.join(COLUMNS)})")
        connection.execute("CREATE TABLE source (fingerprint TEXT NOT NULL)")
        connection.execute("INSERT INTO source VALUES (?)", (fingerprint,))
        connection.executemany(
            f"INSERT INTO answer_v1 VALUES ({', '.join('?' * len(COLUMNS))})",  # noqa: S608 (no outside text)
            (
                tuple(
                    json.dumps(row[name])
                    if name == "config_values"
                    else row[name].strftime("%Y-%m-%d %H:%M:%S.%f")
                    if name == "recorded_at"
                    else row[name]
                    for name in COLUMNS
                )
                for row in answers
            ),
        )
        connection.execute("CREATE TABLE measurement (id INTEGER PRIMARY KEY, detail TEXT)")
        connection.executemany(
            "INSERT OR IGNORE INTO measurement VALUES (?, ?)",
            ((id_, json.dumps(detail)) for id_, detail in details),
        )
        connection.execute("CREATE INDEX ix_answer_v1_workload ON answer_v1 (workload)")
        connection.execute("COMMIT")
