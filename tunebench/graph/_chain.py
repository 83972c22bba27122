"""Expressions of several elementwise nodes as one, and what of it a product's epilogue can do."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tunebench.expression import Apply, Name, Node, names, parse, steps, write
from tunebench.graph.node import Broadcast, Graph
from tunebench.workloads.operators._expression_workload import substitute

__all__ = [
    "ChainEpilogue",
    "ChainExpression",
    "ChainOperand",
    "chain_expression",
    "chains",
    "epilogue_of",
    "statistics_nodes",
]

MOST_CHAINS = 48
"""Chains that end in one node; the shorter ones come first."""

MOST_LINKS = 12
"""Nodes of a chain."""


@dataclass(frozen=True, slots=True)
class ChainOperand:
    """A value that a tree reads, and how it lies beside what the tree gives."""

    value: str
    place: Broadcast


@dataclass(frozen=True, slots=True)
class ChainExpression:
    """What some elementwise nodes compute together.

    Attributes:
        root: The expression.
        leaves: What its names are.
    """

    root: Node
    leaves: Mapping[str, ChainOperand]


def chain_expression(graph: Graph, sink: int, members: frozenset[int]) -> ChainExpression | None:
    """Return what elementwise nodes compute together, or None if they do not walk the same elements.

    Args:
        graph: The graph.
        sink: The node whose result is wanted.
        members: The nodes, `sink` among them.
    """
    leaves: dict[str, ChainOperand] = {}
    called: dict[ChainOperand, str] = {}

    def tree_of(index: int) -> Node | None:
        node = graph.nodes[index]
        inputs: dict[Node, Node] = {}
        for name, operand in node.operands.items():
            writer = graph.writer.get(operand.value)
            # What a node's own kernels have found before is read like any other value.
            if writer in members and writer != index:
                inner = tree_of(writer) if operand.place == "whole" else None
                if inner is None:
                    return None
                inputs[Name(name)] = inner
            else:
                leaf = ChainOperand(operand.value, operand.place)
                called.setdefault(leaf, f"x{len(called)}")
                leaves[called[leaf]] = leaf
                inputs[Name(name)] = Name(called[leaf])
        return substitute(parse(node.expression), inputs)

    root = tree_of(sink)
    if root is None or not _is_even(graph, leaves, graph.nodes[sink].writes[0]):
        return None
    return ChainExpression(root, leaves)


def _is_even(graph: Graph, leaves: Mapping[str, ChainOperand], result: str) -> bool:
    """Tell whether each value is read in one way, and all vectors and rows are as long."""
    values = [leaf.value for leaf in leaves.values()]
    elements = graph.values[result].elements
    lines = {
        graph.values[leaf.value].elements
        if leaf.place == "vector"
        else elements // graph.values[leaf.value].elements
        for leaf in leaves.values()
        if leaf.place in ("vector", "row")
    }
    return len(set(values)) == len(values) and len(lines) <= 1


def chains(graph: Graph, sink: int) -> Iterator[frozenset[int]]:
    """Yield sets of elementwise nodes that end in one, all other values of which are read by none beyond.

    At most one of them has kernels of its own to run before.
    """
    yield from itertools.islice(_chains(graph, sink), MOST_CHAINS)


def statistics_nodes(graph: Graph, members: Iterable[int]) -> list[int]:
    """Return elementwise nodes that have kernels of their own to run before: those of statistics."""
    return [index for index in members if graph.nodes[index].workloads]


def _chains(graph: Graph, sink: int) -> Iterator[frozenset[int]]:
    seen = {frozenset({sink})}
    queue = [frozenset({sink})]
    while queue:
        members = queue.pop(0)
        yield members
        for before in sorted(_grown(graph, members), reverse=True):
            wider = members | {before}
            if wider not in seen and len(wider) <= MOST_LINKS and len(statistics_nodes(graph, wider)) <= 1:
                seen.add(wider)
                queue.append(wider)


def _grown(graph: Graph, members: frozenset[int]) -> set[int]:
    """Return elementwise nodes whose results are read by members, and by none else.

    What is read by kernels that run before the chain must have been written.
    """
    found = set()
    written = {value for index in statistics_nodes(graph, members) for value in graph.nodes[index].reads}
    for index in members:
        for operand in graph.nodes[index].operands.values():
            before = graph.writer.get(operand.value)
            if before is None or before in members or not graph.nodes[before].expression:
                continue
            if operand.value in written:
                continue
            if operand.place == "whole" and graph.is_inner(operand.value, members):
                found.add(before)
    return found


# -- epilogues ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEpilogue:
    """``outer(act(sums * scale + bias + inner residual)) + residual``, or a part of that.

    Attributes:
        scale: Value that the sums are multiplied by, for each column; empty if none.
        bias: Value that is added, for each column.
        inner: Value that is added before the activation, like the sums.
        residual: Value that is added in the end, likewise.
        activation: Expression in ``x``; ``x`` itself if there is none.
    """

    scale: str = ""
    bias: str = ""
    inner: str = ""
    residual: str = ""
    activation: str = "x"


X = Name("x")


def epilogue_of(tree: ChainExpression, sums: str, column: Broadcast) -> ChainEpilogue | None:
    """Return a tree as what follows sums, or None if it is no such thing.

    Args:
        tree: What is computed.
        sums: The value that the sums are.
        column: How a value with one number for each column of the sums lies.
    """
    names_of = {leaf.value: name for name, leaf in tree.leaves.items()}
    if sums not in names_of or tree.leaves[names_of[sums]].place != "whole":
        return None
    start = Name(names_of[sums])
    root, residual = tree.root, ""
    for rest, added in _sums_of(root):
        if start.name in names(rest) and _place(tree, added) == "whole" and added != start:
            found = _activated(tree, rest, start, column)
            if found is not None and found.activation != "x" and not found.inner:
                residual = tree.leaves[added.name].value  # type: ignore[union-attr]
                return ChainEpilogue(
                    scale=found.scale, bias=found.bias, residual=residual, activation=found.activation
                )
    return _activated(tree, root, start, column)


def _activated(tree: ChainExpression, root: Node, start: Name, column: Broadcast) -> ChainEpilogue | None:
    """Return a function of one linear part, the largest there is."""
    parts = [root, *(step for step in reversed(steps(root)) if start.name in names(step)), start]
    for part in parts:
        linear = _linear(tree, part, start, column)
        if linear is None:
            continue
        outer = substitute(root, {part: X})
        if names(outer) in (("x",), ()):
            return ChainEpilogue(**linear, activation=write(outer))
    return None


def _linear(tree: ChainExpression, part: Node, start: Name, column: Broadcast) -> dict[str, str] | None:
    """Return ``start * scale + bias + inner`` as the values it has, or None if it is something else."""
    found: dict[str, str] = {}
    while part != start:
        step = _peeled(tree, part, start, column, found)
        if step is None:
            return None
        part = step
    return found


def _peeled(
    tree: ChainExpression, part: Node, start: Name, column: Broadcast, found: dict[str, str]
) -> Node | None:
    """Take the last operation off a linear part, and note it; what is added comes after the factor."""
    if not isinstance(part, Apply) or part.operation not in ("add", "mul"):
        return None
    for rest, other in (part.arguments, part.arguments[::-1]):
        place = _place(tree, other)
        if start.name not in names(rest) or other == start or place is None:
            continue
        role = {column: "bias", "whole": "inner"}.get(place) if part.operation == "add" else None
        if part.operation == "mul" and place == column:
            role = "scale"
        if role is None or role in found or (role != "scale" and "scale" in found):
            return None
        found[role] = tree.leaves[other.name].value  # type: ignore[union-attr]
        return rest
    return None


def _sums_of(root: Node) -> tuple[tuple[Node, Node], ...]:
    if isinstance(root, Apply) and root.operation == "add":
        first, second = root.arguments
        return ((first, second), (second, first))
    return ()


def _place(tree: ChainExpression, node: Node) -> Broadcast | None:
    return tree.leaves[node.name].place if isinstance(node, Name) and node.name in tree.leaves else None
