"""Schedules that split backward passes: the gradient of the weights fills time in which a rank would wait.

Sources: Qi et al., "Zero bubble pipeline parallelism", 2023, arXiv 2401.10241 (ZB-H1, ZB-H2, ZBV); Qi et al.,
"Pipeline parallelism with controllable memory", 2024, arXiv 2405.15362 (V-Half, V-Min, and schedules made of
one block of passes that repeats for each micro-batch); DeepSeek-AI, "DeepSeek-V3 technical report", 2024,
arXiv 2412.19437 (DualPipe; here folded to one copy of the model, DualPipeV).

The order of forward passes and input gradients is that of the schedule; weight gradients are placed by a list
scheduler that knows the times of stages and the transfers between them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.errors import InputError
from tunebench.training.schedules.action import ActionKind, PipelineAction
from tunebench.training.schedules.costs import PipelineCosts
from tunebench.training.schedules.generators import alternating_order, microbatch_groups
from tunebench.training.schedules.list_scheduler import (
    ListProblem,
    ListRules,
    list_problem,
    list_schedule,
    list_times,
)
from tunebench.training.schedules.schedule import PipelineSchedule, looped_placement, v_placement
from tunebench.training.schedules.simulation import simulate_pipeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "dualpipe_v",
    "interleaved_zero_bubble",
    "v_half",
    "v_min",
    "v_schedule",
    "zb_h1",
    "zb_h2",
    "zbv",
]

F, B, I, W = (  # noqa: E741 (the names of the papers)
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)

Actions = tuple[tuple[PipelineAction, ...], ...]
"""Actions of each rank."""


def zb_h1(ranks: int, microbatches: int, *, costs: PipelineCosts | None = None) -> PipelineSchedule:
    """Return the schedule with the order of 1F1B, and each rank with at most `ranks` micro-batches (ZB-H1).

    If all passes take the same time, ranks idle a third of the time that they idle in 1F1B.

    Args:
        ranks: Number of ranks, each with one stage.
        microbatches: Number of micro-batches.
        costs: Costs of the stages, for the place of weight gradients; one unit of time per pass by default.

    Raises:
        InputError: if a number is below 1.
    """
    order = alternating_order(ranks, microbatches)
    return _weights_filled("zb-h1", looped_placement(ranks), order, microbatches, ranks, costs)


def zb_h2(ranks: int, microbatches: int, *, costs: PipelineCosts | None = None) -> PipelineSchedule:
    """Return the schedule with a warm-up that fills the first bubble (ZB-H2).

    Ranks have at most ``2 * ranks - 1`` micro-batches. If all passes take the same time and there are as many
    micro-batches, no rank idles between its first and its last pass.

    Args:
        ranks: Number of ranks, each with one stage.
        microbatches: Number of micro-batches.
        costs: Costs of the stages, for the place of weight gradients; one unit of time per pass by default.

    Raises:
        InputError: if a number is below 1.
    """
    order = alternating_order(ranks, microbatches, per_hop=2)
    return _weights_filled("zb-h2", looped_placement(ranks), order, microbatches, 2 * ranks - 1, costs)


def interleaved_zero_bubble(
    ranks: int, microbatches: int, chunks: int = 2, *, costs: PipelineCosts | None = None
) -> PipelineSchedule:
    """Return interleaved 1F1B with weight gradients apart, and so with a shorter warm-up.

    Args:
        ranks: Number of ranks.
        microbatches: Number of micro-batches.
        chunks: Stages of each rank, which go around the ranks.
        costs: Costs of the stages, for the place of weight gradients; one unit of time per pass by default.

    Raises:
        InputError: if a number is below 1.
    """
    order = alternating_order(ranks, microbatches, chunks)
    most_stages = (chunks - 1) * microbatch_groups(ranks, microbatches)[0] + ranks
    placement = looped_placement(ranks, chunks)
    return _weights_filled("interleaved-zb", placement, order, microbatches, most_stages, costs)


def zbv(ranks: int, microbatches: int) -> PipelineSchedule:
    """Return the V-shaped schedule without bubbles, with the memory of 1F1B on each rank (ZBV).

    Args:
        ranks: Number of ranks, each with two stages.
        microbatches: Number of micro-batches.

    Raises:
        InputError: if a number is below 1.
    """
    return v_schedule(ranks, microbatches, 2 * ranks, name="zbv")


def v_half(ranks: int, microbatches: int) -> PipelineSchedule:
    """Return the V-shaped schedule with about half the memory of 1F1B (V-Half).

    Args:
        ranks: Number of ranks, each with two stages.
        microbatches: Number of micro-batches.

    Raises:
        InputError: if a number is below 1.
    """
    return v_schedule(ranks, microbatches, 2 * ((ranks + 2) // 2), name="v-half")


def v_min(ranks: int, microbatches: int) -> PipelineSchedule:
    """Return the V-shaped schedule with about a third of the memory of 1F1B (V-Min).

    Args:
        ranks: Number of ranks, each with two stages.
        microbatches: Number of micro-batches.

    Raises:
        InputError: if a number is below 1.
    """
    return v_schedule(ranks, microbatches, 2 * ((ranks + 4) // 3), name="v-min")


def v_schedule(
    ranks: int, microbatches: int, most_stages: int, *, name: str = "v-zb", costs: PipelineCosts | None = None
) -> PipelineSchedule:
    """Return a V-shaped schedule within a limit of memory.

    The result is the best of several blocks of passes that repeat for each micro-batch, between which ranks
    run passes early where memory allows. If all passes take the same time, and the limit is at least two
    thirds of a stage for each rank, repetitions add no bubble.

    Args:
        ranks: Number of ranks, each with two stages.
        microbatches: Number of micro-batches.
        most_stages: Activations that a rank may hold, each of one micro-batch on one stage: at least 2.
        name: Name of the schedule.
        costs: Costs of the stages; one unit of time per pass by default.

    Raises:
        InputError: if a number is below 1, or the limit below 2.
    """
    if min(ranks, microbatches) < 1 or most_stages < 2:
        raise InputError(
            f"schedule {name}: expected at least one rank, one micro-batch and memory of 2 stages, got "
            f"{ranks}, {microbatches} and {most_stages}"
        )
    placement = v_placement(ranks)
    problem = list_problem(
        placement, costs or PipelineCosts.uniform(2 * ranks), [most_stages] * ranks, unit_memory=True
    )
    # A bubble does not depend on the number of micro-batches once there are enough.
    tried_microbatches = min(microbatches, 3 * ranks)
    target = 0.0 if costs else _least_span(ranks, tried_microbatches, most_stages)
    tried: list[tuple[tuple[float, float], _Block, ListRules]] = []
    for block, rules in itertools.islice(_block_tries(ranks, most_stages), None if costs else _MOST_TRIES):
        times = list_times(problem, block.planned(tried_microbatches), rules)
        if times[0] < np.inf:
            tried.append((times, block, rules))
        if times[0] <= target:
            break
    finalists = [attempt[1:] for attempt in sorted(tried, key=itemgetter(0))[:_FINALISTS]]
    # The best of few micro-batches need not be the best of all.
    finalist_times = [list_times(problem, block.planned(microbatches), rules) for block, rules in finalists]
    if finalist_times and min(finalist_times)[0] < np.inf:
        block, rules = finalists[finalist_times.index(min(finalist_times))]
    else:
        block, rules = _slow_block(problem, ranks, microbatches, most_stages), ListRules()
    actions = list_schedule(problem, block.planned(microbatches), rules)
    assert actions is not None, "it was scheduled before"
    return PipelineSchedule(name=name, microbatches=microbatches, placement=placement, actions=actions)


def dualpipe_v(ranks: int, microbatches: int) -> PipelineSchedule:
    """Return DualPipe folded to a V: forward passes of one direction run beside backward ones of the other.

    Pairs of passes that overlap in DualPipe run one after the other here, forward pass first. With fewer than
    ``2 * ranks`` micro-batches, it is the schedule of as many without the passes of the others.

    Args:
        ranks: Number of ranks, each with two stages.
        microbatches: Number of micro-batches.

    Raises:
        InputError: if a number is below 1.
    """
    if min(ranks, microbatches) < 1:
        raise InputError(f"expected at least one rank and micro-batch, got {ranks} and {microbatches}")
    # The pattern needs two micro-batches for each rank: make it for as many, and drop those that do not
    # exist.
    full = max(microbatches, 2 * ranks)
    return PipelineSchedule(
        name="dualpipe-v",
        microbatches=microbatches,
        placement=v_placement(ranks),
        actions=tuple(
            tuple(action for action in _dualpipe_rank(ranks, rank, full) if action.microbatch < microbatches)
            for rank in range(ranks)
        ),
    )


# -------------------------------------------------------------------------------------- weight gradients


def _weights_filled(
    name: str,
    placement: tuple[int, ...],
    order: Actions,
    microbatches: int,
    most_stages: int,
    costs: PipelineCosts | None,
) -> PipelineSchedule:
    """Return the schedule that splits the backward passes of an order, within a limit of stages in memory."""
    ranks = len(order)
    problem = list_problem(
        placement, costs or PipelineCosts.uniform(len(placement)), [most_stages] * ranks, unit_memory=True
    )
    planned = np.zeros((2, len(placement), microbatches))
    for rank_actions in order:
        for position, (stage, kind, microbatch) in enumerate(rank_actions):
            # The position in the order serves as the planned time: only the order of planned times counts.
            planned[int(kind is B), stage, microbatch] = position
    orders = [list_schedule(problem, planned, rules) for rules in (_OVERLAPS if costs else _OVERLAPS[:1])]
    schedules = [
        PipelineSchedule(name=name, microbatches=microbatches, placement=placement, actions=actions)
        for actions in orders
        if actions is not None
    ]
    if costs is None:
        return schedules[0]
    return min(schedules, key=lambda schedule: simulate_pipeline(schedule, costs).step_us)


_OVERLAPS = tuple(ListRules(overlap=overlap) for overlap in (1.0, 0.5, 0.0))
"""Whether a weight gradient may delay a pass whose input is known to arrive."""


# ------------------------------------------------------------------------------------------------ blocks

_PERIOD = 6
"""Passes of a rank with two stages for a micro-batch, each of one unit of time."""

_MOST_TRIES = 1000
"""Blocks that are tried with equal passes. Of 24, 32 and 48 ranks, one has the bubble of the paper."""

_FINALISTS = 4
"""Blocks that are scheduled with all micro-batches."""

_OUTER = ((3, 3, 3, 3), (2, 2, 2, 2), (1, 1, 1, 1), (1, 1, 1, 4), (2, 1, 2, 1))
"""Time from a rank to the next one in forward passes of first and of last stages, and in their gradients."""

_INNER = ((1, 1, 1, 1), (2, 2, 2, 2))
"""The same between ranks close to the turn of the V."""

_EARLY = 2 * _PERIOD
_RULES = (
    ListRules(),
    ListRules(first_window=_EARLY, gradient_window=_EARLY),
    ListRules(first_window=_EARLY, gradient_window=_EARLY, keeps_room=1),
    ListRules(first_window=_EARLY, gradient_window=_EARLY, keeps_room=1, weights_first=True),
    ListRules(first_window=np.inf, gradient_window=np.inf),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Planned passes of one micro-batch, which repeat for each one.

    Attributes:
        forward: Planned time of the forward pass of each stage.
        gradient: Planned time of the input gradient of each stage.
        period: Time between micro-batches.
    """

    forward: tuple[int, ...]
    gradient: tuple[int, ...]
    period: int

    @property
    def repeats(self) -> bool:
        """Whether no two passes of a rank are at one time, if all take one unit of time."""
        return all(
            len({time % self.period for time in (*forwards, *gradients)}) == 4
            for forwards, gradients in zip(_by_rank(self.forward), _by_rank(self.gradient), strict=True)
        )

    @property
    def longest(self) -> int:
        """Longest time that a rank holds activations of a micro-batch, both stages added up."""
        return max(
            sum(gradients) - sum(forwards) + 2
            for forwards, gradients in zip(_by_rank(self.forward), _by_rank(self.gradient), strict=True)
        )

    def planned(self, microbatches: int) -> NDArray[np.float64]:
        """Return planned times of forward passes and input gradients (2, stages, micro-batches)."""
        first = np.array([self.forward, self.gradient], dtype=np.float64)
        return first[:, :, None] + self.period * np.arange(microbatches)


def _by_rank(times: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Return the times of the two stages of each rank of a V."""
    return zip(times[: len(times) // 2], reversed(times[len(times) // 2 :]), strict=True)


def _block(hops: Sequence[Sequence[int]], waits: Sequence[int], period: int) -> _Block:
    """Return the block with given times between neighbours.

    Args:
        hops: Times between each rank and the next one, of four kinds of passes (ranks - 1, 4).
        waits: Time that passes wait at the turn, at the end of forward passes, and at the turn back.
        period: Time between micro-batches.
    """
    down, up, back, home = (
        [0, *itertools.accumulate(hop[kind] for hop in reversed(hops))] for kind in range(4)
    )  # from the turn of the V
    last = [down[-1] + 1 + waits[0] + offset for offset in up]
    last_gradient = [last[-1] + 1 + waits[1] + back[-1] - offset for offset in back]
    forward = [down[-1] - offset for offset in reversed(down)]
    gradient = [last_gradient[0] + 1 + waits[2] + offset for offset in reversed(home)]
    return _Block(forward=(*forward, *last), gradient=(*gradient, *last_gradient), period=period)


def _block_tries(ranks: int, most_stages: int) -> Iterator[tuple[_Block, ListRules]]:
    """Return blocks whose repetition fits the memory or almost does, and rules to follow them."""
    # Blocks whose passes wait least at the turns come first: for any number of ranks, some of them are best.
    listed = sorted(itertools.product(range(_PERIOD + 1), repeat=3), key=lambda waits: (sum(waits), waits))
    shapes = [*itertools.product(_OUTER, _INNER, range(ranks - 1, -1, -1))]
    seen = set()
    for waits, (outer, inner, switch) in itertools.product(listed, shapes):
        block = _block([outer if rank < switch else inner for rank in range(ranks - 1)], waits, _PERIOD)
        if block in seen or block.longest > _PERIOD * (most_stages + 1) or not block.repeats:
            continue
        seen.add(block)
        for rules in _RULES:
            yield block, rules


def _slow_block(problem: ListProblem, ranks: int, microbatches: int, most_stages: int) -> _Block:
    """Return a block with a period that is long enough for little memory."""
    for period in itertools.count(_PERIOD):
        block = _block([(1, 1, 1, 1)] * (ranks - 1), (0, 0, 0), period)
        # Little's law: bytes in flight are the time that a micro-batch holds them over the time between
        # micro-batches.
        fits = block.longest <= period * most_stages
        if fits and list_times(problem, block.planned(microbatches), ListRules())[0] < np.inf:
            return block
    raise AssertionError("a long period runs one micro-batch after the other")


def _least_span(ranks: int, microbatches: int, most_stages: int) -> float:
    """Return the span of the busiest rank, if passes take one unit of time, at which the search ends."""
    bubble = max(
        6 * ranks - 1 - 3 * most_stages, 4 * ranks - 3 * most_stages + 2 * ((most_stages + 1) // 2), 0
    )
    return float(_PERIOD * microbatches + bubble)


# -------------------------------------------------------------------------------------------- DualPipeV


def _dualpipe_rank(ranks: int, rank: int, microbatches: int) -> list[PipelineAction]:
    """Return the actions of a rank, for at least ``2 * ranks`` micro-batches."""
    first, last = rank, 2 * ranks - 1 - rank
    later_ranks = ranks - 1 - rank
    issue = _Issue()
    issue.add((first, F), times=2 * later_ranks)
    issue.add((first, F), (last, F), times=rank + 1)
    for _ in range(later_ranks):
        issue.add((last, I))
        issue.add_weight()
        issue.add((last, F))
    issue.add((first, F), (last, B), (last, F), (first, B), times=microbatches - 2 * ranks + rank + 1)
    issue.add((last, B), (last, F), (first, B), times=later_ranks)
    # Then backward passes of both stages; the second half of them leaves its weight gradients for the end.
    for pass_index in range(2 * (rank + 1)):
        issue.add((last if pass_index % 2 == 0 else first, B if pass_index <= rank else I))
    for _ in range(later_ranks):
        issue.add_weight()
        issue.add((first, I))
    while issue.weights:
        issue.add_weight()
    return issue.actions


class _Issue:
    """Actions of a rank as they are issued, micro-batches in order.

    Attributes:
        actions: The actions.
        weights: Stages and micro-batches of which the weight gradient is to come.
    """

    def __init__(self) -> None:
        self.actions: list[PipelineAction] = []
        self.weights: list[tuple[int, int]] = []
        self._next: Counter[tuple[int, bool]] = Counter()

    def add(self, *passes: tuple[int, ActionKind], times: int = 1) -> None:
        """Append passes of the next micro-batches."""
        for stage, kind in passes * times:
            key = stage, kind is F
            if kind is I:
                self.weights.append((stage, self._next[key]))
            self.actions.append(PipelineAction(stage, kind, self._next[key]))
            self._next[key] += 1

    def add_weight(self) -> None:
        """Append the oldest weight gradient, if there is one."""
        if self.weights:
            stage, microbatch = self.weights.pop(0)
            self.actions.append(PipelineAction(stage, W, microbatch))
