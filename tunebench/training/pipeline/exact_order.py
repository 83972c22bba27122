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
        for rank, rank_bytes in enumerate(available):
            model.limit_memory(rank, placement, costs, rank_bytes)
    solution = model.program.solve(limit_s)
    if solution.values is None:
        lower_us = limit_us if solution.optimal else solution.bound * limit_us
        return ExactOrder(actions=None, lower_us=lower_us, solved=solution.optimal)
    starts = {member: solution.values[name] for member, name in model.start.items()}
    actions = tuple(_rank_order(graph, starts, rank) for rank in range(max(placement) + 1))
    return ExactOrder(actions=actions, lower_us=solution.bound * limit_us, solved=solution.optimal)


def _rank_order(graph: StreamGraph, starts: dict[Member, float], rank: int) -> tuple[PipelineAction, ...]:
    """Return the passes of a rank by their starts; at one start, those of no time are first."""
    rank_passes = [
        (start, graph.streams[index].duration_us, index, microbatch)
        for (index, microbatch), start in starts.items()
        if ("rank", rank, False) in graph.streams[index].resources
    ]
    return tuple(
        PipelineAction(graph.streams[index].stage, graph.streams[index].kind, microbatch)
        for _, _, index, microbatch in sorted(rank_passes)
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
        for precedence in graph.precedences:
            for microbatch in range(graph.microbatches - precedence.shift):
                before, after = (
                    (precedence.before, microbatch),
                    (precedence.after, microbatch + precedence.shift),
                )
                self._require(before, after, precedence.lag_us)
        for member, start in self.start.items():
            self.program.at_most({start: 1.0, self._end: -1.0}, -self._duration(member) / limit_us)
        self._reach = self._reachable()
        pairs = {
            pair
            for streams in graph.by_resource().values()
            for pair in itertools.combinations(sorted(streams), 2)
        }
        for pair in sorted(pairs):
            self._order_pair(*pair)

    def limit_memory(self, rank: int, placement: Sequence[int], costs: PipelineCosts, available: int) -> None:
        """Require that the activations of a rank fit when each of its forward passes starts."""
        graph = self._graph
        rank_streams = [
            index
            for index, stream in enumerate(graph.streams)
            if ("rank", placement[stream.stage], False) in stream.resources
            and placement[stream.stage] == rank
        ]
        whole = max(available, 1)
        for index in rank_streams:
            if graph.streams[index].kind is not ActionKind.FORWARD:
                continue
            for microbatch in range(graph.microbatches):
                activation_bytes = costs.stages[graph.streams[index].stage].activation_bytes
                # Bytes of all passes that are before this one, as far as the order is open; `spare_bytes`
                # takes what is certain.
                row: dict[int, float] = {}
                spare_bytes = available - activation_bytes
                for other_stream, other_microbatch in itertools.product(
                    rank_streams, range(graph.microbatches)
                ):
                    if (other_stream, other_microbatch) == (index, microbatch):
                        continue
                    change = self._change(other_stream, costs)
                    before = self._is_first((other_stream, other_microbatch), (index, microbatch))
                    if isinstance(before, bool):
                        spare_bytes -= change * before
                    else:
                        name, sign = before
                        row[name] = row.get(name, 0.0) + sign * change / whole
                        spare_bytes -= change * (sign < 0)
                self.program.at_most(row, spare_bytes / whole)

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
        for precedence in graph.precedences:
            for microbatch in range(graph.microbatches - precedence.shift):
                following[precedence.before, microbatch].append(
                    (precedence.after, microbatch + precedence.shift)
                )
        # What precedences order already needs no variable: most pairs.
        reach: dict[Member, set[Member]] = {}

        def visit(member: Member) -> set[Member]:
            if member not in reach:
                reach[member] = set(following[member]).union(*map(visit, following[member]))
            return reach[member]

        for member in self.start:
            visit(member)
        return reach

    def _order_pair(self, first_stream: int, second_stream: int) -> None:
        """Add the variables for the order of the members of two streams, where it is open."""
        count = range(self._graph.microbatches)
        for i, j in itertools.product(count, count):
            self._decide((first_stream, i), (second_stream, j))
        # Streams run in the order of micro-batches.
        for i, j in itertools.product(count, count):
            for later in ((i + 1, j), (i, j - 1)):
                if later[0] in count and later[1] in count:
                    implies = self._first[(first_stream, later[0]), (second_stream, later[1])]
                    self._imply(implies, self._first[(first_stream, i), (second_stream, j)])

    def _decide(self, first: Member, second: Member) -> None:
        """Add the variable that is 1 if a member is first, or require the only possible order."""
        if second in self._reach[first] or first in self._reach[second]:
            self._first[first, second] = second in self._reach[first]
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
        if not fits(first, second) or not fits(second, first):
            self._first[first, second] = not fits(second, first)
            self._require(*((first, second) if self._first[first, second] else (second, first)))
            return
        name = self._first[first, second] = self.program.variable(integer=True)
        first_duration, second_duration = self._duration(first) / limit_us, self._duration(second) / limit_us
        # Big M of each row: the most that the pair can miss its order by. The smaller it is, the tighter the
        # relaxation.
        large, larger = spare(first, second), spare(second, first)
        self.program.at_most({start[first]: 1.0, start[second]: -1.0, name: large}, large - first_duration)
        self.program.at_most({start[second]: 1.0, start[first]: -1.0, name: -larger}, -second_duration)

    def _imply(self, condition: int | bool, result: int | bool) -> None:
        """Require a decision if another one is taken."""
        if condition is False or result is True:
            return
        row = {}
        upper = 0.0
        for decision, sign in ((condition, 1.0), (result, -1.0)):
            if isinstance(decision, bool):
                upper -= sign * decision
            else:
                row[decision] = sign
        self.program.at_most(row, upper)

    def _is_first(self, first: Member, second: Member) -> bool | tuple[int, int]:
        """Return whether a member is first, or a variable and 1; -1 if the variable says the opposite."""
        if first[0] == second[0]:
            return first[1] < second[1]
        decision = self._first.get((first, second))
        if decision is not None:
            return decision if isinstance(decision, bool) else (decision, 1)
        decision = self._first[second, first]
        return not decision if isinstance(decision, bool) else (decision, -1)
