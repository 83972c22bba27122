"""Chains of elementwise nodes whose operands have any layout, alone or before a reduction."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.errors import InputError
from tunebench.expression import Name, Node, names, parse, write
from tunebench.graph.node import Graph, NodeOperand, Value
from tunebench.index_map import IndexMap, common_shape
from tunebench.workload import Workload
from tunebench.workloads.common.expression_value import evaluate
from tunebench.workloads.common.expression_workload import substitute
from tunebench.workloads.common.strided_workload import TYPES, StridedOperand, operands_text
from tunebench.workloads.operators.strided_elementwise import StridedElementwise
from tunebench.workloads.operators.strided_reduction import StridedReduction

__all__ = ["StridedChain", "as_strided", "reduction_of_chain", "strided_chain"]

MOST_WORKLOADS = 4096
"""Most workloads that are kept: the layers of a model repeat the same ones."""


@dataclass(frozen=True, slots=True)
class StridedChain:
    """The expression that a chain of elementwise nodes computes, with the place of each operand's elements.

    Attributes:
        root: The expression.
        leaves: Value and index map of each name in the expression, over the elements of the result.
    """

    root: Node
    leaves: Mapping[str, tuple[str, IndexMap]]

    def operands(self, graph: Graph) -> tuple[str, str] | None:
        """Return shape and operands of a strided workload; None if its operands cannot be read together."""
        shape = common_shape(index.shape for _, index in self.leaves.values())
        types: Any = {value: graph.values[value].dtype for value in self.roles.values()}
        if shape is None or not {types[value] for value, _ in self.leaves.values()} <= set(TYPES):
            return None
        operands = {}
        for name, (value, whole) in self.leaves.items():
            index = whole.split(shape)
            gathers = tuple(dataclasses.replace(g, source=self._indices[g.source]) for g in index.gathers)
            index_types = tuple(types[gather.source] for gather in index.gathers)
            operands[name] = StridedOperand(
                types[value], dataclasses.replace(index, gathers=gathers), index_types
            )
        return "x".join(map(str, shape)), operands_text(operands)

    @property
    def _indices(self) -> dict[str, str]:
        """Name of each value whose elements are indices."""
        gathers = (gather for _, index in self.leaves.values() for gather in index.gathers)
        return {value: f"i{number}" for number, value in enumerate(dict.fromkeys(g.source for g in gathers))}

    @property
    def roles(self) -> dict[str, str]:
        """Value of each name in the expression and in gathers."""
        leaves = {name: value for name, (value, _) in self.leaves.items()}
        return leaves | {name: value for value, name in self._indices.items()}

    def after(self, view: IndexMap) -> StridedChain | None:
        """Return the chain for the elements that a view of its result reads; None if it has no affine maps.

        Outside of the view's guards all operands are 0; the chain must be 0 there, too. If there are more
        gathered elements than elements of its result, only a copy is computed for each of them.
        """
        if view.guards and not _is_zero_at_zeros(self.root):
            return None
        # A gather may read an element many times: computing a chain for each read would repeat its work.
        whole = max((index.elements for _, index in self.leaves.values()), default=0)
        if view.gathers and not isinstance(self.root, Name) and view.elements > whole:
            return None
        leaves = {name: (value, index.after(view)) for name, (value, index) in self.leaves.items()}
        mapped = {name: (value, index) for name, (value, index) in leaves.items() if index is not None}
        return StridedChain(self.root, mapped) if len(mapped) == len(leaves) else None


def strided_chain(graph: Graph, sink: int, members: frozenset[int]) -> StridedChain | None:
    """Return the expression of a chain, or None if an operand has no affine index map.

    Args:
        graph: The graph.
        sink: The node that writes the chain's result.
        members: All nodes of the chain, including `sink`; none of them has statistics.
    """
    node = graph.nodes[sink]
    result = graph.values[node.writes[0]]
    inputs: dict[Node, Node] = {}
    leaves: dict[str, tuple[str, IndexMap]] = {}
    called: dict[tuple[str, IndexMap], str] = {}

    def name_of(value: str, index: IndexMap) -> Name:
        name = called.setdefault((value, index), f"x{len(called)}")
        leaves[name] = (value, index)
        return Name(name)

    for name, operand in node.operands.items():
        index = _index_map(graph, operand, result)
        writer = graph.writer.get(operand.value)
        if writer is None or writer not in members or writer == sink:
            inputs[Name(name)] = name_of(operand.value, index)
            continue
        whole = strided_chain(graph, writer, members)
        before = None if whole is None else whole.after(index)
        if before is None:
            return None
        renamed: dict[Node, Node] = {
            Name(leaf): name_of(value, leaf_index) for leaf, (value, leaf_index) in before.leaves.items()
        }
        inputs[Name(name)] = substitute(before.root, renamed)
    return StridedChain(substitute(parse(node.expression), inputs), leaves)


def _index_map(graph: Graph, operand: NodeOperand, result: Value) -> IndexMap:
    """Return where each element of a result, in memory order, is in the memory of an operand."""
    if operand.index is not None:
        return operand.index
    elements, count = result.elements, graph.values[operand.value].elements
    images = result.shape[0] if result.shape else 1
    shape, strides = {
        "whole": ((elements,), (1,)),
        "scalar": ((elements,), (0,)),
        "vector": ((elements // count, count), (0, 1)),
        "row": ((count, elements // count), (1, 0)),
        "channel": ((images, count, elements // (images * count)), (0, 1, 0)),
    }[operand.place]
    return IndexMap(shape, strides)


def _is_zero_at_zeros(root: Node) -> bool:
    value, _ = evaluate(root, {name: np.zeros(()) for name in names(root)})
    return bool(value == 0)


def as_strided(graph: Graph, chain: StridedChain, result: str) -> Workload | None:
    """Return the workload of a chain, or None if no strided workload expresses it."""
    operands, dtype = chain.operands(graph), graph.values[result].dtype
    if operands is None or dtype not in TYPES:
        return None
    return _made(StridedElementwise, chain, operands, dtype=dtype)


def reduction_of_chain(graph: Graph, chain: StridedChain, workload: Any) -> Workload | None:
    """Return a reduction together with the chain that writes its operand, or None if it has no affine maps.

    Args:
        graph: The graph.
        chain: The chain.
        workload: The reduction of the chain's result: `reduction` or `strided_reduction` without a chain.
    """
    if workload.operator == "reduction":
        matrix = IndexMap.contiguous((workload.rows, workload.cols))
        if workload.axis == "rows":
            matrix = IndexMap((workload.cols, workload.rows), (1, workload.cols))
        view, axes, dtype = matrix, 1, workload.out
    else:
        ((_, operand),) = workload.maps.items()
        view, axes, dtype = operand.index, workload.axes, workload.dtype
    whole = chain.after(view)
    operands = None if whole is None else whole.operands(graph)
    if whole is None or operands is None or not operands[0]:  # one element has no axes
        return None
    shape, terms = tuple(map(int, operands[0].split("x"))), math.prod(view.shape[-axes:])
    # The common shape may split axes further: find how many of the last ones make up the reduced terms.
    inner = next((count for count in range(1, len(shape) + 1) if math.prod(shape[-count:]) == terms), 0)
    if not inner:
        return None
    more = {"reduce": workload.reduce, "then": workload.then, "axes": inner}
    return _made(StridedReduction, whole, operands, dtype=dtype, **more)


def _made(
    operator: type[Workload], chain: StridedChain, operands: tuple[str, str], **dimensions: Any
) -> Workload | None:
    try:
        expression = write(chain.root)
    except InputError:  # an expression that is too long
        return None
    shape, text = operands
    return _workload(operator, shape=shape, operands=text, expression=expression, **dimensions)


@functools.lru_cache(MOST_WORKLOADS)
def _workload(operator: type[Workload], **dimensions: Any) -> Workload | None:
    try:
        return operator.from_dimensions(dimensions)
    except InputError:  # no inputs can be drawn for the expression
        return None
