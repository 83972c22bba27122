"""Balanced memory: ranks with many micro-batches in flight keep some of their activations on other ranks.

In 1F1B rank x has p - x micro-batches in flight, and its partner p - 1 - x has x + 1: together p + 1. If rank
x evicts activations to its partner and loads them back before their backward pass, no rank holds more than
``ceil((p + 2) / 2)``, as long as transfers take no time. A copy in flight counts on both ranks.

The plan of a rank follows the times of the schedule without evictions. Wherever a pass or a load needs memory
that is not free, the activations that are needed last are evicted (Belady's rule), early enough to be gone by
then; they are loaded early enough to be back in time.

Source: Kim et al., "BPipe: memory-balanced pipeline parallelism for training large language models", ICML
2023.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tunebench.errors import InputError
from tunebench.training.schedules import (
    ActionKind,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    PipelineSimulation,
    simulate_pipeline,
)
from tunebench.training.schedules.costs import Interconnect

__all__ = ["balance", "balance_at_limit", "partners"]


def partners(ranks: int) -> tuple[int, ...]:
    """Return the partner ``ranks - 1 - x`` of each rank x."""
    return tuple(reversed(range(ranks)))


def balance(
    schedule: PipelineSchedule,
    costs: PipelineCosts,
    *,
    acceptors: Sequence[int] | None = None,
    slowdown: float = 0.0,
) -> PipelineSchedule:
    """Return the schedule with evictions that have the least largest memory of a rank.

    Args:
        schedule: The schedule, without explicit transfers.
        costs: Costs of its stages.
        acceptors: Rank that accepts what each rank evicts; None for its partner.
        slowdown: Share by which the step may become longer.

    Raises:
        InputError: if the schedule evicts already, lists transfers, or cannot be executed.
    """
    plain = simulate_pipeline(schedule, costs)
    best, best_key = schedule, (max(plain.peak_bytes), plain.step_us)
    unit = max((stage.evicted for stage in costs.stages), default=0)
    highest = max(plain.peak_bytes)
    lowest = math.ceil(sum(plain.peak_bytes) / len(plain.peak_bytes))
    # From the mean of all ranks upwards, in steps of half an eviction: finer ones seldom change the plan.
    for limit in range(lowest, highest, max(1, unit // 2)) if unit else ():
        try:
            balanced = balance_at_limit(schedule, costs, limit, acceptors=acceptors, plain=plain)
        except InputError:
            continue
        simulation = simulate_pipeline(balanced, costs)
        key = (max(simulation.peak_bytes), simulation.step_us)
        if simulation.step_us <= plain.step_us * (1 + slowdown) * (1 + 1e-9) and key < best_key:
            best, best_key = balanced, key
    return best


def balance_at_limit(
    schedule: PipelineSchedule,
    costs: PipelineCosts,
    limit_bytes: int,
    *,
    acceptors: Sequence[int] | None = None,
    plain: PipelineSimulation | None = None,
) -> PipelineSchedule:
    """Return the schedule with the evictions that keep the activations of each rank within a limit.

    What a rank accepts from others is not limited: simulate the result to know it.

    Args:
        schedule: The schedule, without explicit transfers.
        costs: Costs of its stages.
        limit_bytes: Most bytes of a rank's own stages, static ones included.
        acceptors: Rank that accepts what each rank evicts; None for its partner.
        plain: Simulation of the schedule, if it is known.

    Raises:
        InputError: if the schedule evicts already or lists transfers, or if a rank cannot keep the limit.
    """
    if schedule.explicit or schedule.acceptors:
        raise InputError(
            f"schedule {schedule.name} lists transfers or evictions already: balance it before that"
        )
    accepts = tuple(acceptors) if acceptors is not None else partners(schedule.ranks)
    if len(accepts) != schedule.ranks:
        raise InputError(
            f"expected an acceptor for each of the {schedule.ranks} ranks of schedule {schedule.name}, got "
            f"{len(accepts)}"
        )
    plain = plain or simulate_pipeline(schedule, costs)
    static = costs.static_bytes(schedule.placement)
    actions = []
    for rank in range(schedule.ranks):
        if accepts[rank] == rank or plain.peak_bytes[rank] <= limit_bytes:
            actions.append(schedule.actions[rank])
        else:
            planner = _RankPlanner(plain, costs, rank, accepts[rank], limit_bytes - static[rank])
            actions.append(planner.planned())
    if all(
        planned_actions is plain_actions
        for planned_actions, plain_actions in zip(actions, schedule.actions, strict=True)
    ):
        return schedule
    return replace(schedule, name=f"{schedule.name} balanced", actions=tuple(actions), acceptors=accepts)


@dataclass(slots=True)
class _Item:
    """Activations of one micro-batch on one stage.

    Attributes:
        stage: Index of the stage.
        microbatch: Index of the micro-batch.
        nbytes: Bytes that the rank holds.
        made: Index of the forward pass among the rank's actions.
        used: Index of the first pass that needs the activations again.
    """

    stage: int
    microbatch: int
    nbytes: int
    made: int
    used: int


@dataclass(slots=True)
class _RankPlanner:
    """Evictions of one rank, planned in the order of its actions.

    Attributes:
        plain: Simulation without evictions.
        costs: Costs of the stages.
        rank: The rank.
        acceptor: Rank that accepts its evictions.
        capacity: Bytes of activations that it may hold.
    """

    plain: PipelineSimulation
    costs: PipelineCosts
    rank: int
    acceptor: int
    capacity: int
    held: int = 0
    here: dict[tuple[int, int], _Item] = field(default_factory=dict)
    """Activations on the rank that were never evicted."""
    before: dict[int, list[PipelineAction]] = field(default_factory=dict)
    """Actions to insert before each action."""
    loads: dict[int, list[_Item]] = field(default_factory=dict)
    """Loads to issue before each action."""

    def planned(self) -> tuple[PipelineAction, ...]:
        """Return the rank's actions with evictions and loads."""
        actions = self.plain.schedule.actions[self.rank]
        uses = self._uses(actions)
        for index, action in enumerate(actions):
            for activation in self.loads.pop(index, ()):
                self._load(index, activation)
            stage = self.costs.stages[action.stage]
            key = (action.stage, action.microbatch)
            if action.kind is ActionKind.FORWARD:
                self._make_room(index, stage.activation_bytes, action)
                self.held += stage.activation_bytes
                if key in uses:
                    self.here[key] = _Item(*key, stage.activation_bytes, index, uses[key])
            elif action.kind is ActionKind.BACKWARD:
                self.held -= stage.activation_bytes
            elif action.kind is ActionKind.INPUT_GRADIENT:
                self.held -= stage.activation_bytes - stage.retained
            elif action.kind is ActionKind.WEIGHT_GRADIENT:
                self.held -= stage.retained
            if action.kind is not ActionKind.FORWARD:
                self.here.pop(key, None)
        return tuple(
            planned_action
            for index, action in enumerate(actions)
            for planned_action in (*self.before.get(index, ()), action)
        )

    def _uses(self, actions: Sequence[PipelineAction]) -> dict[tuple[int, int], int]:
        """Return the first pass after the forward pass that needs each activation."""
        first_uses: dict[tuple[int, int], int] = {}
        for index, action in enumerate(actions):
            if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
                first_uses.setdefault((action.stage, action.microbatch), index)
        return first_uses

    def _copy_us(self, activation: _Item) -> float:
        links = self.costs.interconnect or Interconnect.instant(self.plain.schedule.ranks)
        return links.transfer_us(self.costs.stages[activation.stage].evicted, self.rank, self.acceptor)

    def _index_by(self, time_us: float, first: int, last: int) -> int:
        """Return the last action from `first` to `last` that starts by some time, else `first`."""
        starts = self.plain.starts_us[self.rank]
        return max(first, bisect_right(starts, time_us + 1e-9, first, last + 1) - 1)

    def _make_room(self, index: int, nbytes: int, action: PipelineAction) -> None:
        """Evict activations so that some bytes are free before an action."""
        while self.held + nbytes > self.capacity:
            activation = self._victim(index)
            if activation is None:
                raise InputError(
                    f"rank {self.rank} cannot keep {self.capacity} bytes of activations at {action}: nothing "
                    "more can be evicted; expected a larger limit"
                )
            self._evict(index, activation)

    def _victim(self, index: int) -> _Item | None:
        """Return the activations to evict before an action: those needed last that can be gone by then."""
        starts, ends = self.plain.starts_us[self.rank], self.plain.ends_us[self.rank]
        candidates = [activation for activation in self.here.values() if activation.used > index]
        if not candidates:
            return None
        ready = [
            activation
            for activation in candidates
            if ends[activation.made] + self._copy_us(activation) <= starts[index] + 1e-9
        ]
        # Belady's rule among those that can be gone in time; if there is none, the oldest, whose copy ends
        # first.
        return max(ready or candidates, key=lambda activation: activation.used if ready else -activation.made)

    def _evict(self, index: int, activation: _Item) -> None:
        """Issue an eviction that ends before an action, and the load back."""
        takes_us = self._copy_us(activation)
        starts = self.plain.starts_us[self.rank]
        issued = self._index_by(starts[index] - takes_us, activation.made + 1, index)
        name = PipelineAction(activation.stage, ActionKind.EVICT, activation.microbatch)
        self.before.setdefault(issued, []).append(name)
        self.before.setdefault(index, []).append(name._replace(kind=ActionKind.RELEASE))
        # The release before this action waits for the copy, so that the bytes are free from here on.
        self.held -= self.costs.stages[activation.stage].evicted
        del self.here[activation.stage, activation.microbatch]
        back = self._index_by(starts[activation.used] - takes_us, index, activation.used)
        # Never before the eviction ends. The load itself needs room, which may evict other activations
        # (`_load`).
        self.loads.setdefault(max(back, index + 1) if back < activation.used else back, []).append(activation)

    def _load(self, index: int, activation: _Item) -> None:
        """Issue a load before an action."""
        nbytes = self.costs.stages[activation.stage].evicted
        name = PipelineAction(activation.stage, ActionKind.LOAD, activation.microbatch)
        self._make_room(index, nbytes, name)
        self.held += nbytes
        self.before.setdefault(index, []).append(name)
