"""`tunebench db upgrade` and `tunebench db downgrade`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunebench._command import command_line
from tunebench.cli._option import Database, Json
from tunebench.cli._output import emit

__all__ = ["downgrade", "upgrade"]


def upgrade(db: Database = None, as_json: Json = False) -> None:
    """Upgrade a database to the schema of this version, in one transaction.

    An upgrade that fails leaves the database unchanged. A database that does not exist is created.
    """
    from tunebench.db import upgrade as upgrade_database

    before, after = upgrade_database(db)
    _report(db, before, after, f"upgraded from {before or 'nothing'} to {after}", as_json)


def downgrade(
    to: Annotated[str, typer.Option(help="Target schema revision, such as 0002.")],
    force: Annotated[
        bool, typer.Option("--force", help="Discard data that the earlier schema cannot store.")
    ] = False,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Downgrade a database to an earlier schema, for an earlier version of tunebench.

    The downgrade runs in one transaction. If data would be lost, it is listed and nothing is changed, unless
    --force is given.
    """
    from tunebench.db import downgrade as downgrade_database
    from tunebench.db import locate

    before, after = downgrade_database(db, to=to, force=force)
    upgrade_again = command_line("db upgrade", db=locate(db).option)
    outcome = f"downgraded from {before} to {after}; {upgrade_again} reverts this"
    _report(db, before, after, outcome, as_json)


def _report(db: str | None, before: str | None, after: str, done: str, as_json: bool) -> None:
    from tunebench.db import locate

    database = str(locate(db))
    if before == after:
        done = f"has schema {after} already"
    data = {"database": database, "before": before, "after": after}
    emit(as_json, data, lambda console: console.print(f"{database}: {done}", soft_wrap=True))
