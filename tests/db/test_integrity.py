"""`db verify`: a database that tuners wrote passes, and every corruption is found."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3

import pytest

from tests.db.support import DEVICE, EVERY_OUTCOME, TWIN, WORKLOAD, begin, key, measured
from tunebench import kernels
from tunebench.db import Demand, locate, new_owner, open_store
from tunebench.db.engine import create_engine
from tunebench.db.integrity import KINDS, NOTES, Integrity, examine, fix
from tunebench.db.schema import measurement_table
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
        integrity = examine(store, lambda done, total: seen.append((done, total)))
    assert integrity.clean
    assert dict(integrity.counts) == {"unknown": len(EVERY_OUTCOME)}  # of softmax/example
    assert seen[-1] == (integrity.rows, integrity.rows)
    assert integrity.rows == 2 + 2 + 13 + 12 + 1 + 1  # devices, runs, trials, measurements, demand, origin


def test_records_of_triton_autotune_need_no_installed_source(filled: str) -> None:
    change(filled, "UPDATE trial SET workload = 'triton_scale:n=8', variant = 'triton_scale/autotune'")
    assert found_in(filled).counts["unknown"] == 0


CHANGED_COLUMNS = [
    ("future", "measurement", 2, "recorded_at = '2999-01-01 00:00:00.000000+00:00'"),
    ("bound", "measurement", 2, "bound_us = 100"),
    ("figure", "measurement", 2, "fastest_us = 3"),
    ("figure", "measurement", 2, "ci_low_us = 1000"),
    ("figure", "measurement", 2, "median_us = 5e-324"),
    ("figure", "measurement", 2, "median_us = median_us * 1.005, ci_high_us = median_us * 1.001"),
    ("unreadable", "measurement", 2, "detail = '{}'"),
    ("unreadable", "measurement", 2, """resources = '{"wheels": 4}'"""),
    ("config", "trial", 2, "config = 'tile=7'"),
    ("unreadable", "trial", 2, """config_values = '{"tile": [1]}'"""),
    ("workload", "demand", 1, "workload = 'softmax:rows=0'"),
    ("device", "device", 2, "key = 'sm_90:b100,sm=1'"),
    ("device", "device", 2, "sm_count = 3"),
    ("unreadable", "device", 2, "descriptor = '{}'"),
    ("source", "trial", 1, "revision = 'r0'"),
]
COLUMNS = ", ".join(column.name for column in measurement_table.c if column.name != "id")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "place", "statement"),
    [
        *(
            (kind, f"{table} {row}", f"UPDATE {table} SET {change} WHERE id = {row}")
            for kind, table, row, change in CHANGED_COLUMNS
        ),
        ("workload", "run ", "UPDATE run SET workload = 'softmax:cols=64,rows=64,dtype=f32'"),
        ("reference", "trial 2", "DELETE FROM measurement WHERE id = 2"),
        (
            "duplicate",
            "measurement 77",
            f"INSERT INTO measurement (id, {COLUMNS}) SELECT 77, {COLUMNS} FROM measurement WHERE id = 2",
        ),
    ],
)
def test_corrupted_row_is_found_and_named(kind: str, place: str, statement: str, filled: str) -> None:
    change(filled, statement)
    integrity = found_in(filled)
    assert not integrity.clean
    assert set(integrity.counts) - set(NOTES) == {kind}
    assert all(finding.place.startswith(place) for finding in integrity.first[kind])
    assert integrity.first[kind][0].reason


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
    integrity = found_in(filled)
    assert set(integrity.counts) - set(NOTES) == {"rule", "reference", "unreadable", "figure"}
    findings = [
        str(finding) for kind in ("rule", "reference", "unreadable") for finding in integrity.first[kind]
    ]
    for expected in (
        "measurement 2: it violates ck_measurement_kind",
        "measurement 3: it violates ck_measurement_purpose",
        "measurement 1: median_us has the wrong type",
        "demand 1: it violates ck_demand_amount",
        "measurement 4: its trial_id refers to a missing trial",
    ):
        assert expected in findings
    assert any(line.startswith("measurement 6: its reason cannot be decoded") for line in findings)


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
    integrity = found_in(filled)
    assert set(integrity.counts) == {"damaged"}


def test_fix_marks_trials_as_stale_and_deletes_nothing(filled: str) -> None:
    change(
        filled,
        "UPDATE trial SET revision = 'r0' WHERE id = 1",
        f"UPDATE trial SET variant = '{OWN}', revision = 'r1' WHERE id = 3",
    )
    integrity = found_in(filled)
    assert (integrity.counts["source"], integrity.counts["space"]) == (1, 1)
    with open_store(filled) as store:
        before = len(store.history(WORKLOAD))
        fix(store, integrity)
        assert integrity.clean
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
    invalid = next(
        changed
        for parameter in variant.space.parameters
        for value in parameter.values
        if str(changed := type(default)({**default, parameter.name: value})) not in allowed
    )
    with open_store(filled) as store:
        trial = dataclasses.replace(key(variant=OWN), config=invalid)
        store.record(trial, Result(outcome=measured(1.0)))
    integrity = found_in(filled)
    assert integrity.counts["space"] == 1
    assert "violates" in integrity.first["space"][0].reason


def test_claims_of_dead_tuners_are_notes_not_errors(filled: str) -> None:
    change(
        filled,
        "UPDATE trial SET claim_expires_at = '2026-01-01 00:00:00.000000+00:00' WHERE state = 'claimed'",
    )
    integrity = found_in(filled)
    assert integrity.clean
    assert integrity.counts["claim"] == 1


def test_first_findings_of_a_kind_are_kept_and_all_are_counted() -> None:
    integrity = Integrity()
    for number in range(30):
        integrity.add("rule", f"trial {number}", "x\n" * 1000)
    assert (integrity.counts["rule"], len(integrity.first["rule"])) == (30, 10)
    assert len(str(integrity.first["rule"][0])) < 600
    assert set(NOTES) <= set(KINDS)
