"""The gradient of relu, as statistics of gradients find it by the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebench.expression import canonical
from tunebench.graph.node import Graph
from tunebench.workloads import parse

__all__ = ["with_relu_gradient"]

GRADIENT = canonical("x0*step(x1)")
"""What relu's gradient is of the gradient of its result and of the result."""


def with_relu_gradient(
    graph: Graph, nodes: tuple[int, ...], texts: tuple[str, ...], roles: Mapping[str, str]
) -> tuple[int, tuple[str, ...], dict[str, str]] | None:
    """Return the node before that is relu's gradient, the problems that do both, and their roles.

    Args:
        graph: The graph.
        nodes: A normalisation's gradient, and what follows it.
        texts: Their problems, the first of which are statistics.
        roles: Which value each of their tensors is.

    Returns:
        None if these are none of gradients, or what they read is no gradient of relu.
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
    found = {**roles, "dy": dy.value, "y": y.value, "dz": roles["dy"]}
    return before, (str(statistics.changed(act="relu")), *texts[1:]), found
