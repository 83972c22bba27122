"""`tunebench db verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench.cli._option import Database, Json, VariantFiles
from tunebench.cli._output import console, emit, progress
from tunebench.errors import DatabaseError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db.integrity import Integrity

__all__ = ["verify"]


def verify(
    fix: Annotated[
        bool,
        typer.Option(
            "--fix", help="Mark trials of changed sources as stale, delete faults of the environment."
        ),
    ] = False,
    variant_file: VariantFiles = None,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Check the integrity of a database: its file, the constraints of its schema, and every row.

    The exit code is 4 if there is any error. Nothing is written unless --fix is given. Nothing is deleted
    but faults of the environment that earlier versions recorded as failures of kernels.
    """
    from tunebench.db import integrity, locate, open_store

    database = str(locate(db))
    with open_store(db, read_only=True) as store, progress(console(stderr=True), database) as watcher:
        report = integrity.examine(store, watcher)
    fixed = len(report.outdated) + len(report.environment) if fix else 0
    if fixed:
        with open_store(db) as store:
            integrity.fix(store, report)
    emit(as_json, _described(database, report, fixed), lambda to: _render(to, database, report, fixed))
    if not report.clean:
        wrong = sum(count for kind, count in report.counts.items() if kind not in integrity.NOTES)
        raise DatabaseError(f"database {database} fails the integrity check: {wrong} findings")


def _described(database: str, report: Integrity, fixed: int) -> dict[str, Any]:
    return {
        "database": database,
        "clean": report.clean,
        "rows": report.rows,
        "fixed": fixed,
        "counts": dict(report.counts),
        "first": {kind: [*map(str, first)] for kind, first in report.first.items()},
    }


def _render(to: Console, database: str, report: Integrity, fixed: int) -> None:
    from tunebench.db.integrity import KINDS

    for kind, meaning in KINDS.items():
        if report.counts[kind]:
            to.print(f"{report.counts[kind]} {kind}: {meaning}", soft_wrap=True)
            for finding in report.first[kind]:
                to.print(f"  {finding}", soft_wrap=True)
    marked = f"; {fixed} records were marked as stale or deleted" if fixed else ""
    verdict = "passes the integrity check" if report.clean else "fails the integrity check"
    to.print(f"{database} {verdict}: {report.rows} rows checked{marked}", soft_wrap=True)
