"""`tunebench plan`: each command is a function of a module here."""

from __future__ import annotations

import typer

from tunebench.cli._help import HelpCommand, HelpGroup
from tunebench.cli._option_group import with_verbosity
from tunebench.cli.plan.cluster import cluster
from tunebench.cli.plan.memory import memory
from tunebench.cli.plan.pipeline import pipeline

__all__ = ["app"]

app = typer.Typer(cls=HelpGroup, no_args_is_help=True, add_completion=False)


@app.callback()
def group() -> None:
    """Plan how training steps run: the memory of one device, a pipeline, or training on a cluster."""


for command in (cluster, memory, pipeline):
    app.command(cls=HelpCommand)(with_verbosity(command))
