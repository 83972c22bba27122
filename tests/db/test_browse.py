"""Pages of trials in every order, and the plans of queries that must not depend on the number of trials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.db.support import DEVICE, EVERY_OUTCOME, TWIN, VARIANT, WORKLOAD, begin, key, measured, result
from tunebench.db import RunSummary, open_store
from tunebench.db.browse import TRIAL_ORDERS, Browser, Changes, TrialFilter, open_browser
from tunebench.errors import DatabaseError
from tunebench.outcome import FAILURES, CompileFailed, Pruned, Result

TRIALS = len(EVERY_OUTCOME) + 5 + 1 + 1
"""Trials of `fill`: with equal times, of another revision, and claimed."""


def fill(db: str) -> str:
    """Write trials of every outcome, equal times, a stale and a claimed one; return the id of the run."""
    with open_store(db) as store:
        begin(store, TWIN)
        run = begin(store)
        for number, outcome in enumerate(EVERY_OUTCOME):
            store.record(key(number), Result(outcome=outcome), run_id=run, bound_us=2.5)
        for number in range(20, 25):
            store.record(key(number), result(4.0), run_id=run)
        store.record(key(20, revision="r2"), result(3.0), run_id=run)
        store.record(key(21), result(5.0), run_id=run, purpose="finalist")
        store.claim(key(30), "someone")
    return run


@pytest.mark.slow
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("order", TRIAL_ORDERS)
def test_pages_of_trials_are_complete_in_both_directions(db: str, order: str, descending: bool) -> None:
    fill(db)
    with open_browser(db) as browser:
        device = next(entry.id for entry in browser.devices() if entry.key == DEVICE.key)
        ordering: dict[str, Any] = {"order": order, "descending": descending}
        whole = browser.trials(device, WORKLOAD, limit=100, **ordering)
        pages = [browser.trials(device, WORKLOAD, limit=4, **ordering)]
        while pages[-1].after:
            cursor = ("after", pages[-1].rows[-1].cursor)
            pages.append(browser.trials(device, WORKLOAD, limit=4, place=cursor, **ordering))
        rows = [row for page in pages for row in page.rows]
        assert rows == list(whole.rows)
        assert len({row.id for row in rows}) == TRIALS
        back = [pages[-1]]
        while back[0].before:
            cursor = ("before", back[0].rows[0].cursor)
            back.insert(0, browser.trials(device, WORKLOAD, limit=4, place=cursor, **ordering))
        assert [row for page in back for row in page.rows] == rows


def test_entry_counts_and_trial_shows_its_finalist(db: str) -> None:
    fill(db)
    with open_browser(db) as browser:
        (entry,) = browser.entries(WORKLOAD)
        assert (entry.trials, entry.stale, entry.claimed) == (TRIALS, 1, 1)
        assert (entry.measurements, entry.measured, entry.predicted) == (TRIALS, 8, 1)
        assert entry.failed == sum(isinstance(outcome, FAILURES) for outcome in EVERY_OUTCOME)
        assert (entry.fastest_us, entry.least_bound_us) == (3.0, 2.5)
        answers = [(answer.kind, answer.stale) for answer in entry.answers]
        assert answers == [("measured", False), ("measured", True), ("predicted", False)]
        (row,) = browser.trials(entry.device_id, WORKLOAD, select=TrialFilter(config="tile=21,")).rows
        assert (row.purpose, row.time_us) == ("finalist", 5.0)
        assert browser.workloads() == [(WORKLOAD, (entry.device_id,))]
        (group,) = browser.stale_groups()
        assert (group.variant, group.trials) == (VARIANT, 1)


def test_changes_name_the_workloads(db: str) -> None:
    run = fill(db)
    with open_browser(db) as browser, open_store(db) as store:
        runs: set[str] = set()
        before = browser.changes()
        assert browser.changed_workloads(Changes(), runs) == {WORKLOAD}
        assert run in runs
        assert browser.changes() == before
        store.record(key(30), Result(outcome=measured(9.0)), run_id=run)
        assert browser.changes() != before
        before = browser.changes()
        store.recheck(DEVICE.key, WORKLOAD, VARIANT, lambda config: "r1")
        assert browser.changes().stale != before.stale


def test_runs_without_a_time_have_failed(db: str) -> None:
    with open_store(db) as store:
        runs = {name: begin(store) for name in ("timed", "failed", "empty", "pruned", "known")}
        store.record(key(1), result(4.0), run_id=runs["timed"])
        store.record(key(2), Result(outcome=CompileFailed(reason="first")), run_id=runs["timed"])
        for number, reason in ((3, "second"), (4, "third"), (5, "third")):
            store.record(key(number), Result(outcome=CompileFailed(reason=reason)), run_id=runs["failed"])
        store.record(key(6), Result(outcome=Pruned(bound_us=2.0, incumbent_us=1.0)), run_id=runs["pruned"])
        store.record(key(7), Result(outcome=CompileFailed(reason="fourth")), run_id=runs["known"])
        for name, run in runs.items():
            store.finish_run(run, RunSummary(wall_s=1.0, cached=8 if name == "known" else 0))
    with open_browser(db) as browser:
        assert [run.id for run in browser.runs(state="failed")] == [runs["failed"]]
        assert runs["failed"] not in {run.id for run in browser.runs(state="finished")}
        assert len(browser.runs(state="finished")) == 4
        reasons = browser.first_failures(list(runs.values()))
        assert reasons == {runs["timed"]: "first", runs["failed"]: "second", runs["known"]: "fourth"}
        failures = [(failure.reason, failure.count) for failure in browser.failures(runs["failed"])]
        assert failures == [("third", 2), ("second", 1)]


def test_queries_that_pages_repeat_read_no_whole_table(tmp_path: Path) -> None:
    db = str(tmp_path / "store.db")
    run = fill(db)
    with open_browser(db) as browser:
        repeated: tuple[Callable[[Browser], Any], ...] = (
            lambda browser: browser.changes(),
            lambda browser: browser.workloads(),
            lambda browser: browser.stale_groups(),
            lambda browser: browser.runs(),
            lambda browser: browser.runs(state="failed"),
            lambda browser: browser.unfinished_runs(),
            lambda browser: browser.first_failures([run]),
            lambda browser: browser.failures(run),
            lambda browser: browser.run_points(run),
            lambda browser: browser.trials(1, WORKLOAD),
            lambda browser: browser.points(1, WORKLOAD),
            lambda browser: browser.entries(WORKLOAD),
        )
        statements: list[tuple[str, Any]] = []
        sa.event.listen(
            browser._engine,
            "before_cursor_execute",
            lambda c, cursor, text, parameters, *_: statements.append((text, parameters)),
        )
        for query in repeated:
            query(browser)
        queries = [pair for pair in statements if pair[0].startswith(("SELECT", "WITH"))]
        assert len(queries) > len(repeated)
        with browser._engine.connect() as connection:
            for text, parameters in queries:
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", parameters)
                scans = [
                    line
                    for *_, line in plan
                    if line.startswith(("SCAN trial", "SCAN measurement", "SCAN t", "SCAN m"))
                ]
                assert all("ix_trial_" in line for line in scans), (
                    text,
                    scans,
                )  # partial, or counted by an index


def test_endless_query_fails(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunebench.db.browse.browser.QUERY_S", 0.2)
    fill(db)
    endless = sa.text("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT 1 FROM n) SELECT sum(i) FROM n")
    with open_browser(db) as browser:
        with pytest.raises(DatabaseError, match=r"interrupted|timeout"), browser.reading() as connection:
            connection.execute(endless)
        assert browser.workloads()  # later queries have their own time
