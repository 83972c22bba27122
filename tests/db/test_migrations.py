"""Upgrades and downgrades of databases of every released schema, on SQLite and PostgreSQL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.db.support import load_golden
from tests.support import needs_fork
from tunebench.db import downgrade, locate, migrate, open_store, schema, upgrade
from tunebench.db.engine import create_engine, write
from tunebench.db.integrity import examine
from tunebench.errors import DatabaseError, InputError, SchemaError, UnknownName

FIRST, HEAD = schema.REVISIONS[0], schema.HEAD
MADE_ANEW = {"alembic_version", "origin"}


def load(revision: str, db: str, folder: Path) -> None:
    """Create a database of an earlier schema with the rows of its golden file."""
    location = locate(db)
    path = location.path or folder / "golden.db"
    load_golden(revision, path)
    if location.path is None:
        engine = create_engine(location)
        with write(engine) as connection:
            migrate.run_alembic(connection, "upgrade", revision)
            _copy(path, connection)
        engine.dispose()


def _copy(path: Path, target: sa.Connection) -> None:
    tables = sa.MetaData()
    tables.reflect(target)
    file = sa.create_engine(f"sqlite:///{path}")
    with file.connect() as source:
        for table in tables.sorted_tables:
            if table.name == "alembic_version":
                continue
            target.execute(table.delete())
            for row in source.execute(sa.text(f'SELECT * FROM "{table.name}"')).mappings():
                filled = {name: value for name, value in row.items() if value is not None}
                values = {name: _typed(value, table.c[name].type) for name, value in filled.items()}
                target.execute(table.insert(), values)
    file.dispose()


def _typed(value: Any, kind: Any) -> Any:
    match kind:
        case sa.JSON():
            return json.loads(value)
        case sa.DateTime():
            return datetime.fromisoformat(f"{value}+00:00")
        case sa.Boolean():
            return bool(value)
    return value


Rows = dict[str, list[Any]]


def rows(db: str) -> Rows:
    """Return every row of every table without decoding, and the ids of the view."""
    engine = create_engine(locate(db))
    tables = sa.MetaData()
    with engine.connect() as connection:
        tables.reflect(connection)
        rows_of = {
            name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
            for name, table in tables.tables.items()
            if name not in MADE_ANEW
        }
        view = connection.exec_driver_sql("SELECT measurement_id FROM answer_v1").scalars().all()
    engine.dispose()
    for table_rows in rows_of.values():
        table_rows.sort(key=lambda row: str(row["id"]))
    return {**rows_of, "answer_v1": sorted(view)}


@pytest.mark.parametrize("revision", schema.REVISIONS)
def test_every_schema_is_upgraded_and_downgraded(revision: str, db: str, tmp_path: Path) -> None:
    load(revision, db, tmp_path)
    before = rows(db)
    assert upgrade(db) == (revision, HEAD)
    after = rows(db)
    with open_store(db) as store:
        assert examine(store).clean
    assert downgrade(db, to=revision) == (HEAD, revision)
    assert rows(db) == before
    if revision != HEAD:
        with pytest.raises(SchemaError, match="tunebench db upgrade"):
            open_store(db)
    assert upgrade(db) == (revision, HEAD)
    assert rows(db) == after


@pytest.mark.parametrize("revision", [schema.REVISIONS[1], HEAD])
def test_downgrade_names_the_data_it_would_lose(revision: str, db: str, tmp_path: Path) -> None:
    load(revision, db, tmp_path)
    upgrade(db)
    before = rows(db)
    lost = {name: _told(name, before) for name in ("verdicts", "demand", "budgets", "options", "metrics")}
    if any(lost.values()):
        with pytest.raises(InputError, match=r"cannot store .* was not changed.*--force") as caught:
            downgrade(db, to=FIRST)
        assert ("measurement.versus_default" in str(caught.value)) == bool(lost["verdicts"])
        assert ("rows of demand" in str(caught.value)) == bool(lost["demand"])
        assert ("values of run.budget_trials" in str(caught.value)) == bool(lost["budgets"])
        assert ("values of run.options" in str(caught.value)) == bool(lost["options"])
        assert ("values of measurement.metrics" in str(caught.value)) == bool(lost["metrics"])
        assert rows(db) == before
    assert downgrade(db, to=FIRST, force=True) == (HEAD, FIRST)
    assert upgrade(db) == (FIRST, HEAD)
    upgraded = rows(db)
    for row in before["measurement"]:
        row |= {"versus_default": None, "comparison": None, "metrics": None}
    for row in before["run"]:
        row |= {"budget_trials": None, "options": None}
    for contents in (upgraded, before):
        assert contents.pop("answer_v1")
    assert upgraded == before | ({"demand": []} if "demand" in before else {})


def _told(name: str, contents: Rows) -> list[Any]:
    if name == "demand":
        return list(contents.get("demand", []))
    if name in ("budgets", "options"):
        column = {"budgets": "budget_trials", "options": "options"}[name]
        return [row for row in contents["run"] if row[column]]
    column = {"verdicts": "versus_default", "metrics": "metrics"}[name]
    return [row for row in contents["measurement"] if row[column]]


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("direction", "statement"), [("up", 12), ("down", -1)])
def test_killed_migration_changes_nothing(statement: int, direction: str, db: str, tmp_path: Path) -> None:
    load(FIRST, db, tmp_path)
    if direction == "down":
        upgrade(db)
    before, schema_before = rows(db), _tables(db)
    assert _is_killed(db, direction, statement)
    assert (rows(db), _tables(db)) == (before, schema_before)
    assert upgrade(db)[1] == HEAD if direction == "up" else downgrade(db, to=FIRST)[1] == FIRST


@needs_fork
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("direction", ["up", "down"])
def test_migration_killed_at_any_statement_changes_nothing(direction: str, tmp_path: Path) -> None:
    db = str(tmp_path / "results.db")
    load(FIRST, db, tmp_path)
    if direction == "down":
        upgrade(db)
    before, schema_before = rows(db), _tables(db)
    kills = 0
    while _is_killed(db, direction, kills + 1):
        kills += 1
        assert (rows(db), _tables(db)) == (before, schema_before), kills
    assert kills > 20
    assert rows(db) != before  # the last one ended


def _is_killed(db: str, direction: str, statement: int) -> bool:
    """Migrate in a child that is killed at a statement (see `_killed_at`); return whether it was."""
    child = os.fork()
    if child == 0:
        _killed_at(statement)
        with contextlib.suppress(BaseException):
            _ = upgrade(db) if direction == "up" else downgrade(db, to=FIRST, force=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def _killed_at(statement: int) -> None:
    """Kill this process at the writing statement of that number; -1 is before the commit."""

    def die(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if statement < 0:
        migrate.check_references = die  # type: ignore[assignment]
        return
    count = 0

    def seen(conn: Any, cursor: Any, text: str, *rest: Any) -> None:
        nonlocal count
        count += not text.lstrip().upper().startswith(("SELECT", "PRAGMA", "BEGIN"))
        if count >= statement:
            die()

    sa.event.listen(sa.Engine, "after_cursor_execute", seen)


def _tables(db: str) -> dict[str, list[str]]:
    engine = create_engine(locate(db))
    with engine.connect() as connection:
        inspector = sa.inspect(connection)
        tables = {
            name: sorted(column["name"] for column in inspector.get_columns(name))
            for name in inspector.get_table_names()
        }
    engine.dispose()
    return tables


def test_downgrade_accepts_only_known_earlier_revisions(db: str, tmp_path: Path) -> None:
    load(FIRST, db, tmp_path)
    assert downgrade(db, to=FIRST) == (FIRST, FIRST)
    with pytest.raises(InputError, match=f"has schema {FIRST}, older than {HEAD}; run: tunebench db upgrade"):
        downgrade(db, to=HEAD)
    with pytest.raises(UnknownName, match="unknown revision '0'"):
        downgrade(db, to="0")


def test_downgrade_needs_an_existing_database(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="does not exist"):
        downgrade(tmp_path / "none.db", to=FIRST)
    (tmp_path / "empty.db").touch()
    with pytest.raises(DatabaseError, match="is empty"):
        downgrade(tmp_path / "empty.db", to=FIRST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.db"]
