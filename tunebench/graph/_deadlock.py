"""Deadlocks: groups that wait for each other, and the pairs of nodes that cause it.

Two groups may both be convex, and still neither can run before the other: each reads a result of the other.
Longer cycles of groups deadlock in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunebench.graph._precedence import Precedence, bits

__all__ = ["Deadlock", "deadlocked", "deadlocks"]

MAX_CYCLES = 64
"""Most groups from which a cycle is searched at a time."""


@dataclass(frozen=True, slots=True, order=True)
class Deadlock:
    """Pairs of nodes that must not all be together in two or more groups. Each pair is a bit mask.

    The second node of each pair leads to the first node of the next pair, and the last pair to the first. If
    a group holds both nodes of a pair, everything before its second node waits for everything after its first
    node.
    """

    pairs: tuple[int, ...]


def deadlocked(precedence: Precedence, groups: Sequence[int]) -> list[list[int]]:
    """Return the sets of groups (bit masks) that wait for each other, by position; none if all can run."""
    order, waits = precedence.order(groups)
    blocked = set(range(len(groups))) - set(order)
    readers: dict[int, set[int]] = {index: set() for index in blocked}
    for index in blocked:
        for awaited in waits[index] & blocked:
            readers[awaited].add(index)
    components = []
    while blocked:
        first = min(blocked)
        # Reached in both directions: a strongly connected component, whose groups all wait for one another.
        component = _reached(first, waits, blocked) & _reached(first, readers, blocked)
        blocked -= component
        if len(component) > 1:
            components.append(sorted(component))
    return components


def _reached(first: int, onward: Sequence[set[int]] | Mapping[int, set[int]], among: set[int]) -> set[int]:
    reached, front = {first}, [first]
    while front:
        new = (onward[front.pop()] & among) - reached
        reached |= new
        front += new
    return reached


def deadlocks(precedence: Precedence, groups: Sequence[int], holding: Sequence[int]) -> set[Deadlock]:
    """Return the deadlocks on shortest cycles of groups.

    Args:
        precedence: The graph.
        groups: Groups that wait for each other, as bit masks.
        holding: For each node the candidates that hold it, as a bit mask. Of several pairs that cause a cycle
            the pair that most candidates hold is chosen.
    """
    # A single node cannot cause a deadlock: every cycle needs a group that is left and entered again.
    several = [group for group in groups if group & (group - 1)]
    reach = {group: _reach(precedence, group) for group in several}
    cycles = {_shortest_cycle(group, several, reach) for group in several[:MAX_CYCLES]} - {()}
    return {_deadlock(precedence, cycle, holding) for cycle in sorted(cycles)}


def _reach(precedence: Precedence, group: int) -> int:
    after = 0
    for node in bits(group):
        after |= precedence.beyond[node]
    return after


def _shortest_cycle(first: int, groups: Sequence[int], reach: Mapping[int, int]) -> tuple[int, ...]:
    """Return a shortest cycle through a group, lowest member first; empty if there is none."""
    came: dict[int, int] = {}
    front = [first]
    while front:
        following = []
        for group in front:
            if group != first and reach[group] & first:
                path = [group]
                while path[-1] != first:
                    path.append(came[path[-1]])
                path.reverse()
                lowest = path.index(min(path))
                return (*path[lowest:], *path[:lowest])
            for successor in groups:
                if (
                    successor != first
                    and successor not in came
                    and successor != group
                    and reach[group] & successor
                ):
                    came[successor] = group
                    following.append(successor)
        front = following
    return ()


def _deadlock(precedence: Precedence, cycle: Sequence[int], holding: Sequence[int]) -> Deadlock:
    """Return the pairs of nodes that cause a cycle of groups."""
    doors = []  # for each group: edges to the next group, (a node of the group, a node of the next)
    for index, group in enumerate(cycle):
        # The last group leads back to the first one.
        following = cycle[(index + 1) % len(cycle)]
        ways = [
            (out, into)
            for out in bits(group)
            for into in bits(following)
            if precedence.beyond[out] >> into & 1
        ]
        doors.append(ways)
    pairs = _most_common_pairs(doors, holding)
    return Deadlock(tuple(sorted(set(pairs))))


def _most_common_pairs(doors: Sequence[Sequence[tuple[int, int]]], holding: Sequence[int]) -> list[int]:
    """Choose an edge from each group to the next such that many candidates hold the resulting pairs."""
    chosen = [ways[0] for ways in doors]
    for index, ways in enumerate(doors):
        into = chosen[index - 1][1]
        out = chosen[(index + 1) % len(doors)][0]

        def held(way: tuple[int, int], into: int = into, out: int = out) -> int:
            in_first, in_second = holding[into] & holding[way[0]], holding[way[1]] & holding[out]
            return in_first.bit_count() * in_second.bit_count()

        chosen[index] = max(ways, key=held)
    # Of each group: the node that the cycle enters, and the one that it leaves.
    return [1 << chosen[index - 1][1] | 1 << out for index, (out, _) in enumerate(chosen)]
