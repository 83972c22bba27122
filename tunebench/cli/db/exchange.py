"""`tunebench db import` and `tunebench db export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tunebench.cli._option import Database, Json
from tunebench.cli._output import console, emit, plain, progress, table
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db.record import ImportResult
    from tunebench.outcome import CacheState

__all__ = ["export", "import_"]


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE…", help="Kernel Tuner cache files, files in T4 format, JSON Lines."),
    ],
    device: Annotated[
        str | None, typer.Option(help="The device they were measured on. Default: what each file tells.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Name of the kernel. Default: what each file tells.")
    ] = None,
    problem: Annotated[
        str | None, typer.Option(help="Its size, such as 4096x4096. Default: what each file tells.")
    ] = None,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Bring in what other tuners measured, or what another database exported as JSON Lines.

    What is of other tuners is kept apart and never served. A row that cannot be used is told, and the others
    go in. Rows that are there already are left out. Each file goes in as a whole, or not at all if it is
    interrupted.
    """
    from tunebench.db import open_store
    from tunebench.db.exchange import import_file
    from tunebench.db.recorded_space import ImportOverrides

    naming = ImportOverrides(device=device, kernel=kernel, problem=_problem(problem))
    done: list[ImportResult] = []
    to = console(stderr=True)
    try:
        with open_store(db) as store:
            for file in files:
                with progress(to, file.name) as watcher:
                    done.append(import_file(store, file, naming, watcher))
    except BaseException:
        left = ", ".join(map(str, files[len(done) :]))
        to.print(f"nothing went in of: {left}", soft_wrap=True)
        raise
    finally:
        if done:
            emit(as_json, [_describe(each) for each in done], lambda out: _render_imports(out, done))
    refused = sum(each.refused for each in done)
    if refused:
        raise InputError(f"{refused} rows cannot be used; the others are in")


def _problem(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    sizes = text.split("x")
    if not all(size.isdecimal() and len(size) < 19 for size in sizes):
        raise InputError(f"--problem {text!r} must be sizes, such as 4096x4096")
    return tuple(int(size) for size in sizes)


SHOWN_FAULTS = 10
"""Rows that cannot be used of which people are told why; `--json` has more of them."""


def _describe(each: ImportResult) -> dict[str, Any]:
    return {**plain(each), "faults": [str(fault) for fault in each.faults]}


def _render_imports(to: Console, done: list[ImportResult]) -> None:
    rows = [(e.added, e.known, e.refused, e.file.name, _spaces(e)) for e in done]
    to.print(table(">added", ">known", ">refused", "file", "what", rows=rows))
    err = console(stderr=True)
    for each in done:
        for fault in each.faults[:SHOWN_FAULTS]:
            err.print(f"{each.file}: {fault}", soft_wrap=True)
        if each.refused > SHOWN_FAULTS:
            err.print(f"{each.file}: and {each.refused - SHOWN_FAULTS} more", soft_wrap=True)


def _spaces(each: ImportResult) -> str:
    more = f" and {len(each.spaces) - 1} more" if len(each.spaces) > 1 else ""
    return f"{each.spaces[0]}{more}" if each.spaces else "nothing"


def export(
    out: Annotated[Path, typer.Option(help="File to write; compressed by gzip if it ends in .gz.")],
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", help="Of this workload only.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Of this device only: its name, architecture or key.", show_default=False),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Of this variant only, by its key.", show_default=False)
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="cold or warm, where it was timed with both.", show_default=False)
    ] = None,
    form: Annotated[
        str,
        typer.Option("--format", help="t4 or kernel-tuner: one space, for other tuners; jsonl: everything."),
    ] = "t4",
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Write what is known for other tuners, or for programs of your own.

    t4 and kernel-tuner hold one variant for one workload on one device, and of each configuration the newest
    measurement; what was only predicted is left out. jsonl has a line for every measurement, with all that
    is stored of it.
    """
    from tunebench.db import open_store
    from tunebench.db.exchange import Selection, export_to

    wanted = Selection(workload=workload, device=device, variant=variant, cache=_cache(cache))
    with open_store(db, read_only=True) as store:
        count = export_to(store, out, form, wanted)
    data = {"file": str(out), "format": form, "rows": count}
    emit(as_json, data, lambda to: to.print(f"{count} rows written to {out}", soft_wrap=True))


def _cache(text: str | None) -> CacheState | None:
    from tunebench.errors import UnknownName

    if text not in (None, "cold", "warm"):
        raise UnknownName("cache state", text, ("cold", "warm"))
    return cast("CacheState | None", text)
