"""Fusion of relu's gradient into the batch normalisation gradient that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebench.expression import canonical
from tunebench.graph.node import Graph
from tunebench.workloads import parse

__all__ = ["with_relu_gradient"]

GRADIENT = canonical("where(le(x1,0),0,x0)")
"""Expression of relu's gradient: x0 is the gradient of its result, x1 its result."""


def with_relu_gradient(
    graph: Graph, nodes: tuple[int, ...], texts: tuple[str, ...], roles: Mapping[str, str]
) -> tuple[int, tuple[str, ...], dict[str, str]] | None:
    """Return relu's gradient before a normalisation's gradient, with the workloads that compute both.

    Args:
        graph: The graph.
        nodes: The normalisation's gradient and the nodes fused with it.
        texts: Their workloads, statistics first.
        roles: Value of each of their tensors.

    Returns:
        The node of relu's gradient, the workloads, and their roles; None if the workloads are not gradient
        statistics, or do not read a gradient of relu.
    """
    statistics: Any = parse(texts[0])
    if statistics.operator != "batchnorm_stats" or statistics.direction != "backward":
        return None
    before = graph.writer.get(roles["dy"])
    if before is None or before in nodes:
        return None
    node = graph.nodes[before]
    if node.expression != GRADIENT or node.workloads:
        return None
    dy, y = node.operands["x0"], node.operands["x1"]
    if (dy.place, y.place) != ("whole", "whole"):
        return None
    fused_roles = {**roles, "dy": dy.value, "y": y.value, "dz": roles["dy"]}
    return before, (str(statistics.changed(act="relu")), *texts[1:]), fused_roles
