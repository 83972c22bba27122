"""Faults of any database: killed tuners and servers, wrong clocks, and commits without a reply."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.db.support import DEVICE, VARIANT, WORKLOAD, Clock, begin, dead_owner, in_threads, key, result
from tests.faults import power_cuts, signal_soak, soak
from tests.support import needs_fork
from tunebench.db import (
    MeasurementBatch,
    NewMeasurement,
    RunStart,
    RunSummary,
    database,
    engine,
    locate,
    lookup_index,
    new_owner,
    open_store,
    server_watch,
    sqlite_file,
)
from tunebench.db.owner import is_dead
from tunebench.db.retry import RetryPolicy
from tunebench.db.store import Store
from tunebench.errors import DatabaseError
from tunebench.outcome import CompileFailed, Result

YEARS = timedelta(days=3650)


def tiles(store: Store) -> list[int]:
    return [entry.key.config["tile"] for entry in store.history(WORKLOAD)]


# -- claims ----------------------------------------------------------------------------------------


def test_claims_of_a_dead_process_are_taken_over_at_once(store: Store) -> None:
    begin(store)
    alive, dead = new_owner(), dead_owner()
    assert store.claim(key(1), alive)
    assert store.claim(key(2), dead)
    assert store.claim(key(3), f"otherhost:1:{dead.split(':', 2)[2]}")
    survivor = new_owner()
    assert [store.claim(key(number), survivor) for number in (1, 2, 3)] == [False, True, False]
    assert not store.claim(key(2), new_owner())


def test_only_one_process_takes_over_a_dead_claim(db: str) -> None:
    with open_store(db) as store:
        begin(store)
        dead = dead_owner()
        for number in range(20):
            assert store.claim(key(number), dead)
    won: list[int] = []

    def survive() -> None:
        owner = new_owner()
        with open_store(db) as store:
            won.extend(number for number in range(20) if store.claim(key(number), owner))

    in_threads([survive] * 4)
    assert sorted(won) == list(range(20))


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="this system does not report the start of processes"
)
def test_reused_process_number_does_not_keep_a_dead_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = new_owner()
    process, _, token = owner.rpartition(":")
    boot, started, nonce = token.split(".")
    assert not is_dead(owner)
    assert is_dead(f"{process}:{boot}.{int(started) + 1}.{nonce}")
    assert is_dead(f"{process}:00000000.{started}.{nonce}")  # before a reboot
    assert not is_dead(f"{process}:{nonce}")  # token of an earlier version


def test_claim_made_with_a_clock_years_ahead_is_free(db: str) -> None:
    clock = Clock()
    with closing(Store(locate(db), clock=clock)) as store:
        begin(store)
        clock.now += YEARS
        assert store.claim(key(1), "elsewhere:1")
        clock.now -= YEARS
        assert store.claim(key(1), "b")
        assert not store.claim(key(1), "c")


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [YEARS, -YEARS], ids=["ahead", "back"])
def test_later_run_is_found_by_measurement_ids_not_by_the_clock(db: str, jump: timedelta) -> None:
    clock = Clock()

    def run(store: Store, number: int, *, finished: bool) -> None:
        start = RunStart(device=DEVICE, workload=WORKLOAD, sampler="bound", seed=7, host=dead_owner())
        run_id = store.begin_run(start)
        store.record(key(number), result(), run_id=run_id)
        if finished:
            store.finish_run(run_id, RunSummary())

    def cut_off(store: Store) -> int:
        return sum(run.trials for run in store.interrupted_runs(DEVICE.key, WORKLOAD, lambda *_: True))

    with closing(Store(locate(db), clock=clock)) as store:
        clock.now += jump
        run(store, 1, finished=jump > timedelta())
        clock.now -= jump
        run(store, 2, finished=jump < timedelta())
        assert cut_off(store) == (1 if jump > timedelta() else 0)
        clock.now += jump
        run(store, 3, finished=True)
        clock.now -= jump
        assert cut_off(store) == 0
        run(store, 4, finished=False)
        assert cut_off(store) == 1


def test_server_time_is_used_whatever_the_local_clock(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2099, 1, 1, tzinfo=tz)

    with open_store(server.new_database()) as store:
        monkeypatch.setattr(database, "datetime", Ahead)
        begin(store)
        store.record(key(1), result())
        recorded_at = store.history(WORKLOAD)[0].recorded_at
    assert abs(datetime.now(UTC) - recorded_at) < timedelta(minutes=5)


def test_measurements_dated_in_the_future_do_not_block_imports(db: str) -> None:
    clock = Clock()
    with closing(Store(locate(db), clock=clock)) as store:
        begin(store)
        clock.now += YEARS
        store.record(key(1), result(9.0))
        clock.now -= YEARS
        store.record(key(2), result(9.0))
        start = RunStart(device=DEVICE, workload=WORKLOAD, sampler="import", seed=0)
        then = clock.now - timedelta(hours=1)
        batch = MeasurementBatch(
            start=start,
            measurements=tuple(
                NewMeasurement(key=key(n), result=result(5.0), recorded_at=then) for n in (1, 2)
            ),
        )
        assert store.add([batch]) == 1
        assert tiles(store) == [1, 2, 1]


# -- what belongs together -------------------------------------------------------------------------


def test_record_together_commits_all_measurements_or_none(store: Store) -> None:
    run_id = begin(store)
    measurements = [
        NewMeasurement(key=key(n), result=result(1.0 + n), purpose="finalist", seed=n) for n in range(3)
    ]
    ids = store.record_together(measurements, run_id=run_id)
    entries = store.history(WORKLOAD)
    assert [entry.id for entry in entries] == ids == sorted(ids)
    assert [(e.key, e.result, e.purpose, e.seed, e.run_id) for e in entries] == [
        (a.key, a.result, "finalist", a.seed, run_id) for a in measurements
    ]
    broken = NewMeasurement(key=key(8), result=Result(outcome=CompileFailed(reason=object())))  # type: ignore[arg-type]
    with pytest.raises(DatabaseError):
        store.record_together([NewMeasurement(key=key(7), result=result()), broken])
    assert tiles(store) == [0, 1, 2]


def test_fingerprint_depends_on_which_trials_are_stale(store: Store) -> None:
    begin(store)
    for number in (1, 2):
        store.record(key(number), result())
    seen = set()
    for stale in (1, 2):
        store.recheck(DEVICE.key, WORKLOAD, VARIANT, lambda c, stale=stale: f"r{1 + (c['tile'] == stale)}")
        assert store.stats().stale == 1
        seen.add(store.fingerprint())
    assert len(seen) == 2


def test_index_is_consistent_during_concurrent_records(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that was just superseded is returned with its own details."""
    begin(store)
    store.record(key(1), result(5.0))
    answers = store.answers

    def outdone() -> Any:
        current = answers()
        store.record(key(2), result(4.0))
        return current

    monkeypatch.setattr(store, "answers", outdone)
    path = tmp_path / "index.db"
    lookup_index.export_index(store, path)
    with closing(sqlite_file.open_read_only(path)) as connection:
        assert connection.execute(
            "SELECT COUNT(*) FROM answer_v1 AS a JOIN measurement AS m ON m.id = a.measurement_id"
        ).fetchone() == (1,)


def test_concurrent_records_of_two_revisions_do_not_deadlock(db: str) -> None:
    """Each marks the other as stale: on a server, one transaction may have to be retried."""
    with open_store(db) as store:
        begin(store)

    def record(revision: str, order: Iterator[int]) -> None:
        with open_store(db) as store:
            for number in order:
                store.record(key(number % 3, revision=revision), result())

    in_threads([lambda r=r: record(r, iter(range(30))) for r in ("r1", "r2", "r3", "r4")])
    with open_store(db) as store:
        assert len(store.history(WORKLOAD)) == 120
        assert store.stats().stale == 9


# -- databases that go away ------------------------------------------------------------------------


def test_tuner_waits_for_a_server_restart_and_reports_it(server: Any) -> None:
    messages: list[str] = []
    with open_store(server.new_database(), retry_policy=RetryPolicy(notify=messages.append)) as store:
        run_id, owner = begin(store), new_owner()
        assert store.claim(key(1), owner)
        server.kill()
        restart = threading.Timer(0.5, server.start)
        restart.start()
        store.record(key(1), result(), run_id=run_id)
        restart.join()
        assert messages[0].startswith("waiting for the database, up to 120 s: database postgresql://")
        assert messages[1:] == [""]
        assert "\n" not in messages[0]
        server.stop("immediate")
        server.start()
        assert store.claim(key(2), owner)  # a stale pooled connection is not an outage
        store.finish_run(run_id, RunSummary())
        assert tiles(store) == [1]


def test_silent_server_is_reported_waited_for_and_given_up(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_watch, "NOTICE_S", 0.2)
    monkeypatch.setitem(engine.KEEPALIVE, "connect_timeout", 2)
    messages: list[str] = []
    with open_store(server.new_database(), retry_policy=RetryPolicy(notify=messages.append)) as store:
        begin(store)
        with server.paused():
            threading.Timer(0.6, server._signal, (signal.SIGCONT,)).start()
            store.record(key(1), result())  # the server answers in time
        assert [line.partition(" s")[0] for line in messages] == [
            "waiting for the database: no answer for 0",
            "",
        ]
        assert tiles(store) == [1]
        store.retry_policy = None
        monkeypatch.setattr(server_watch, "SILENCE_S", 0.5)
        with (
            pytest.raises(
                DatabaseError, match="connection timeout expired"
            ),  # after the silent one was closed
            pytest.warns(RuntimeWarning, match="no answer"),
            server.paused(),
        ):
            store.record(key(2), result())
        assert tiles(store) == [1]


def test_ctrl_c_ends_a_wait_for_a_silent_server(server: Any) -> None:
    messages: list[str] = []
    with ExitStack() as stack:
        policy = RetryPolicy(notify=messages.append)
        store = stack.enter_context(open_store(server.new_database(), retry_policy=policy))
        begin(store)
        with store.reading(), store.reading():  # two idle connections
            pass
        with server.paused():
            started = time.monotonic()
            threading.Timer(server_watch.NOTICE_S + 0.5, signal.raise_signal, (signal.SIGINT,)).start()
            with pytest.raises(KeyboardInterrupt):
                store.record(key(1), result())
            with pytest.raises(DatabaseError, match="did not answer before Ctrl-C"):
                store.release(key(1), "owner")
            assert time.monotonic() - started < server_watch.SILENCE_S / 2
        store = stack.enter_context(open_store(store.location.url, retry_policy=store.retry_policy))
        with server.paused():
            started = time.monotonic()
            store.hurry()  # Ctrl-C came while the server was not needed
            for _ in range(3):
                with pytest.raises(DatabaseError):
                    store.release(key(1), "owner")
            assert time.monotonic() - started < server_watch.SILENCE_S / 2
    assert [line.partition(":")[0] for line in messages] == ["waiting for the database"]


def test_retry_ends_after_the_limit(server: Any) -> None:
    with open_store(
        server.new_database(), retry_policy=RetryPolicy(limit_s=0.3, notify=lambda line: None)
    ) as store:
        begin(store)
        server.stop("immediate")
        try:
            with pytest.raises(DatabaseError, match="committed records are kept"):
                store.record(key(1), result())
        finally:
            server.start()
        store.record(key(1), result())


def test_retry_after_a_broken_commit_stores_no_duplicate(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    with open_store(server.new_database(), retry_policy=RetryPolicy(notify=lambda line: None)) as store:
        commit = store._engine.dialect.do_commit
        broken: list[Any] = []

        def commit_unheard(connection: Any) -> None:
            commit(connection)
            if not broken:
                broken.append(connection)
                raise psycopg.OperationalError("server closed the connection unexpectedly")

        monkeypatch.setattr(store._engine.dialect, "do_commit", commit_unheard)
        run_id = begin(store)
        assert broken
        assert store.stats().runs == 1
        broken.clear()
        first = store.record(key(1), result(), run_id=run_id)
        assert broken
        assert [entry.id for entry in store.history(WORKLOAD)] == [first]
        broken.clear()
        assert store.claim(key(2), new_owner())
        broken.append(None)
        second = store.record(key(1), result(), run_id=run_id)  # the same result again is another measurement
        assert [entry.id for entry in store.history(WORKLOAD)] == [first, second]


def test_errors_other_than_outages_are_not_retried(store: Store) -> None:
    messages: list[str] = []
    store.retry_policy = RetryPolicy(notify=messages.append)
    begin(store)
    with pytest.raises(DatabaseError):
        store.record(key(1), Result(outcome=CompileFailed(reason=object())))  # type: ignore[arg-type]
    with pytest.raises(DatabaseError):
        store._lasting(
            lambda connection, is_retry: connection.execute(sa.text("SELECT nothing FROM nowhere"))
        )
    assert messages == []


def test_damaged_or_future_index_is_written_again(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBENCH_CACHE", str(tmp_path))
    url = server.new_database()
    with open_store(url) as store:
        begin(store)
        store.record(key(1), result(5.0))
    path = lookup_index.refresh(locate(url))
    path.write_bytes(b"\xff" * path.stat().st_size)
    os.utime(path, (time.time() + 1e9,) * 2)
    lookup_index.forget_servers()
    with closing(sqlite_file.open_read_only(lookup_index.refresh(locate(url)))) as connection:
        assert connection.execute("SELECT config FROM answer_v1").fetchall() == [(str(key(1).config),)]
    path.write_bytes(b"\xff" * path.stat().st_size)
    os.utime(path, (time.time() - 1e9,) * 2)
    lookup_index.forget_servers()
    server.stop("immediate")
    try:
        with pytest.raises(DatabaseError, match="Check the URL and the server"):
            lookup_index.refresh(locate(url))
    finally:
        server.start()


# -- the soak, in small ----------------------------------------------------------------------------


@pytest.mark.slow
@needs_fork
def test_killed_tuners_lose_and_repeat_no_trial(tmp_path: Path) -> None:
    counts = soak.sqlite_soak(tmp_path, 4, pause_s=0.3)
    assert counts.faults == 0, counts
    assert (counts.kills, counts.journalled >= 256, counts.lookups > 0) == (4, True, True)


@pytest.mark.slow
def test_signals_leave_no_processes_files_or_claims(tmp_path: Path) -> None:
    signals = [signal.SIGTERM, signal.SIGKILL, signal.SIGINT]
    counts = signal_soak.signal_soak(tmp_path, signals, latest_s=1.0)
    assert counts.faults == 0, counts
    assert counts.kills == 3


@pytest.mark.slow
def test_killed_server_loses_no_record_and_tuners_continue(server: Any, tmp_path: Path) -> None:
    counts = soak.server_soak(server, tmp_path, 2, pause_s=0.4)
    assert counts.faults == 0, counts
    assert (counts.kills, counts.journalled >= 256, counts.lookups > 0) == (2, True, True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("how", [{}, {"network": True}, {"synchronous": "NORMAL"}], ids=str)
def test_commits_survive_simulated_power_cuts(tmp_path: Path, how: dict[str, Any]) -> None:
    """The last parameter, without durable commits, shows that the test detects lost commits."""
    try:
        counts = power_cuts.cuts(tmp_path, 12, trials=40, **how)
    except subprocess.CalledProcessError:
        pytest.skip("strace is not allowed here")
    assert (counts["kills"], counts["duplicates"], counts["damaged"]) == (12, 0, 0)
    assert counts["journalled"] > 12
    assert (counts["lost"] > 0) is ("synchronous" in how)
