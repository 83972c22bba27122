"""`tunebench db runs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench._figure import duration
from tunebench.cli._option import Json, ReadDatabase, VariantFiles
from tunebench.cli._output import emit, table

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

    from tunebench.db.browse import RunEntry

__all__ = ["runs"]


def runs(
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", metavar="TEXT", help="Workload: only its runs.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Device: only its runs; a name, architecture or key.", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of runs to list, the newest first.")] = 20,
    variant_file: VariantFiles = None,
    db: ReadDatabase = None,
    as_json: Json = False,
) -> None:
    """List runs of tune: their options, trials, state and best time.

    Options are those that differ from a command without options. tunebench tune --repeat RUN repeats a run,
    or continues an interrupted one.
    """
    from tunebench.db.browse import open_browser
    from tunebench.db.exchange import device_keys, workload_text

    with open_browser(db) as browser:
        names = {entry.id: entry.key for entry in browser.devices()}
        chosen = None
        if device is not None:
            keys = device_keys(device, names.values())
            chosen = [number for number, key in names.items() if key in keys]
        texts = {text for text, _ in browser.workloads()}
        text = None if workload is None else workload_text(workload, texts)
        entries = browser.runs(workload=text, device_ids=chosen, state="tuned", limit=limit)
        now = browser.now()
    data = [_described(entry, names[entry.device_id], now) for entry in entries]
    emit(as_json, data, lambda to: _render(to, data))


def _described(run: RunEntry, device: str, now: datetime) -> dict[str, Any]:
    from tunebench.tuning.run_options import changed_options

    return {
        "id": run.id,
        "started_at": run.started_at.isoformat(),
        "finished_at": None if run.finished_at is None else run.finished_at.isoformat(),
        "workload": run.workload,
        "device": device,
        "state": run.state(now),
        "trials": run.progress.searched,
        "failed": run.progress.failed,
        "best_us": run.progress.best_us,
        "changed": None if run.options is None else changed_options(run.options),
        "options": run.options,
    }


def _render(to: Console, data: list[dict[str, Any]]) -> None:
    from tunebench.tuning.run_options import SHOWN_ID

    rows = [
        (
            run["id"][:SHOWN_ID],
            run["started_at"][:16].replace("T", " "),
            run["state"],
            run["trials"],
            None if run["best_us"] is None else duration(run["best_us"]),
            run["workload"],
            run["device"],
        )
        for run in data
    ]
    to.print(table("run", "started (UTC)", "state", ">trials", ">best", "workload", "device", rows=rows))
    for run in data:  # on lines of their own, which can be copied
        options = "unknown: of an earlier version" if run["changed"] is None else run["changed"] or "none"
        to.print(f"{run['id'][:SHOWN_ID]}  options: {options}", soft_wrap=True)
