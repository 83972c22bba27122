"""Prologues: elementwise chains that a product or a reduction applies to an operand while it reads it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from tunebench.errors import InputError
from tunebench.expression import Apply, Name, Node, names, steps, write
from tunebench.graph import node as graph_node
from tunebench.graph._chain import (
    ChainExpression,
    chain_expression,
    chains,
    matrix_dimensions,
    plain_chains,
    statistics_nodes,
)
from tunebench.graph._strided_chain import reduction_of_chain, strided_chain
from tunebench.graph.node import Broadcast, Graph
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.common.expression_workload import substitute
from tunebench.workloads.common.prologue import PREFIX

__all__ = ["PRODUCTS", "NodeWithPrologue", "prologues", "reduction_prologues"]

PRODUCTS = ("gemm", "conv2d")
"""Operators whose kernels accept a prologue."""

MAX_PROLOGUES = 8
"""Most prologues of one product; shorter chains come first."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeWithPrologue:
    """A product or a reduction with its prologue.

    Attributes:
        node: One node that computes both.
        nodes: The product or the reduction, and the chain.
    """

    node: graph_node.Node
    nodes: frozenset[int]


def prologues(graph: Graph, index: int) -> Iterator[NodeWithPrologue]:
    """Yield a product with each chain that can be its prologue: one whose result only the product reads."""
    yield from itertools.islice(_aheads(graph, index), MAX_PROLOGUES)


def _aheads(graph: Graph, index: int) -> Iterator[NodeWithPrologue]:
    node = graph.nodes[index]
    if node.expression or len(node.workloads) != 1 or node.workloads[0].partition(":")[0] not in PRODUCTS:
        return
    workload: Any = parse(node.workloads[0])
    operand = workload.inputs()[0]
    read = node.roles.get(operand.name, "")
    before = graph.writer.get(read)
    if before is None or not graph.nodes[before].expression or not graph.is_internal(read, (index,)):
        return
    # A product of a value with itself reads it twice, and a view has other elements: the prologue would apply
    # to one operand only.
    is_other = list(node.roles.values()).count(read) > 1 or graph.values[read].elements != operand.size
    if is_other or getattr(workload, "direction", "fprop") != "fprop":
        return
    for members, tree in plain_chains(graph, before):
        function = _function(graph, tree, workload, read)
        if function is None:
            continue
        expression, roles = function
        if any(name != operand.name for name in roles) and node.copied:
            continue  # the workload describes the layout in memory before the copy
        try:
            fused = workload.changed(pre=expression)
        except InputError:
            continue
        both = dataclasses.replace(node, workloads=(str(fused),), roles={**node.roles, **roles})
        yield NodeWithPrologue(both, members | {index})


def _function(
    graph: Graph, tree: ChainExpression, workload: Workload, result: str
) -> tuple[str, Mapping[str, str]] | None:
    """Return a chain as a function of one value and of up to two vectors along k.

    Args:
        graph: The graph.
        tree: The chain's expression.
        workload: The product.
        result: The value that the chain writes.

    Returns:
        The expression, and the values that are the operand, scale and shift; None if the chain has another
        form.
    """
    wholes = [name for name in names(tree.root) if tree.leaves[name].place == "whole"]
    vectors = [name for name in names(tree.root) if name not in wholes]
    dtypes = {graph.values[tree.leaves[name].value].dtype for name in (*wholes, *vectors)}
    if len(wholes) != 1 or dtypes != {graph.values[result].dtype}:
        return None
    broadcast, count = _numbers(workload)
    leaves = [tree.leaves[name] for name in vectors]
    if any(leaf.place != broadcast or graph.values[leaf.value].elements != count for leaf in leaves):
        return None
    called = _called(tree.root, vectors)
    if called is None:
        return None
    function = substitute(tree.root, {Name(wholes[0]): Name("x"), **called})
    roles = {workload.inputs()[0].name: tree.leaves[wholes[0]].value}
    for name in vectors:
        roles[PREFIX + called[Name(name)].name] = tree.leaves[name].value
    try:
        return write(function), roles
    except InputError:  # expression too long
        return None


def _numbers(workload: Any) -> tuple[Broadcast | None, int]:
    """Return the broadcast of a vector along k against the left operand, and its length."""
    if workload.operator == "conv2d":
        return ("vector" if workload.layout == "nhwc" else "channel"), workload.c
    if workload.trans[0] == "n":
        return "vector", workload.k
    return ("row" if workload.batch == 1 else None), workload.k


def _called(root: Node, numbers: list[str]) -> dict[Node, Name] | None:
    """Return the names scale and shift for the vectors of a prologue; None if there are more than two.

    The choice only affects the random data of verification: scales multiply or divide.
    """
    if len(numbers) > 2:
        return None
    first, second = Name("scale"), Name("shift")
    factors = [name for name in numbers if _multiplies(root, name)]
    if len(numbers) == 1:
        return {Name(numbers[0]): first if factors else second}
    if factors and factors[0] != numbers[0]:
        numbers = numbers[::-1]
    return dict(zip(map(Name, numbers), (first, second), strict=False))


def _multiplies(root: Node, name: str) -> bool:
    return any(
        isinstance(step, Apply) and step.operation in ("mul", "div") and Name(name) in step.arguments
        for step in steps(root)
    )


# -- reductions ----------------------------------------------------------------------------------------------


def reduction_prologues(graph: Graph, index: int) -> Iterator[NodeWithPrologue]:
    """Yield a reduction with each elementwise chain before it whose result only the reduction reads."""
    node = graph.nodes[index]
    if node.expression or len(node.workloads) != 1:
        return
    workload: Any = parse(node.workloads[0])
    read = node.roles.get("x0", "")
    before = graph.writer.get(read)
    if workload.operator not in ("reduction", "strided_reduction") or before is None:
        return
    if not graph.nodes[before].expression or not graph.is_internal(read, (index,)):
        return
    for members in chains(graph, before):
        reduced = None if statistics_nodes(graph, members) else _reduced(graph, before, members, workload)
        if reduced is not None:
            fused, leaves = reduced
            roles = {**leaves, "out": node.roles["out"]}
            both = dataclasses.replace(node, workloads=(str(fused),), roles=roles)
            yield NodeWithPrologue(both, members | {index})


def _reduced(
    graph: Graph, sink: int, members: frozenset[int], workload: Any
) -> tuple[Workload, Mapping[str, str]] | None:
    """Return the reduction of a chain and the value of each input, or None if no workload expresses it."""
    tree, (read,) = chain_expression(graph, sink, members), graph.nodes[sink].writes
    if workload.operator == "reduction" and tree is not None:
        fused = _reduced_matrix(graph, tree, read, workload)
        if fused is not None:
            return fused, {name: tree.leaves[name].value for name in names(tree.root)}
    chain = strided_chain(graph, sink, members)
    strided = None if chain is None else reduction_of_chain(graph, chain, workload)
    return None if chain is None or strided is None else (strided, chain.roles)


def _reduced_matrix(graph: Graph, tree: ChainExpression, read: str, workload: Any) -> Workload | None:
    """Return the reduction of a chain whose operands form a matrix, or None if they do not."""
    dimensions = matrix_dimensions(graph, tree, read)
    if dimensions is None or dimensions.get("vector_dtype", workload.dtype) != workload.dtype:
        return None
    depends_on_shape = dimensions["vectors"] or dimensions["columns"]
    if depends_on_shape and (dimensions["rows"], dimensions["cols"]) != (workload.rows, workload.cols):
        return None
    try:
        return workload.changed(**{key: dimensions[key] for key in ("expression", "vectors", "columns")})  # type: ignore[no-any-return]
    except InputError:
        return None
