"""`tunebench db upgrade` and `tunebench db downgrade`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunebench.cli._option import Database, Json
from tunebench.cli._output import emit

__all__ = ["downgrade", "upgrade"]


def upgrade(db: Database = None, as_json: Json = False) -> None:
    """Bring a database to the schema of this version.

    All of it or nothing: an upgrade that fails leaves the database as it was. A database that does not
    exist yet is made.
    """
    from tunebench.db import locate
    from tunebench.db import upgrade as upgrade_database

    before, after = upgrade_database(db)
    database = str(locate(db))
    done = (
        f"has schema {after} already"
        if before == after
        else f"upgraded from {before or 'nothing'} to {after}"
    )
    emit(
        as_json,
        {"database": database, "before": before, "after": after},
        lambda console: console.print(f"{database}: {done}", soft_wrap=True),
    )


def downgrade(
    to: Annotated[str, typer.Option(help="The schema revision to go back to, such as 0002.")],
    force: Annotated[bool, typer.Option(help="Lose what the earlier schema has no place for.")] = False,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Take a database back to an earlier schema, for an earlier version of tunebench.

    All of it or nothing. Where something would be lost it says what, and changes nothing unless --force is
    given.
    """
    from tunebench.db import downgrade as downgrade_database
    from tunebench.db import locate

    before, after = downgrade_database(db, to=to, force=force)
    database = str(locate(db))
    done = (
        f"has schema {after} already"
        if before == after
        else f"taken back from {before} to {after}; tunebench db upgrade brings it along again"
    )
    emit(
        as_json,
        {"database": database, "before": before, "after": after},
        lambda console: console.print(f"{database}: {done}", soft_wrap=True),
    )
