"""Partition of a graph's nodes into groups of minimal total time.

    candidates = [PartitionCandidate(nodes=frozenset({0}), cost_us=3.0), …]
    partition = cheapest_partition([(), (0,), (1,)], candidates)

Each node is in exactly one group: a set partitioning problem, solved as an integer program by HiGHS. Groups
also run one after the other, so the graph of groups must be acyclic. Two convex groups (no path leaves the
group and returns) can wait for each other. Such deadlocks are rare, so constraints against them are added
only when they occur in a solution; every partition satisfies them, so lower bounds stay valid.

Of partitions with the same cost the one with the fewest groups is chosen, then the one with the earliest
candidates. Costs that differ by less than 1e-7 of the most expensive candidate count as equal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tunebench._highs import silent_solver
from tunebench.errors import InputError
from tunebench.graph._deadlock import Deadlock, deadlocked, deadlocks
from tunebench.graph._precedence import Precedence, bits

__all__ = ["LIMIT_S", "Partition", "PartitionCandidate", "cheapest_partition"]

LIMIT_S = 30.0
"""Default time limit in seconds; graphs of models take some milliseconds."""

_LARGEST_COST = 1e4
_PER_GROUP = 1e-3
"""Objective of the most expensive candidate, and what every group adds so that ties go to fewer groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCandidate:
    """A group of nodes that can run together.

    Attributes:
        nodes: The nodes.
        cost_us: Time of the group in microseconds.
    """

    nodes: frozenset[int]
    cost_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The chosen groups.

    Attributes:
        chosen: Indices of candidates, in an order in which they can run.
        cost_us: Total time of the chosen groups in microseconds.
        lower_us: Lower bound of the total time of any partition.
        cuts: Number of deadlocks that were excluded.
    """

    chosen: tuple[int, ...]
    cost_us: float
    lower_us: float
    cuts: int

    @property
    def exact(self) -> bool:
        """Whether this is proven to be the cheapest partition."""
        return self.cost_us == self.lower_us

    @property
    def gap(self) -> float:
        """Optimality gap: cost over lower bound, minus 1; 0 if this is the cheapest partition."""
        if self.exact:
            return 0.0
        return self.cost_us / self.lower_us - 1 if self.lower_us else math.inf


def cheapest_partition(
    predecessors: Sequence[Collection[int]],
    candidates: Sequence[PartitionCandidate],
    *,
    limit_s: float = LIMIT_S,
) -> Partition:
    """Choose groups of minimal total cost that contain each node once and can run in some order.

    Args:
        predecessors: Immediate predecessors of the nodes 0, 1, …, in any order.
        candidates: Groups to choose from, among them one for each single node. Of several groups with the
            same nodes only the cheapest is considered. Groups need not be connected.
        limit_s: Time limit in seconds. When it is reached, the best partition so far is returned with its
            gap.

    Raises:
        InputError: if the graph has a cycle, or a node has no candidate that consists of it alone; if a
            candidate is empty or not convex, or has a node that does not exist; or if a cost is negative or
            not finite.
        MissingDependency: if HiGHS is not installed.
    """
    if not limit_s >= 0:
        raise InputError(f"limit_s must be 0 or more seconds, got {limit_s}")
    precedence = Precedence.of(predecessors)
    _check(precedence, candidates)
    groups = _useful(candidates)
    alone = {next(bits(group.nodes)): group for group in groups if not group.nodes & (group.nodes - 1)}
    # Single nodes are always a partition that can run, and so the first incumbent.
    best, lower_us = list(alone.values()), _share_bound(groups, alone)
    cover, deadline, is_optimal = _ExactCover(groups, len(alone)), time.monotonic() + limit_s, not groups
    while not is_optimal and time.monotonic() < deadline:
        chosen, bound_us, is_solved = cover.solve(deadline - time.monotonic())
        lower_us = max(lower_us, bound_us)
        # The bound of the solver stays valid: forbidden combinations of groups are in no partition that can
        # run.
        stuck = deadlocked(precedence, [group.nodes for group in chosen])
        best = min(best, _without_deadlocks(precedence, chosen, alone), key=_cost_us)
        if is_optimal := is_solved and not stuck:
            best, lower_us = chosen, _cost_us(chosen)
        elif not is_solved:
            break
        for component in stuck:
            for deadlock in deadlocks(
                precedence, [chosen[index].nodes for index in component], cover.holding
            ):
                cover.forbid(deadlock)
    order, _ = precedence.order([group.nodes for group in best])
    return Partition(
        chosen=tuple(best[index].index for index in order),
        cost_us=_cost_us(best),
        lower_us=min(lower_us, _cost_us(best)),
        cuts=cover.cuts,
    )


def _check(precedence: Precedence, candidates: Sequence[PartitionCandidate]) -> None:
    count = len(precedence.before)
    for index, candidate in enumerate(candidates):
        named = f"candidate {index} ({', '.join(map(str, sorted(candidate.nodes)))})"
        if not candidate.nodes or not all(0 <= node < count for node in candidate.nodes):
            raise InputError(f"{named} must have nodes of the graph, which are 0 to {count - 1}")
        if not (math.isfinite(candidate.cost_us) and candidate.cost_us >= 0):
            raise InputError(f"{named} must have a finite cost of 0 or more, got {candidate.cost_us}")
        between = precedence.between(_mask(candidate.nodes))
        if between is not None:
            raise InputError(
                f"{named} is not convex: a path between its nodes passes through node {between}; "
                "remove the candidate"
            )
    single = {
        node: candidate.cost_us
        for candidate in candidates
        if len(candidate.nodes) == 1
        for node in candidate.nodes
    }
    for node in range(count):
        if node not in single:
            raise InputError(f"every node must have a candidate of its own; node {node} has none")
    if not math.isfinite(sum(single.values())):
        raise InputError("costs must have a finite sum")


def _mask(nodes: Iterable[int]) -> int:
    return sum(1 << node for node in nodes)


@dataclass(frozen=True, slots=True)
class _Group:
    """A candidate: its index, its nodes as a bit mask, and its cost."""

    index: int
    nodes: int
    cost_us: float


def _useful(candidates: Sequence[PartitionCandidate]) -> list[_Group]:
    """Return the cheapest candidate of each set of nodes, if it costs at most as much as single nodes."""
    cheapest: dict[int, _Group] = {}
    for index, candidate in enumerate(candidates):
        nodes = _mask(candidate.nodes)
        if nodes not in cheapest or candidate.cost_us < cheapest[nodes].cost_us:
            cheapest[nodes] = _Group(index, nodes, candidate.cost_us)
    return [
        group
        for group in cheapest.values()
        if group.cost_us <= _cost_us(cheapest[1 << node] for node in bits(group.nodes))
    ]


def _cost_us(groups: Iterable[_Group]) -> float:
    """Return the total time of groups, rounded once."""
    return math.fsum(group.cost_us for group in groups)


def _share_bound(groups: Iterable[_Group], nodes: Iterable[int]) -> float:
    """Return a lower bound of all partitions: each node costs at least its smallest share of a group."""
    shares = dict.fromkeys(nodes, math.inf)
    for group in groups:
        # Rounding must not lift the bound above the cost of a partition.
        share = group.cost_us / group.nodes.bit_count() * (1 - 1e-12)
        for node in bits(group.nodes):
            shares[node] = min(shares[node], share)
    return math.fsum(shares.values()) * (1 - 1e-12)


def _without_deadlocks(
    precedence: Precedence, chosen: list[_Group], alone: dict[int, _Group]
) -> list[_Group]:
    """Split groups into single nodes until all can run: an eighth of each deadlock at a time."""
    while stuck := deadlocked(precedence, [group.nodes for group in chosen]):
        split: set[_Group] = set()
        for component in stuck:
            several = [
                chosen[index] for index in component if chosen[index].nodes & (chosen[index].nodes - 1)
            ]
            # Groups that save the least are split first.
            several.sort(
                key=lambda group: _cost_us(alone[node] for node in bits(group.nodes)) - group.cost_us
            )
            split.update(several[: max(1, len(several) // 8)])
        parts = sorted(node for group in split for node in bits(group.nodes))
        chosen = [group for group in chosen if group not in split] + [alone[node] for node in parts]
    return chosen


class _ExactCover:
    """The integer program: which groups to choose so that each node is in exactly one.

    Attributes:
        holding: For each node the groups that hold it, as a bit mask of their places.
        cuts: Number of deadlocks that are excluded.
    """

    def __init__(self, groups: Sequence[_Group], nodes: int) -> None:
        self._highs = highs = silent_solver()
        import highspy

        self._groups, self._nodes, self.cuts = groups, nodes, 0
        self.holding = [0] * nodes
        for index, group in enumerate(groups):
            for node in bits(group.nodes):
                self.holding[node] |= 1 << index
        self._scale = _LARGEST_COST / (max((group.cost_us for group in groups), default=0) or 1)
        for option in ("mip_rel_gap", "mip_abs_gap"):
            highs.setOptionValue(option, 0.0)
        for option in (
            "mip_feasibility_tolerance",
            "primal_feasibility_tolerance",
            "dual_feasibility_tolerance",
        ):
            highs.setOptionValue(option, 1e-9)
        highs.setOptionValue("parallel", "off")
        # Ties go to fewer groups, then to earlier candidates: both terms together stay below 2 * _PER_GROUP
        # for each group.
        latest = nodes * (1 + max((group.index for group in groups), default=0))
        costs = np.array(
            [group.cost_us * self._scale + _PER_GROUP * (1 + group.index / latest) for group in groups]
        )
        columns = np.arange(len(groups), dtype=np.int32)
        highs.addVars(len(groups), np.zeros(len(groups)), np.ones(len(groups)))
        highs.changeColsCost(len(groups), columns, costs)
        highs.changeColsIntegrality(len(groups), columns, np.full(len(groups), highspy.HighsVarType.kInteger))
        rows = [list(bits(mask)) for mask in self.holding]
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int32)
        members = np.array([index for row in rows for index in row], dtype=np.int32)
        ones = np.ones(nodes)
        highs.addRows(nodes, ones, ones, len(members), starts[:-1], members, np.ones(len(members)))
        self._optimal, self._feasible = highspy.HighsModelStatus.kOptimal, highspy.kSolutionStatusFeasible

    def forbid(self, deadlock: Deadlock) -> None:
        """Exclude partitions in which all pairs of a deadlock are together, in two groups or more."""
        every = 0
        for pair in deadlock.pairs:
            every |= pair
        pairs: dict[int, float] = {}
        for pair in deadlock.pairs:
            first, *rest = bits(pair)
            for index in bits(self.holding[first] & self.holding[rest[0] if rest else first]):
                # A single group with all these nodes is no deadlock, and stays allowed.
                if self._groups[index].nodes & every != every:
                    pairs[index] = pairs.get(index, 0.0) + 1.0
        max_pairs = len(deadlock.pairs) - 1
        self._highs.addRow(-math.inf, max_pairs, len(pairs), list(pairs), list(pairs.values()))
        self.cuts += 1

    def solve(self, limit_s: float) -> tuple[list[_Group], float, bool]:
        """Return the best groups found, a lower bound in microseconds, and whether the groups are optimal.

        Without a solution within the time limit these are the single nodes.
        """
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(0.0, limit_s))
        self._highs.run()
        info = self._highs.getInfo()
        # Subtract the most that the terms for ties can add, or the bound would not hold for costs alone.
        bound = info.mip_dual_bound - 2 * self._nodes * _PER_GROUP
        bound_us = bound / self._scale if math.isfinite(bound) else 0.0
        if info.primal_solution_status != self._feasible:
            return [group for group in self._groups if group.nodes.bit_count() == 1], bound_us, False
        values = self._highs.getSolution().col_value
        chosen = [group for group, value in zip(self._groups, values, strict=True) if value > 0.5]
        return chosen, bound_us, self._highs.getModelStatus() == self._optimal
