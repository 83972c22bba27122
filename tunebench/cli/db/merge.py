"""`tunebench db merge`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._option import Json, VariantFiles
from tunebench.cli._output import console, emit, plain, progress, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db.merge import MergeResult

__all__ = ["merge"]

SHOWN = 5
"""Number of reasons that are shown for each database."""


def merge(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DB", help="Databases to merge, as paths or URLs; opened for reading only."),
    ],
    into: Annotated[
        str, typer.Option(metavar="PATH|URL", help="Target database; created if it does not exist.")
    ],
    variant_file: VariantFiles = None,
    as_json: Json = False,
) -> None:
    """Merge databases into one: each measurement, run and device once.

    The latest measurement of a trial counts, whichever database it comes from. Each database is merged in one
    transaction; merging it again adds only new records. Claims are not merged.
    """
    from tunebench.db.merge import merge as merge_databases

    done: list[MergeResult] = []
    to = console(stderr=True)
    try:
        with progress(to, "") as watcher:
            merge_databases(
                sources,
                into=into,
                watcher=lambda source, looked, total: watcher(looked, total, source),
                done=done.append,
            )
    except BaseException:
        remaining = ", ".join(sources[len(done) :])
        to.print(f"not merged: {remaining}", soft_wrap=True)
        raise
    finally:
        if done:
            emit(as_json, plain(done), lambda out: _render(out, done))


def _render(to: Console, done: list[MergeResult]) -> None:
    rows = [(e.added, e.known, e.refused, e.runs, e.devices, e.demand, e.database) for e in done]
    columns = (">added", ">known", ">refused", ">new runs", ">new devices", ">new demand", "database")
    to.print(table(*columns, rows=rows))
    for result in done:
        for reason, count in Counter(result.faults).most_common(SHOWN):
            to.print(f"{result.database}: {count} refused: {reason}", soft_wrap=True)
        for key in result.described:
            to.print(
                f"{result.database}: {key} has another description; the later one was kept", soft_wrap=True
            )
