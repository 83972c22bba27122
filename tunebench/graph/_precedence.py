"""Order of nodes and of groups of nodes, and the nodes between them."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tunebench.errors import InputError

__all__ = ["Precedence", "bits"]


def bits(mask: int) -> Iterator[int]:
    """Yield the nodes of a bit mask in ascending order."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


@dataclass(frozen=True, slots=True)
class Precedence:
    """An acyclic graph of the nodes 0, 1 and so on.

    Attributes:
        before: Immediate predecessors of each node, as a bit mask.
        beyond: All direct and indirect successors of each node, as a bit mask.
    """

    before: tuple[int, ...]
    beyond: tuple[int, ...]

    @classmethod
    def of(cls, predecessors: Sequence[Collection[int]]) -> Precedence:
        """Build the graph from the immediate predecessors of each node.

        Raises:
            InputError: if a predecessor does not exist, or the graph has a cycle.
        """
        count = len(predecessors)
        for node, direct in enumerate(predecessors):
            for predecessor in direct:
                if not 0 <= predecessor < count:
                    raise InputError(f"node {node} has predecessor {predecessor}; nodes are 0 to {count - 1}")
        before = tuple(sum(1 << predecessor for predecessor in set(direct)) for direct in predecessors)
        order = _sorted([set(direct) for direct in predecessors], range(count))
        if len(order) < count:
            stuck = min(set(range(count)) - set(order))
            raise InputError(f"nodes must form an acyclic graph, but node {stuck} is on a cycle or after one")
        beyond = [0] * count
        # Last nodes first: the successors of a node are complete before they are added to its predecessors.
        for node in reversed(order):
            for predecessor in bits(before[node]):
                beyond[predecessor] |= beyond[node] | 1 << node
        return cls(before, tuple(beyond))

    def between(self, group: int) -> int | None:
        """Return a node outside a group (bit mask) that is on a path between nodes of the group."""
        after = 0
        for node in bits(group):
            after |= self.beyond[node]
        for node in bits(group):
            # A predecessor outside the group that comes after a node of the group: a path leaves the group
            # and returns.
            if between := self.before[node] & after & ~group:
                return next(bits(between))
        return None

    def order(self, groups: Sequence[int]) -> tuple[list[int], list[set[int]]]:
        """Return an order in which disjoint groups (bit masks) can run, lowest node first among ready groups.

        Returns:
            Places of groups in `groups`, in running order, and the groups that each one immediately waits
            for. Groups on a cycle, or after one, are not in the order.
        """
        owner = {node: index for index, group in enumerate(groups) for node in bits(group)}
        waits: list[set[int]] = []
        for index, group in enumerate(groups):
            needed = 0
            for node in bits(group):
                needed |= self.before[node]
            waits.append({owner[node] for node in bits(needed & ~group)} - {index})
        return _sorted(waits, [group & -group for group in groups]), waits


def _sorted(waits: Sequence[Collection[int]], ranks: Sequence[int]) -> list[int]:
    """Return a topological order; of ready elements the one with the lowest rank is first."""
    remaining = [len(awaited) for awaited in waits]
    then: list[list[int]] = [[] for _ in waits]
    for index, awaited in enumerate(waits):
        for awaited_index in awaited:
            then[awaited_index].append(index)
    ready = [(ranks[index], index) for index, count in enumerate(remaining) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for waiting in then[index]:
            remaining[waiting] -= 1
            if not remaining[waiting]:
                heapq.heappush(ready, (ranks[waiting], waiting))
    return order
