"""Groups that wait for each other: finding them, saying which nodes make them wait, and parting them.

Each of two groups may be convex, and neither can run before the other: one has a node that the other needs,
and needs a node of the other. A longer circle of groups does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunebench.graph._precedence import Precedence, bits

__all__ = ["Deadlock", "deadlocks", "waiting"]

MOST = 64
"""Circles looked for at a time among groups that wait for each other."""


@dataclass(frozen=True, slots=True, order=True)
class Deadlock:
    """Pairs of nodes, each as a mask, that must not all be together if that takes two groups or more.

    Of each pair the second node leads to the first one of the next pair, round to the first pair. If a
    group holds both nodes of a pair, what comes before its second node waits for what comes after its first
    one.
    """

    pairs: tuple[int, ...]


def waiting(precedence: Precedence, groups: Sequence[int]) -> list[int]:
    """Return the places of groups (bit masks) that are on or between cycles; none if all can run."""
    order, waits = precedence.order(groups)
    left = set(range(len(groups))) - set(order)
    while True:
        needed = left & {other for place in left for other in waits[place]}
        if needed == left:
            return sorted(left)
        left = needed


def deadlocks(precedence: Precedence, groups: Sequence[int], holding: Sequence[int]) -> set[Deadlock]:
    """Return shortest circles of groups that wait for each other.

    Args:
        precedence: The graph.
        groups: Masks of groups that wait for each other.
        holding: For each node the candidates that hold it, as a mask: of several pairs that make a circle
            the one that most candidates hold is told.
    """
    several = [group for group in groups if group & (group - 1)]
    reach = {group: _reach(precedence, group) for group in several}
    found = {_circle(group, several, reach) for group in several[:MOST]} - {()}
    return {_deadlock(precedence, circle, holding) for circle in sorted(found)}


def _reach(precedence: Precedence, group: int) -> int:
    after = 0
    for node in bits(group):
        after |= precedence.beyond[node]
    return after


def _circle(first: int, groups: Sequence[int], reach: Mapping[int, int]) -> tuple[int, ...]:
    """Return a shortest circle through a group, its lowest member first; empty if there is none."""
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
            for other in groups:
                if other != first and other not in came and other != group and reach[group] & other:
                    came[other] = group
                    following.append(other)
        front = following
    return ()


def _deadlock(precedence: Precedence, circle: Sequence[int], holding: Sequence[int]) -> Deadlock:
    """Say which nodes of a circle's groups must not be together."""
    doors = []  # for each group and the next one: the node that leads on, and the node it leads to
    for place, group in enumerate(circle):
        following = circle[(place + 1) % len(circle)]
        ways = [
            (out, into)
            for out in bits(group)
            for into in bits(following)
            if precedence.beyond[out] >> into & 1
        ]
        doors.append(ways)
    pairs = _strongest(doors, holding)
    return Deadlock(tuple(sorted(set(pairs))))


def _strongest(doors: Sequence[Sequence[tuple[int, int]]], holding: Sequence[int]) -> list[int]:
    """Choose a way from each group to the next, so that the pairs are held by many candidates."""
    chosen = [ways[0] for ways in doors]
    for place, ways in enumerate(doors):
        into = chosen[place - 1][1]
        out = chosen[(place + 1) % len(doors)][0]

        def held(way: tuple[int, int], into: int = into, out: int = out) -> int:
            behind, ahead = holding[into] & holding[way[0]], holding[way[1]] & holding[out]
            return behind.bit_count() * ahead.bit_count()

        chosen[place] = max(ways, key=held)
    return [1 << chosen[place - 1][1] | 1 << out for place, (out, _) in enumerate(chosen)]
