"""Merges into SQLite and PostgreSQL: each measurement once, in the order of recording."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.db.support import (
    DEVICE,
    EVERY_OUTCOME,
    TWIN,
    WORKLOAD,
    added,
    batch,
    begin,
    key,
    measured,
    served,
)
from tunebench.db import Demand, RunStart, RunSummary, Verdict, locate, new_owner, open_store, schema
from tunebench.db.integrity import examine
from tunebench.db.merge import MergeResult, merge
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.errors import DatabaseError, InputError
from tunebench.outcome import Crashed, Measured, Result, WrongResult

BEGAN = datetime(2026, 11, 1, tzinfo=UTC)


class Place:
    """A database that records at times chosen by the test."""

    def __init__(self, db: str, device: Device = DEVICE) -> None:
        self.db, self._now = db, BEGAN
        self.store = Store(locate(db), clock=lambda: self._now)
        self.store._clock_is_behind = timedelta()
        self.run = begin(self.store, device)

    def record(self, minute: int, number: int, outcome: Any, *, revision: str = "r1", **changes: Any) -> None:
        self._now = BEGAN + timedelta(minutes=minute)
        result = outcome if isinstance(outcome, Result) else Result(outcome=outcome)
        self.store.record(key(number, revision=revision), result, run_id=self.run, **changes)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """Factory of SQLite databases to merge."""
    opened: list[Place] = []

    def make(**changes: Any) -> Place:
        opened.append(Place(str(tmp_path / f"source{len(opened)}.db"), **changes))
        return opened[-1]

    yield make
    for database in opened:
        database.store.close()


def contents(db: str) -> list[Any]:
    """Return all measurements without ids."""
    with open_store(db, read_only=True) as store:
        integrity = examine(store)
        assert integrity.clean, integrity.first
        return [dataclasses.replace(entry, id=0) for entry in store.history(WORKLOAD)]


def everything(db: str) -> dict[str, Any]:
    """Return every row of every table."""
    with open_store(db, read_only=True) as store, store.reading() as connection:
        return {
            table.name: connection.execute(sa.select(table).order_by(table.c.id)).all()
            for table in schema.METADATA.sorted_tables
        }


def test_options_of_runs_are_merged(db: str, tmp_path: Path) -> None:
    options = {"seed": 7, "protocol": {"cache": "warm"}}
    start = RunStart(device=DEVICE, workload=WORKLOAD, sampler="bound", seed=7, options=options)
    with open_store(tmp_path / "one.db") as store:
        run_id = store.begin_run(start)
    merge([tmp_path / "one.db"], into=db)
    with open_store(db, read_only=True) as store:
        assert store.run_of(run_id).options == options


def test_merge_copies_every_measurement_once_with_all_fields(db: str, place: Any) -> None:
    first_db, second_db = place(), place(device=TWIN)
    for number, outcome in enumerate(EVERY_OUTCOME):
        verdict = Verdict(versus_default="faster", comparison={"default": {"ratio": 1.5}})
        first_db.record(number, number, outcome, purpose="audit", bound_us=2.5, seed=7, verdict=verdict)
    second_db.store.record(key(1, device=TWIN), Result(outcome=measured(3.0)), run_id=second_db.run)
    first_db.store.finish_run(first_db.run, RunSummary(masked=3, wall_s=2.0))
    first, second = merge([first_db.db, second_db.db], into=db)
    assert dataclasses.asdict(first) == {
        "database": first_db.db,
        "added": len(EVERY_OUTCOME),
        "known": 0,
        "refused": 0,
        "faults": [],
        "runs": 1,
        "devices": 1,
        "described": [],
        "demand": 0,
    }
    assert (second.added, second.devices, second.runs) == (1, 1, 1)
    assert contents(db) == contents(first_db.db) + contents(second_db.db)
    with open_store(db) as store, store.reading() as connection:
        runs = {row.id: row for row in connection.execute(sa.select(schema.run_table))}
        assert {row.id: row.versions["database"] for row in runs.values()} == {
            first_db.run: first_db.db,
            second_db.run: second_db.db,
        }
        assert (runs[first_db.run].masked, runs[first_db.run].wall_s, runs[second_db.run].finished_at) == (
            3,
            2.0,
            None,
        )
        begin(store)
        store.record(key(99), Result(outcome=measured(1.0)))  # ids continue after used ones
        assert store.history(WORKLOAD)[-1].key == key(99)


def test_merging_again_adds_only_new_measurements(db: str, place: Any) -> None:
    source = place()
    for number, outcome in enumerate(EVERY_OUTCOME):
        source.record(number, number % 3, outcome)
    merge([source.db], into=db)
    before = everything(db)
    [repeated] = merge([source.db], into=db)
    assert (repeated.added, repeated.known, repeated.runs, repeated.devices) == (0, len(EVERY_OUTCOME), 0, 0)
    assert everything(db) == before
    source.record(50, 1, measured(4.0))
    source.store.finish_run(source.run, RunSummary(masked=9))
    [later] = merge([source.db], into=db)
    assert (later.added, later.runs) == (1, 0)
    assert contents(db)[-1].result.outcome == measured(4.0)
    with open_store(db) as store, store.reading() as connection:
        assert connection.execute(sa.select(schema.run_table.c.masked)).scalar_one() == 9


def test_latest_measurement_counts_whatever_the_merge_order(db: str, place: Any, tmp_path: Path) -> None:
    first, second = place(), place()
    first.record(0, 1, measured(10.0))
    second.record(1, 1, measured(12.0))
    first.record(2, 2, measured(11.0))
    second.record(3, 2, Crashed(reason="x"))
    first.record(4, 3, measured(20.0))
    orders = [first.db, second.db], [second.db, first.db]
    for sources, into in zip(orders, (db, str(tmp_path / "turned.db")), strict=True):
        merge(sources, into=into)
        times = [entry.recorded_at for entry in contents(into)]
        assert times == [BEGAN + timedelta(minutes=minute) for minute in range(5)]
        with open_store(into) as store:
            assert served(store) == [(1, 12.0, False)]


def test_merged_finalists_supersede_only_earlier_searches(db: str, place: Any) -> None:
    first, second = place(), place()
    first.record(0, 1, measured(9.0))
    second.record(1, 2, measured(10.0), purpose="finalist")
    first.record(2, 3, measured(9.9))
    merge([second.db, first.db], into=db)
    with open_store(db) as store:
        assert served(store) == [(3, 9.9, False)]


def test_wrong_result_in_any_database_excludes_its_trial(db: str, place: Any) -> None:
    first, second = place(), place()
    first.record(0, 1, WrongResult(reason="nan"))
    second.record(1, 1, measured(5.0))
    second.record(2, 2, measured(6.0))
    merge([second.db, first.db], into=db)
    with open_store(db) as store:
        assert served(store) == [(2, 6.0, False)]


def test_wrong_clock_does_not_change_the_order_within_a_database(db: str, place: Any) -> None:
    first, second = place(), place()
    first.record(0, 1, measured(1.0))
    first.record(10_000_000, 1, measured(2.0))  # in twenty years
    first.record(-5, 1, measured(3.0))  # the clock was set back
    first.record(6, 1, measured(4.0))
    second.record(3, 1, measured(5.0))
    for sources in ([first.db, second.db], [second.db, first.db]):
        merge(sources, into=db)
    with open_store(db) as store:
        medians = [entry.result.outcome.median_us for entry in store.history(WORKLOAD)]  # type: ignore[union-attr]
    assert medians == [1.0, 2.0, 3.0, 5.0, 4.0]


def test_target_keeps_the_order_of_its_measurements(db: str, place: Any) -> None:
    source = place()
    source.record(1, 1, measured(1.0))
    source.record(3, 1, measured(3.0))
    with closing(Place(db).store) as store:
        store._clock = lambda: BEGAN + timedelta(minutes=2)
        store.record(key(1), Result(outcome=measured(2.0)))
    merge([source.db], into=db)
    with open_store(db) as store:
        assert [e.result.outcome.median_us for e in store.history(WORKLOAD)] == [1.0, 2.0, 3.0]  # type: ignore[union-attr]
    assert merge([source.db], into=db)[0].added == 0


def test_claims_are_not_merged_and_end_if_the_trial_was_measured(db: str, place: Any) -> None:
    source = place()
    source.store.claim(key(1), new_owner())
    source.record(0, 2, measured(1.0))
    with open_store(db) as store:
        begin(store)
        assert store.claim(key(2), new_owner())
        assert store.claim(key(3), new_owner())
    merge([source.db], into=db)
    with open_store(db) as store:
        assert (store.stats().claimed, store.stats().trials) == (1, 1)


def test_newest_revision_is_current_if_the_variant_is_not_installed(
    db: str, place: Any, tmp_path: Path
) -> None:
    first, second = place(), place()
    first.record(0, 1, measured(1.0), revision="old")
    first.record(1, 1, measured(2.0), revision="new")
    second.record(2, 1, measured(3.0), revision="older")
    second.record(3, 1, measured(4.0), revision="old")  # the clock was set back since
    for sources, into in (([first.db, second.db], db), ([second.db, first.db], str(tmp_path / "turned.db"))):
        merge(sources, into=into)
        with open_store(into) as store:
            assert {e.key.revision: e.stale for e in store.history(WORKLOAD)} == {
                "old": False,
                "new": True,
                "older": True,
            }


def test_installed_variant_decides_which_merged_trials_are_stale(db: str, place: Any) -> None:
    from tunebench import kernels
    from tunebench.workloads import parse

    variant, workload = kernels.variant("softmax/cuda_block"), parse(WORKLOAD)
    config = variant.default(workload, DEVICE)
    today = variant.revision(workload, config)
    source = place()
    trial = dataclasses.replace(key(variant="softmax/cuda_block"), config=config, revision=today)
    source.store.record(trial, Result(outcome=measured(1.0)))
    source.store.record(dataclasses.replace(trial, revision="other"), Result(outcome=measured(2.0)))
    merge([source.db], into=db)
    with open_store(db) as store:
        assert [e.stale for e in store.history(WORKLOAD)] == [False, True]


def test_merge_keeps_the_device_description_of_the_latest_run(db: str, place: Any) -> None:
    cooler = dataclasses.replace(DEVICE, tdp_w=100.0)
    first, second = place(), place(device=cooler)
    second._now += timedelta(hours=1)
    begin(second.store, cooler)
    for sources in ([first.db, second.db], [second.db, first.db]):
        merged = merge(sources, into=db)
        with open_store(db) as store:
            assert Device(**store.descriptors()[DEVICE.key]) == cooler
    assert [result.described for result in merged] == [[], [DEVICE.key]]


def test_merged_demand_is_summed_without_duplicates(db: str, place: Any) -> None:
    first, second = place(), place()
    for database, calls in ((first, 3), (second, 40)):
        database.store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=calls, time_us=calls / 2)])
    with open_store(db) as store:
        store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=500, time_us=1.0)])
    assert [result.demand for result in merge([first.db, second.db], into=db)] == [1, 1]
    assert [result.demand for result in merge([second.db, first.db], into=db)] == [0, 0]
    first.store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=1, time_us=1.0)])
    merge([first.db], into=db)
    with open_store(db) as store:
        [demand] = store.demand(DEVICE.key)
    assert (demand.calls, demand.time_us) == (544, 23.5)
    merge([db], into=second.db)  # merged back: no measurement is added twice
    assert [(d.calls, d.time_us) for d in second.store.demand(DEVICE.key)] == [(544, 23.5)]


def test_interrupted_merge_keeps_only_complete_sources(db: str, place: Any) -> None:
    first, second = place(), place()
    first.record(0, 1, measured(1.0))
    second.record(1, 2, measured(2.0))
    done: list[MergeResult] = []

    def interrupt(source: str, looked: int, total: int) -> None:
        if source == second.db and looked:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge([first.db, second.db], into=db, watcher=interrupt, done=done.append)
    assert [result.database for result in done] == [first.db]
    assert contents(db) == contents(first.db)
    with open_store(db) as store:
        assert store.stats().runs == 1


@pytest.mark.slow
def test_many_trials_are_merged_in_chunks(db: str, place: Any) -> None:
    origin = place()
    with origin.store.writing():
        pass
    outcomes = [added(number % 700, measured(1.0 + number)) for number in range(1400)]
    origin.store.add([batch(*outcomes)])
    seen: list[tuple[int, int]] = []
    with open_store(db) as store:
        begin(store)
        store.record(key(0), Result(outcome=Crashed(reason="x")))
    [merged] = merge([origin.db], into=db, watcher=lambda source, done, total: seen.append((done, total)))
    assert (merged.added, merged.known) == (1400, 0)
    assert seen[-1] == (1400, 1400)
    with open_store(db) as store:
        tiles = [
            e.key.config["tile"] for e in store.history(WORKLOAD) if isinstance(e.result.outcome, Measured)
        ]
        assert tiles == [number % 700 for number in range(1400)]
        assert store.spaces() == {key().space: 700}
    assert merge([origin.db], into=db)[0].known == 1400


def test_unreadable_source_is_refused_before_the_merge(db: str, place: Any, tmp_path: Path) -> None:
    source = place()
    source.record(0, 1, measured(1.0))
    link = tmp_path / "link.db"
    link.symlink_to(source.db)
    with pytest.raises(InputError, match="into itself"):
        merge([source.db], into=str(link))
    with pytest.raises(InputError, match="into itself"):
        merge([db], into=db)
    with pytest.raises(InputError, match="at least one database"):
        merge([], into=db)
    with pytest.raises(DatabaseError, match="does not exist"):
        merge([source.db, str(tmp_path / "none.db")], into=db)
    if locate(db).path is not None:
        assert not Path(db).exists()


def test_merge_of_a_server_into_a_file(server: Any, tmp_path: Path) -> None:
    remote = Place(server.new_database())
    for number, outcome in enumerate(EVERY_OUTCOME):
        remote.record(number, number, outcome)
    into = str(tmp_path / "file.db")
    [merged] = merge([remote.db], into=into)
    remote.store.close()
    assert (merged.added, merged.database) == (len(EVERY_OUTCOME), str(locate(remote.db)))
    assert contents(into) == contents(remote.db)
    assert merge([into], into=remote.db)[0].added == 0


def test_measurements_that_an_import_refuses_are_not_merged(db: str, place: Any) -> None:
    source = place()
    for number in range(5):
        source.record(number, number, measured(3.0), bound_us=2.0)
    source.record(9, 1, measured(4.0), bound_us=2.0)  # the trial has another, true measurement
    with source.store.writing() as connection:
        wrong = ("median_us = 5e-324", "median_us = 9.0", "bound_us = 3.5", "detail = '{}'")
        for trial, change in enumerate(wrong, start=1):
            first = f"(SELECT min(id) FROM measurement WHERE trial_id = {trial})"
            connection.exec_driver_sql(f"UPDATE measurement SET {change} WHERE id = {first}")
    [merged] = merge([source.db], into=db)
    assert (merged.added, merged.refused, len(merged.faults)) == (2, 4, 4)
    assert "below the shortest possible time" in merged.faults[0]
    assert "is below its lower bound of 3.5 us" in merged.faults[2]
    assert sorted(entry.result.outcome.median_us for entry in contents(db)) == [3.0, 4.0]
    [repeated] = merge([source.db], into=db)
    assert (repeated.added, repeated.known, repeated.refused) == (0, 2, 4)


def test_unreadable_rows_name_the_verify_command(db: str, place: Any) -> None:
    source = place()
    source.record(0, 1, measured(1.0))
    with source.store.writing() as connection:
        connection.exec_driver_sql("UPDATE measurement SET conditions = '{'")
    with pytest.raises(DatabaseError, match=r"cannot be read .*tunebench db verify"):
        merge([source.db], into=db)
    with open_store(db) as store:
        assert store.stats().runs == 0
