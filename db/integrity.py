"""Integrity check of a database: its file, the constraints of its schema, and the contents of every row.

    found = examine(store)
    found.clean, found.counts, found.first

The check writes nothing. `fix` marks trials of changed sources as stale, and deletes faults of the
environment that earlier versions recorded as failures of kernels; nothing else is deleted.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from tunebench.db import schema
from tunebench.db.bulk import CLOCK_TOLERANCE
from tunebench.db.jsonl_codec import check_workload
from tunebench.db.owner import is_dead
from tunebench.db.reader import Reader
from tunebench.db.record import AUTOTUNED, RECORDED, SpaceKey
from tunebench.db.row_checks import (
    check_device,
    check_measurement,
    check_trial,
    decode_row,
    lenient_text,
    raw_columns,
)
from tunebench.db.schema import device_table, measurement_table, run_table, trial_table
from tunebench.db.staleness import Revision, installed_revision, mark_stale
from tunebench.db.store import Store
from tunebench.device import Device
from tunebench.errors import ConfigError, InputError
from tunebench.fault import names_environment
from tunebench.outcome import CompileFailed, LaunchFailed
from tunebench.space import Config

__all__ = ["FIRST", "KINDS", "NOTES", "Finding", "Integrity", "examine", "fix"]

KINDS = {
    "damaged": "the file is damaged: restore a copy, or recover what is readable by sqlite3 FILE .recover",
    "rule": "rows that violate a constraint of the schema",
    "reference": "rows that refer to a missing row, or that no row refers to",
    "unreadable": "rows that cannot be decoded",
    "figure": "measurements with contradictory values",
    "workload": "workloads that cannot be parsed, or are not canonical",
    "config": "configurations whose text differs from their values",
    "device": "devices whose key differs from their description",
    "future": "times in the future: later imports would count as older",
    "duplicate": "duplicate measurements",
    "bound": "measurements that are faster than their lower bound",
    "space": "current trials with configurations that the installed space does not contain (--fix)",
    "source": "current trials whose source has changed since (--fix)",
    "environment": "faults of the environment that are recorded as failures of kernels (--fix)",
    "claim": "claims of dead tuners; the next tuner takes them over",
    "unknown": "trials of kernels that are not installed here: name their files by --variant-file",
}
"""Kinds of findings, in the order of the report."""

NOTES = ("claim", "unknown")
"""Kinds that are reported but are not errors."""

_BLAMED = (CompileFailed.kind, LaunchFailed.kind)

FIRST = 10
"""Findings of each kind that are kept; the rest are only counted."""

ProgressCallback = Callable[[int, int], None]
"""Progress callback: rows checked, and their total."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: its kind, the row, and the reason."""

    kind: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


@dataclass(slots=True)
class Integrity:
    """Result of an integrity check.

    Attributes:
        rows: Number of rows checked.
        counts: Number of findings of each kind; see `KINDS`.
        first: First findings of each kind.
        outdated: Ids of the trials that `fix` marks as stale.
        environment: Ids of the measurements that `fix` deletes.
    """

    rows: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[Finding]] = field(default_factory=dict)
    outdated: list[int] = field(default_factory=list)
    environment: list[int] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether there is no finding, except notes."""
        return not set(self.counts) - set(NOTES)

    def add(self, kind: str, place: str, reason: str) -> None:
        """Add a finding."""
        assert kind in KINDS, kind
        self.counts[kind] += 1
        findings = self.first.setdefault(kind, [])
        if len(findings) < FIRST:
            findings.append(Finding(kind, place, " ".join(ascii(reason)[1:-1].split())[:500]))


def examine(store: Reader, watcher: ProgressCallback | None = None) -> Integrity:
    """Check a database.

    Args:
        store: The database; may be open for reading only.
        watcher: Progress callback.

    Raises:
        DatabaseError: if it cannot be read at all.
    """
    integrity = Integrity()
    with store.reading() as connection, lenient_text(connection):
        if not _check_file(connection, integrity):
            return integrity
        check_rules(connection, integrity)
        check_rows(connection, integrity, watcher or (lambda done, total: None))
    return integrity


def fix(store: Store, integrity: Integrity) -> None:
    """Mark current trials with a changed source as stale, and delete recorded faults of the environment.

    `lookup` returns stale trials only if there is no other. Trials without another measurement are deleted.
    """
    with store.writing() as connection:
        mark_stale(connection, {True: integrity.outdated})
        for start in range(0, len(integrity.environment), 500):
            ids = integrity.environment[start : start + 500]
            measured, trial = measurement_table.c, trial_table.c
            trials = sa.select(measured.trial_id).where(measured.id.in_(ids))
            affected = connection.execute(trials).scalars().all()
            connection.execute(measurement_table.delete().where(measured.id.in_(ids)))
            remaining = sa.select(measured.id).where(measured.trial_id == trial.id).exists()
            connection.execute(
                trial_table.delete().where(trial.id.in_(affected), trial.state == "done", ~remaining)
            )
    for kind in ("space", "source", "environment"):
        integrity.counts.pop(kind, None)
        integrity.first.pop(kind, None)


# -- the file --------------------------------------------------------------------------------------


def _check_file(connection: sa.Connection, integrity: Integrity) -> bool:
    """Run SQLite's integrity check; return whether the file is intact. Servers check their own files."""
    if connection.dialect.name != "sqlite":
        return True
    try:
        lines = connection.exec_driver_sql("PRAGMA integrity_check(100)").scalars().all()
    except sa.exc.DatabaseError as error:
        lines = [str(error.orig)]
    # It also reports NOT NULL, CHECK and UNIQUE violations, which `check_rules` reports by row.
    damaged = [line for line in lines if line != "ok" and not line.startswith(_OF_ROWS)]
    for line in damaged:
        integrity.add("damaged", "file", str(line))
    return not damaged


_OF_ROWS = ("CHECK constraint", "NULL value", "non-unique entry", "NUMERIC value", "TEXT value", "non-")


# -- the schema ------------------------------------------------------------------------------------


def check_rules(connection: sa.Connection, integrity: Integrity) -> None:
    """Check every row against every constraint: writes that bypass tunebench may violate them."""
    for table in schema.METADATA.sorted_tables:
        for row_name, rule in _rule_violations(connection, table):
            integrity.add("rule", row_name, rule)
        for constraint in table.foreign_key_constraints:
            (column,), (element,) = constraint.columns, constraint.elements
            referenced = element.column
            exists = sa.select(referenced).where(referenced == column).exists()
            lost = sa.select(table.c.id).where(column.is_not(None), ~exists)
            for id_ in connection.execute(lost).scalars():
                reason = f"its {column.name} refers to a missing {referenced.table.name}"
                integrity.add("reference", f"{table.name} {id_}", reason)
    trial, measurement = trial_table.c, measurement_table.c
    timed = sa.select(measurement.id).where(measurement.trial_id == trial.id).exists()
    for id_, state in connection.execute(
        sa.select(trial.id, trial.state).where((trial.state == "done") != timed)
    ):
        reason = (
            "it is done but has no measurement" if state == "done" else "it is claimed but has a measurement"
        )
        integrity.add("reference", f"trial {id_}", reason)
    for id_ in connection.execute(_duplicates()).scalars():
        integrity.add("duplicate", f"measurement {id_}", "its trial has an equal one")


def _rule_violations(connection: sa.Connection, table: sa.Table) -> Iterator[tuple[str, str]]:
    """Yield the rows that violate a constraint on a single row, and rows that violate UNIQUE."""
    rules, query = _rules(table, connection.dialect.name)
    for id_, *broken in connection.execute(query):
        for rule, is_broken in zip(rules, broken, strict=True):
            if is_broken:
                yield f"{table.name} {id_}", rule
    for constraint in table.constraints:
        if isinstance(constraint, sa.UniqueConstraint):
            rank = sa.func.row_number().over(partition_by=list(constraint.columns), order_by=table.c.id)
            ranked = sa.select(table.c.id, rank.label("place")).subquery()
            for id_ in connection.execute(sa.select(ranked.c.id).where(ranked.c.place > 1)).scalars():
                yield f"{table.name} {id_}", f"{constraint.name} occurs twice"


@functools.cache
def _rules(table: sa.Table, dialect: str) -> tuple[tuple[str, ...], sa.Select[Any]]:
    """Return the single-row constraints of a table, and a query with a column for each violation."""
    rules: dict[str, sa.ColumnElement[bool]] = {
        f"{column.name} is missing": column.is_(None) for column in table.c if not column.nullable
    }
    for constraint in table.constraints:
        if isinstance(constraint, sa.CheckConstraint):
            holds: sa.ColumnElement[bool] = sa.literal_column(f"({constraint.sqltext})", sa.Boolean())
            rules[f"it violates {constraint.name}"] = sa.not_(holds)
    if dialect == "sqlite":  # SQLite columns accept values of any type
        for column in table.c:
            storage_class = sa.func.typeof(column)
            rules[f"{column.name} has the wrong type"] = storage_class.not_in(
                ("null", *_storage_classes(column))
            )
    id_: sa.ColumnElement[Any] = sa.type_coerce(table.c.id, sa.types.NullType())
    broken = [rule.label(f"rule{number}") for number, rule in enumerate(rules.values())]
    return tuple(rules), sa.select(id_, *broken).where(sa.or_(*rules.values()))


def _storage_classes(column: sa.Column[Any]) -> tuple[str, ...]:
    match column.type:
        case sa.Boolean() | sa.Integer():
            return ("integer",)
        case sa.Float():
            return ("real", "integer")
    return ("text",)


def _duplicates() -> sa.Select[Any]:
    at = measurement_table.c
    alike = (at.trial_id, at.purpose, at.kind, at.recorded_at, at.median_us, at.predicted_us, at.fastest_us)
    columns = (*alike, at.reason, sa.cast(at.samples_us, sa.Text))
    rank = sa.func.row_number().over(partition_by=columns, order_by=at.id)
    ranked = sa.select(at.id, rank.label("place")).subquery()
    return sa.select(ranked.c.id).where(ranked.c.place > 1)


# -- the rows --------------------------------------------------------------------------------------


def check_rows(connection: sa.Connection, integrity: Integrity, watcher: ProgressCallback) -> None:
    """Check the contents of every row."""
    tables = schema.METADATA.sorted_tables
    count = sum(connection.execute(sa.select(sa.func.count()).select_from(t)).scalar_one() for t in tables)
    looking = _RowChecker(integrity)
    for table in tables:
        chosen = sa.select(*raw_columns(table)).order_by(table.c.id)
        for row in connection.execution_options(yield_per=1000).execute(chosen).mappings():
            looking.take(table, row)
            integrity.rows += 1
            if integrity.rows % 1000 == 0:
                watcher(integrity.rows, count)
    watcher(integrity.rows, count)


class _RowChecker:
    """Checks rows in order: devices come before the trials measured on them."""

    def __init__(self, integrity: Integrity) -> None:
        self._found = integrity
        self._latest = datetime.now(UTC) + CLOCK_TOLERANCE
        self._devices: dict[int, Device] = {}
        self._revisions: dict[tuple[int, str, str], Revision | None] = {}

    def take(self, table: sa.Table, raw: Mapping[Any, Any]) -> None:
        """Check one row."""
        row_name = f"{table.name} {raw['id']}"
        try:
            row = decode_row(raw, table)
        except ValueError as error:
            self._found.add("unreadable", row_name, str(error))
            return
        for kind, reason in self._of(table, row):
            self._found.add(kind, row_name, reason)

    def _of(self, table: sa.Table, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for column in table.c:
            value = row[column.name]
            if isinstance(value, datetime) and column.name != "claim_expires_at" and value > self._latest:
                yield "future", f"its {column.name} is {value.isoformat()}"
        if "workload" in table.c:
            yield from _check_workload(row["workload"])
        if table is device_table:
            faults = list(check_device(row))
            if not any(kind == "unreadable" for kind, _ in faults):
                self._devices[row["id"]] = Device(**row["descriptor"])
            yield from faults
        elif table is measurement_table:
            yield from check_measurement(row)
            if _is_suspect(row):
                self._found.environment.append(row["id"])
                yield "environment", row["reason"]
        elif table is trial_table:
            faults = list(check_trial(row))
            yield from faults or self._check_trial(row)
        elif table is run_table and not isinstance(row["versions"], dict):
            yield "unreadable", "its versions are not an object"

    def _check_trial(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if row["state"] == "claimed":
            gone = is_dead(row["claim_owner"] or "") or row["claim_expires_at"] < datetime.now(UTC)
            yield from [("claim", f"it is claimed by {row['claim_owner']}")] if gone else []
        elif not row["stale"] and not _is_of_program(row):
            yield from self._check_source(row)

    def _check_source(self, row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Check a current trial against the installed source."""
        if row["device_id"] not in self._devices:
            return
        device = self._devices[row["device_id"]]
        space = (row["device_id"], row["workload"], row["variant"])
        if space not in self._revisions:
            key = SpaceKey(device=device.key, workload=row["workload"], variant=row["variant"])
            self._revisions[space] = installed_revision(key, device)
        revision = self._revisions[space]
        if revision is None:
            yield "unknown", f"variant {row['variant']} for {row['workload']} is not installed"
            return
        try:
            changed = revision(Config(row["config_values"])) != row["revision"]
        except ConfigError as error:
            self._found.outdated.append(row["id"])
            yield "space", str(error)
        else:
            if changed:
                self._found.outdated.append(row["id"])
                yield (
                    "source",
                    f"the source of {row['variant']} has changed since {row['config']} was measured",
                )


def _is_of_program(row: Mapping[str, Any]) -> bool:
    """Return whether no source can be compared: a trial is recorded, or its program checks it."""
    return bool(row["workload"].startswith(RECORDED) or row["variant"].endswith(AUTOTUNED))


def _is_suspect(row: Mapping[str, Any]) -> bool:
    """Return whether a measurement is a fault of the environment, recorded as a failure of a kernel.

    Earlier versions did; later ones state the number of attempts in new processes.
    """
    detail = row["detail"] if isinstance(row["detail"], dict) else {}
    conditions = detail.get("conditions")
    tried = isinstance(conditions, dict) and "attempts" in conditions
    return row["kind"] in _BLAMED and not tried and names_environment(row["reason"] or "")


def _check_workload(text: str) -> Iterator[tuple[str, str]]:
    try:
        check_workload(text)
    except InputError as error:
        yield "workload", str(error)
