"""A convolution of concatenated images as a sum of convolutions, so that the concatenation is not written."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tunebench.errors import InputError
from tunebench.graph.node import Graph
from tunebench.workloads import parse

__all__ = ["channels_of", "split_convolution", "sum_of", "zeros_of"]


def channels_of(filters: str, first: int, end: int) -> str:
    """Return the name of the value that holds the filters of some input channels."""
    return f"{filters}[{first}:{end}]"


def sum_of(node: str, part: int) -> str:
    """Return the name of the value that holds the sum of the convolutions up to a part."""
    return f"{node}~sum{part}"


def zeros_of(node: str) -> str:
    """Return the name of the zero bias of a convolution."""
    return f"{node}~zeros"


def split_convolution(
    graph: Graph, nodes: tuple[int, ...], text: str, roles: Mapping[str, str]
) -> tuple[int, tuple[str, ...], dict[str, str]] | None:
    """Return a convolution of concatenated images as one convolution per image.

    The first part adds the bias, each later part adds the sum of the parts before it, and the last part
    applies the activation. Sums are rounded to the images' type.

    Args:
        graph: The graph.
        nodes: The convolution and the nodes in its epilogue.
        text: Its workload.
        roles: Value of each of its tensors.

    Returns:
        The concatenation's node, the workloads of the parts, and their roles; None if the images are not
        concatenated, or other nodes read them too.
    """
    workload: Any = parse(text)
    joining = graph.writer.get(roles.get("x", ""))
    if joining is None or workload.operator != "conv2d" or workload.direction != "fprop":
        return None
    values, is_plain = graph.nodes[joining].joins, not workload.has_residual and not workload.has_pre
    if not values or not is_plain or not graph.is_internal(roles["x"], nodes):
        return None
    name = _convolution(graph, nodes, roles["x"])
    channel_ends = list(itertools.accumulate(graph.values[value].shape[1] for value in values))
    filters = [
        channels_of(roles["w"], *bounds) for bounds in zip((0, *channel_ends), channel_ends, strict=False)
    ]
    if any(part_name not in graph.values for part_name in filters):
        return None
    texts, part_roles = [], {name: value for name, value in roles.items() if name == "scale"}
    for part, (value, weights) in enumerate(zip(values, filters, strict=True)):
        last = part == len(values) - 1
        try:
            texts.append(str(_part(workload, part, graph.values[value].shape[1], last=last)))
        except InputError:
            return None
        part_roles |= {f"{part}.x": value, f"{part}.w": weights}
        # Sums pass from part to part through values of the group, which no node of the graph reads.
        part_roles[f"{part}.y"] = roles["y"] if last else sum_of(name, part)
        if part:
            part_roles |= {f"{part}.residual": sum_of(name, part - 1), f"{part}.bias": zeros_of(name)}
        elif "bias" in roles:
            part_roles["0.bias"] = roles["bias"]
    return joining, tuple(texts), part_roles


def _convolution(graph: Graph, nodes: tuple[int, ...], images: str) -> str:
    return next(graph.nodes[index].name for index in nodes if graph.nodes[index].roles.get("x") == images)


def _part(workload: Any, part: int, channels: int, *, last: bool) -> Any:
    """Return the workload of one part."""
    pieces = [
        "scale" if workload.has_scale else "",
        "bias" if part or workload.has_bias else "",
        "residual" if part else "",
        "relu" if last and workload.has_relu else "",
    ]
    epilogue = "+".join(filter(None, pieces)) or "none"
    return workload.changed(c=channels, epilogue=epilogue, act=workload.act if last else "x")
