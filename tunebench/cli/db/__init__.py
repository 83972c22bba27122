"""`tunebench db`: each command is a function of a module here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tunebench.cli._help import HelpCommand, HelpGroup, WorkloadCommand
from tunebench.cli._option import Database, Json, VariantFiles
from tunebench.cli._option_group import with_verbosity
from tunebench.cli._output import emit, plain, table
from tunebench.cli.db.bundled import export_bundled, ship
from tunebench.cli.db.exchange import export, import_
from tunebench.cli.db.forget import forget
from tunebench.cli.db.merge import merge
from tunebench.cli.db.optuna_export import export_optuna
from tunebench.cli.db.runs import runs
from tunebench.cli.db.schema import downgrade, upgrade
from tunebench.cli.db.verify import verify

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db import Stats

__all__ = ["app"]

app = typer.Typer(cls=HelpGroup, no_args_is_help=True, add_completion=False)


@app.callback()
def group() -> None:
    """Manage the database of tuning results."""


app.command(cls=HelpCommand)(with_verbosity(upgrade))
app.command(cls=HelpCommand)(with_verbosity(downgrade))


@app.command(cls=HelpCommand)
@with_verbosity
def stats(variant_file: VariantFiles = None, db: Database = None, as_json: Json = False) -> None:
    """Show statistics of a database: devices, workloads, trials, and outcomes by class."""
    from tunebench.db import open_store

    with open_store(db, read_only=True) as store:
        statistics = store.stats()
    emit(as_json, plain(statistics), lambda console: _render(console, statistics))


def _render(console: Console, statistics: Stats) -> None:
    console.print(f"{statistics.database}, schema {statistics.revision}", soft_wrap=True)
    rows = [
        ("devices", len(statistics.devices)),
        ("workloads", statistics.workloads),
        ("runs", statistics.runs),
        ("trials", statistics.trials),
        ("  of recorded tuning spaces", statistics.recorded),
        ("  in work", statistics.claimed),
        ("  stale", statistics.stale),
        ("measurements", sum(statistics.outcomes.values())),
        *((f"  {kind}", count) for kind, count in sorted(statistics.outcomes.items())),
        ("below their lower bound", statistics.violations),
    ]
    console.print(table("", ">count", rows=rows))
    kinds = {"compiling": "compile_s", "verifying": "verify_s", "measuring": "measure_s"}
    console.print(
        ", ".join(f"{kind} {getattr(statistics.effort, name):.1f} s" for kind, name in kinds.items())
    )
    for key in statistics.devices:
        console.print(f"  {key}", soft_wrap=True)


for command in (runs, verify, export_optuna, export, merge, export_bundled):
    app.command(cls=HelpCommand)(with_verbosity(command))
app.command(cls=WorkloadCommand)(with_verbosity(forget))
app.command("import", cls=HelpCommand)(with_verbosity(import_))
app.command(hidden=True, cls=HelpCommand)(with_verbosity(ship))
