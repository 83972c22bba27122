"""The fastest order of the passes of a small pipeline, by an integer program.

The program has the start of each pass and transfer, and for each two streams of a rank or of a direction of
a link, which of two of their members is first. Memory counts the activations of passes, not the tensors that
are sent and received. Transfers may take any order, while the simulation serves them in the order of their
issue: the optimum is that of the simulation if links are not contended and transferred tensors take no
memory, and a lower bound of it otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tunebench.training.integer_program import IntegerProgram
from tunebench.training.pipeline.order_bound import StreamGraph
from tunebench.training.schedules import ActionKind, PipelineAction, PipelineCosts

__all__ = ["ExactOrder", "exact_order"]

Member = tuple[int, int]
"""A stream, and a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOrder:
    """The solution of the integer program.

    Attributes:
        actions: Actions of each rank; none if none was found in time, or none is faster than the limit.
        lower_us: Lower bound of the time of a step; the limit if nothing is faster.
        solved: Whether the solver ended in time.
    """

    actions: tuple[tuple[PipelineAction, ...], ...] | None
    lower_us: float
    solved: bool


def exact_order(
    graph: StreamGraph,
    placement: Sequence[int],
    costs: PipelineCosts,
    *,
    limit_us: float,
    limit_s: float,
    available: Sequence[int] | None = None,
) -> ExactOrder:
    """Return the fastest order among those that take at most `limit_us`.

    Args:
        graph: Passes and transfers.
        placement: Rank of each stage.
        costs: Costs of the stages, for their memory.
        limit_us: Time of a known schedule.
        limit_s: Time limit of the solver in seconds.
        available: Bytes of each rank for activations; None for no limit.

    Raises:
        MissingDependency: HiGHS is not installed.
    """
    model = _Model(graph, limit_us)
    if available is not None:
        for rank, most in enumerate(available):
            model.limit_memory(rank, placement, costs, most)
    solution = model.program.solve(limit_s)
    if solution.values is None:
        lower_us = limit_us if solution.optimal else solution.bound * limit_us
        return ExactOrder(actions=None, lower_us=lower_us, solved=solution.optimal)
    starts = {member: solution.values[name] for member, name in model.start.items()}
    actions = tuple(_rank_order(graph, starts, rank) for rank in range(max(placement) + 1))
    return ExactOrder(actions=actions, lower_us=solution.bound * limit_us, solved=solution.optimal)


def _rank_order(graph: StreamGraph, starts: dict[Member, float], rank: int) -> tuple[PipelineAction, ...]:
    """Return the passes of a rank by their starts; at one start, those of no time are first."""
    own = [
        (start, graph.streams[index].duration_us, index, microbatch)
        for (index, microbatch), start in starts.items()
        if ("rank", rank, False) in graph.streams[index].resources
    ]
    return tuple(
        PipelineAction(graph.streams[index].stage, graph.streams[index].kind, microbatch)
        for _, _, index, microbatch in sorted(own)
    )


class _Model:
    """The integer program. Times are fractions of the limit.

    Attributes:
        program: The program.
        start: Variable of the start of each pass and transfer.
    """

    def __init__(self, graph: StreamGraph, limit_us: float) -> None:
        self._graph, self._limit_us = graph, limit_us
        self._durations = [stream.duration_us for stream in graph.streams]
        self.program = IntegerProgram()
        # A known bound as the lower end of the objective: the solver stops as soon as it attains it.
        least = graph.lower_bound_us() / limit_us
        self._end = self.program.variable(lower=min(least, 1.0), cost=1.0)
        members = itertools.product(range(len(graph.streams)), range(graph.microbatches))
        self.start = {member: self._start(*member) for member in members}
        self._first: dict[tuple[Member, Member], int | bool] = {}
        for each in graph.precedences:
            for microbatch in range(graph.microbatches - each.shift):
                before, after = (each.before, microbatch), (each.after, microbatch + each.shift)
                self._require(before, after, each.lag_us)
        for member, start in self.start.items():
            self.program.at_most({start: 1.0, self._end: -1.0}, -self._duration(member) / limit_us)
        self._reach = self._reachable()
        pairs = {
            pair for own in graph.by_resource().values() for pair in itertools.combinations(sorted(own), 2)
        }
        for pair in sorted(pairs):
            self._order_pair(*pair)

    def limit_memory(self, rank: int, placement: Sequence[int], costs: PipelineCosts, most: int) -> None:
        """Require that the activations of a rank fit when each of its forward passes starts."""
        graph = self._graph
        own = [
            index
            for index, stream in enumerate(graph.streams)
            if ("rank", placement[stream.stage], False) in stream.resources
            and placement[stream.stage] == rank
        ]
        whole = max(most, 1)
        for index in own:
            if graph.streams[index].kind is not ActionKind.FORWARD:
                continue
            for microbatch in range(graph.microbatches):
                held = costs.stages[graph.streams[index].stage].activation_bytes
                # Bytes of all passes that are before this one, as far as the order is open; `left` takes what
                # is certain.
                row: dict[int, float] = {}
                left = most - held
                for other, each in itertools.product(own, range(graph.microbatches)):
                    if (other, each) == (index, microbatch):
                        continue
                    change = self._change(other, costs)
                    before = self._is_first((other, each), (index, microbatch))
                    if isinstance(before, bool):
                        left -= change * before
                    else:
                        name, sign = before
                        row[name] = row.get(name, 0.0) + sign * change / whole
                        left -= change * (sign < 0)
                self.program.at_most(row, left / whole)

    def _change(self, index: int, costs: PipelineCosts) -> int:
        """Return the change of its rank's memory after a pass, in bytes."""
        stream = self._graph.streams[index]
        stage = costs.stages[stream.stage]
        return {
            ActionKind.FORWARD: stage.activation_bytes,
            ActionKind.BACKWARD: -stage.activation_bytes,
            ActionKind.INPUT_GRADIENT: stage.retained - stage.activation_bytes,
            ActionKind.WEIGHT_GRADIENT: -stage.retained,
        }[stream.kind]

    def _start(self, index: int, microbatch: int) -> int:
        latest = self._limit_us - self._graph.tails_us[index, microbatch] - self._durations[index]
        earliest = float(self._graph.heads_us[index, microbatch])
        return self.program.variable(
            lower=earliest / self._limit_us, upper=max(earliest, latest) / self._limit_us
        )

    def _duration(self, member: Member) -> float:
        return self._durations[member[0]]

    def _require(self, before: Member, after: Member, lag_us: float = 0.0) -> None:
        """Require that one member ends before another one starts."""
        gap = (self._duration(before) + lag_us) / self._limit_us
        self.program.at_most({self.start[before]: 1.0, self.start[after]: -1.0}, -gap)

    def _reachable(self) -> dict[Member, set[Member]]:
        """Return the members that precedences put after each one."""
        graph = self._graph
        following: dict[Member, list[Member]] = {member: [] for member in self.start}
        for each in graph.precedences:
            for microbatch in range(graph.microbatches - each.shift):
                following[each.before, microbatch].append((each.after, microbatch + each.shift))
        # What precedences order already needs no variable: most pairs.
        reach: dict[Member, set[Member]] = {}

        def visit(member: Member) -> set[Member]:
            if member not in reach:
                reach[member] = set(following[member]).union(*map(visit, following[member]))
            return reach[member]

        for member in self.start:
            visit(member)
        return reach

    def _order_pair(self, one: int, other: int) -> None:
        """Add the variables for the order of the members of two streams, where it is open."""
        count = range(self._graph.microbatches)
        for i, j in itertools.product(count, count):
            self._decide((one, i), (other, j))
        # Streams run in the order of micro-batches.
        for i, j in itertools.product(count, count):
            for later in ((i + 1, j), (i, j - 1)):
                if later[0] in count and later[1] in count:
                    implies = self._first[(one, later[0]), (other, later[1])]
                    self._imply(implies, self._first[(one, i), (other, j)])

    def _decide(self, one: Member, other: Member) -> None:
        """Add the variable that is 1 if a member is first, or require the only possible order."""
        if other in self._reach[one] or one in self._reach[other]:
            self._first[one, other] = other in self._reach[one]
            return
        limit_us, start = self._limit_us, self.start
        slack = 1e-9 * limit_us

        def spare(before: Member, after: Member) -> float:
            """Return by how much the two can miss their order."""
            graph = self._graph
            latest_end = limit_us - float(graph.tails_us[before])
            return max(0.0, latest_end - float(graph.heads_us[after])) / limit_us

        def fits(before: Member, after: Member) -> bool:
            path = self._graph.heads_us[before] + self._duration(before) + self._duration(after)
            return bool(path + self._graph.tails_us[after] <= limit_us + slack)

        # In one of the two orders, the longest path through both exceeds the limit: only the other one is
        # possible.
        if not fits(one, other) or not fits(other, one):
            self._first[one, other] = not fits(other, one)
            self._require(*((one, other) if self._first[one, other] else (other, one)))
            return
        name = self._first[one, other] = self.program.variable(integer=True)
        own, others = self._duration(one) / limit_us, self._duration(other) / limit_us
        # Big M of each row: the most that the pair can miss its order by. The smaller it is, the tighter the
        # relaxation.
        large, larger = spare(one, other), spare(other, one)
        self.program.at_most({start[one]: 1.0, start[other]: -1.0, name: large}, large - own)
        self.program.at_most({start[other]: 1.0, start[one]: -1.0, name: -larger}, -others)

    def _imply(self, condition: int | bool, result: int | bool) -> None:
        """Require a decision if another one is taken."""
        if condition is False or result is True:
            return
        row = {}
        most = 0.0
        for decision, sign in ((condition, 1.0), (result, -1.0)):
            if isinstance(decision, bool):
                most -= sign * decision
            else:
                row[decision] = sign
        self.program.at_most(row, most)

    def _is_first(self, one: Member, other: Member) -> bool | tuple[int, int]:
        """Return whether a member is first, or a variable and 1; -1 if the variable says the opposite."""
        if one[0] == other[0]:
            return one[1] < other[1]
        known = self._first.get((one, other))
        if known is not None:
            return known if isinstance(known, bool) else (known, 1)
        known = self._first[other, one]
        return not known if isinstance(known, bool) else (known, -1)
