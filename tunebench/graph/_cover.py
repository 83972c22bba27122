"""The cheapest exact cover of nodes by groups, with a proof of how much cheaper any could be.

Nodes are eliminated one after the other (`_elimination`). When a node's turn comes, there are tables of
what was decided below it: each row says which later nodes are taken already, and the least that this costs.
The tables are joined; where the node is still free, each group that begins at it is tried; and the result
goes to the node above. So a chain takes a few rows at each node, a tree as many as groups cross an edge,
and a graph as many as there are ways to cut its groups at a separator. Source: nonserial dynamic
programming (Bertelè and Brioschi, 1972), with orders by least degree; as bucket elimination in Dechter,
"Bucket elimination: a unifying framework for reasoning", 1999.

A group whose nodes are on several paths of the tree begins on each of them, and rows are joined if both
have it. Until then rows keep its index; of all others they know but the nodes that they take.

All is counted by what a group costs over the prices of its nodes. Prices solve the dual of the linear
programme: no group costs less than its nodes' prices, so that all prices together are a lower bound, and a
row that costs more over prices than the best known cover is of no use. If a table gets too long, the rows
that cost least stay, and the least that was dropped bounds what was missed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tunebench.graph._deadlock import Deadlock
from tunebench.graph._dual import by_descent, by_order
from tunebench.graph._elimination import Group, Step, eliminate

__all__ = ["Budget", "Cover", "cover"]

_Trail = tuple[int, "_Trail", "_Trail"] | tuple[()]
"""How a row came about: a group or -1, and the trails of the rows it was made of."""

_State = tuple[int, tuple[int, ...], int]
"""What matters later: later nodes that are taken, groups begun on one of several paths, pairs seen."""

_Row = tuple[int, _State, _Trail]
"""What was decided costs so much over prices, leads to this state, and came about so."""

_NOTHING: _State = (0, (), 0)


@dataclass(frozen=True, slots=True)
class Cover:
    """Groups by their index, what they cost together, and what no cover can be below."""

    chosen: tuple[int, ...]
    weight: int
    lower: int


@dataclass(slots=True)
class Budget:
    """How many rows may still be made."""

    left: int

    def width(self, most: int) -> int:
        """Return how long a table may be: once all is used up, 1."""
        return most if self.left > 0 else 1


def cover(
    groups: Sequence[Group],
    deadlocks: Sequence[Deadlock],
    edges: Sequence[int],
    known: Cover,
    width: int,
    rounds: int,
    budget: Budget,
) -> Cover:
    """Find the cheapest set of groups that holds every node once and has none of the deadlocks.

    Args:
        groups: Among them one for each node alone.
        deadlocks: What must not be together.
        edges: For each node of the graph its neighbours, as a mask.
        known: The best known; only what is cheaper is looked for.
        width: Rows that a table may have.
        rounds: How much to work on prices first.
        budget: Rows that may still be made. Once it is used up, tables have one row, and there is still an
            answer.

    Returns:
        `known` with a lower bound that may be higher, or what is cheaper than that.
    """
    steps = eliminate(groups, deadlocks, edges)
    prices = by_order(groups, [step.node.bit_length() - 1 for step in steps if step.node])
    if rounds:
        prices = by_descent(groups, prices, known.weight, rounds)
    floor = sum(prices.values())
    over = {group.index: group.weight - sum([prices[node] for node in group.members]) for group in groups}
    slack = known.weight - floor
    useful = [group for group in groups if over[group.index] < slack]
    if len({node for group in useful for node in group.members}) < len(prices):
        return Cover(known.chosen, known.weight, known.weight)  # a node has no group that is below the slack
    sweep = _Sweep(
        {group.index: group for group in useful}, _doors(useful, deadlocks), over, slack, width, budget
    )
    found = sweep.run(eliminate(useful, deadlocks, edges) if 2 * len(useful) < len(groups) else steps)
    lower = max(known.lower, min(known.weight, floor + min(sweep.lost, slack if found is None else found[0])))
    if found is None:
        return Cover(known.chosen, known.weight, lower)
    return Cover(tuple(sorted(set(_groups(found[1])))), floor + found[0], lower)


def _doors(groups: Iterable[Group], deadlocks: Iterable[Deadlock]) -> dict[int, int]:
    """Return for each group that has pairs of deadlocks the nodes at which these are looked at."""
    found: dict[int, int] = {}
    for deadlock in deadlocks:
        for group in groups:
            held = [pair for pair in deadlock.pairs if pair & group.nodes == pair]
            if 0 < len(held) < len(deadlock.pairs):
                for pair in held:
                    found[group.index] = found.get(group.index, 0) | pair & -pair
    return found


class _Sweep:
    """One pass over all steps. `lost` is the least that rows dropped for want of width cost over prices."""

    def __init__(
        self,
        groups: Mapping[int, Group],
        doors: Mapping[int, int],
        over: Mapping[int, int],
        slack: int,
        width: int,
        budget: Budget,
    ) -> None:
        self.groups, self.doors, self.over, self.slack = groups, doors, over, slack
        self.width, self.budget, self.lost = width, budget, slack

    def run(self, steps: Sequence[Step]) -> tuple[int, _Trail] | None:
        """Return what the best costs over prices, and how it came about; None if none is below the slack."""
        waiting: dict[int, list[tuple[list[_Row], int]]] = {}
        total = 0
        trail: _Trail = ()
        for place, step in enumerate(steps):
            table: list[_Row] = [(0, _NOTHING, ())]
            inside = 0
            for other, below in sorted(waiting.pop(place, []), key=lambda each: len(each[0])):
                table = self._joined(table, inside, other, below, step.whole) if inside else other
                inside |= below
            table = self._decided(table, step)
            if step.onward >= 0:
                waiting.setdefault(step.onward, []).append((table, step.inside))
            elif not table or total + table[0][0] >= self.slack:
                return None
            else:
                total, trail = total + table[0][0], (-1, trail, table[0][2])
        return total, trail

    def _joined(
        self, left: list[_Row], left_nodes: int, right: list[_Row], right_nodes: int, whole: Sequence[int]
    ) -> list[_Row]:
        """Return what the tables of two parts make together; their nodes are given as masks."""
        rows: dict[tuple[int, ...], list[tuple[_Row, int]]] = {}
        for row in right:
            rows.setdefault(self._touching(row, left_nodes), []).append((row, self._taken(row)))
        best: dict[_State, _Row] = {}
        tried = 0
        for ours in left:
            if tried >= self.budget.left and ours[1] != _NOTHING and tried:
                self.lost = min(self.lost, ours[0])
                continue
            both = self._touching(ours, right_nodes)
            shared, taken = self._nodes(both), self._taken(ours)
            counted = ours[0] - sum(self.over[index] for index in both)
            (mask, begun, seen), trail = ours[1], ours[2]
            for theirs, also in rows.get(both, ()):
                if counted + theirs[0] >= self.slack:
                    break
                tried += 1
                if taken & also == shared:
                    other = theirs[1]
                    state = (mask | other[0], _merged(begun, other[1]), seen | other[2])
                    _note(best, (counted + theirs[0], state, (-1, trail, theirs[2])), whole)
        self.budget.left -= tried
        return self._cut(best)

    def _decided(self, table: list[_Row], step: Step) -> list[_Row]:
        """Return what becomes of rows when the step's node is decided."""
        best: dict[_State, _Row] = {}
        groups = sorted((self.over[group.index], group.index, group.nodes) for group in step.groups)
        tried = 0
        for row in table:
            if tried >= self.budget.left and row[1] != _NOTHING and tried:
                self.lost = min(self.lost, row[0])
                continue
            cost, (mask, begun, seen), trail = row
            taken = self._taken(row)
            if not step.node or taken & step.node:
                tried += 1
                _note(best, (cost, self._onward(mask, begun, seen, step), trail), step.whole)
                continue
            for more, index, nodes in groups:
                if cost + more >= self.slack:
                    break
                tried += 1
                if not taken & nodes:
                    state = self._onward(mask, _merged(begun, (index,)), seen, step)
                    _note(best, (cost + more, state, (index, trail, ())), step.whole)
        self.budget.left -= tried
        return self._cut(best)

    def _onward(self, mask: int, begun: tuple[int, ...], seen: int, step: Step) -> _State:
        """Return the state above a step: groups that go on upwards only are known by the nodes they take."""
        still = []
        for index in begun:
            nodes = self.groups[index].nodes
            for door in step.doors:
                if nodes & door.pair == door.pair and nodes & door.all != door.all:
                    seen |= door.seen
            outside = nodes & ~step.inside
            if outside & ~step.above or outside & self.doors.get(index, 0):
                still.append(index)
            else:
                mask |= outside
        return mask & ~step.node, tuple(still), seen & ~step.forget

    def _cut(self, best: Mapping[_State, _Row]) -> list[_Row]:
        """Sort rows, keep the cheapest, and the one that takes nothing: any other can be joined with it."""
        table = sorted(best.values(), key=_rank)
        width = self.budget.width(self.width)
        if len(table) <= width:
            return table
        free = [row for row in table[width:] if row[1] == _NOTHING]
        if len(table) > width + len(free):
            self.lost = min(self.lost, next(row[0] for row in table[width:] if row[1] != _NOTHING))
        return table[:width] + free

    def _touching(self, row: _Row, nodes: int) -> tuple[int, ...]:
        """Return the row's begun groups that have some of these nodes."""
        return tuple([index for index in row[1][1] if self.groups[index].nodes & nodes])

    def _nodes(self, begun: Iterable[int]) -> int:
        nodes = 0
        for index in begun:
            nodes |= self.groups[index].nodes
        return nodes

    def _taken(self, row: _Row) -> int:
        """Return the nodes that a row takes, those of begun groups included."""
        return row[1][0] | self._nodes(row[1][1])


def _note(best: dict[_State, _Row], row: _Row, whole: Iterable[int]) -> None:
    """Keep a row if it has no deadlock, and nothing cheaper leads to the same state."""
    state = row[1]
    for mask in whole:
        if state[2] & mask == mask:
            return
    known = best.get(state)
    if known is None or row[0] < known[0]:
        best[state] = row


def _merged(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*first, *second})) if first and second else first or second


def _rank(row: _Row) -> tuple[int, _State]:
    return row[:2]


def _groups(trail: _Trail) -> Iterator[int]:
    """Yield the groups of a trail; one that began on several paths more than once."""
    stack = [trail]
    while stack:
        found = stack.pop()
        if found:
            index, first, second = found
            if index >= 0:
                yield index
            stack += (first, second)
