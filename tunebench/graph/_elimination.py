"""The order in which nodes are eliminated, and what of it can be said before anything is counted.

Nodes are joined by few edges, just so that each group is connected. When a node is eliminated, its
neighbours become each other's; the earliest of them is the node that its table goes to. So nodes form a
tree, and a group's nodes are on one path to its root, or on several that meet.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tunebench.graph._deadlock import Deadlock
from tunebench.graph._precedence import bits

__all__ = ["Door", "Group", "Step", "eliminate"]


@dataclass(frozen=True, slots=True)
class Group:
    """A candidate: its place, its nodes as a mask and in ascending order, its cost as a whole number."""

    index: int
    nodes: int
    members: tuple[int, ...]
    weight: int


@dataclass(frozen=True, slots=True)
class Door:
    """Where a pair of a deadlock is looked at: when the lower of its nodes is eliminated.

    Args:
        pair: Both nodes.
        all: The nodes of all pairs: a group that holds them waits for nobody.
        seen: The bit that says that the pair is together.
    """

    pair: int
    all: int
    seen: int


@dataclass(frozen=True, slots=True)
class Step:
    """The elimination of a node, or of a deadlock whose pairs have all been looked at.

    Args:
        node: The node's bit; 0 for a deadlock.
        inside: What is eliminated with it: the nodes below it in the tree, and itself.
        above: The nodes above it in the tree.
        groups: Groups that hold the node and none below it.
        doors: Pairs of deadlocks that are looked at here.
        whole: Bits of deadlocks of which not all may be set.
        forget: Bits of pairs that no later step asks for.
        onward: The step that the table goes to, or -1.
    """

    node: int
    inside: int
    above: int
    groups: tuple[Group, ...]
    doors: tuple[Door, ...]
    whole: tuple[int, ...]
    forget: int
    onward: int


def eliminate(groups: Sequence[Group], deadlocks: Sequence[Deadlock], edges: Sequence[int]) -> list[Step]:
    """Return steps for all nodes that groups hold.

    Args:
        groups: What nodes are to be covered by.
        deadlocks: What must not be together.
        edges: For each node of the graph its neighbours, as a mask: edges that are used first.
    """
    around = _around(groups, edges)
    wide = max(around) + 1  # elements are nodes, then deadlocks
    doors: dict[int, list[Door]] = {}
    whole, shift = {}, 0
    for element, deadlock in enumerate(deadlocks, wide):
        for door in _doors(deadlock, shift):
            lower = next(bits(door.pair))
            doors.setdefault(lower, []).append(door)
            around[lower] |= 1 << element
            around[element] = around.get(element, 0) | 1 << lower
        whole[element] = (1 << len(deadlock.pairs)) - 1 << shift
        shift += len(deadlock.pairs)
    order = _order(around, wide)
    rank = {element: place for place, (element, _) in enumerate(order)}
    onward = [min((rank[other] for other in bits(near)), default=-1) for _, near in order]
    inside, above = _tree([1 << element if element < wide else 0 for element, _ in order], onward)
    holding: dict[int, list[Group]] = {}
    for group in groups:
        for node in group.members:
            if group.nodes & inside[rank[node]] == 1 << node:
                holding.setdefault(node, []).append(group)
    return [
        Step(
            node=1 << element if element < wide else 0,
            inside=inside[place],
            above=above[place],
            groups=tuple(holding.get(element, ())),
            doors=tuple(doors.get(element, ())),
            whole=tuple(whole[other] for other in bits((near | 1 << element) >> wide << wide)),
            forget=whole.get(element, 0),
            onward=onward[place],
        )
        for place, (element, near) in enumerate(order)
    ]


def _doors(deadlock: Deadlock, shift: int) -> list[Door]:
    every = 0
    for pair in deadlock.pairs:
        every |= pair
    return [Door(pair, every, 1 << shift + place) for place, pair in enumerate(deadlock.pairs)]


def _around(groups: Iterable[Group], edges: Sequence[int]) -> dict[int, int]:
    """Return for each node its neighbours, such that the nodes of each group are connected.

    Small groups come first, and edges that are there already; then those of the graph, then others.
    """
    around: dict[int, int] = {}
    for group in sorted(groups, key=lambda group: (len(group.members), group.members)):
        for node in group.members:
            around.setdefault(node, 0)
        parts = _parts(group.nodes, around)
        for given in (edges, None):
            while len(parts) > 1:
                way = _way(parts, given)
                if way is None:
                    break
                first, second = way
                around[first] |= 1 << second
                around[second] |= 1 << first
                parts = _parts(group.nodes, around)
    return around


def _parts(nodes: int, around: Mapping[int, int] | Sequence[int]) -> list[int]:
    """Return the connected parts of a set of nodes."""
    parts = []
    while nodes:
        part, front = 0, nodes & -nodes
        while front:
            part |= front
            reached = 0
            for node in bits(front):
                reached |= around[node]
            front = reached & nodes & ~part
        parts.append(part)
        nodes &= ~part
    return parts


def _way(parts: Sequence[int], edges: Sequence[int] | None) -> tuple[int, int] | None:
    """Return an edge from the first part to another, one of the given ones if any are given."""
    rest = sum(parts[1:])
    if edges is None:
        return parts[0].bit_length() - 1, next(bits(rest))
    for part in parts[:-1]:
        for node in bits(part):
            if met := edges[node] & sum(parts) & ~part:
                return node, next(bits(met))
    return None


def _order(around: Mapping[int, int], wide: int) -> list[tuple[int, int]]:
    """Return elements in the order of their elimination, each with its neighbours then, as a mask.

    Next is the element with the fewest neighbours. A deadlock waits until its nodes are gone.
    """
    around = dict(around)
    unseen = {element: near for element, near in around.items() if element >= wide}
    heap = [(near.bit_count(), element) for element, near in around.items() if element < wide]
    heapq.heapify(heap)
    order = []
    while heap:
        count, element = heapq.heappop(heap)
        if element not in around or count != around[element].bit_count():
            continue
        near = around.pop(element)
        order.append((element, near))
        for other in bits(near):
            around[other] = (around[other] | near) & ~(1 << element | 1 << other)
            if other >= wide:
                unseen[other] &= ~(1 << element)
            if other < wide or not unseen[other]:
                heapq.heappush(heap, (around[other].bit_count(), other))
    return order


def _tree(own: Sequence[int], onward: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return for each place of a tree what is below it and itself, and what is above it."""
    inside, above = list(own), [0] * len(own)
    for place, upper in enumerate(onward):
        if upper >= 0:
            inside[upper] |= inside[place]
    for place in reversed(range(len(own))):
        if onward[place] >= 0:
            above[place] = above[onward[place]] | own[onward[place]]
    return inside, above
