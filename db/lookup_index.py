"""Lookup index: an SQLite copy of a server's answers, which `lookup` reads with the standard library alone.

`lookup` must not import SQLAlchemy. It reads an SQLite database directly, through the view `answer_v1`. For a
server, an SQLite file in the cache folder contains a table of that name, and the columns of `measurement`,
`trial` and `device` that a lookup reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebench import _environment
from tunebench._private_file import create_folder, is_private
from tunebench.db.location import Location
from tunebench.db.sqlite_file import explain_sqlite, open_read_only
from tunebench.errors import DatabaseError, SchemaError, TunebenchError

if TYPE_CHECKING:
    from tunebench.db.store import Store

__all__ = [
    "COLUMNS",
    "REFRESH_S",
    "SERVER_S",
    "export_index",
    "forget_servers",
    "index_path",
    "join_refreshes",
    "outdated",
    "refresh",
    "refresh_due",
    "refresh_in_thread",
    "replace_index",
]

REFRESH_S = 60.0
"""Age in seconds at which an index is compared with its server again."""

SERVER_S = 2.0
"""Longest wait of a lookup for its server, in seconds."""

RETRY_S = 5.0
"""Seconds between two attempts to reach a server that is unavailable and has no index yet."""

COLUMNS = (
    *("device", "device_kind", "architecture", "product", "sm_count", "workload", "variant", "revision"),
    *("config", "config_values", "stale", "measurement_id", "kind", "cache", "verification", "time_us"),
    *("ci_low_us", "ci_high_us", "bound_us", "recorded_at"),
)
"""Columns of `answer_v1`, in order."""

FORMAT = 4
"""Format of an index file, part of its name. 4 adds `run`, which names the files of imported records."""

MAX_INDEXES = 64
"""Number of index files that are kept: of servers, and of bundled records of several versions."""

WRITING_S = 3600.0
"""Age in seconds at which the unfinished file of a writer is deleted."""

_asked_at: dict[Path, float] = {}
"""Time of the last attempt to reach each server, so that an unavailable one does not delay every lookup."""


def index_path(location: Location) -> Path:
    """Return the path of a server's index."""
    name = hashlib.sha256(str(location.url).encode()).hexdigest()[:16]
    return _environment.cache_folder() / "answers" / f"{name}.{FORMAT}.db"


def refresh_due(location: Location) -> bool:
    """Return whether the index of a server must be refreshed."""
    age = _age_s(index_path(location))
    asked_ago = time.monotonic() - _asked_at.get(index_path(location), -REFRESH_S)
    return age is None or not (0 <= age < REFRESH_S or asked_ago < REFRESH_S)


def refresh(location: Location) -> Path:
    """Refresh the index of a server if it is older than `REFRESH_S`, and return its path.

    If the server cannot be reached, the existing index is used and a warning reports its age.

    Raises:
        DatabaseError: if the server cannot be reached and there is no index yet, or the index cannot be
            written.
    """
    path = index_path(location)
    if not refresh_due(location):
        return path
    age = _age_s(path)
    _asked_at[path] = time.monotonic()
    from tunebench.db.store import open_store

    try:
        with open_store(location.url, read_only=True, hasty=True) as store:
            export_index(store, path)
    except DatabaseError as error:
        if age is None or _fingerprint(path) is None:
            raise
        _failures[path] = error
        warnings.warn(f"answers are {max(age, 0):.0f} s old: {error}", RuntimeWarning, stacklevel=3)
    else:
        _failures.pop(path, None)
    return path


# -- refreshing in a thread, so that no lookup waits for a server that is silent --------------------------


@dataclass(slots=True)
class _Refresh:
    """One attempt to refresh an index.

    Attributes:
        thread: The thread that reads the server.
        began: Reading of `time.monotonic` at its start.
    """

    thread: threading.Thread
    began: float


_refreshes: dict[Path, _Refresh] = {}
"""The last attempt of each index."""

_failures: dict[Path, TunebenchError] = {}
"""Why the last attempt of an index failed."""

_silent: set[Path] = set()
"""Indexes whose server did not answer within the wait of a lookup; no other lookup waits until it does."""


def refresh_in_thread(location: Location, *, wait_s: float = 0.0) -> None:
    """Refresh the index of a server in a thread if it is due, and wait for the thread.

    No lookup waits for a server that was silent, until the server has answered a thread.

    Args:
        location: The server.
        wait_s: Longest wait in seconds.
    """
    if not refresh_due(location):
        return
    path = index_path(location)
    wait_s = 0.0 if path in _silent else wait_s
    attempt = _refreshes.get(path)
    if attempt is None or not attempt.thread.is_alive():
        is_recent = attempt is not None and time.monotonic() - attempt.began < RETRY_S
        if path in _failures and is_recent and not wait_s:
            return
        thread = threading.Thread(target=_try_to_refresh, args=(location,), daemon=True)
        attempt = _refreshes[path] = _Refresh(thread=thread, began=time.monotonic())
        thread.start()
    if wait_s:
        attempt.thread.join(wait_s)
        if attempt.thread.is_alive() or (path in _failures and time.monotonic() - attempt.began > wait_s / 2):
            _silent.add(path)


def join_refreshes() -> None:
    """Wait for the threads that read servers."""
    for attempt in list(_refreshes.values()):
        attempt.thread.join()


def forget_servers() -> None:
    """Forget what is known of servers, after the threads that read them have ended."""
    join_refreshes()
    for state in (_asked_at, _refreshes, _failures, _silent):
        state.clear()


def _try_to_refresh(location: Location) -> None:
    path = index_path(location)
    try:
        refresh(location)
    except TunebenchError as error:
        _failures[path] = error
    else:
        if path not in _failures:
            _silent.discard(path)


def outdated(location: Location) -> str:
    """Return why the index of a server is missing or older than `REFRESH_S`; empty if it is current.

    Raises:
        TunebenchError: if the server answered, and its records cannot be read: another schema, or a URL
            without a driver.
    """
    path, attempt = index_path(location), _refreshes.get(index_path(location))
    error, age = _failures.get(path), _age_s(path)
    if error is not None and (isinstance(error, SchemaError) or not isinstance(error, DatabaseError)):
        raise error
    if age is not None and 0 <= age < REFRESH_S:
        return ""
    reason = "" if error is None else str(error)
    if not reason and attempt is not None and attempt.thread.is_alive():
        reason = f"database {location} has not answered yet"
    if reason and age is None:
        return f"{reason}; answered without its records"
    return reason and f"answers are {age:.0f} s old: {reason}"


def _age_s(path: Path) -> float | None:
    """Return the age of an index in seconds, negative if its clock was ahead.

    None if it does not exist or if another user may write it: a refresh replaces it.
    """
    try:
        return time.time() - path.stat().st_mtime if is_private(path) else None
    except OSError:
        return None


def export_index(store: Store, path: Path) -> None:
    """Write the answers of a store to an index file, unless the file already contains them.

    Args:
        store: The records.
        path: The index file.

    Raises:
        DatabaseError: if the store cannot be read or the file cannot be written.
    """
    fingerprint = store.fingerprint()
    try:
        if _fingerprint(path) == fingerprint:
            os.utime(path)
        else:
            replace_index(path, fingerprint, store.answers(), store.descriptors())
    except (sqlite3.Error, OSError) as error:
        raise DatabaseError(explain_sqlite(path, error)) from error


def _fingerprint(path: Path) -> str | None:
    """Return the fingerprint of the records of an index; None if it is missing, damaged or not private."""
    if not is_private(path):
        return None
    try:
        with contextlib.closing(open_read_only(path)) as connection:
            row = connection.execute("SELECT fingerprint FROM source").fetchone()
    except (sqlite3.Error, OSError):
        return None
    return str(row[0]) if row else None


def replace_index(
    path: Path,
    fingerprint: str,
    answers: Iterable[Mapping[str, Any]],
    devices: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write an index to a temporary file, then rename it: readers see the old index or the new one.

    Args:
        path: The index file; its folder is created if it is missing.
        fingerprint: Fingerprint of the records (see `Reader.fingerprint`).
        answers: Rows of `answer_v1` with detail, comparison and run, as `Reader.answers` returns them.
        devices: Fields of each device, by key.

    Raises:
        sqlite3.Error, OSError: if the file cannot be written.
    """
    create_folder(path.parents[1], path.parent.name)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    os.close(handle)
    fresh = Path(name)
    try:
        _write_index(fresh, fingerprint, list(answers), devices)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    _prune(path.parent, keep=path)


def _prune(folder: Path, keep: Path) -> None:
    """Delete all but the latest indexes of a folder, and the unfinished files of interrupted writers.

    A deleted index is written again by the next lookup that needs it; open files stay readable.
    """
    ages = [(_age_s(path) or 0.0, path) for path in folder.iterdir() if path != keep]
    indexes = sorted((age, path) for age, path in ages if path.suffix == ".db")
    unfinished = [path for age, path in ages if path.suffix == ".new" and age > WRITING_S]
    for path in (*unfinished, *(path for _, path in indexes[MAX_INDEXES - 1 :])):
        with contextlib.suppress(OSError):
            path.unlink()


def _write_index(
    path: Path,
    fingerprint: str,
    answers: Sequence[Mapping[str, Any]],
    devices: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write an index into an empty file."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        connection.execute("CREATE TABLE source (fingerprint TEXT NOT NULL)")
        connection.execute("INSERT INTO source VALUES (?)", (fingerprint,))
        details = [
            (row["measurement_id"], *map(_to_json, (row["detail"], row["comparison"])), row.get("run_id"))
            for row in answers
        ]
        runs = {  # bundled records have none
            row["run_id"]: (row["run_id"], row["sampler"], _to_json(row["versions"]))
            for row in answers
            if row.get("run_id") is not None
        }
        device_rows = [(number, key, _to_json(devices[key])) for number, key in enumerate(devices, start=1)]
        _fill(connection, "answer_v1", ", ".join(COLUMNS), map(_answer_row, answers))
        _fill(connection, "measurement", "id INTEGER PRIMARY KEY, detail, comparison, run_id", details)
        _fill(connection, "run", "id TEXT PRIMARY KEY, sampler, versions", runs.values())
        _fill(connection, "device", "id INTEGER PRIMARY KEY, key, descriptor", device_rows)
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


def _answer_row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return a row of `answer_v1` in SQLite's types."""
    values = dict(row)
    values["config_values"] = json.dumps(values["config_values"])
    values["recorded_at"] = values["recorded_at"].strftime("%Y-%m-%d %H:%M:%S.%f")
    return tuple(values[name] for name in COLUMNS)


def _to_json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(dict(value))
