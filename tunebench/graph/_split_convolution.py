"""A convolution of joined images as a sum of convolutions: what is joined need not be written as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tunebench.errors import InputError
from tunebench.graph.node import Graph
from tunebench.workloads import parse

__all__ = ["channels_of", "split_convolution", "sum_of", "zeros_of"]


def channels_of(filters: str, first: int, end: int) -> str:
    """Return the name of the value that the filters of some input channels are."""
    return f"{filters}[{first}:{end}]"


def sum_of(node: str, part: int) -> str:
    """Return the name of the value that the convolutions of the parts up to one come to."""
    return f"{node}~sum{part}"


def zeros_of(node: str) -> str:
    """Return the name of a bias that adds nothing."""
    return f"{node}~zeros"


def split_convolution(
    graph: Graph, nodes: tuple[int, ...], text: str, roles: Mapping[str, str]
) -> tuple[int, tuple[str, ...], dict[str, str]] | None:
    """Return the node that joins the images of a convolution, the problems of its parts, and their roles.

    The first part has the bias, each later one adds what the parts before it come to, and the last one has
    the activation. Sums of parts are rounded to the type of the images.

    Args:
        graph: The graph.
        nodes: The convolution, and what is done in its epilogue.
        text: The problem.
        roles: Which value each of its tensors is.

    Returns:
        None if the images are not joined, or are read by others as well.
    """
    workload: Any = parse(text)
    joining = graph.writer.get(roles.get("x", ""))
    if joining is None or workload.operator != "conv2d" or workload.direction != "fprop":
        return None
    values, is_plain = graph.nodes[joining].joins, not workload.has_residual and not workload.has_pre
    if not values or not is_plain or not graph.is_inner(roles["x"], nodes):
        return None
    name = _convolution(graph, nodes, roles["x"])
    ends = list(itertools.accumulate(graph.values[value].shape[1] for value in values))
    filters = [channels_of(roles["w"], *bounds) for bounds in zip((0, *ends), ends, strict=False)]
    if any(one not in graph.values for one in filters):
        return None
    texts, found = [], {name: value for name, value in roles.items() if name == "scale"}
    for part, (value, weights) in enumerate(zip(values, filters, strict=True)):
        last = part == len(values) - 1
        try:
            texts.append(str(_part(workload, part, graph.values[value].shape[1], last=last)))
        except InputError:
            return None
        found |= {f"{part}.x": value, f"{part}.w": weights}
        found[f"{part}.y"] = roles["y"] if last else sum_of(name, part)
        if part:
            found |= {f"{part}.residual": sum_of(name, part - 1), f"{part}.bias": zeros_of(name)}
        elif "bias" in roles:
            found["0.bias"] = roles["bias"]
    return joining, tuple(texts), found


def _convolution(graph: Graph, nodes: tuple[int, ...], images: str) -> str:
    return next(graph.nodes[index].name for index in nodes if graph.nodes[index].roles.get("x") == images)


def _part(workload: Any, part: int, channels: int, *, last: bool) -> Any:
    """Return the problem of one part."""
    pieces = [
        "scale" if workload.has_scale else "",
        "bias" if part or workload.has_bias else "",
        "residual" if part else "",
        "relu" if last and workload.has_relu else "",
    ]
    epilogue = "+".join(filter(None, pieces)) or "none"
    return workload.changed(c=channels, epilogue=epilogue, act=workload.act if last else "x")
