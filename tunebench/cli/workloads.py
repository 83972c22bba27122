"""`tunebench workloads`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tunebench import workloads
from tunebench._command import command_line
from tunebench._figure import significant
from tunebench.cli._option import Json, VariantFiles
from tunebench.cli._output import emit, plain, table
from tunebench.errors import InputError, UnknownName
from tunebench.workload import Tensor, Workload

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["command"]


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="OPERATOR|SUITE|WORKLOAD", help="Operator, suite or workload to show in detail."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size of the suite.")] = 1,
    variant_file: VariantFiles = None,
    as_json: Json = False,
) -> None:
    """List operators, suites of real layers, and models.

    The usage of an operator is the text that `tune` and `lookup` take; dimensions in brackets are optional.
    SUITE/LAYER names a layer of a suite, and SUITE/LAYER,n=8 the same layer at another size. `predict` and
    `compare` take a model by --model.
    """
    if name is None:
        _all(batch, as_json)
    elif name in workloads.all_operators():
        _operator(workloads.operator(name), as_json)
    elif name in workloads.suites():
        _suite(name, batch, as_json)
    elif ":" in name or "/" in name:
        _workload(workloads.parse(name), as_json)
    else:
        from tunebench.workloads.networks import networks

        if name in networks():
            predict = command_line("predict", model=name, seq=_sequence_length(name), device="h100-sxm")
            raise InputError(
                f"{name} is a model, not a suite: `{predict}` lists its workloads with their times; "
                f"suites: {', '.join(workloads.suites())}"
            )
        raise UnknownName("operator or suite", name, {*workloads.all_operators(), *workloads.suites()})


def _sequence_length(model: str) -> int | None:
    """Return a number of tokens that a model can take; None if it has no sequences of any length."""
    from tunebench.workloads.networks import network

    architecture = getattr(network(model), "architecture", None)
    if architecture is None or architecture.tokens:
        return None
    return architecture.positions or 512


def _all(batch: int, as_json: bool) -> None:
    from tunebench.workloads.networks import networks

    operators = [
        {"operator": name, "usage": cls.usage(), "about": _about(cls)}
        for name, cls in workloads.all_operators().items()
    ]
    suites = [
        {"suite": name, "batches": workloads.batches(name), **_totals(workloads.suite(name, batch))}
        for name in workloads.suites()
    ]

    def render(console: Console) -> None:
        console.print("Operators", style="bold")
        for entry in operators:
            console.print(f"  {entry['usage']}", soft_wrap=True)
        console.print()
        rows = (
            (s["suite"], s["layers"], s["kernels"], f"{s['gflop']:.2f}", " ".join(map(str, s["batches"])))
            for s in suites
        )
        columns = ("suite", ">layers", ">kernel runs", ">GFLOP in total", "usual batches")
        console.print(table(*columns, title=f"Suites at batch size {batch}", rows=rows))
        console.print()
        console.print("Models", style="bold")
        console.print("  " + ", ".join(networks()))

    emit(as_json, {"operators": operators, "suites": suites, "models": networks()}, render)


def _about(cls: type[Workload]) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0]


def _totals(layers: tuple[workloads.Layer, ...]) -> dict[str, Any]:
    flops = sum(layer.count * layer.workload.flops() for layer in layers)
    return {
        "layers": len(layers),
        "kernels": sum(layer.count for layer in layers),
        "gflop": flops / 1e9,
    }


def _operator(cls: type[Workload], as_json: bool) -> None:
    data = {
        "operator": cls.operator,
        "usage": cls.usage(),
        "about": inspect.getdoc(cls) or "",
        "dimensions": list(cls.dimensions()),
    }

    def render(console: Console) -> None:
        console.print(f"{data['usage']}\n\n{data['about']}", soft_wrap=True)

    emit(as_json, data, render)


def _suite(name: str, batch: int, as_json: bool) -> None:
    layers = workloads.suite(name, batch)
    data = [
        {
            "layer": f"{name}/{layer.name}",
            "workload": str(layer.workload),
            "count": layer.count,
            "gflop": layer.workload.flops() / 1e9,
        }
        for layer in layers
    ]

    def render(console: Console) -> None:
        rows = ((d["layer"], d["workload"], d["count"], f"{d['gflop']:.3f}") for d in data)
        console.print(table("layer", "workload", ">runs", ">GFLOP each", rows=rows))
        totals = _totals(layers)
        console.print(f"\n{totals['kernels']} kernel runs, {totals['gflop']:.2f} GFLOP in total")

    emit(as_json, data, render)


def _workload(workload: Workload, as_json: bool) -> None:
    traffic, tolerance = workload.traffic(), workload.tolerance()
    data = {
        "workload": str(workload),
        "dimensions": {field.name: getattr(workload, field.name) for field in dataclasses.fields(workload)},
        "inputs": plain(workload.inputs()),
        "outputs": plain(workload.outputs()),
        "gflop": workload.flops() / 1e9,
        "read_bytes": traffic.read_bytes,
        "write_bytes": traffic.write_bytes,
        "tolerance": plain(tolerance),
    }

    def render(console: Console) -> None:
        lines = [
            str(workload),
            *(f"  reads  {_shape(tensor)}" for tensor in workload.inputs()),
            *(f"  writes {_shape(tensor)}" for tensor in workload.outputs()),
            f"  {significant(data['gflop'], 6)} GFLOP, at least "
            f"{significant(traffic.total_bytes / 1e6, 6)} MB of memory traffic, "
            f"{significant(workload.flops() / traffic.total_bytes, 3)} FLOP/byte",
            f"  |error| <= {significant(tolerance.eps_out, 2)} |result| + "
            f"{significant(tolerance.eps_acc, 2)} scale:",
            f"  {tolerance.reason}",
        ]
        console.print("\n".join(lines), soft_wrap=True)

    emit(as_json, data, render)


def _shape(tensor: Tensor) -> str:
    return f"{tensor.name} ({', '.join(map(str, tensor.shape))}) {tensor.dtype}"
