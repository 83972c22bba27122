"""`tunebench lookup`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._option import Database, Json, Problem
from tunebench.cli._output import emit

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["command"]


def command(
    workload: Problem,
    device: Annotated[
        str | None, typer.Option(help="A device by name, or an architecture. Default: this machine's.")
    ] = None,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Answer from memory which kernel and parameters to use for a workload.

    Exit code 3 says that nothing is known.
    """
    from tunebench.answer import lookup_workload

    answer = lookup_workload(workload, device=device, db=db)

    def render(to: Console) -> None:
        to.print(f"{answer.workload} on {answer.device}")
        to.print(f"  variant  {answer.variant}")
        to.print(f"  config   {answer.config}", soft_wrap=True)
        known = f"{answer.how}, {answer.recorded_at:%Y-%m-%d %H:%M} UTC" + (", stale" if answer.stale else "")
        if answer.interval_us is not None:
            low_us, high_us = answer.interval_us
            known += f"; nine of ten times within {low_us:.2f} to {high_us:.2f}"
        to.print(f"  time     {answer.expected_us:.2f} us ({known})")

    emit(as_json, answer.to_json(), render)
