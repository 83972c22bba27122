"""`tunebench kernels`."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench.cli._option import Json, VariantFiles
from tunebench.cli._output import emit, table

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.variant import Variant

__all__ = ["command"]


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="OPERATOR|VARIANT", help="Operator or variant to show with its parameters."),
    ] = None,
    variant_file: VariantFiles = None,
    as_json: Json = False,
) -> None:
    """List kernel variants and their parameters.

    The size of a search space is counted before its constraints, which depend on the workload.
    """
    chosen = _chosen(name)
    data = [_describe(variant) for variant in chosen]

    def render(console: Console) -> None:
        rows = ((d["variant"], d["language"], d["space_size"], d["about"]) for d in data)
        console.print(table("variant", "language", ">space", "about", rows=rows))
        if name is not None:
            for entry in data:
                console.print()
                console.print(_parameters(entry))

    emit(as_json, data, render)


def _chosen(name: str | None) -> tuple[Variant[Any], ...]:
    from tunebench import kernels, workloads

    if name is None:
        return kernels.variants()
    if "/" in name:
        return (kernels.variant(name),)
    return kernels.variants(workloads.operator(name).operator)


def _describe(variant: Variant[Any]) -> dict[str, Any]:
    documentation = inspect.getdoc(sys.modules[type(variant).__module__]) or ""
    return {
        "variant": variant.key,
        "language": variant.language,
        "about": documentation.partition("\n")[0],
        "space_size": variant.space.size,
        "parameters": [
            {"name": parameter.name, "values": parameter.values, "about": parameter.about}
            for parameter in variant.space.parameters
        ],
    }


def _parameters(entry: dict[str, Any]) -> Any:
    return table(
        "parameter",
        "values",
        "about",
        title=entry["variant"],
        rows=((p["name"], " ".join(map(str, p["values"])), p["about"]) for p in entry["parameters"]),
    )
