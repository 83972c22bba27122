"""`tunebench report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunebench.cli._option import (
    Architecture,
    DeviceName,
    Json,
    ReadDatabase,
    Tolerance,
    Workloads,
    target_device,
)
from tunebench.cli._output import emit
from tunebench.errors import InputError

__all__ = ["command"]


def command(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="HTML file to write.")],
    workload: Workloads = None,
    device: DeviceName = None,
    arch: Architecture = None,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="A B",
            help="Compare the best times of two databases (files or URLs) instead.",
            show_default=False,
        ),
    ] = None,
    tolerance: Tolerance = 0.05,
    db: ReadDatabase = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page of search histories, or of the best times of two databases.

    The page loads nothing from elsewhere. It has the records of all workloads and devices of the database, or
    of those given.
    """
    if compare is not None:
        if workload or device or arch or db:
            raise InputError("--compare A B excludes --workload, --device, --arch and --db")
        data = _write_comparison(out, compare, tolerance)
    else:
        key = target_device(device, arch).key if device or arch else None
        data = _write_histories(out, workload or [], key, db)
    lines = (f"{name.replace('_', ' ')}: {value}" for name, value in data.items())
    emit(as_json, data, lambda to: to.print("\n".join(lines), soft_wrap=True))


def _write_histories(
    out: Path, workloads: list[str], device: str | None, db: str | None
) -> dict[str, object]:
    from tunebench.db.record import RECORDED
    from tunebench.db.store import open_store
    from tunebench.report import history_page, search_histories
    from tunebench.workloads import parse

    texts = [text if text.startswith(RECORDED) else str(parse(text)) for text in workloads]
    with open_store(db, read_only=True) as store:
        histories = search_histories(store, workloads=texts, device=device)
        database = str(store.location)
    if not histories:
        raise InputError(f"no record to report in {database}: expected a record of the workload and device")
    out.write_text(history_page(histories, database=database), encoding="utf-8")
    records = sum(len(history.records) for history in histories)
    return {"file": str(out), "histories": len(histories), "records": records}


def _write_comparison(out: Path, databases: tuple[str, str], tolerance: float) -> dict[str, object]:
    from tunebench.db.location import locate
    from tunebench.db.store import open_store
    from tunebench.report import compare_databases, comparison_page

    for database in databases:
        locate(database).require()
    with (
        open_store(databases[0], read_only=True) as before,
        open_store(databases[1], read_only=True) as after,
    ):
        comparison = compare_databases(before, after, tolerance=tolerance)
    out.write_text(comparison_page(comparison), encoding="utf-8")
    regressions = len(comparison.regressions)
    return {"file": str(out), "compared": len(comparison.times), "regressions": regressions}
