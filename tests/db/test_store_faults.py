"""Faults of SQLite files: power cuts, damage, full and read-only disks, deleted files, and several names."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.db.support import DEVICE, WORKLOAD, begin, filled, result, unprivileged
from tests.faults import ROOT
from tests.support import needs_sqlite3
from tunebench import lookup
from tunebench.db import TrialKey, disk, engine, locate, open_store, sqlite_file
from tunebench.db.retry import RetryPolicy
from tunebench.db.store import Store
from tunebench.errors import DatabaseError, DatabaseUnavailable, LookupMiss, SchemaError
from tunebench.kernels import variant
from tunebench.workloads import parse

PROBLEM, VARIANT = parse(WORKLOAD), variant("softmax/cuda_block")
TABLE = VARIANT.configs(PROBLEM, DEVICE)


def key(number: int) -> TrialKey:
    """Return a trial that a lookup would return, by number."""
    config = TABLE.config(number)
    revision = VARIANT.revision(PROBLEM, config)
    return TrialKey(
        device=DEVICE.key, workload=WORKLOAD, variant=VARIANT.key, revision=revision, config=config
    )


def ask(path: Path) -> int:
    """Return the number of the trial that a lookup returns."""
    answer = lookup("softmax", rows=64, cols=64, dtype="f32", device=DEVICE, db=path, strict=True)
    return _number(answer.config)


def _number(config: Any) -> int:
    row = TABLE.row(config)
    assert row is not None
    return row


def numbers(store: Store) -> list[int]:
    return [_number(entry.key.config) for entry in store.history(WORKLOAD)]


@contextlib.contextmanager
def at_work(path: Path, count: int) -> Iterator[Store]:
    """A file that its tuner has not closed: the last records are in the write-ahead log."""
    with open_store(path) as store:
        begin(store)
        for number in range(count):
            store.record(key(number), result(100.0 - number))
        yield store


def taken(path: Path, to: Path, *suffixes: str) -> Path:
    """Copy the files that a crash would leave."""
    to.mkdir(exist_ok=True)
    for suffix in ("", *suffixes):
        shutil.copy(f"{path}{suffix}", to / f"{path.name}{suffix}")
    return to / path.name


# -- power cuts ------------------------------------------------------------------------------------


def test_every_connection_syncs_its_commits(tmp_path: Path) -> None:
    with open_store(tmp_path / "x.db") as store, contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(store._engine.connect())
            pragmas = [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "checkpoint_fullfsync")
            ]
            assert pragmas[:3] == ["wal", 2, 1]


def test_torn_write_ahead_log_keeps_commits_before_the_tear(tmp_path: Path) -> None:
    path, draw = tmp_path / "x.db", random.Random(1)
    sizes = []
    with open_store(path) as store:
        begin(store)
        for number in range(25):
            store.record(key(number), result())
            sizes.append(Path(f"{path}-wal").stat().st_size)
        whole = taken(path, tmp_path / "whole", "-wal")
    assert sizes == sorted(set(sizes))  # no checkpoint happened meanwhile
    for attempt in range(12):
        torn = taken(whole, tmp_path / f"torn{attempt}", "-wal")
        log = Path(f"{torn}-wal")
        tear = draw.randrange(32, sizes[-1])
        if attempt % 2:
            os.truncate(log, tear)
        else:  # unsynced bytes may be anything
            log.write_bytes(log.read_bytes()[:tear] + draw.randbytes(sizes[-1] - tear))
        with open_store(torn) as store:
            complete = sum(size <= tear for size in sizes)
            assert numbers(store) == list(range(complete))
            with store.reading() as connection:
                assert connection.exec_driver_sql("PRAGMA integrity_check").fetchall() == [("ok",)]
            begin(store)
            store.record(key(98), result())


# -- damage ----------------------------------------------------------------------------------------


def test_damaged_database_is_read_partly_or_the_error_names_a_remedy(tmp_path: Path) -> None:
    path, draw = filled(tmp_path / "x.db", 60, key=key), random.Random(2)
    data, messages = path.read_bytes(), list[str]()
    for attempt in range(30):
        damaged = bytearray(data)
        page = 4096 * draw.randrange(len(data) // 4096)
        for _ in range(8):
            damaged[page + draw.randrange(4096)] = draw.randrange(256)
        if attempt % 3 == 0:
            damaged = damaged[:page]
        path = tmp_path / f"{attempt}.db"
        path.write_bytes(damaged)
        for read in (ask, lambda path: open_store(path, read_only=True).history(WORKLOAD)):
            try:
                read(path)
            except (DatabaseError, LookupMiss) as error:
                messages.append(str(error))
        assert path.read_bytes() == damaged
    assert len(messages) > 20
    assert not [line for line in messages if "\n" in line]
    assert [line for line in messages if "is damaged. Restore a copy" in line]


def _saved(path: Path, command: str) -> Path:
    saved = path.with_name("saved.db")
    piped = f"sqlite3 {path} {command} | sqlite3 {saved}"
    subprocess.run(piped, shell=True, check=True, stderr=subprocess.DEVNULL)
    return saved


@pytest.mark.parametrize("command", [".recover", ".dump"])
@needs_sqlite3
def test_recovered_file_is_a_valid_database(tmp_path: Path, command: str) -> None:
    path = filled(tmp_path / "x.db", 60, key=key)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'ix_measurement_trial_id'"
        [page] = connection.execute(query).fetchone()
    saved = _saved(path, command)
    if command == ".recover" and saved.stat().st_size == 0:
        pytest.skip("this sqlite3 shell was built without .recover")
    saved.unlink()
    data = bytearray(path.read_bytes())
    data[4096 * (page - 1) : 4096 * page] = b"\xff" * 4096
    path.write_bytes(data)
    with open_store(path) as store, pytest.raises(DatabaseError, match=r"\.recover"):
        store.best(WORKLOAD)
    with open_store(_saved(path, command)) as store:
        assert numbers(store) == list(range(60))
        begin(store)
        store.record(key(98), result(0.5))
    assert ask(saved) == 98


def test_missing_view_is_named(tmp_path: Path) -> None:
    path = filled(tmp_path / "x.db", key=key)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP VIEW answer_v1")
    with open_store(path) as store, pytest.raises(DatabaseError, match=r"was edited.*answer_v1"):
        store.best(WORKLOAD)
    with pytest.raises(SchemaError, match="answer_v1"):
        ask(path)


def test_file_of_another_program_is_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "places.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE moz_places (id INTEGER)")
    before = path.read_bytes()
    with pytest.raises(SchemaError, match="another program"):
        open_store(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_readers_never_see_a_database_without_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    made = engine.create_engine(locate(path))
    with made.connect(), pytest.raises(LookupMiss):
        ask(path)
    made.dispose()


# -- disks -----------------------------------------------------------------------------------------


def test_write_ahead_log_in_a_read_only_folder_is_read(tmp_path: Path, open_folder: Path) -> None:
    with at_work(tmp_path / "x.db", 3):
        abandoned = taken(tmp_path / "x.db", open_folder, "-wal")
    before = {path: path.read_bytes() for path in open_folder.iterdir()}
    for path in before:
        path.chmod(0o444)
    open_folder.chmod(0o555)
    with unprivileged():
        assert ask(abandoned) == 2
        with open_store(abandoned, read_only=True) as store:
            assert numbers(store) == [0, 1, 2]
            with pytest.raises(DatabaseError, match="cannot be written"):
                store.record(key(9), result())
        with pytest.raises(DatabaseError, match="writable"):
            open_store(abandoned)
    assert {path: path.read_bytes() for path in open_folder.iterdir()} == before


def test_changing_write_ahead_log_is_read_when_stable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_work(tmp_path / "x.db", 3):
        abandoned = taken(tmp_path / "x.db", tmp_path / "left", "-wal")
    heads, real = [b"older", b"newer"], sqlite_file._wal_header
    monkeypatch.setattr(sqlite_file, "_wal_header", lambda log: heads.pop() if heads else real(log))
    with contextlib.closing(sqlite_file._copy(abandoned)) as connection:
        assert connection.execute("SELECT COUNT(*) FROM measurement").fetchone() == (3,)
    monkeypatch.setattr(sqlite_file, "_wal_header", lambda log: os.urandom(8))
    with pytest.raises(sqlite3.OperationalError, match="keeps changing"):
        sqlite_file._copy(abandoned)


@pytest.mark.parametrize(
    "said", ["disk I/O error", "database or disk is full", "unable to open database file"]
)
def test_lookup_works_without_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """SQLite reports the first error on a full disk."""
    path = filled(tmp_path / "x.db", key=key)
    probed = sqlite_file._probed

    def refuse(uri: str, factory: type[sqlite3.Connection], *wait: float) -> sqlite3.Connection:
        if "immutable" not in uri:
            raise sqlite3.OperationalError(said)
        return probed(uri, factory, *wait)

    monkeypatch.setattr(sqlite_file, "_probed", refuse)
    assert ask(path) == 0


def test_vanishing_write_ahead_log_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "x.db", key=key)
    probed, refusals = sqlite_file._probed, [1, 2]

    def refuse(uri: str, factory: type[sqlite3.Connection], *wait: float) -> sqlite3.Connection:
        if refusals:
            refusals.pop()
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return probed(uri, factory, *wait)

    monkeypatch.setattr(sqlite_file, "_probed", refuse)
    with contextlib.closing(sqlite_file.open_read_only(path)) as connection:
        assert not isinstance(connection, sqlite_file.FrozenConnection)


_LIMITED = """
import resource, signal
from tests.faults import journaled_tuning
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, -1))
with journaled_tuning.journaled_store({db!r}, Path({journal!r})) as store:
    journaled_tuning.tune(store, journaled_tuning.workload(0), 1)
"""


def _tune_within(limit: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Tune a workload with a limit on the size of files."""
    names = {"db": str(folder / "x.db"), "journal": str(folder / "journal")}
    script = _LIMITED.format(limit=limit, **names)
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.skipif(os.name == "nt", reason="this system has no limits on file sizes")
def test_tuner_on_a_full_disk_keeps_records_and_resumes(tmp_path: Path) -> None:
    ended = _tune_within(900_000, tmp_path)
    assert "run the command again" in ended.stderr.strip().splitlines()[-1], ended.stderr
    journalled = (tmp_path / "journal").read_text().count("\n")
    with open_store(tmp_path / "x.db") as store:
        assert sum(store.stats().outcomes.values()) == journalled > 20
    assert _tune_within(-1, tmp_path).returncode == 0
    with open_store(tmp_path / "x.db") as store:
        assert (store.stats().trials, store.stats().claimed) == (256, 0)


# -- files and their names -------------------------------------------------------------------------


def test_deleted_file_is_noticed(tmp_path: Path) -> None:
    path = filled(tmp_path / "x.db", key=key)
    replacement = filled(tmp_path / "other.db", key=key)
    with open_store(path) as store:
        begin(store)
        path.rename(tmp_path / "moved.db")
        for attempt in (lambda: store.record(key(9), result()), lambda: store.history(WORKLOAD)):
            with pytest.raises(DatabaseError, match="was deleted or replaced"):
                attempt()
        replacement.replace(path)
        with pytest.raises(DatabaseError, match="was deleted or replaced"):
            store.record(key(9), result())
        assert ask(path) == 0
        (tmp_path / "moved.db").replace(path)  # restored
        store.record(key(9), result())
        assert numbers(store) == [0, 1, 2, 9]
    with open_store(path) as store:
        assert numbers(store) == [0, 1, 2, 9]


def test_deleted_folder_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = filled(folder / "x.db", key=key)
    with open_store(path) as store:
        assert ask(path) == 0
        shutil.rmtree(folder)
        with pytest.raises(DatabaseError, match=r"was deleted|its folder must exist"):
            store.record(key(9), result())
        with pytest.raises(LookupMiss):
            ask(path)


def test_hard_links_are_refused_and_symbolic_links_are_followed(tmp_path: Path) -> None:
    path, folder = filled(tmp_path / "x.db", key=key), tmp_path / "elsewhere"
    folder.mkdir()
    link = folder / "link.db"
    link.symlink_to(path)
    with open_store(path) as direct, open_store(link) as linked:
        direct.record(key(7), result())
        linked.record(key(8), result(0.5))
        assert numbers(direct) == numbers(linked) == [0, 1, 2, 7, 8]
        assert ask(link) == ask(path) == 8
    os.link(path, folder / "hard.db")
    for name in (path, folder / "hard.db"):
        with pytest.raises(DatabaseError, match=r"has 2 hard links"):
            open_store(name)
    (folder / "hard.db").unlink()
    open_store(path).close()


def _mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, mount_point: Path, kind: str) -> None:
    table = folder / "mountinfo"
    space = str(mount_point).replace(" ", "\\040")
    table.write_text(
        f"27 1 254:0 / / rw - ext4 /dev/vda rw\n40 27 0:50 / {space} rw shared:1 - {kind} there rw\n"
    )
    monkeypatch.setattr(disk, "MOUNTS", table)


def test_single_file_mount_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(tmp_path / "x.db", key=key)
    _mounted(monkeypatch, tmp_path, path, "ext4")
    with pytest.raises(DatabaseError, match="mount the folder"):
        open_store(path)
    assert ask(path) == 0


def test_network_file_system_disables_the_write_ahead_log_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "of all machines"
    folder.mkdir()
    path = filled(folder / "x.db", key=key)
    _mounted(monkeypatch, tmp_path, folder, "nfs4")
    with pytest.warns(RuntimeWarning, match=r"network file system \(nfs4\)"):
        store = open_store(path)
    _works_without_log(store, path)
    path = folder / "fresh.db"
    open_store(path).close()
    with pytest.warns(RuntimeWarning, match="network file system"):
        store = open_store(path)
    begin(store)
    store.record(key(1), result())
    store.close()


def test_missing_shared_memory_disables_the_write_ahead_log_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, connect = filled(tmp_path / "x.db", key=key), sqlite3.connect
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")

    def connect_without(database: Any, **options: Any) -> sqlite3.Connection:
        """Connect with a build of SQLite that cannot share memory."""
        uri = str(database) if options.pop("uri", False) else f"file:{database}?mode=rwc"
        return connect(f"{uri}&vfs=unix-dotfile", uri=True, **options)

    monkeypatch.setattr(sqlite3, "connect", connect_without)
    with pytest.warns(RuntimeWarning, match="cannot have shared memory"):
        store = open_store(path)
    _works_without_log(store, path)


def _works_without_log(store: Store, path: Path) -> None:
    with store:
        with store.reading() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 3
        begin(store)
        store.record(key(5), result(0.25))
        assert ask(path) == 5
    assert not Path(f"{path}-wal").exists()


# -- waiting ---------------------------------------------------------------------------------------


def test_tuner_waits_for_a_long_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_S", 0.05)
    path, messages = filled(tmp_path / "x.db", key=key), list[str]()
    with open_store(path, retry_policy=RetryPolicy(notify=messages.append)) as store:
        begin(store)
        holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        holder.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.4, holder.execute, ("COMMIT",))
        timer.start()
        store.record(key(9), result())
        timer.join()
        holder.execute("BEGIN IMMEDIATE")
        store.retry_policy = None
        with pytest.raises(DatabaseError, match="locked by another program"):
            store.record(key(10), result())
        holder.close()
        assert numbers(store) == [0, 1, 2, 9]
    assert [line.partition(":")[0] for line in messages] == ["waiting for the database, up to 120 s", ""]


def test_lookups_are_correct_during_writes(tmp_path: Path) -> None:
    path, done = tmp_path / "x.db", threading.Event()
    seen: list[list[int]] = [[], []]
    raised: list[BaseException] = []

    def read(mine: list[int]) -> None:
        while not done.is_set():
            try:
                mine.append(ask(path))
            except LookupMiss as error:
                if mine:
                    raised.append(error)
            except DatabaseUnavailable:  # while the file is created
                time.sleep(0.01)
            except BaseException as error:
                raised.append(error)
                return

    readers = [threading.Thread(target=read, args=(mine,)) for mine in seen]
    for reader in readers:
        reader.start()
    for start in range(0, 40, 10):  # opening and closing creates and removes log and shared memory
        with open_store(path) as store:
            begin(store)
            for number in range(start, start + 10):
                store.record(key(number), result(100.0 - number))
    deadline = time.monotonic() + 30
    while not all(mine and mine[-1] == 39 for mine in seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    done.set()
    for reader in readers:
        reader.join()
    assert raised == []
    assert [(mine[-1], mine == sorted(mine)) for mine in seen] == [(39, True)] * 2
