"""`tunebench db forget`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench.cli._option import Architecture, Json, ReadDatabase, VariantFiles, WorkloadText
from tunebench.cli._output import emit, table
from tunebench.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from tunebench.db.forget import Forgotten

__all__ = ["forget"]


def forget(
    workload: WorkloadText,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Variant: only its outcomes; a name or key; repeatable. Default: all.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,…",
            help="Configuration: only outcomes of those with these values; repeatable. Default: all.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Device: only its outcomes; a name, architecture or key. Default: all.",
            show_default=False,
        ),
    ] = None,
    arch: Architecture = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete the outcomes; without it, they are only listed.")
    ] = False,
    variant_file: VariantFiles = None,
    db: ReadDatabase = None,
    as_json: Json = False,
) -> None:
    """Forget recorded outcomes of a workload: lookup no longer returns them, and tune tries them again.

    Without --yes, what would be forgotten is listed and nothing is changed. Merging or importing records that
    contain the outcomes brings them back.
    """
    from tunebench.db import forget as forgetting
    from tunebench.db import locate, open_store

    locate(db).require()
    if device is not None and arch is not None:
        raise InputError("--device and --arch exclude each other: a device has its architecture")
    selection = forgetting.ForgetSelection(
        workload=workload,
        device=arch if device is None else device,
        variants=variant or None,
        configs=[_values(text) for text in config] if config else None,
    )
    with open_store(db, read_only=not yes) as store:
        spaces = forgetting.forget(store, selection) if yes else forgetting.find(store, selection)
    emit(as_json, _described(spaces, forgotten=yes), lambda to: _render(to, spaces, forgotten=yes))


def _values(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name and equals and value for name, equals, value in pairs):
        raise InputError(f"--config must be values such as bm=64,bn=128, got {text!r}")
    return {name: value for name, _, value in pairs}


def _described(spaces: Sequence[Forgotten], *, forgotten: bool) -> dict[str, Any]:
    return {
        "forgotten": forgotten,
        "trials": sum(entry.trials for entry in spaces),
        "spaces": [
            {
                "device": entry.space.device,
                "workload": entry.space.workload,
                "variant": entry.space.variant,
                "trials": entry.trials,
                "outcomes": dict(entry.outcomes),
            }
            for entry in spaces
        ],
    }


def _render(to: Console, spaces: Sequence[Forgotten], *, forgotten: bool) -> None:
    rows = [
        (
            entry.trials,
            ", ".join(f"{count} {kind}" for kind, count in sorted(entry.outcomes.items())),
            entry.space.variant,
            entry.space.device,
        )
        for entry in spaces
    ]
    to.print(table(">configurations", "outcomes", "variant", "device", rows=rows))
    count = sum(entry.trials for entry in spaces)
    were = f"{count} configuration{'' if count == 1 else 's'} of {spaces[0].space.workload}"
    verdict = "forgotten" if forgotten else "would be forgotten; --yes forgets them"
    to.print(f"{were} {verdict}", soft_wrap=True)
