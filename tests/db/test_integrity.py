"""`db verify`: a database that tuners wrote passes, and every corruption is found."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from typing import Any

import pytest

from tests.db.test_stores import DEVICE, EVERY_OUTCOME, TWIN, WORKLOAD, begin, key, measured
from tunebench import kernels
from tunebench.db import Demand, locate, new_owner, open_store
from tunebench.db.engine import create_engine
from tunebench.db.integrity import KINDS, NOTES, Integrity, examine, fix
from tunebench.outcome import Result
from tunebench.workloads import parse

OWN = "softmax/cuda_block"


@pytest.fixture
def filled(db: str) -> str:
    """A database with every outcome, a claim, and a trial of an installed variant."""
    variant, workload = kernels.variant(OWN), parse(WORKLOAD)
    config = variant.default(workload, DEVICE)
    trial = dataclasses.replace(key(variant=OWN), config=config, revision=variant.revision(workload, config))
    with open_store(db) as store:
        run = begin(store)
        begin(store, TWIN)
        store.record(trial, Result(outcome=measured(1.0)), run_id=run)
        for number, outcome in enumerate(EVERY_OUTCOME):
            store.record(key(number), Result(outcome=outcome), run_id=run, bound_us=0.5)
        store.claim(key(99), new_owner())
        store.add_demand(DEVICE, [Demand(workload=WORKLOAD, calls=3, time_us=2.0)])
    return db


def found_in(db: str) -> Integrity:
    with open_store(db, read_only=True) as store:
        return examine(store)


def change(db: str, *statements: str) -> None:
    """Write to a database without its constraints."""
    engine = create_engine(locate(db), foreign_keys=False)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        connection.commit()
        for statement in statements:
            connection.exec_driver_sql(statement)
        connection.commit()
    engine.dispose()


def test_database_of_a_tuner_passes_the_integrity_check(filled: str) -> None:
    seen: list[tuple[int, int]] = []
    with open_store(filled, read_only=True) as store:
        found = examine(store, lambda done, total: seen.append((done, total)))
    assert found.clean
    assert dict(found.counts) == {"unknown": len(EVERY_OUTCOME)}  # of softmax/example
    assert seen[-1] == (found.rows, found.rows)
    assert found.rows == 2 + 2 + 11 + 10 + 1 + 1  # devices, runs, trials, measurements, demand, origin


FIRST_KINDS: dict[str, tuple[str, str, str]] = {
    "two moments": (
        "UPDATE measurement SET recorded_at = '2999-01-01 00:00:00.000000+00:00' WHERE id = 2",
        "future",
        "measurement 2",
    ),
    "a time below its bound": (
        "UPDATE measurement SET bound_us = 100 WHERE id = 2",
        "bound",
        "measurement 2",
    ),
    "a wrong fastest sample": (
        "UPDATE measurement SET fastest_us = 3 WHERE id = 2",
        "figure",
        "measurement 2",
    ),
    "a descending interval": (
        "UPDATE measurement SET ci_low_us = 1000 WHERE id = 2",
        "figure",
        "measurement 2",
    ),
    "an outcome without its fields": (
        "UPDATE measurement SET detail = '{}' WHERE id = 2",
        "unreadable",
        "measurement 2",
    ),
    "unknown resources": (
        """UPDATE measurement SET resources = '{"wheels": 4}' WHERE id = 2""",
        "unreadable",
        "measurement 2",
    ),
    "a text that differs from the values": (
        "UPDATE trial SET config = 'tile=7' WHERE id = 2",
        "config",
        "trial 2",
    ),
    "values of a wrong type": (
        """UPDATE trial SET config_values = '{"tile": [1]}' WHERE id = 2""",
        "unreadable",
        "trial 2",
    ),
    "a workload that is not canonical": (
        "UPDATE run SET workload = 'softmax:cols=64,rows=64,dtype=f32'",
        "workload",
        "run ",
    ),
    "an invalid workload": ("UPDATE demand SET workload = 'softmax:rows=0'", "workload", "demand 1"),
    "a device with another key": (
        "UPDATE device SET key = 'sm_90:b100,sm=1' WHERE id = 2",
        "device",
        "device 2",
    ),
    "a device of another size": ("UPDATE device SET sm_count = 3 WHERE id = 2", "device", "device 2"),
    "a device without description": (
        "UPDATE device SET descriptor = '{}' WHERE id = 2",
        "unreadable",
        "device 2",
    ),
    "a trial without a measurement": ("DELETE FROM measurement WHERE id = 2", "reference", "trial 2"),
    "a duplicate measurement": (
        "INSERT INTO measurement SELECT {columns} FROM measurement WHERE id = 2",
        "duplicate",
        "measurement 77",
    ),
    "another source": ("UPDATE trial SET revision = 'r0' WHERE id = 1", "source", "trial 1"),
}


@pytest.mark.parametrize("what", FIRST_KINDS)
def test_corrupted_row_is_found_and_named(what: str, filled: str) -> None:
    statement, kind, place = FIRST_KINDS[what]
    columns = ", ".join(("77", *(c.name for c in _measurement_columns() if c.name != "id")))
    change(filled, statement.format(columns=columns) if "{columns}" in statement else statement)
    found = found_in(filled)
    assert not found.clean
    assert set(found.counts) - set(NOTES) == {kind}
    assert all(finding.place.startswith(place) for finding in found.first[kind])
    assert found.first[kind][0].reason


def _measurement_columns() -> Any:
    from tunebench.db.schema import measurement_table

    return measurement_table.c


def test_constraint_violations_are_found(filled: str) -> None:
    if locate(filled).path is None:
        pytest.skip("PostgreSQL enforces all constraints")
    change(
        filled,
        "UPDATE measurement SET kind = 'lucky' WHERE id = 2",
        "UPDATE measurement SET purpose = 'fun' WHERE id = 3",
        "UPDATE measurement SET trial_id = 999 WHERE id = 4",
        "UPDATE measurement SET median_us = 'quick' WHERE id = 1",
        "UPDATE measurement SET reason = CAST(x'ff' AS TEXT) WHERE id = 6",
        "UPDATE demand SET calls = 0",
    )
    found = found_in(filled)
    assert set(found.counts) - set(NOTES) == {"rule", "reference", "unreadable", "figure"}
    told = [str(finding) for kind in ("rule", "reference", "unreadable") for finding in found.first[kind]]
    for expected in (
        "measurement 2: it violates ck_measurement_kind",
        "measurement 3: it violates ck_measurement_purpose",
        "measurement 1: median_us has the wrong type",
        "demand 1: it violates ck_demand_amount",
        "measurement 4: its trial_id refers to a missing trial",
    ):
        assert expected in told
    assert any(line.startswith("measurement 6: its reason cannot be decoded") for line in told)


def test_damaged_file_is_reported_without_row_checks(filled: str) -> None:
    path = locate(filled).path
    if path is None:
        pytest.skip("servers check their own files")
    change(filled, "PRAGMA wal_checkpoint(TRUNCATE)")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'ix_trial_workload'"
        (page,) = connection.execute(query).fetchone()
    data = bytearray(path.read_bytes())
    data[4096 * (page - 1) + 100 : 4096 * page] = b"\xff" * (4096 - 100)
    path.write_bytes(data)
    found = found_in(filled)
    assert set(found.counts) == {"damaged"}


def test_fix_marks_trials_as_stale_and_deletes_nothing(filled: str) -> None:
    change(
        filled,
        "UPDATE trial SET revision = 'r0' WHERE id = 1",
        f"UPDATE trial SET variant = '{OWN}', revision = 'r1' WHERE id = 3",
    )
    found = found_in(filled)
    assert (found.counts["source"], found.counts["space"]) == (1, 1)
    with open_store(filled) as store:
        before = len(store.history(WORKLOAD))
        fix(store, found)
        assert found.clean
        assert {e.key.revision for e in store.history(WORKLOAD) if e.stale} >= {"r0"}
        assert (len(store.history(WORKLOAD)), store.stats().stale) == (before, 2)
    assert found_in(filled).clean


def test_configuration_that_violates_a_constraint_is_reported(filled: str) -> None:
    variant, workload = kernels.variant(OWN), parse(WORKLOAD)
    default = variant.default(workload, DEVICE)
    allowed = {
        str(variant.configs(workload, DEVICE).config(row))
        for row in range(len(variant.configs(workload, DEVICE)))
    }
    other = next(
        changed
        for parameter in variant.space.parameters
        for value in parameter.values
        if str(changed := type(default)({**default, parameter.name: value})) not in allowed
    )
    with open_store(filled) as store:
        trial = dataclasses.replace(key(variant=OWN), config=other)
        store.record(trial, Result(outcome=measured(1.0)))
    found = found_in(filled)
    assert found.counts["space"] == 1
    assert "violates" in found.first["space"][0].reason


def test_claims_of_dead_tuners_are_notes_not_errors(filled: str) -> None:
    change(
        filled,
        "UPDATE trial SET claim_expires_at = '2026-01-01 00:00:00.000000+00:00' WHERE state = 'claimed'",
    )
    found = found_in(filled)
    assert found.clean
    assert found.counts["claim"] == 1


def test_first_findings_of_a_kind_are_kept_and_all_are_counted() -> None:
    found = Integrity()
    for number in range(30):
        found.add("rule", f"trial {number}", "x\n" * 1000)
    assert (found.counts["rule"], len(found.first["rule"])) == (30, 10)
    assert len(str(found.first["rule"][0])) < 600
    assert set(NOTES) <= set(KINDS)
