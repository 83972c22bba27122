"""`tunebench db export-bundled`, and its old name `tunebench db ship`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunebench._deprecation import warn_renamed
from tunebench.cli._option import Database, Json
from tunebench.cli._output import emit
from tunebench.errors import InputError

__all__ = ["export_bundled", "ship"]

Out = Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write to: one file per architecture.")]


def export_bundled(out: Out, db: Database = None, as_json: Json = False) -> None:
    """Write the records that may be bundled with the package: measured and verified against the reference.

    Only records of the package's own kernels with their current source are written. They are added to
    existing files; of two records of one kernel, workload and device the newer one is kept.
    """
    from tunebench.db import bundled, open_store

    with open_store(db, read_only=True) as store:
        written = bundled.export_bundled(store, out)
    if not written:
        raise InputError(
            "no record can be bundled: none was measured with the current source and verified "
            "against the reference"
        )
    data = [{"file": str(path), "records": count} for path, count in written]
    lines = [f"{path}: {count} records" for path, count in written]
    emit(as_json, data, lambda to: to.print("\n".join(lines), soft_wrap=True))


def ship(out: Out, db: Database = None, as_json: Json = False) -> None:
    """Run `tunebench db export-bundled` under its old name."""
    warn_renamed("tunebench db ship", "tunebench db export-bundled")
    export_bundled(out, db, as_json)
