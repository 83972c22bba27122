"""`tunebench db`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tunebench.cli._option import Database, Json
from tunebench.cli._output import emit, plain, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db import Stats

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def group() -> None:
    """Look after the database."""


@app.command()
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


@app.command()
def stats(db: Database = None, as_json: Json = False) -> None:
    """Tell what a database holds: devices, workloads, trials and outcomes by class."""
    from tunebench.db import open_store

    with open_store(db, read_only=True) as store:
        found = store.stats()
    emit(as_json, plain(found), lambda console: _render(console, found))


def _render(console: Console, found: Stats) -> None:
    console.print(f"{found.database}, schema {found.revision}", soft_wrap=True)
    rows = [
        ("devices", len(found.devices)),
        ("workloads", found.workloads),
        ("runs", found.runs),
        ("trials", found.trials),
        ("  in work", found.claimed),
        ("  to be timed again", found.stale),
        ("measurements", sum(found.outcomes.values())),
        *((f"  {kind}", count) for kind, count in sorted(found.outcomes.items())),
    ]
    console.print(table("", ">count", rows=rows))
    kinds = {"compiling": "compile_s", "verifying": "verify_s", "measuring": "measure_s"}
    console.print(", ".join(f"{kind} {getattr(found.effort, name):.1f} s" for kind, name in kinds.items()))
    for key in found.devices:
        console.print(f"  {key}", soft_wrap=True)
