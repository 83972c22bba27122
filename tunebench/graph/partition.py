"""The partition of minimal time: which groups of operations to run, so that each operation is in exactly one.

    candidates = [Candidate(nodes=frozenset({0}), cost_us=3.0), …]
    partition = cheapest_partition([(), (0,), (1,)], candidates)

Groups run one after the other, so they must not wait for each other: two groups may each be convex (no path
leaves and comes back), and deadlock together. What is chosen is proved cheapest, or is told with a lower
bound.

Deadlocks are rare, so they are first ignored: a region (nodes that candidates join) is covered exactly by
dynamic programming (`_cover`). If groups of the cheapest covers wait for each other, that deadlock is
forbidden, the regions it spans are joined, and these alone are covered again; until nothing waits. What is
forbidden holds in every partition, so costs of covers stay lower bounds throughout.

Costs are compared as whole numbers, so sums are exact and a tie is a tie: fewer groups win, then the lower
sum of indices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tunebench.errors import InputError
from tunebench.graph._cover import Budget, Cover, cover
from tunebench.graph._deadlock import Deadlock, deadlocks, stuck
from tunebench.graph._elimination import Group
from tunebench.graph._precedence import Precedence, bits

__all__ = ["LIMIT", "Candidate", "Partition", "cheapest_partition"]

LIMIT = 1_000_000
"""Rows of tables that a search makes before it contents itself with a gap: some seconds."""

EFFORTS = ((64, 0), (1024, 50), (2**62, 100))
"""Rows that a table may have, and rounds of work on prices: at first, and where that proves too little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group of nodes that can run as one, and the time it takes."""

    nodes: frozenset[int]
    cost_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The groups that were chosen.

    Args:
        chosen: Indices of candidates, in an order in which they can run.
        cost_us: What they take together.
        lower_us: Proven: no partition takes less.
        rows: How much was searched, in rows of tables.
    """

    chosen: tuple[int, ...]
    cost_us: float
    lower_us: float
    rows: int

    @property
    def exact(self) -> bool:
        """Tell whether this is proved to be the cheapest."""
        return self.cost_us == self.lower_us

    @property
    def gap(self) -> float:
        """Return by which share a partition could be cheaper at most: 0 if this is the cheapest."""
        if self.exact:
            return 0.0
        return self.cost_us / self.lower_us - 1 if self.lower_us else math.inf


def cheapest_partition(
    predecessors: Sequence[Collection[int]], candidates: Sequence[Candidate], *, limit: int = LIMIT
) -> Partition:
    """Choose groups so that every node is in exactly one, none waits for each other, and the cost is least.

    Args:
        predecessors: For each of the nodes 0, 1, … those that it needs immediately, in any order.
        candidates: Groups to choose from; each node has one of its own among them. Of several groups with the
            same nodes the cheapest counts. Groups need not be connected.
        limit: How many rows of tables to make. The same limit gives the same result on every machine.

    Raises:
        InputError: if the graph has a cycle, a node has no candidate of its own, or a candidate is empty or
            not convex, has a node that does not exist, or a cost that is not finite and 0 or more.
    """
    if limit < 0:
        raise InputError(f"limit must be 0 or more rows, got {limit}")
    precedence = Precedence.of(predecessors)
    _check(precedence, candidates)
    scale = _Scale.of(len(predecessors), candidates)
    search = _Search.over(precedence, scale.groups(candidates), limit)
    search.run()
    best = search.best
    order, _ = precedence.order([search.groups[index].nodes for index in best.chosen])
    return Partition(
        chosen=tuple(best.chosen[place] for place in order),
        cost_us=scale.cost_us(best.weight),
        lower_us=scale.cost_us(best.lower),
        rows=limit - search.budget.left,
    )


def _check(precedence: Precedence, candidates: Sequence[Candidate]) -> None:
    count = len(precedence.before)
    for index, candidate in enumerate(candidates):
        named = f"candidate {index} ({', '.join(map(str, sorted(candidate.nodes)))})"
        if not candidate.nodes or not all(0 <= node < count for node in candidate.nodes):
            raise InputError(f"{named} must have nodes of the graph, which are 0 to {count - 1}")
        if not (math.isfinite(candidate.cost_us) and candidate.cost_us >= 0):
            raise InputError(f"{named} must have a finite cost of 0 or more, got {candidate.cost_us}")
        met = precedence.between(_mask(candidate.nodes))
        if met is not None:
            raise InputError(
                f"{named} is not convex: a path between its nodes meets node {met}; leave it out"
            )
    alone: dict[int, float] = {}
    for candidate in candidates:
        if len(candidate.nodes) == 1:
            (node,) = candidate.nodes
            alone[node] = min(candidate.cost_us, alone.get(node, math.inf))
    for node in range(count):
        if node not in alone:
            raise InputError(f"every node must have a candidate of its own; node {node} has none")
    if not math.isfinite(sum(alone.values())):
        raise InputError("costs must have a finite sum")


def _mask(nodes: Iterable[int]) -> int:
    mask = 0
    for node in nodes:
        mask |= 1 << node
    return mask


@dataclass(frozen=True, slots=True)
class _Scale:
    """Costs as whole numbers: in units of which all are multiples, then one for a group, then the index."""

    unit: int
    nodes: int
    indices: int

    @classmethod
    def of(cls, nodes: int, candidates: Sequence[Candidate]) -> _Scale:
        unit = max((candidate.cost_us.as_integer_ratio()[1] for candidate in candidates), default=1)
        return cls(unit=unit, nodes=nodes + 1, indices=nodes * len(candidates) + 1)

    def groups(self, candidates: Sequence[Candidate]) -> dict[int, Group]:
        """Return by index the cheapest candidate of each set of nodes, unless its nodes alone cost less."""
        cheapest: dict[int, Group] = {}
        for index, candidate in enumerate(candidates):
            above, below = candidate.cost_us.as_integer_ratio()
            weight = (above * (self.unit // below) * self.nodes + 1) * self.indices + index
            nodes = _mask(candidate.nodes)
            if nodes not in cheapest or weight < cheapest[nodes].weight:
                cheapest[nodes] = Group(index, nodes, tuple(sorted(candidate.nodes)), weight)
        return {
            group.index: group
            for group in cheapest.values()
            if group.weight <= sum(cheapest[1 << node].weight for node in group.members)
        }

    def cost_us(self, weight: int) -> float:
        """Return what a partition of this weight costs, rounded once: a higher weight never costs less."""
        return weight // self.indices // self.nodes / self.unit


@dataclass(slots=True)
class _Region:
    """Nodes that candidates or deadlocks join; how they are covered, and how often that was searched."""

    nodes: int
    groups: list[Group]
    deadlocks: list[Deadlock]
    best: Cover
    searched: int = 0

    @property
    def exact(self) -> bool:
        return self.best.weight == self.best.lower


@dataclass(slots=True)
class _Search:
    """What is searched: `best` is a partition that can run, with a lower bound of all."""

    precedence: Precedence
    groups: dict[int, Group]
    alone: dict[int, Group]
    holding: list[int]
    edges: list[int]
    regions: list[_Region]
    budget: Budget
    best: Cover

    @classmethod
    def over(cls, precedence: Precedence, groups: dict[int, Group], limit: int) -> _Search:
        alone, holding = {}, [0] * len(precedence.before)
        for place, group in enumerate(groups.values()):
            for node in group.members:
                holding[node] |= 1 << place
            if len(group.members) == 1:
                alone[group.members[0]] = group
        singles = Cover(
            tuple(group.index for group in alone.values()), sum(group.weight for group in alone.values()), 0
        )
        edges = list(precedence.before)
        for node, before in enumerate(precedence.before):
            for other in bits(before):
                edges[other] |= 1 << node
        search = cls(precedence, groups, alone, holding, edges, [], Budget(limit), singles)
        search.regions = [search._region(joined, (), 0) for joined in _joined(groups.values())]
        return search

    def run(self) -> None:
        """Search until the best is proved to be the best, or the limit is reached."""
        while True:
            for region in self.regions:
                if not region.searched:
                    self._cover(region)
            chosen = [index for region in self.regions for index in region.best.chosen]
            circles = self._stuck(chosen)
            self._keep(chosen, circles)
            if self.best.weight == self.best.lower or self.budget.left <= 0:
                return
            if circles:
                self._forbid([chosen[place] for place in circle] for circle in circles)
                continue
            wider = [region for region in self.regions if not region.exact and region.searched < len(EFFORTS)]
            if not wider:
                return
            for region in wider:
                self._cover(region)

    def _region(self, groups: Iterable[Group], deadlocks: Iterable[Deadlock], lower: int) -> _Region:
        """Return a region that is covered as the best partition covers it."""
        groups = sorted(groups, key=lambda group: group.index)
        chosen = {group.index for group in groups} & set(self.best.chosen)
        weight = sum(self.groups[index].weight for index in chosen)
        nodes = 0
        for group in groups:
            nodes |= group.nodes
        return _Region(nodes, groups, sorted(set(deadlocks)), Cover(tuple(sorted(chosen)), weight, lower))

    def _cover(self, region: _Region) -> None:
        width, rounds = EFFORTS[region.searched]
        region.searched += 1
        region.best = cover(
            region.groups, region.deadlocks, self.edges, region.best, width, rounds, self.budget
        )

    def _stuck(self, chosen: Sequence[int]) -> list[list[int]]:
        return stuck(self.precedence, [self.groups[index].nodes for index in chosen])

    def _keep(self, chosen: list[int], circles: list[list[int]]) -> None:
        """Keep what the regions make together if it is better, its circles parted until all can run."""
        while circles:
            apart: set[int] = set()
            for circle in circles:
                several = [place for place in circle if self._loss(chosen[place])]
                several.sort(key=lambda place: (self._loss(chosen[place]), place))
                apart.update(several[: max(1, len(several) // 8)])
            kept = [index for place, index in enumerate(chosen) if place not in apart]
            nodes = [node for place in sorted(apart) for node in self.groups[chosen[place]].members]
            chosen = kept + [self.alone[node].index for node in nodes]
            circles = self._stuck(chosen)
        weight = sum(self.groups[index].weight for index in chosen)
        lower = sum(region.best.lower for region in self.regions)
        if weight < self.best.weight:
            self.best = Cover(tuple(chosen), weight, lower)
        self.best = Cover(self.best.chosen, self.best.weight, min(lower, self.best.weight))

    def _loss(self, index: int) -> int:
        """Return what a group costs more in parts, more than 0 if it has several nodes."""
        group = self.groups[index]
        return sum(self.alone[node].weight for node in group.members) - group.weight

    def _forbid(self, circles: Iterable[Sequence[int]]) -> None:
        """Forbid what makes groups wait for each other, and join the regions that this spans."""
        found: set[Deadlock] = set()
        for circle in circles:
            groups = [self.groups[index].nodes for index in circle]
            found |= deadlocks(self.precedence, groups, self.holding)
        spans = [_Span(region.nodes, [region], []) for region in self.regions]
        for deadlock in sorted(found):
            touched = [span for span in spans if any(span.nodes & pair for pair in deadlock.pairs)]
            spans = [span for span in spans if span not in touched]
            spans.append(_Span.of(touched, deadlock))
        self.regions = [self._spanned(span) if span.deadlocks else span.regions[0] for span in spans]

    def _spanned(self, span: _Span) -> _Region:
        groups = [group for region in span.regions for group in region.groups]
        known = [deadlock for region in span.regions for deadlock in region.deadlocks]
        return self._region(groups, span.deadlocks + known, sum(region.best.lower for region in span.regions))


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Regions that new deadlocks join."""

    nodes: int
    regions: list[_Region]
    deadlocks: list[Deadlock]

    @classmethod
    def of(cls, spans: Sequence[_Span], deadlock: Deadlock) -> _Span:
        return cls(
            sum(span.nodes for span in spans),
            [region for span in spans for region in span.regions],
            [deadlock, *(known for span in spans for known in span.deadlocks)],
        )


def _joined(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups of each set of nodes that groups join."""
    groups = list(groups)
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while parent.setdefault(node, node) != node:
            parent[node] = node = parent[parent[node]]
        return node

    for group in groups:
        first, *rest = group.members
        for node in rest:
            parent[root(node)] = root(first)
    regions: dict[int, list[Group]] = {}
    for group in groups:
        regions.setdefault(root(group.members[0]), []).append(group)
    return list(regions.values())
