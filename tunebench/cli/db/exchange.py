"""`tunebench db import` and `tunebench db export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tunebench.cli._option import Database, Json, VariantFiles
from tunebench.cli._output import console, emit, plain, progress, table
from tunebench.cli._recorded import RecordedKernel, RecordedSizes
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.db.record import ImportResult
    from tunebench.outcome import CacheState

__all__ = ["export", "import_"]


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Kernel Tuner cache files, T4 files, or JSON Lines exports."),
    ],
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Device: a name. Default: the one that the file names.", show_default=False
        ),
    ] = "",
    kernel: RecordedKernel = "",
    problem: RecordedSizes = "",
    variant_file: VariantFiles = None,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Import recorded tuning spaces of other tuners, or JSON Lines exports of other databases.

    Recorded tuning spaces are stored separately, and lookup never returns them. Rows that cannot be used are
    reported and skipped; rows that the database already contains are skipped. Each file is imported in one
    transaction.
    """
    from tunebench.db import open_store
    from tunebench.db.exchange import import_file
    from tunebench.db.recorded_space import ImportOverrides

    naming = ImportOverrides(device=device or None, kernel=kernel or None, problem=_problem(problem))
    done: list[ImportResult] = []
    to = console(stderr=True)
    try:
        with open_store(db) as store:
            for file in files:
                with progress(to, file.name) as watcher:
                    done.append(import_file(store, file, naming, watcher))
    except BaseException:
        remaining = ", ".join(map(str, files[len(done) :]))
        to.print(f"not imported: {remaining}", soft_wrap=True)
        raise
    finally:
        if done:
            emit(as_json, [_describe(result) for result in done], lambda out: _render_imports(out, done))
    refused = sum(result.refused for result in done)
    if refused:
        raise InputError(f"{refused} rows cannot be used; the others were imported")


def _problem(text: str) -> tuple[int, ...] | None:
    if not text:
        return None
    sizes = text.split("x")
    if not all(size.isdecimal() and len(size) < 19 for size in sizes):
        raise InputError(f"--problem must be sizes such as 4096x4096, got {text!r}")
    return tuple(int(size) for size in sizes)


SHOWN_FAULTS = 10
"""Rejected rows that are printed with their reason; `--json` lists more."""


def _describe(result: ImportResult) -> dict[str, Any]:
    return {**plain(result), "faults": [str(fault) for fault in result.faults]}


def _render_imports(to: Console, done: list[ImportResult]) -> None:
    rows = [(e.added, e.known, e.refused, e.file.name, _spaces(e)) for e in done]
    to.print(table(">added", ">known", ">refused", "file", "what", rows=rows))
    err = console(stderr=True)
    for result in done:
        for fault in result.faults[:SHOWN_FAULTS]:
            err.print(f"{result.file}: {fault}", soft_wrap=True)
        if result.refused > SHOWN_FAULTS:
            err.print(f"{result.file}: and {result.refused - SHOWN_FAULTS} more", soft_wrap=True)


def _spaces(result: ImportResult) -> str:
    more = f" and {len(result.spaces) - 1} more" if len(result.spaces) > 1 else ""
    return f"{result.spaces[0]}{more}" if result.spaces else "nothing"


def export(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File to write; compressed by gzip if it ends in .gz.")
    ],
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload", "-w", metavar="TEXT", help="Workload: only its records.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Device: only its records; a name, architecture or key.", show_default=False
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Variant: only its records; a key.", show_default=False),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(help="Cache state, cold or warm; needed if both were measured.", show_default=False),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format: t4 or kernel-tuner, one space for other tuners; jsonl, all measurements.",
        ),
    ] = "t4",
    variant_file: VariantFiles = None,
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Export measurements for other tuners, or as JSON Lines.

    t4 and kernel-tuner contain one variant for one workload on one device, with the newest measurement of
    each configuration; predictions are left out. jsonl contains every measurement with all its fields.
    """
    from tunebench.db import open_store
    from tunebench.db.exchange import Selection, export_to

    selection = Selection(workload=workload, device=device, variant=variant, cache=_cache(cache))
    with open_store(db, read_only=True) as store:
        count = export_to(store, out, form, selection)
    data = {"file": str(out), "format": form, "rows": count}
    emit(as_json, data, lambda to: to.print(f"{count} rows written to {out}", soft_wrap=True))


def _cache(text: str | None) -> CacheState | None:
    from tunebench.errors import UnknownName

    if text not in (None, "cold", "warm"):
        raise UnknownName("cache state", text, ("cold", "warm"))
    return cast("CacheState | None", text)
