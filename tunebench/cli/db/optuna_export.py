"""`tunebench db export-optuna`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunebench.cli._option import (
    Architecture,
    Json,
    ReadDatabase,
    StoredDevice,
    VariantFiles,
    Workloads,
    device_filter,
)
from tunebench.cli._output import emit
from tunebench.errors import InputError

__all__ = ["export_optuna"]


def export_optuna(
    storage: Annotated[
        str, typer.Option(metavar="URL", help="Optuna storage, such as sqlite:///studies.db.")
    ],
    workload: Workloads = None,
    device: StoredDevice = None,
    arch: Architecture = None,
    variant_file: VariantFiles = None,
    db: ReadDatabase = None,
    as_json: Json = False,
) -> None:
    """Export records to an Optuna storage: one study for each workload, device and variant.

    Lower bounds are user attributes of the trials. optuna-dashboard shows the studies.
    """
    from tunebench.db.record import RECORDED
    from tunebench.db.store import open_store
    from tunebench.report import search_histories
    from tunebench.report.optuna_export import export_studies
    from tunebench.workloads import parse

    texts = [text if text.startswith(RECORDED) else str(parse(text)) for text in workload or []]
    select = device_filter(device, arch)
    with open_store(db, read_only=True) as store:
        keys = select({space.device for space in store.spaces()})
        histories = search_histories(store, workloads=texts, devices=keys) if keys else []
        if not histories:
            raise InputError(f"{store.location} has no record to export")
    names = export_studies(histories, storage)
    emit(as_json, {"studies": names}, lambda to: to.print("\n".join(names), soft_wrap=True))
