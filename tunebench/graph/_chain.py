"""Chains of elementwise nodes as one expression, and the part of it that fits a product's epilogue."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from tunebench.errors import InputError
from tunebench.expression import Apply, Name, Node, names, parse, steps, write
from tunebench.graph.node import Broadcast, Graph, NodeOperand
from tunebench.workloads.common.expression_workload import substitute

__all__ = [
    "ChainEpilogue",
    "ChainExpression",
    "chain_expression",
    "chains",
    "epilogue_of",
    "matrix_dimensions",
    "plain_chains",
    "statistics_nodes",
]

MAX_CHAINS = 48
"""Most chains to consider per last node: those of all nodes up to each distance first, then shorter ones."""

MAX_CHAIN_NODES = 12
"""Most nodes of a chain."""


@dataclass(frozen=True, slots=True)
class ChainExpression:
    """The expression that a chain of elementwise nodes computes.

    Attributes:
        root: The expression.
        leaves: The operand of each name in the expression.
    """

    root: Node
    leaves: Mapping[str, NodeOperand]


def chain_expression(graph: Graph, sink: int, members: frozenset[int]) -> ChainExpression | None:
    """Return the expression of a chain, or None if its nodes do not iterate over the same elements.

    Args:
        graph: The graph.
        sink: The node that writes the chain's result.
        members: All nodes of the chain, including `sink`.
    """
    leaves: dict[str, NodeOperand] = {}
    called: dict[NodeOperand, str] = {}

    def tree_of(index: int) -> Node | None:
        node = graph.nodes[index]
        inputs: dict[Node, Node] = {}
        for name, operand in node.operands.items():
            writer = graph.writer.get(operand.value)
            # The results of a node's statistics kernels are read like any other value.
            if writer in members and writer != index:
                inner = tree_of(writer) if operand.place == "whole" else None
                if inner is None:
                    return None
                inputs[Name(name)] = inner
            else:
                called.setdefault(operand, f"x{len(called)}")
                leaves[called[operand]] = operand
                inputs[Name(name)] = Name(called[operand])
        return substitute(parse(node.expression), inputs)

    root = tree_of(sink)
    if root is None or not _has_consistent_operands(graph, leaves, graph.nodes[sink].writes[0]):
        return None
    return ChainExpression(root, leaves)


def _has_consistent_operands(graph: Graph, leaves: Mapping[str, NodeOperand], result: str) -> bool:
    """Return whether each value has one broadcast, and all vectors and rows have the same length."""
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
    """Yield chains of elementwise nodes that end in one node and whose other results no node outside reads.

    At most one node of a chain needs statistics kernels to run first.
    """
    # The number of chains is exponential. The largest ones first, which usually win; then breadth first, the
    # shortest ones.
    candidates = itertools.chain(_largest_chains(graph, sink), _chains(graph, sink))
    yield from itertools.islice(dict.fromkeys(itertools.islice(candidates, 2 * MAX_CHAINS)), MAX_CHAINS)


def _largest_chains(graph: Graph, sink: int) -> Iterator[frozenset[int]]:
    """Yield the chains of all nodes up to each distance from their end, as long as there is room for all."""
    members = frozenset({sink})
    while True:
        yield members
        before = _fusible_predecessors(graph, members)
        wider = members | before
        if not before or len(wider) > MAX_CHAIN_NODES or len(statistics_nodes(graph, wider)) > 1:
            return
        members = wider


def plain_chains(graph: Graph, sink: int) -> Iterator[tuple[frozenset[int], ChainExpression]]:
    """Yield the chains that end in one node and need no statistics, with their expressions."""
    for members in chains(graph, sink):
        tree = None if statistics_nodes(graph, members) else chain_expression(graph, sink, members)
        if tree is not None:
            yield members, tree


def statistics_nodes(graph: Graph, members: Iterable[int]) -> list[int]:
    """Return the elementwise nodes that need kernels to compute statistics first."""
    return [index for index in members if graph.nodes[index].workloads]


def _chains(graph: Graph, sink: int) -> Iterator[frozenset[int]]:
    seen = {frozenset({sink})}
    queue = [frozenset({sink})]
    while queue:
        members = queue.pop(0)
        yield members
        for before in sorted(_fusible_predecessors(graph, members), reverse=True):
            wider = members | {before}
            if (
                wider not in seen
                and len(wider) <= MAX_CHAIN_NODES
                and len(statistics_nodes(graph, wider)) <= 1
            ):
                seen.add(wider)
                queue.append(wider)


def _fusible_predecessors(graph: Graph, members: frozenset[int]) -> set[int]:
    """Return the elementwise nodes whose results only members read.

    A value that statistics kernels read must be in memory, so its node cannot join the chain.
    """
    predecessors = set()
    written = {value for index in statistics_nodes(graph, members) for value in graph.nodes[index].reads}
    for index in members:
        for operand in graph.nodes[index].operands.values():
            before = graph.writer.get(operand.value)
            if before is None or before in members or not graph.nodes[before].expression:
                continue
            if operand.value in written:
                continue
            if operand.place in ("whole", "strided") and graph.is_internal(operand.value, members):
                predecessors.add(before)
    return predecessors


def matrix_dimensions(graph: Graph, tree: ChainExpression, result: str) -> dict[str, Any] | None:
    """Return the dimensions of an elementwise workload, or None if its operands do not form a matrix."""
    value = graph.values[result]
    placed: dict[Broadcast, list[str]] = {broadcast: [] for broadcast in get_args(Broadcast)}
    for name in names(tree.root):
        placed[tree.leaves[name].place].append(name)
    columns = placed["row"]
    if value.shape[:1] == (1,):  # the channels of a single image are rows
        columns, placed["channel"] = [*columns, *placed["channel"]], []
    if placed["channel"] or placed["scalar"] or placed["strided"] or not placed["whole"]:
        return None
    if any(graph.values[tree.leaves[x].value].dtype != value.dtype for x in (*placed["whole"], *columns)):
        return None
    elements = {name: graph.values[tree.leaves[name].value].elements for name in tree.leaves}
    lines = {elements[name] for name in placed["vector"]}
    lines |= {value.elements // elements[name] for name in columns}
    if len(lines) > 1:
        return None
    cols = lines.pop() if lines else value.inner
    try:
        expression = write(tree.root)
    except InputError:  # expression too long
        return None
    types = {graph.values[tree.leaves[name].value].dtype for name in placed["vector"]}
    if len(types) > 1:
        return None
    return {
        "rows": value.elements // cols,
        "cols": cols,
        "dtype": value.dtype,
        "expression": expression,
        "vectors": "+".join(placed["vector"]),
        "columns": "+".join(columns),
        **({"vector_dtype": types.pop()} if types else {}),
    }


# -- epilogues ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEpilogue:
    """An epilogue ``outer(act(sums * scale + bias + inner residual)) + residual``, or a part of it.

    Attributes:
        scale: Value that multiplies the sums, one number per column; empty if there is none.
        bias: Value that is added, one number per column; empty if there is none.
        inner: Value of the sums' shape that is added before the activation; empty if there is none.
        residual: Value of the sums' shape that is added last; empty if there is none.
        activation: Expression in ``x``; ``x`` itself if there is none.
    """

    scale: str = ""
    bias: str = ""
    inner: str = ""
    residual: str = ""
    activation: str = "x"


X = Name("x")


def epilogue_of(tree: ChainExpression, sums: str, column: Broadcast) -> ChainEpilogue | None:
    """Return an expression as an epilogue of sums, or None if it does not have that form.

    Args:
        tree: The expression.
        sums: The value that holds the sums.
        column: Broadcast of a value with one number per column of the sums.
    """
    names_of = {leaf.value: name for name, leaf in tree.leaves.items()}
    if sums not in names_of or tree.leaves[names_of[sums]].place != "whole":
        return None
    start = Name(names_of[sums])
    root, residual = tree.root, ""
    # A residual is added outside the activation. Without an activation, the value counts as an inner
    # residual.
    for rest, added in _sums_of(root):
        if start.name in names(rest) and _place(tree, added) == "whole" and added != start:
            epilogue = _with_activation(tree, rest, start, column)
            if epilogue is not None and epilogue.activation != "x" and not epilogue.inner:
                residual = tree.leaves[added.name].value  # type: ignore[union-attr]
                return ChainEpilogue(
                    scale=epilogue.scale,
                    bias=epilogue.bias,
                    residual=residual,
                    activation=epilogue.activation,
                )
    return _with_activation(tree, root, start, column)


def _with_activation(
    tree: ChainExpression, root: Node, start: Name, column: Broadcast
) -> ChainEpilogue | None:
    """Return an expression as an activation of its largest linear part."""
    # From the whole expression inwards: the first linear part is the largest one, and the rest is the
    # activation.
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
    """Return the values in ``start * scale + bias + inner``, or None if the expression has another form."""
    values: dict[str, str] = {}
    while part != start:
        step = _strip_operation(tree, part, start, column, values)
        if step is None:
            return None
        part = step
    return values


def _strip_operation(
    tree: ChainExpression, part: Node, start: Name, column: Broadcast, values: dict[str, str]
) -> Node | None:
    """Remove the last operation of a linear expression and note its value; the factor comes before sums."""
    if not isinstance(part, Apply) or part.operation not in ("add", "mul"):
        return None
    for rest, argument in (part.arguments, part.arguments[::-1]):
        broadcast = _place(tree, argument)
        if start.name not in names(rest) or argument == start or broadcast is None:
            continue
        role = {column: "bias", "whole": "inner"}.get(broadcast) if part.operation == "add" else None
        if part.operation == "mul" and broadcast == column:
            role = "scale"
        # Operations are removed from the outside in. A scale inside a sum can be an epilogue, a sum inside a
        # scale cannot.
        if role is None or role in values or (role != "scale" and "scale" in values):
            return None
        values[role] = tree.leaves[argument.name].value  # type: ignore[union-attr]
        return rest
    return None


def _sums_of(root: Node) -> tuple[tuple[Node, Node], ...]:
    if isinstance(root, Apply) and root.operation == "add":
        first, second = root.arguments
        return ((first, second), (second, first))
    return ()


def _place(tree: ChainExpression, node: Node) -> Broadcast | None:
    return tree.leaves[node.name].place if isinstance(node, Name) and node.name in tree.leaves else None
