"""`tunebench db ship`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunebench.cli._option import Database, Json
from tunebench.cli._output import emit
from tunebench.errors import InputError

__all__ = ["ship"]


def ship(
    out: Annotated[Path, typer.Option(help="Folder to write to: a file an architecture.")],
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Write records that may come with the package: what was timed, and proved right where it was timed.

    They are of the package's own kernels with today's sources. A file that is there is added to; of two
    records of one kernel for one problem on one device the newer one stays.
    """
    from tunebench.db import open_store
    from tunebench.db.bundled import ship as ship_records

    with open_store(db, read_only=True) as store:
        written = ship_records(store, out)
    if not written:
        raise InputError(
            "there is nothing to ship: no answer was timed with today's sources and proved right"
        )
    data = [{"file": str(path), "records": count} for path, count in written]
    lines = [f"{path}: {count} records" for path, count in written]
    emit(as_json, data, lambda to: to.print("\n".join(lines), soft_wrap=True))
