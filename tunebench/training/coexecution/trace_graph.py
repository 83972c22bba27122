"""Traces of a step's operations, merged into a graph of basic blocks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

__all__ = ["BasicBlock", "TraceGraph", "TracedOperation", "number_occurrences"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TracedOperation:
    """An operation of a trace, identified by what ran, with what, and where.

    Attributes:
        operator: Name of the operator and its overload, such as ``aten::add.Tensor``.
        attributes: Arguments that are no tensors, and shapes and types of those that are, as text.
        site: Call stack within the step, outermost first, each ``file:line``.
        occurrence: How often the same operation ran at the same site before, within its iteration.
    """

    operator: str
    attributes: str
    site: tuple[str, ...]
    occurrence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BasicBlock:
    """Operations that always follow one another.

    Attributes:
        operations: The operations, in order; none if the block is an end of the graph.
        successors: Indices of the blocks that followed, sorted.
    """

    operations: tuple[TracedOperation, ...]
    successors: tuple[int, ...]


def number_occurrences(trace: Iterable[TracedOperation]) -> list[TracedOperation]:
    """Return a trace whose operations count their occurrences: the loop counters of their sites."""
    seen: Counter[TracedOperation] = Counter()
    numbered = []
    for operation in trace:
        numbered.append(replace(operation, occurrence=seen[operation]))
        seen[operation] += 1
    return numbered


Node = TracedOperation | None
"""An operation, or None: the start of an iteration and its end."""


@dataclass(slots=True)
class TraceGraph:
    """Operations of all traces, and which followed which.

    Merging is the union of two sets, so it is idempotent and independent of the order of traces.

    Attributes:
        edges: Pairs of operations that followed one another; None before the first and after the last.
    """

    edges: set[tuple[Node, Node]] = field(default_factory=set)

    def add(self, trace: Iterable[TracedOperation]) -> bool:
        """Merge a trace; return whether any of its steps was new."""
        path: list[Node] = [None, *number_occurrences(trace), None]
        before = len(self.edges)
        self.edges.update(itertools.pairwise(path))
        return len(self.edges) > before

    def operations(self) -> set[TracedOperation]:
        """Return all operations."""
        return {node for edge in self.edges for node in edge if node is not None}

    def blocks(self) -> list[BasicBlock]:
        """Return the basic blocks; the first is the start, the last the end of an iteration.

        The order depends on the graph only, not on the order of traces.
        """
        after: dict[Node, list[Node]] = {}
        before: dict[Node, list[Node]] = {}
        for left, right in self.edges:
            after.setdefault(left, []).append(right)
            before.setdefault(right, []).append(left)
        heads = sorted(
            node
            for node in self.operations()
            if len(before[node]) != 1 or before[node][0] is None or len(after[before[node][0]]) != 1
        )
        heads += _cycle_heads(heads, after, self.operations())
        index = {node: position + 1 for position, node in enumerate(heads)}
        end = len(heads) + 1
        blocks = [BasicBlock(operations=(), successors=_indices(after.get(None, []), index, end))]
        for head in heads:
            chain = _chain(head, after, index)
            blocks.append(
                BasicBlock(operations=tuple(chain), successors=_indices(after[chain[-1]], index, end))
            )
        return [*blocks, BasicBlock(operations=(), successors=())]


def _chain(
    head: TracedOperation, after: dict[Node, list[Node]], index: dict[TracedOperation, int]
) -> list[TracedOperation]:
    chain = [head]
    while len(after[chain[-1]]) == 1:
        following = after[chain[-1]][0]
        if following is None or following in index:
            break
        chain.append(following)
    return chain


def _cycle_heads(
    heads: list[TracedOperation], after: dict[Node, list[Node]], operations: set[TracedOperation]
) -> list[TracedOperation]:
    """Return one operation of every closed cycle that no head leads to."""
    index = dict.fromkeys(heads, 0)
    covered = {node for head in heads for node in _chain(head, after, index)}
    found = []
    for node in sorted(operations - covered):
        if node not in covered:
            index[node] = 0
            found.append(node)
            covered.update(_chain(node, after, index))
    return found


def _indices(nodes: list[Node], index: dict[TracedOperation, int], end: int) -> tuple[int, ...]:
    return tuple(sorted(end if node is None else index[node] for node in nodes))
