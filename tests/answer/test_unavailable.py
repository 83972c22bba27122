"""Lookups while the database cannot be read: locked, left by a dead writer, no file, or a silent server.

Each lookup must answer soon. The limits here only tell an answer from a wait (`benchmarks/lookup.py`
measures).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import measured, needs_postgres
from tunebench.answer import Answer, _cache, generation, lookup_workload, recorded, timed
from tunebench.cli import run as command
from tunebench.db import RunStart, TrialKey, locate, lookup_index, open_store, sqlite_file
from tunebench.device import Device, described, local_cpu
from tunebench.errors import DatabaseError, DatabaseUnavailable
from tunebench.kernels import variant
from tunebench.outcome import Result
from tunebench.workloads import parse

SOON_S = 10.0
"""Less than the 30 s that a reader waits for a lock elsewhere."""

SXM = described()["h100-sxm"]
WORKLOAD = "softmax:rows=64,cols=128,dtype=f32"

HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
for statement in sys.argv[2].split(";"):
    connection.execute(statement).fetchall()
print("held", flush=True)
time.sleep(600)
"""
LOCKS = {
    "write-ahead log": "PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE",
    "rollback journal": "PRAGMA journal_mode = DELETE; BEGIN EXCLUSIVE",
    "unfinished transaction": "PRAGMA journal_mode = DELETE; PRAGMA cache_size = 1; BEGIN EXCLUSIVE; "
    "UPDATE measurement SET median_us = 5.0, ci_low_us = 5.0, ci_high_us = 5.0; "
    "CREATE TABLE filler AS WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 3000) "
    "SELECT randomblob(1000) AS y FROM n",
}
"""Statements after which nobody else can read; the last lock has overwritten pages of the file."""


def record(db: str | Path, median_us: float, *, device: Device = SXM, number: int = 7) -> None:
    """Record a time of a configuration, given by its number, for the workload."""
    workload = parse(WORKLOAD)
    kind = variant("softmax/cuda_block" if device.kind == "gpu" else "softmax/numba_cpu")
    config = kind.configs(workload, device).config(number)
    with open_store(db) as store:
        store.begin_run(RunStart(device=device, workload=WORKLOAD, sampler="bound", seed=0))
        trial = TrialKey(
            device=device.key,
            workload=WORKLOAD,
            variant=kind.key,
            revision=kind.revision(workload, config),
            config=config,
        )
        store.record(trial, Result(outcome=measured(median_us)), bound_us=0.01)


@contextlib.contextmanager
def holding(db: str | Path, statements: str) -> Iterator[subprocess.Popen[str]]:
    """Run statements in another process, which holds its locks within the context."""
    for view in _cache.lookup_cache.views.values():  # the lock needs that nobody reads
        view.close()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(db), statements], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def soon(limit_s: float = SOON_S) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < limit_s


def ask(db: str | Path, **options: Any) -> Answer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lookup_workload(WORKLOAD, device=SXM, db=db, **options)


def look() -> None:
    """Let the next lookup check the files."""
    _cache.lookup_cache.due = 0.0


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Path]:
    """A database with a time of 12.5 us."""
    path = tmp_path / "answers.db"
    record(path, 12.5)
    yield path
    _cache.lookup_cache.views.pop(path, None)


@pytest.fixture(autouse=True)
def forgetful() -> None:
    """Let every test warn again, and see only its own files."""
    _cache.lookup_cache.warned.clear()
    for view in _cache.lookup_cache.views.values():
        view.close()
    _cache.lookup_cache.views.clear()
    _cache.lookup_cache.look()


# -- a locked file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("statements", LOCKS.values(), ids=LOCKS)
def test_locked_file_is_answered_from_its_last_commit(statements: str, stopped: bool, db: Path) -> None:
    with holding(db, statements) as holder:
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite_file.open_read_only(db, busy_s=0.0)
        if stopped:
            holder.send_signal(signal.SIGSTOP)
        with soon(), pytest.warns(RuntimeWarning, match="is locked by another program; answered from its"):
            answer = lookup_workload(WORKLOAD, device=SXM, db=db)
        assert (answer.how, answer.expected_us) == ("measured here", 12.5)
        assert answer.warning == f"database {db} is locked by another program; answered from its last commit"
        assert answer.because.endswith(answer.warning)
        assert answer.to_json()["warning"] == answer.warning
        with soon():
            assert ask(db, strict=True).expected_us == 12.5
    record(db, 3.0, number=8)  # the lock has ended
    look()
    answer = ask(db)
    assert (answer.expected_us, answer.warning) == (3.0, None)


def test_file_that_cannot_be_copied_is_answered_without_its_records(
    db: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sqlite_file, "COPY_BYTES", 0)
    with holding(db, LOCKS["write-ahead log"]):
        before = generation()
        with soon():
            answer = ask(db)
        assert answer.how == "predicted"
        assert answer.warning is not None
        assert "is locked by another program" in answer.warning
        assert answer.warning.endswith("answered without its records")
        for strictly in (lambda: ask(db, strict=True), lambda: recorded(WORKLOAD, device=SXM, db=db)):
            with soon(), pytest.raises(DatabaseUnavailable, match="locked"):
                strictly()
        look()
        with soon():
            assert generation() == before  # a lock is no news
        with soon(20.0):
            assert command(["lookup", WORKLOAD, "--device", "h100-sxm", "--db", str(db)]) == 0
        shown = capsys.readouterr()
        assert "answered without its records" in shown.out
    look()
    assert ask(db).how == "measured here"
    assert generation() > before


def test_cached_answers_do_not_wait_for_a_lock(db: Path) -> None:
    assert ask(db).expected_us == 12.5
    before = generation()
    with holding(db, LOCKS["rollback journal"]), soon():
        for _ in range(20):
            look()
            assert ask(db).expected_us == 12.5
            assert generation() == before
    record(db, 3.0, number=8)
    look()
    assert ask(db).expected_us == 3.0


def test_lookup_of_a_locked_file_does_not_stop_other_threads(db: Path) -> None:
    assert ask(db).expected_us == 12.5
    with _cache.lookup_cache.lock:  # as a thread that looks up another workload
        look()
        finished = threading.Event()
        thread = threading.Thread(target=lambda: (generation(), finished.set()))
        thread.start()
        assert finished.wait(SOON_S)
        thread.join()


def test_kernels_run_while_the_default_database_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebench.numba import softmax

    db = tmp_path / "served.db"
    monkeypatch.setenv("TUNEBENCH_DB", str(db))
    record(db, 12.5, device=local_cpu(), number=0)
    x = np.ones((64, 128), np.float32)
    with holding(db, LOCKS["rollback journal"]):
        assert timed(WORKLOAD, device="cpu") is not None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a call of a kernel does not warn
            assert np.allclose(softmax(x), 1 / 128)
        with soon():
            for _ in range(10):
                look()
                softmax(x)


def test_transaction_of_a_dead_writer_is_not_read(db: Path) -> None:
    with holding(db, LOCKS["unfinished transaction"]):
        journal = Path(f"{db}-journal")
        assert journal.stat().st_size > 10_000
    assert journal.exists()
    before = {path.name: path.read_bytes() for path in db.parent.iterdir() if path.is_file()}
    with (
        contextlib.closing(sqlite3.connect(f"{db.as_uri()}?immutable=1", uri=True)) as file,
        pytest.raises(sqlite3.DatabaseError, match="malformed"),  # without its journal
    ):
        file.execute("SELECT median_us FROM measurement")
    with soon():
        assert ask(db, strict=True).expected_us == 12.5
    after = {path.name: path.read_bytes() for path in db.parent.iterdir() if path.is_file()}
    assert after == before  # a reader changes nothing


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_special_file_is_refused_at_once(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pipe.db"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    with soon(), pytest.raises(DatabaseError, match="is a pipe, a socket or a device"):
        ask(path)
    with soon(20.0):
        for words in (["lookup", WORKLOAD], ["tune", WORKLOAD, "--device", "cpu"], ["db", "stats"]):
            assert command([*words, "--db", str(path)]) == 4
            assert "is a pipe, a socket or a device" in capsys.readouterr().err


# -- a server ---------------------------------------------------------------------------------------------


@pytest.fixture
def url(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a new database with a time of 12.5 us, which no lookup has read."""
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path / "cache"))
    lookup_index.forget_servers()
    monkeypatch.setattr(lookup_index, "RETRY_S", 0.0)
    name = server.new_database()
    record(name, 12.5)
    yield name
    lookup_index.forget_servers()
    _cache.lookup_cache.views.pop(lookup_index.index_path(locate(name)), None)


def _paused(server: Any, url: str) -> Any:
    return server.paused()


@contextlib.contextmanager
def _table_locked(server: Any, url: str) -> Iterator[None]:
    """Lock a table, as a migration does."""
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("LOCK TABLE measurement IN ACCESS EXCLUSIVE MODE")
        yield


def _ask_and_settle(url: str) -> None:
    """Expect the answer of the last index, and wait for the thread that refreshes it.

    Filters of warnings stay as they are meanwhile, since the thread whose warning is expected restores them.
    """
    look()  # however little time has passed since the last check
    with soon(lookup_index.SERVER_S + SOON_S):
        answer = lookup_workload(WORKLOAD, device=SXM, db=url, strict=True)
    assert answer.expected_us == 12.5
    lookup_index.join_refreshes()


@needs_postgres
@pytest.mark.parametrize("stall", [_paused, _table_locked], ids=["stopped", "locked"])
def test_silent_server_is_waited_for_once(
    stall: Callable[[Any, str], contextlib.AbstractContextManager[None]],
    server: Any,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stall(server, url):
        with soon(lookup_index.SERVER_S + SOON_S):
            answer = ask(url)
        assert answer.how == "predicted"
        assert answer.warning is not None
        assert answer.warning.endswith("answered without its records")
        with soon(lookup_index.SERVER_S):  # later ones do not wait
            with pytest.raises(DatabaseUnavailable):
                ask(url, strict=True)
            for _ in range(10):
                look()
                assert ask(url) == answer or ask(url).how == "predicted"
    lookup_index.join_refreshes()
    lookup_index.refresh_in_thread(locate(url), wait_s=0.0)
    lookup_index.join_refreshes()
    look()
    answer = ask(url)
    assert (answer.how, answer.expected_us, answer.warning) == ("measured here", 12.5, None)
    monkeypatch.setattr(lookup_index, "REFRESH_S", 0.0)  # the index is due
    with stall(server, url), pytest.warns(RuntimeWarning, match="answers are"):
        _ask_and_settle(url)


@needs_postgres
def test_unreachable_server_is_named_and_a_wrong_schema_is_an_error(server: Any, url: str) -> None:
    with soon():
        answer = ask(url.replace("?", "_gone?"))
    assert answer.how == "predicted"
    assert "answered without its records" in (answer.warning or "")
    with open_store(url) as store, store.writing() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(DatabaseError, match="newer than"):
        ask(url)
