"""Reading answers with the standard library alone: an SQLite file, or a local index of a server's.

Serving code must not pay for SQLAlchemy. A file is read as it is, through its view `answer_v1`; of a server
the rows of that view are exported to an SQLite file in the cache folder, which has a table of that name, and
of the tables `measurement`, `trial` and `device` those columns that a lookup reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunebench import _environment
from tunebench.db.location import Location
from tunebench.errors import DatabaseError

if TYPE_CHECKING:
    from tunebench.db.store import Store

__all__ = [
    "COLUMNS",
    "REFRESH_S",
    "changed",
    "due",
    "explain_sqlite",
    "export",
    "has_log",
    "index_path",
    "open_read_only",
    "refresh",
    "shipped",
    "write_index",
    "writes",
]

REFRESH_S = 60.0
"""Age at which an index asks its server whether anything is new."""

writes = 0
"""How often this process has written to a database: what it wrote is served at once."""

_REFUSALS = ("unable to open", "readonly", "disk i/o", "is full")
"""What SQLite says where the shared memory beside a file in WAL mode cannot be made, or just goes away."""

_ATTEMPTS = 3
_PAUSE_S = 0.01


def changed() -> None:
    """Count one more write of this process."""
    global writes
    writes += 1


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
        if not _refused(error) or not path.is_file():
            raise
        try:
            return _merged(path) if has_log(path) else _probed(_uri(path, immutable=True), FrozenConnection)
        except (sqlite3.Error, OSError):
            raise error from None


def _opened(path: Path) -> sqlite3.Connection:
    """Open a file as usual. The last of its writers may just be taking log and shared memory away."""
    attempts = _ATTEMPTS if os.access(path.parent, os.W_OK) else 1
    for attempt in range(1, attempts + 1):
        try:
            return _probed(_uri(path), sqlite3.Connection)
        except sqlite3.OperationalError as error:
            if attempt == attempts or not _refused(error) or not path.is_file():
                raise
            time.sleep(_PAUSE_S)
    raise AssertionError("unreachable")


def _refused(error: sqlite3.Error) -> bool:
    return any(sign in str(error).lower() for sign in _REFUSALS)


def _uri(path: Path, *, immutable: bool = False) -> str:
    return f"{path.absolute().as_uri()}?mode=ro" + ("&immutable=1" if immutable else "")


def _merged(path: Path) -> FrozenConnection:
    """Return a copy in memory of a file and the log that was left beside it.

    Whoever writes may be at it, on another machine. While the head of the log stays the same, the log holds
    all that is being moved into the file, so that the two are whole together.
    """
    log = Path(f"{path}-wal")
    with tempfile.TemporaryDirectory(prefix="tunebench-") as folder:
        copy = Path(folder) / "copy.db"
        for _ in range(_ATTEMPTS):
            head = _head(log)
            # By SQLite, not by a file of our own: to close that would end this process's locks on the other.
            with contextlib.closing(_probed(_uri(path, immutable=True), FrozenConnection)) as raw:
                copy.write_bytes(raw.serialize())
            shutil.copyfile(log, f"{copy}-wal")
            if _head(log) == head == _head(Path(f"{copy}-wal")):
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


def _head(log: Path) -> bytes:
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


def has_log(path: Path) -> bool:
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


# -- an index of a server --------------------------------------------------------------------------

COLUMNS = (
    *("device", "device_kind", "architecture", "product", "sm_count", "workload", "variant", "revision"),
    *("config", "config_values", "stale", "measurement_id", "kind", "cache", "verification", "time_us"),
    *("ci_low_us", "ci_high_us", "bound_us", "recorded_at"),
)
"""Columns of `answer_v1`, in its order."""

FORMAT = 3
"""Of an index file; another one has another name. 3 has `trial`, `device` and comparisons with libraries."""

_asked: dict[Path, float] = {}
"""When this process last asked each server for news: one that is down is not asked at every lookup."""


def index_path(location: Location) -> Path:
    """Return where the index of a server is kept."""
    name = hashlib.sha256(str(location.url).encode()).hexdigest()[:16]
    return _environment.cache_folder() / "answers" / f"{name}.{FORMAT}.db"


def due(location: Location) -> bool:
    """Tell whether the index of a server is to be brought up to date."""
    age = _age_s(index_path(location))
    asked_ago = time.monotonic() - _asked.get(index_path(location), -REFRESH_S)
    return age is None or not (0 <= age < REFRESH_S or asked_ago < REFRESH_S)


def refresh(location: Location) -> Path:
    """Bring the index of a server up to date if it is older than `REFRESH_S`, and return its path.

    A server that cannot be reached costs a warning, not the answers: the index serves on as it is.

    Raises:
        DatabaseError: if the server cannot be reached and there is no index yet, or it cannot be written.
    """
    path = index_path(location)
    if not due(location):
        return path
    age = _age_s(path)
    _asked[path] = time.monotonic()
    from tunebench.db.store import open_store

    try:
        with open_store(location.url, read_only=True) as store:
            export(store, path)
    except DatabaseError as error:
        if age is None or _fingerprint(path) is None:
            raise
        warnings.warn(f"answers are as of {max(age, 0):.0f} s ago: {error}", RuntimeWarning, stacklevel=3)
    return path


def _age_s(path: Path) -> float | None:
    """Return how old an index is, less than nothing if its clock was ahead; None if there is none."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return None


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
            write_index(fresh, fingerprint, store)
            fresh.replace(path)
        except BaseException:
            fresh.unlink()
            raise
    except (sqlite3.Error, OSError) as error:
        raise DatabaseError(explain_sqlite(path, error)) from error


def _fingerprint(path: Path) -> str | None:
    """Return what an index was made of; None if there is none, or it is damaged."""
    try:
        with contextlib.closing(open_read_only(path)) as connection:
            row = connection.execute("SELECT fingerprint FROM source").fetchone()
    except (sqlite3.Error, OSError):
        return None
    return str(row[0]) if row else None


class Answers(Protocol):
    """What an index is made of."""

    def answers(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of `answer_v1`."""

    def said(
        self, measurements: Sequence[int], /
    ) -> Iterable[tuple[int, Mapping[str, Any], Mapping[str, Any] | None]]:
        """Return details and comparisons of measurements, by their ids: those of `answers`."""

    def descriptors(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the fields of every device, by key."""


def write_index(path: Path, fingerprint: str, store: Answers) -> None:
    """Write an index file.

    Args:
        path: A file with nothing in it.
        fingerprint: Of what it is made of.
        store: What it is made of.

    Raises:
        sqlite3.Error: if it cannot be written.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE source (fingerprint TEXT NOT NULL)")
        connection.execute("INSERT INTO source VALUES (?)", (fingerprint,))
        answers = list(store.answers())
        said = store.said([row["measurement_id"] for row in answers])
        _fill(connection, "answer_v1", ", ".join(COLUMNS), map(_answer, answers))
        _fill(connection, "measurement", "id INTEGER PRIMARY KEY, detail, comparison", map(_said, said))
        _fill(connection, "device", "id INTEGER PRIMARY KEY, key, descriptor", _devices(store))
        connection.execute(
            "CREATE TABLE trial AS SELECT DISTINCT d.id AS device_id, a.workload "
            "FROM answer_v1 AS a JOIN device AS d ON d.key = a.device"
        )
        connection.execute("CREATE INDEX ix_answer_v1_workload ON answer_v1 (workload)")
        connection.execute("CREATE INDEX ix_trial_device_id ON trial (device_id, workload)")
        connection.execute("COMMIT")


def _fill(connection: sqlite3.Connection, table: str, columns: str, rows: Iterable[tuple[Any, ...]]) -> None:
    marks = ", ".join("?" * len(columns.split(", ")))
    connection.execute(f"CREATE TABLE {table} ({columns})")
    connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)  # noqa: S608 (no outside text)


def _answer(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a row of `answer_v1` as SQLite has it."""
    values = dict(row)
    values["config_values"] = json.dumps(values["config_values"])
    values["recorded_at"] = values["recorded_at"].strftime("%Y-%m-%d %H:%M:%S.%f")
    return tuple(values[name] for name in COLUMNS)


def _said(row: tuple[int, Mapping[str, Any], Mapping[str, Any] | None]) -> tuple[int, str, str | None]:
    id_, detail, comparison = row
    return id_, json.dumps(detail), json.dumps(comparison) if comparison else None


def _devices(store: Answers) -> Iterable[tuple[int, str, str]]:
    found = enumerate(store.descriptors().items(), start=1)
    return ((number, key, json.dumps(dict(descriptor))) for number, (key, descriptor) in found)


# -- what comes with the package -------------------------------------------------------------------


def shipped(architecture: str | None = None) -> list[Path]:
    """Return indexes of the records that come with the package, which are read beneath a user's own.

    A file that cannot be used is passed over; `tunebench doctor` tells why.

    Args:
        architecture: Of which they are; None is all of them.
    """
    from tunebench.db import bundled

    found = []
    for path in bundled.files():
        if architecture in (None, path.stem):
            with contextlib.suppress(DatabaseError):
                found.append(bundled.index_of(path))
    return found
