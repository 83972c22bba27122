"""`tunebench plan`: each command is a function of a module here."""

from __future__ import annotations

import typer

from tunebench.cli.plan.memory import memory

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def group() -> None:
    """Plan how the training steps of a PyTorch model run on a device."""


app.command()(memory)
