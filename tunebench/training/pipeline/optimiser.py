"""The fastest schedule of given stages on given ranks, within a limit of memory.

Candidates are the named schedules, and list schedules with several priorities and numbers of micro-batches in
flight. Simulated annealing improves the order of passes of the best ones. For small pipelines an integer
program then finds the optimum. Every result is simulated, and stated with a lower bound.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from tunebench.errors import InputError, MissingDependency
from tunebench.training.pipeline._order_search import OrderProblem, anneal
from tunebench.training.pipeline.exact_order import exact_order
from tunebench.training.pipeline.order_bound import available_bytes, stream_graph
from tunebench.training.schedules import (
    ActionKind,
    ListProblem,
    ListRules,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    PipelineSimulation,
    list_problem,
    list_schedule,
    list_times,
    looped_placement,
    simulate_pipeline,
    v_placement,
    v_schedule,
)
from tunebench.training.schedules.registry import SCHEDULES

__all__ = ["OptimisedSchedule", "optimise_schedule"]

_TOLERANCE = 1e-6
"""Relative difference at which a step equals its lower bound."""

_SOLVER_TOLERANCE = 1e-7
"""Relative error of the bound of the integer program."""

_EXACT_PASSES = 72
"""Most passes of a step for the integer program: 4 ranks, 6 micro-batches, split backward passes."""

_STARTS = 3
"""Schedules that simulated annealing starts from."""

_ROUNDS = 8
_MOVES = 8_000
"""Rounds of simulated annealing from each start, and moves in each."""

_PERIODS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Periods of list schedules, as multiples of the work of the busiest rank for a micro-batch."""

_PERIODIC_RULES = (
    ListRules(),
    ListRules(overlap=0.5),
    ListRules(keeps_room=2),
    ListRules(inf, inf, inf, keeps_room=2),
)

_JUDGED = 12
"""List schedules that are simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimisedSchedule:
    """The best schedule found.

    Attributes:
        schedule: The schedule.
        simulation: Its simulation.
        lower_bound_us: Time of a step that no order of passes beats.
        best_named: Name of the fastest named schedule that fits; None if none fits.
        best_named_us: Its time of a step; infinite if none fits.
        solved: Whether an integer program was solved to its end, or the first lower bound was reached.
            Without HiGHS no integer program is solved.
    """

    schedule: PipelineSchedule
    simulation: PipelineSimulation
    lower_bound_us: float
    best_named: str | None
    best_named_us: float
    solved: bool

    @property
    def gap(self) -> float:
        """Relative difference of the time of a step and its lower bound; 0 if the schedule is optimal."""
        over = self.simulation.step_us - self.lower_bound_us
        return over / self.lower_bound_us if over > _TOLERANCE * self.lower_bound_us else 0.0


def optimise_schedule(
    placement: Sequence[int],
    microbatches: int,
    costs: PipelineCosts,
    memory_bytes: int | None = None,
    split_backward: bool = True,
    time_limit_s: float = 20.0,
    *,
    exact: bool = True,
) -> OptimisedSchedule:
    """Return the best schedule found, its simulation and a lower bound.

    The result is never slower than the fastest named schedule with this placement that fits. It depends on
    the time limit only if that is reached.

    Args:
        placement: Rank of each stage.
        microbatches: Number of micro-batches.
        costs: Costs of the stages, and links.
        memory_bytes: Memory of each rank, static bytes included; None for no limit.
        split_backward: Whether gradients of the weights may run apart from those of the input.
        time_limit_s: Time limit of the search in seconds.
        exact: Whether to solve an integer program for a small pipeline, if HiGHS is installed.

    Raises:
        InputError: if no schedule was found that fits the memory, or the costs are of other stages.
    """
    search = _Search(tuple(placement), microbatches, costs, memory_bytes, split_backward, time_limit_s)
    search.try_named()
    search.try_lists()
    search.improve()
    if exact:
        search.solve()
    return search.result()


class _Search:
    """State of a search: the schedules found so far."""

    def __init__(
        self,
        placement: tuple[int, ...],
        microbatches: int,
        costs: PipelineCosts,
        memory_bytes: int | None,
        split: bool,
        time_limit_s: float,
    ) -> None:
        if len(costs.stages) != len(placement):
            raise InputError(
                f"expected costs of {len(placement)} stages, one for each of the placement, got "
                f"{len(costs.stages)}"
            )
        self._placement, self._microbatches, self._costs = placement, microbatches, costs
        self._memory_bytes, self._split = memory_bytes, split
        self._end_s = time.monotonic() + time_limit_s
        self._graph = stream_graph(
            placement, microbatches, costs, memory_bytes=memory_bytes, split_backward=split
        )
        self._lower_us = self._graph.lower_bound_us()
        self._solved = False
        self._named: tuple[float, str | None] = (inf, None)
        self._found: list[PipelineSimulation] = []  # those that fit, by the time of a step
        self._available = (
            [inf] * (max(placement) + 1)
            if memory_bytes is None
            else [float(rank_bytes) for rank_bytes in available_bytes(placement, costs, memory_bytes)]
        )

    # ------------------------------------------------------------------------------------------ candidates

    def try_named(self) -> None:
        """Simulate the named schedules with this placement, and their variants for these costs and memory."""
        for name, registered in SCHEDULES.items():
            simulation = self._judge(registered.make(max(self._placement) + 1, self._microbatches))
            if simulation is not None:
                self._named = min(self._named, (simulation.step_us, name))
        for schedule in self._variants():
            self._judge(schedule)

    def _variants(self) -> Iterator[PipelineSchedule]:
        """Return schedules of the same families for more stages, these costs and less memory."""
        ranks, count, costs = max(self._placement) + 1, self._microbatches, self._costs
        chunks = len(self._placement) // ranks
        if self._placement == looped_placement(ranks, chunks):
            for registered in SCHEDULES.values():
                varies = registered.layout == "looped" or (registered.depends_on_costs and chunks == 1)
                if varies and (self._split or not registered.splits_backward):
                    yield registered.make(ranks, count, chunks, costs)
        elif self._placement == v_placement(ranks):
            stage_bytes = max(stage.activation_bytes for stage in costs.stages)
            fitting = 2 * ranks if self._memory_bytes is None else min(self._available) // max(stage_bytes, 1)
            for most_stages in {2 * ranks, int(fitting), int(fitting) - 1}:
                if 2 <= most_stages <= 2 * ranks:
                    split_schedule = v_schedule(ranks, count, most_stages)
                    yield split_schedule if self._split else self._whole(split_schedule)

    def _whole(self, schedule: PipelineSchedule) -> PipelineSchedule:
        """Return a schedule with whole backward passes in the place of input gradients."""
        gradient, weight = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
        return self._schedule(
            tuple(
                tuple(
                    action._replace(kind=ActionKind.BACKWARD) if action.kind is gradient else action
                    for action in rank_actions
                    if action.kind is not weight
                )
                for rank_actions in schedule.actions
            )
        )

    def try_lists(self) -> None:
        """Simulate the best of many list schedules."""
        tried: list[tuple[float, int, ListProblem, NDArray[np.float64], ListRules]] = []
        # One problem for each limit of memory, the loosest last.
        limited = [
            list_problem(self._placement, self._costs, limits, split=self._split, unit_memory=unit)
            for limits, unit in self._limits()
        ]
        tries = itertools.chain(
            itertools.product(limited, self._plans(), self._rules()),
            itertools.product(limited[-1:], self._periodic_plans(), _PERIODIC_RULES),
        )
        # One micro-batch in flight holds the least: it is tried even if no time is left.
        least = list_schedule(limited[0], self._plans()[0], self._rules()[0])
        if least is not None:
            self._judge(self._schedule(least))
        for problem, planned, rules in tries:
            if self._is_over():
                break
            tried.append((list_times(problem, planned, rules)[1], len(tried), problem, planned, rules))
        tried = [attempt for attempt in tried if attempt[0] < inf]
        # The fastest of all, and of each limit: transferred tensors need memory too.
        tried.sort(key=lambda attempt: attempt[:2])
        of_limits = [
            next((attempt for attempt in tried if attempt[2] is problem), None) for problem in limited
        ]
        for _, _, problem, planned, rules in [*tried[:_JUDGED], *filter(None, of_limits)]:
            actions = list_schedule(problem, planned, rules)
            assert actions is not None, "it was scheduled before"
            self._judge(self._schedule(actions))

    def _limits(self) -> Iterator[tuple[list[float], bool]]:
        """Return limits of each rank, from one micro-batch in flight on, and whether they count stages."""
        stages = [self._placement.count(rank) for rank in range(max(self._placement) + 1)]
        activation_bytes = [
            sum(
                stage.activation_bytes
                for stage, owner in zip(self._costs.stages, self._placement, strict=True)
                if owner == rank
            )
            for rank in range(len(stages))
        ]
        flights = sorted({1, 2, 3, *(round(1.5**power) for power in range(4, 20))})
        for flight in [count for count in flights if count < self._microbatches] + [self._microbatches]:
            if self._memory_bytes is None:
                yield [float(flight * stage_count) for stage_count in stages], True
            else:
                yield (
                    [min(a, flight * b) for a, b in zip(self._available, activation_bytes, strict=True)],
                    False,
                )

    def _plans(self) -> list[NDArray[np.float64]]:
        """Return planned times of forward passes and gradients (2, stages, micro-batches)."""
        streams = self._graph.streams
        computes = [
            [index for index, stream in enumerate(streams) if stream.kind in kinds]
            for kinds in ((ActionKind.FORWARD,), (ActionKind.INPUT_GRADIENT, ActionKind.BACKWARD))
        ]
        rows = [sorted(row_streams, key=lambda index: streams[index].stage) for row_streams in computes]
        heads = np.array([self._graph.heads_us[row_streams] for row_streams in rows])
        tails = np.array([self._graph.tails_us[row_streams] for row_streams in rows])
        durations = np.array([[streams[index].duration_us for index in row_streams] for row_streams in rows])
        urgent = -tails - durations[:, :, None]
        # Gradients are planned before all forward passes: whatever gradient can run runs first.
        gradients_first = heads - np.array([0.0, 2.0 * heads.max()])[:, None, None]
        return [heads, urgent, gradients_first, heads + urgent]

    def _periodic_plans(self) -> Iterator[NDArray[np.float64]]:
        """Return plans that repeat the passes of the first micro-batch, after periods of several lengths."""
        heads = self._plans()[0]
        busy_us = max(
            sum(self._graph.streams[index].duration_us for index in resource_streams)
            for resource_streams in self._graph.by_resource().values()
        )
        for factor in _PERIODS:
            yield heads[:, :, :1] + factor * busy_us * np.arange(self._microbatches)

    def _rules(self) -> list[ListRules]:
        """Return rules that never end in a deadlock, or seldom."""
        return [
            ListRules(window, window, window, weights, room, overlap)
            for window, weights, room in ((inf, False, 2), (inf, True, 2), (0.0, False, 2))
            for overlap in ((1.0, 0.5, 0.0) if self._split else (1.0,))
        ]

    # ----------------------------------------------------------------------------------------- improvement

    def improve(self) -> None:
        """Improve the order of passes of the best schedules."""
        # Fixed seeds: the result depends on the time limit only, and only if that is reached.
        for seed, start in enumerate(list(self._found[:_STARTS])):
            if not self._is_over():
                self._anneal(start.schedule, seed)

    def _anneal(self, start: PipelineSchedule, seed: int) -> None:
        """Improve the order of passes of a schedule by simulated annealing."""
        order, lengths = _encoded(start, self._costs, split=self._split)
        limits = list(self._available)
        for annealing_round in range(_ROUNDS):
            step_us = self._found[0].step_us
            problem = self._order_problem(limits)
            hot = 0.01 * step_us * 0.5**annealing_round
            order = anneal(
                problem,
                order,
                lengths,
                moves=_MOVES,
                temperatures=(hot, hot / 4),
                seed=1000 * seed + annealing_round,
            )
            actions = _decoded(order, lengths, len(self._placement), split=self._split)
            excess = self._judge_excess(self._schedule(actions))
            # The next round starts from the best schedule that fits, with tighter limits.
            if any(excess):
                # Transferred tensors take memory that the search did not count.
                limits = [limit - over for limit, over in zip(limits, excess, strict=True)]
                order, lengths = _encoded(self._found[0].schedule, self._costs, split=self._split)
            if self._is_over():
                break

    def _order_problem(self, limits: Sequence[float]) -> OrderProblem:
        problem = list_problem(self._placement, self._costs, limits, split=self._split)
        links = self._costs.interconnect
        nodes = links.nodes if links else (0,) * len(limits)
        crosses = [nodes[a] != nodes[b] for a, b in itertools.pairwise(self._placement)]
        return OrderProblem(
            placement=problem.placement,
            microbatches=self._microbatches,
            times=problem.times,
            whole=np.array([stage.full_backward_us for stage in self._costs.stages]),
            copies=problem.delays,
            links=np.array([*crosses, False], dtype=np.int64),
            held=problem.held,
            limits=problem.limits,
        )

    def _merged(self, schedule: PipelineSchedule) -> PipelineSchedule:
        """Return a schedule with whole backward passes where both gradients follow each other."""
        stages = self._costs.stages
        actions = []
        for rank_actions in schedule.actions:
            merged: list[PipelineAction] = []
            for action in rank_actions:
                cost = stages[action.stage]
                apart_us = cost.input_gradient_us + cost.weight_gradient_us
                follows = merged and merged[-1] == action._replace(kind=ActionKind.INPUT_GRADIENT)
                is_weight = action.kind is ActionKind.WEIGHT_GRADIENT
                if is_weight and follows and cost.full_backward_us < apart_us:
                    merged[-1] = action._replace(kind=ActionKind.BACKWARD)
                else:
                    merged.append(action)
            actions.append(tuple(merged))
        return self._schedule(tuple(actions))

    # ----------------------------------------------------------------------------------------------- proof

    def solve(self) -> None:
        """Find the optimum of a small pipeline by an integer program."""
        passes = self._microbatches * len(self._placement) * (3 if self._split else 2)
        if self._is_over() or not self._found or passes > _EXACT_PASSES:
            return
        try:
            exact = exact_order(
                self._graph,
                self._placement,
                self._costs,
                limit_us=self._found[0].step_us,
                limit_s=self._end_s - time.monotonic(),
                available=None
                if self._memory_bytes is None
                else [int(rank_bytes) for rank_bytes in self._available],
            )
        except MissingDependency:
            return
        # The solver may stop within its tolerance: lower its bound by as much.
        self._lower_us = max(self._lower_us, exact.lower_us * (1.0 - _SOLVER_TOLERANCE))
        self._solved = exact.solved
        if exact.actions is not None:
            self._judge(self._schedule(exact.actions))
            self._judge(self._merged(self._schedule(exact.actions)))

    def result(self) -> OptimisedSchedule:
        """Return the best schedule.

        Raises:
            InputError: if none fits.
        """
        if not self._found:
            raise InputError(
                f"found no schedule of {self._microbatches} micro-batches within {self._memory_bytes} bytes: "
                "transferred tensors need memory too; raise the limit"
            )
        best = self._found[0]
        return OptimisedSchedule(
            schedule=best.schedule,
            simulation=best,
            # Rounding must not put the bound above the schedule that attains it.
            lower_bound_us=min(self._lower_us, best.step_us),
            best_named=self._named[1],
            best_named_us=self._named[0],
            solved=self._solved or best.step_us <= self._lower_us * (1.0 + _TOLERANCE),
        )

    def _schedule(self, actions: tuple[tuple[PipelineAction, ...], ...]) -> PipelineSchedule:
        return PipelineSchedule(
            name="optimised", microbatches=self._microbatches, placement=self._placement, actions=actions
        )

    def _judge(self, schedule: PipelineSchedule) -> PipelineSimulation | None:
        """Simulate a schedule and keep it if it fits; return None if it does not or is placed otherwise."""
        if schedule.placement != self._placement or (_splits(schedule) and not self._split):
            return None
        return None if any(self._judge_excess(schedule)) else self._latest

    def _judge_excess(self, schedule: PipelineSchedule) -> list[int]:
        """Simulate a schedule, keep it if it fits, and return the bytes of each rank over the limit."""
        simulation = simulate_pipeline(schedule, self._costs)
        self._latest = simulation
        excess = [0] * len(simulation.peak_bytes)
        if self._memory_bytes is not None:
            excess = [max(0, peak - self._memory_bytes) for peak in simulation.peak_bytes]
        if not any(excess) and all(
            known_simulation.schedule.actions != schedule.actions for known_simulation in self._found
        ):
            self._found = sorted(
                [*self._found, simulation], key=lambda known_simulation: known_simulation.step_us
            )[:_STARTS]
        return excess

    def _is_over(self) -> bool:
        """Return whether the time is used up or the lower bound is reached."""
        reached = bool(self._found) and self._found[0].step_us <= self._lower_us * (1.0 + _TOLERANCE)
        return reached or time.monotonic() >= self._end_s


# ------------------------------------------------------------------------------------------------ orders

_SPLIT = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT, ActionKind.BACKWARD)
_WHOLE = (ActionKind.FORWARD, ActionKind.BACKWARD)


def _splits(schedule: PipelineSchedule) -> bool:
    """Return whether some gradients of a schedule are apart."""
    return any(
        action.kind is ActionKind.WEIGHT_GRADIENT
        for rank_actions in schedule.actions
        for action in rank_actions
    )


def _encoded(
    schedule: PipelineSchedule, costs: PipelineCosts, *, split: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the codes of each rank, and their numbers."""
    rows = []
    for rank_actions in schedule.actions:
        row = []
        for stage, kind, _ in rank_actions:
            parts: tuple[ActionKind, ...] = (kind,)
            if split and kind is ActionKind.BACKWARD:
                cost = costs.stages[stage]
                apart_us = cost.input_gradient_us + cost.weight_gradient_us
                joined = cost.full_backward_us < apart_us
                parts = (kind if joined else ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
            kinds = _SPLIT if split else _WHOLE
            row += [kinds.index(part) * schedule.stages + stage for part in parts]
        rows.append(row)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    order = np.zeros((len(rows), max(lengths)), dtype=np.int64)
    for rank, row in enumerate(rows):
        order[rank, : len(row)] = row
    return order, lengths


def _decoded(
    order: NDArray[np.int64], lengths: NDArray[np.int64], stages: int, *, split: bool
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of each rank; micro-batches of a pass are in order."""
    actions = []
    for rank, length in enumerate(lengths.tolist()):
        done: Counter[tuple[bool, int, bool]] = Counter()
        joined = set()
        rank_actions = []
        for code in order[rank, :length].tolist():
            kind, stage = (_SPLIT if split else _WHOLE)[code // stages], code % stages
            # Input gradients and whole backward passes are counted together.
            key = (kind is ActionKind.FORWARD, stage, kind is ActionKind.WEIGHT_GRADIENT)
            action = PipelineAction(stage, kind, done[key])
            done[key] += 1
            if kind is ActionKind.BACKWARD:
                joined.add((stage, action.microbatch))
            if kind is not ActionKind.WEIGHT_GRADIENT or (stage, action.microbatch) not in joined:
                rank_actions.append(action)
        actions.append(tuple(rank_actions))
    return tuple(actions)
