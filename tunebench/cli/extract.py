"""`tunebench extract`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tunebench.cli._option import (
    Architecture,
    DeviceName,
    Json,
    ModelInputs,
    ModelType,
    Training,
    VariantFiles,
    target_device,
)
from tunebench.cli._output import duration, emit, table
from tunebench.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from tunebench.graph import Graph, Node, PartitionPlan

__all__ = ["command"]

MAX_REJECTED = 5


def command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="FILE.py:FUNCTION or MODULE:FUNCTION that returns the model, or a graph written by --out.",
            show_default=False,
        ),
    ],
    inputs: ModelInputs = None,
    training: Training = False,
    dtype: ModelType = None,
    device: DeviceName = None,
    arch: Architecture = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder for the graphs (JSON) and the suite (TOML).", show_default=False
        ),
    ] = None,
    variant_file: VariantFiles = None,
    as_json: Json = False,
) -> None:
    """Extract the workloads of a PyTorch model, and the groups of operations that share a kernel.

    Groups are chosen for minimal time on the device, measured or predicted; the device need not be in this
    machine. Operations that no kernel computes are left to torch and listed. The model's file is executed,
    the model is only traced. A model with graph breaks has several graphs, as in torch.compile, and a
    warning lists the reasons.
    """
    from tunebench.graph import Graph, InputSpec, extract, load_factory, plan

    target = target_device(device, arch)
    if model.endswith(".json"):
        if inputs or training or dtype:
            raise InputError(
                f"{model} is a graph: remove --input, --training and --dtype, which apply only to a model"
            )
        graphs: Sequence[Graph] = (Graph.load(model),)
    else:
        factory = load_factory(model)
        if not inputs:
            raise InputError("the model needs its inputs: add --input SHAPE:TYPE for each argument")
        specs = [InputSpec.parse(text) for text in inputs]
        graphs = extract(factory, specs, training=training, dtype=dtype, device=target)
    plans = [plan(graph, target) for graph in graphs]
    written = _write(plans, out) if out is not None else []
    emit(as_json, [one.to_json() for one in plans], lambda to: _render(plans, written, to))


def _write(plans: Sequence[PartitionPlan], folder: Path) -> list[Path]:
    from tunebench.graph import suite_of

    try:
        folder.mkdir(parents=True, exist_ok=True)
        name = plans[0].graph.name.lower()
        written = [folder / f"{name}.{one.graph.phase}{_number(one, plans)}.json" for one in plans]
        for one, path in zip(plans, written, strict=True):
            one.graph.save(path)
        if any(one.workloads for one in plans):
            written.append(folder / f"{name}.toml")
            written[-1].write_text(suite_of(plans), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror or error}") from None
    return written


def _number(one: PartitionPlan, plans: Sequence[PartitionPlan]) -> str:
    """Return the number of a plan in its phase, such as `.2`; empty if the phase has one plan."""
    alike = [other for other in plans if other.graph.phase == one.graph.phase]
    return f".{next(place for place, other in enumerate(alike, 1) if other is one)}" if alike[1:] else ""


def _render(plans: Sequence[PartitionPlan], written: Sequence[Path], to: Console) -> None:
    for one in plans:
        _render_plan(one, _number(one, plans), to)
    for path in written:
        to.print(f"wrote {path}", soft_wrap=True)


def _render_plan(one: PartitionPlan, number: str, to: Console) -> None:
    graph = one.graph
    to.print(
        f"{graph.name}, {graph.phase}{number}, on {one.device.name}: {len(graph.nodes)} operations in "
        f"{len(one.chosen)} groups",
        soft_wrap=True,
    )
    to.print(table("Step", "", rows=_times(one)))
    to.print(table(">count", ">time", ">saved", "run by", "workloads of the group", rows=_groups(one)))
    left = Counter((node.target, node.reason) for node in _torch_nodes(one))
    if left:
        rows = ((str(count), target, reason) for (target, reason), count in left.most_common())
        to.print(table(">count", "left to torch", "reason", rows=rows))
    for priced in one.rejected[:MAX_REJECTED]:
        longer = f"would take {duration(-priced.saved_us)} longer"
        to.print(f"not fused: {_named(graph, priced.group.nodes)} ({longer})", soft_wrap=True)


def _times(one: PartitionPlan) -> Iterator[tuple[str, str]]:
    yield "torch, one kernel per operation", duration(one.torch_us)
    yield "faster of torch and tuned kernels, one per operation", duration(one.alone_us)
    proof = "proven optimal" if one.partition.exact else f"optimality gap {one.partition.gap:.1%}"
    yield "fused groups", f"{duration(one.us)} ({proof})"
    measured_us = sum(priced.price.us for priced in one.chosen if priced.price.how == "measured")
    yield "fraction of that time measured, not predicted", f"{measured_us / one.us:.0%}" if one.us else "-"
    yield "fraction of torch's time in operators of tunebench", f"{one.coverage:.1%}"
    yield "memory traffic saved by fusion", f"{one.saved_bytes / 1e6:.1f} MB"


def _groups(one: PartitionPlan) -> Iterator[tuple[str, ...]]:
    """Yield the groups of tuned kernels, equal groups once, slowest first."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, priced in enumerate(one.chosen):
        if priced.group.workloads:
            alike.setdefault((*priced.group.workloads, priced.price.by), []).append(index)
    for indices in sorted(alike.values(), key=lambda i: -sum(one.chosen[k].price.us for k in i)):
        offers = [one.chosen[index] for index in indices]
        saved = sum(group.saved_us for group in offers)
        yield (
            str(len(offers)),
            duration(sum(offer.price.us for offer in offers)),
            duration(saved) if len(offers[0].group.nodes) > 1 else "-",
            offers[0].price.variant or offers[0].price.by,
            " and ".join(offers[0].group.workloads),
        )


def _torch_nodes(one: PartitionPlan) -> Iterator[Node]:
    for priced in one.chosen:
        if not priced.group.workloads:
            yield from (one.graph.nodes[index] for index in priced.group.nodes)


def _named(graph: Graph, nodes: Sequence[int]) -> str:
    return " + ".join(graph.nodes[index].target.removeprefix("aten.") for index in nodes)
