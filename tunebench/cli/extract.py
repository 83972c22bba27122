"""`tunebench extract`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
            help="FILE.py:FUNCTION or MODULE:FUNCTION that returns the model, an .onnx file, or a graph "
            "written by --out.",
            show_default=False,
        ),
    ],
    inputs: ModelInputs = None,
    training: Training = False,
    dtype: ModelType = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="Extent of a dynamic axis of an .onnx file, such as batch=8; repeatable.",
            show_default=False,
        ),
    ] = None,
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
    warning lists the reasons. Of an .onnx file, an inference step is extracted; its weights are not read.
    """
    from tunebench.graph import Graph, InputSpec, extract, extract_onnx, load_factory, plan_partition

    target = target_device(device, arch)
    is_onnx = model.endswith(".onnx")
    if (is_onnx or model.endswith(".json")) and (inputs or training or dtype):
        kind = "an ONNX model, whose inputs and types are fixed" if is_onnx else "a graph"
        raise InputError(
            f"{model} is {kind}: remove --input, --training and --dtype, which apply to models in Python"
        )
    if size and not is_onnx:
        raise InputError(f"{model} is not an .onnx file: remove --size, which applies only to these")
    graphs: Sequence[Graph]
    if is_onnx:
        graphs = extract_onnx(model, _sizes(size or ()), device=target)
    elif model.endswith(".json"):
        graphs = (Graph.load(model),)
    else:
        factory = load_factory(model)
        if not inputs:
            raise InputError("the model needs its inputs: add --input SHAPE:TYPE for each argument")
        specs = [InputSpec.parse(text) for text in inputs]
        graphs = extract(factory, specs, training=training, dtype=dtype, device=target)
    plans = [plan_partition(graph, target) for graph in graphs]
    written = _write(plans, out) if out is not None else {}
    emit(as_json, [planned.to_json() for planned in plans], lambda to: _render(plans, written, to))


def _sizes(texts: Sequence[str]) -> dict[str, int]:
    """Return the extents of dynamic axes by name."""
    sizes = {}
    for text in texts:
        name, _, extent = text.rpartition("=")
        if not name or not extent.isascii() or not extent.isdigit() or not int(extent):
            raise InputError(f"--size {text}: expected NAME=N with N of 1 or more, such as batch=8")
        sizes[name] = int(extent)
    return sizes


def _write(plans: Sequence[PartitionPlan], folder: Path) -> dict[Path, str]:
    """Write the graphs and suites, and return whether each file was written or replaced."""
    from tunebench.graph import suite_of

    name = plans[0].graph.name.lower()
    suite = name if plans[0].graph.phase == "inference" else f"{name}.training"
    texts = {f"{suite}.toml": suite_of(plans)} if any(plan.workloads for plan in plans) else {}
    if any(plan.alternative_workloads for plan in plans):
        texts[f"{suite}.alternatives.toml"] = suite_of(plans, alternatives=True)
    graphs = {f"{name}.{plan.graph.phase}{_number(plan, plans)}.json": plan.graph for plan in plans}
    paths = [folder / file for file in (*graphs, *texts)]
    verbs = {path: "replaced" if path.exists() else "wrote" for path in paths}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, graph in graphs.items():
            graph.save(folder / file)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write into {folder}: {error.strerror or error}") from None
    return verbs


def _number(plan: PartitionPlan, plans: Sequence[PartitionPlan]) -> str:
    """Return the number of a plan in its phase, such as `.2`; empty if the phase has one plan."""
    alike = [candidate for candidate in plans if candidate.graph.phase == plan.graph.phase]
    return (
        f".{next(number for number, candidate in enumerate(alike, 1) if candidate is plan)}"
        if alike[1:]
        else ""
    )


def _render(plans: Sequence[PartitionPlan], written: Mapping[Path, str], to: Console) -> None:
    for plan in plans:
        _render_plan(plan, _number(plan, plans), to)
    for path, verb in written.items():
        to.print(f"{verb} {path}", soft_wrap=True)


def _render_plan(plan: PartitionPlan, number: str, to: Console) -> None:
    graph = plan.graph
    to.print(
        f"{graph.name}, {graph.phase}{number}, on {plan.device.name}: {len(graph.nodes)} operations in "
        f"{len(plan.chosen)} groups",
        soft_wrap=True,
    )
    to.print(table("Step", "", rows=_times(plan)))
    to.print(table(">count", ">time", ">saved", "run by", "workloads of the group", rows=_groups(plan)))
    torch_counts = Counter((node.target, node.reason) for node in _torch_nodes(plan))
    if torch_counts:
        rows = ((str(count), target, reason) for (target, reason), count in torch_counts.most_common())
        to.print(table(">count", "left to torch", "reason", rows=rows))
    for priced in plan.rejected[:MAX_REJECTED]:
        longer = f"would take {duration(-priced.saved_us)} longer"
        to.print(f"not fused: {_named(graph, priced.group.nodes)} ({longer})", soft_wrap=True)


def _times(plan: PartitionPlan) -> Iterator[tuple[str, str]]:
    yield "torch, one kernel per operation", duration(plan.torch_us)
    yield "faster of torch and tuned kernels, one per operation", duration(plan.alone_us)
    yield "fused groups", f"{duration(plan.us)} ({plan.proof})"
    if plan.interval_us is None:
        yield "90 % interval of that time", "not known on a processor"
    elif plan.interval_us[0] < plan.interval_us[1]:
        yield "90 % interval of that time", " to ".join(map(duration, plan.interval_us))
    if plan.alternatives:
        yield "groups that may be faster once measured", str(len(plan.alternatives))
    measured_us = sum(priced.price.us for priced in plan.chosen if priced.price.how == "measured")
    yield "fraction of that time measured, not predicted", f"{measured_us / plan.us:.0%}" if plan.us else "-"
    yield "fraction of torch's time in operators of tunebench", f"{plan.coverage:.1%}"
    yield "memory traffic saved by fusion", f"{plan.saved_bytes / 1e6:.1f} MB"


def _groups(plan: PartitionPlan) -> Iterator[tuple[str, ...]]:
    """Yield the groups of tuned kernels, equal groups once, slowest first."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for index, priced in enumerate(plan.chosen):
        if priced.group.workloads:
            alike.setdefault((*priced.group.workloads, priced.price.by), []).append(index)
    for indices in sorted(alike.values(), key=lambda i: -sum(plan.chosen[k].price.us for k in i)):
        offers = [plan.chosen[index] for index in indices]
        saved = sum(group.saved_us for group in offers)
        yield (
            str(len(offers)),
            duration(sum(offer.price.us for offer in offers)),
            duration(saved) if len(offers[0].group.nodes) > 1 else "-",
            offers[0].price.variant or offers[0].price.by,
            " and ".join(offers[0].group.workloads),
        )


def _torch_nodes(plan: PartitionPlan) -> Iterator[Node]:
    for priced in plan.chosen:
        if not priced.group.workloads:
            yield from (plan.graph.nodes[index] for index in priced.group.nodes)


def _named(graph: Graph, nodes: Sequence[int]) -> str:
    return " + ".join(graph.nodes[index].target.removeprefix("aten.") for index in nodes)
