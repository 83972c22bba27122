"""Schema revisions: detection, creation, upgrade and downgrade.

Plain SQL reads the revision; Alembic is imported only to migrate.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tunebench._command import command_line
from tunebench.db import schema
from tunebench.db.engine import create_engine, translate_errors, write
from tunebench.db.location import NO_RECORD, Location, locate
from tunebench.db.migrations import newer_schema
from tunebench.errors import DatabaseError, InputError, SchemaError, UnknownName

__all__ = ["MIGRATIONS", "check_references", "downgrade", "prepare", "run_alembic", "upgrade"]

_LOCK = 0x74756E65  # PostgreSQL advisory lock: only one of two processes creates the tables
MIGRATIONS = Path(str(resources.files("tunebench.db"))) / "migrations"


def prepare(engine: sa.Engine, location: Location, *, read_only: bool) -> None:
    """Check that the database has the schema of this version, and create it in an empty one.

    Args:
        engine: Engine of the database.
        location: Path or URL, for messages.
        read_only: Refuse an empty database instead.

    Raises:
        SchemaError: if it has another revision, or belongs to another program.
        DatabaseError: if it is empty and `read_only` is set, or cannot be read.
    """
    with engine.connect() as connection:
        if read_only and not sa.inspect(connection).get_table_names():
            raise DatabaseError(f"database {location} is empty: {NO_RECORD}")
        revision = _revision(connection, location)
    if revision is None and not read_only:
        with write(engine) as connection:
            _lock(connection)
            if _revision(connection, location) is None:
                _create(connection)
    elif revision != schema.HEAD:
        _refuse(revision, location)


def _revision(connection: sa.Connection, location: Location) -> str | None:
    """Return the schema revision; None for an empty database.

    Raises:
        SchemaError: if its tables belong to another program.
    """
    tables = set(sa.inspect(connection).get_table_names())
    if not tables:
        return None
    if not {"alembic_version", "measurement", "trial"} <= tables:
        raise SchemaError(
            f"database {location} belongs to another program; name a tunebench database by --db"
        )
    revision = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    if revision is None:
        raise SchemaError(
            f"database {location} has no schema revision in alembic_version; restore a copy of it"
        )
    return str(revision)


def _refuse(revision: str | None, location: Location) -> None:
    if revision in schema.REVISIONS:
        raise SchemaError(
            f"database {location} has schema {revision}, older than {schema.HEAD} of this version; run: "
            + command_line("db upgrade", db=location.option)
        )
    raise SchemaError(newer_schema(location, revision))


def _lock(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")


def _create(connection: sa.Connection) -> None:
    schema.METADATA.create_all(connection, checkfirst=False)
    connection.exec_driver_sql(schema.ANSWER_VIEW)
    connection.execute(sa.insert(schema.origin_table).values(id=uuid.uuid4().hex))
    # As Alembic creates it, so that Alembic can migrate the database later.
    connection.exec_driver_sql(
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
        "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
    )
    connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{schema.HEAD}')")  # noqa: S608 (a constant)


def upgrade(db: str | Path | None = None) -> tuple[str | None, str]:
    """Upgrade a database to the schema of this version, in one transaction.

    Args:
        db: Path, URL, or None for the default database.

    Returns:
        Revision before (None if it was empty) and after.

    Raises:
        SchemaError: if it has a newer schema, or belongs to another program.
        DatabaseError: if it cannot be opened or written.
    """
    location = locate(db)
    with translate_errors(location):
        _check_readable(location)
    with translate_errors(location), _migrating(location) as connection:
        _lock(connection)
        before = _known_revision(connection, location)
        if before != schema.HEAD:
            run_alembic(connection, "upgrade", schema.HEAD)
            check_references(connection, location)
    return before, schema.HEAD


def downgrade(db: str | Path | None = None, *, to: str, force: bool = False) -> tuple[str, str]:
    """Downgrade a database to an earlier schema, in one transaction.

    This version cannot read it afterwards; `upgrade` reverts the downgrade.

    Args:
        db: Path, URL, or None for the default database.
        to: Target revision, one of `REVISIONS`.
        force: Downgrade although the earlier schema cannot store all data, which is lost.

    Returns:
        Revision before and after.

    Raises:
        UnknownName: if the revision does not exist.
        InputError: if the database is older than the revision, or data would be lost and `force` is not set.
        SchemaError: if it has a newer schema, or belongs to another program.
        DatabaseError: if it does not exist, or cannot be opened or written.
    """
    if to not in schema.REVISIONS:
        raise UnknownName("revision", to, schema.REVISIONS)
    location = locate(db)
    location.require()
    with translate_errors(location):
        _check_readable(location)
    with translate_errors(location), _migrating(location) as connection:
        _lock(connection)
        before = _known_revision(connection, location)
        if before is None:
            raise DatabaseError(f"database {location} is empty: {NO_RECORD}")
        if before < to:
            raise InputError(
                f"database {location} has schema {before}, older than {to}; run: "
                + command_line("db upgrade", db=location.option)
            )
        counts = _value_counts(connection)
        if before != to:
            run_alembic(connection, "downgrade", to)
            check_references(connection, location)
        lost = _lost(counts, _value_counts(connection))
        if lost and not force:
            raise InputError(
                f"schema {to} cannot store {', '.join(lost)} of database {location}, which was not changed. "
                f"Export it first ({_export(location)}), or discard the data by --force"
            )
    return before, to


def _export(location: Location) -> str:
    return command_line("db export", out="tunebench.jsonl.gz", format="jsonl", db=location.option)


_DERIVED = {"measurement.fastest_us", "origin.id"}
"""Columns that an upgrade recomputes."""


def _value_counts(connection: sa.Connection) -> dict[str, int]:
    """Return the number of values of each column, by table and column name."""
    inspector = sa.inspect(connection)
    totals: dict[str, int] = {}
    for name in inspector.get_table_names():
        columns: list[sa.ColumnClause[Any]] = [
            sa.column(column["name"]) for column in inspector.get_columns(name)
        ]
        counts = sa.select(*(sa.func.count(column) for column in columns)).select_from(sa.table(name))
        amounts = connection.execute(counts).one()
        totals |= {f"{name}.{c.name}": amount for c, amount in zip(columns, amounts, strict=True)}
    return totals


def _lost(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return the losses of a downgrade: rows of a dropped table, or values of a dropped column."""
    tables = {name.partition(".")[0] for name in after}
    lost: dict[str, int] = {}
    for name, amount in before.items():
        if amount > after.get(name, 0) and name not in _DERIVED:
            table, _, column = name.partition(".")
            subject = f"{table}.{column}" if table in tables else table
            lost[subject] = max(amount - after.get(name, 0), lost.get(subject, 0))
    return [
        f"{amount} {'values' if '.' in subject else 'rows'} of {subject}" for subject, amount in lost.items()
    ]


def _check_readable(location: Location) -> None:
    """Refuse another program's file before it is opened for writing, because opening may change it."""
    if location.path is not None and location.path.exists() and location.path.stat().st_size:
        engine = create_engine(location, read_only=True)
        try:
            with engine.connect() as connection:
                _known_revision(connection, location)
        finally:
            engine.dispose()


def _known_revision(connection: sa.Connection, location: Location) -> str | None:
    revision = _revision(connection, location)
    if revision not in (None, *schema.REVISIONS):
        _refuse(revision, location)
    return revision


@contextmanager
def _migrating(location: Location) -> Iterator[sa.Connection]:
    # Foreign keys are not enforced during a migration: rebuilding a table would cascade to its references.
    engine = create_engine(location, foreign_keys=False)
    try:
        with write(engine) as connection:
            yield connection
    finally:
        engine.dispose()


def run_alembic(connection: sa.Connection, command: str, revision: str) -> None:
    """Run Alembic's `upgrade` or `downgrade` in an open transaction."""
    import alembic.command
    import alembic.config

    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    run: Any = getattr(alembic.command, command)
    run(config, revision)


def check_references(connection: sa.Connection, location: Location) -> None:
    """Refuse a SQLite database with rows that refer to missing rows.

    Raises:
        DatabaseError: if there are such rows.
    """
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
        if broken:
            raise DatabaseError(
                f"database {location}: {len(broken)} rows refer to missing rows; nothing was changed"
            )
