"""Fast schedules of large training steps: local search over the policies of greedy eviction.

`greedy_schedules` varies the tensors that `evict` swaps, the tensors that it keeps, the memory that it leaves
unused for recomputation until the peak of the step, and how much the time until the next use counts. Of a
large step, a linear program proposes what to keep and to swap at the peak.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from tunebench.training.memory.eviction import EvictionPolicy, StepIndex, evict
from tunebench.training.memory.relaxation import relaxed_choice
from tunebench.training.memory.schedule import Action, Compute
from tunebench.training.memory.simulation import simulate
from tunebench.training.memory.step import TrainingStep

__all__ = ["GreedySearch", "greedy_schedules"]

_RESERVES: tuple[float, ...] = (0.15, 0.3, 0.5, 0.7)
"""Fractions of the budget above the largest operation that the first half of the step may leave unused."""

_SHARES = (1.0, 0.97, 0.93, 0.85)
"""Parts of the budget for which a linear program proposes what to keep; the rest is for recomputation."""

_NEAR = 0.005
"""Part of the lower bound by which a schedule may exceed it for the search to end."""

_FORESIGHT = (1.0, 0.5)
"""Powers of the time until the next use to try."""

_SWAPPED_TIMES = (0.5, 1.0)
"""Times of copies to the host to try, as fractions of the time of all operations."""


def greedy_schedules(
    step: TrainingStep, budget_bytes: int, *, rounds: int = 20
) -> Iterator[tuple[Action, ...]]:
    """Yield schedules within a budget, each faster than those before.

    Args:
        step: The training step.
        budget_bytes: Bytes that the device has.
        rounds: Number of changes that the local search tries.
    """
    yield from GreedySearch(StepIndex(step), budget_bytes).schedules(rounds)


class GreedySearch:
    """A search of policies within one budget.

    Attributes:
        budget_bytes: Bytes that the device has.
        policy: The best policy so far.
        lower_us: Lower bound in microseconds of any schedule, by the linear program; 0 without it.
    """

    def __init__(self, index: StepIndex, budget_bytes: int) -> None:
        self.lower_us = 0.0
        self._step, self._index, self.budget_bytes = index.step, index, budget_bytes
        self.policy = EvictionPolicy()
        self._best: tuple[Action, ...] | None = None
        self._best_us = math.inf
        self._tried: set[EvictionPolicy] = set()

    def schedules(
        self, rounds: int, near: GreedySearch | None = None, *, relaxed_s: float = 0.0
    ) -> Iterator[tuple[Action, ...]]:
        """Yield schedules, each faster than those before.

        Args:
            rounds: Number of changes that the local search tries.
            near: A search of the same step within another budget. Its best policy is also tried, and fewer
                others.
            relaxed_s: Time limit in seconds of each linear program that proposes what to keep and to swap.
        """
        # Smaller shares leave room for what the linear program ignores: recomputation between the moments.
        for share in _SHARES if relaxed_s and self._recomputes else ():
            choice = relaxed_choice(
                self._step, int(share * self.budget_bytes), self._index.peak_stage, limit_s=relaxed_s
            )
            self.lower_us = self.lower_us or choice.lower_us  # that of the whole budget, which comes first
            yield from self.attempt(EvictionPolicy(swapped=choice.swapped, pinned=choice.kept))
            if self._best_us <= (1 + _NEAR) * self.lower_us:
                return
        for swapped in self._swapped_sets:
            yield from self.attempt(EvictionPolicy(swapped=swapped))
        room = self._room(self.budget_bytes)
        reserves, fewer = _RESERVES, 1
        if near is not None:
            # The same share of what is left above the largest operation, not the same bytes.
            part = near.policy.reserve_bytes / max(1, self._room(near.budget_bytes))
            yield from self.attempt(replace(near.policy, reserve_bytes=int(part * room)))
            reserves, fewer = _RESERVES[1::2], 8
        for reserve, foresight in itertools.product((0.0, *reserves), _FORESIGHT):
            reserve_bytes = int(reserve * room)
            yield from self.attempt(replace(self.policy, reserve_bytes=reserve_bytes, foresight=foresight))
        for _ in range(rounds // fewer):
            change = self.change()
            if change is None:
                return
            yield from self.attempt(change)

    @cached_property
    def _recomputes(self) -> bool:
        """Whether any operation may run again."""
        return any(operation.recomputable for operation in self._step.operations)

    @cached_property
    def _swapped_sets(self) -> list[frozenset[int]]:
        """Sets of tensors to swap: none, all, and as many as the link can copy in some time."""
        if self._step.link is None or not self._recomputes:
            return [frozenset()]
        producer, size, peak = self._index.producer, self._index.size, self._index.peak_stage
        written = [tensor for tensor, index in enumerate(producer) if index >= 0]
        operations = self._step.operations
        saved = [
            tensor
            for tensor in written
            if size[tensor] and producer[tensor] < peak < max(self._index.uses[tensor], default=-1)
        ]
        # Most time of recomputation per byte first: these gain most from being swapped.
        slowest = sorted(saved, key=lambda tensor: -operations[producer[tensor]].time_us / size[tensor])
        copied_us = list(itertools.accumulate(self._step.link.to_host_us(size[tensor]) for tensor in slowest))
        sets = [
            slowest[: bisect.bisect_right(copied_us, part * self._step.compute_us)] for part in _SWAPPED_TIMES
        ]
        sets += [self._paced(saved), self._paced(sorted(slowest[: len(slowest) // 2])), written]
        return list(dict.fromkeys([frozenset(), *map(frozenset, sets)]))

    def _paced(self, tensors: list[int]) -> list[int]:
        """Return the tensors of which each is copied to the host before the next one is written."""
        link, chosen, free_us = self._step.link, [], 0.0
        assert link is not None
        for tensor in tensors:
            written_us = self._index.clock_us[self._index.producer[tensor] + 1]
            if written_us >= free_us:
                chosen.append(tensor)
                free_us = written_us + link.to_host_us(self._index.size[tensor])
        return chosen

    def _room(self, budget_bytes: int) -> int:
        """Return the bytes of a budget above the largest operation."""
        return max(0, budget_bytes - self._index.largest_bytes)

    def attempt(self, policy: EvictionPolicy) -> Iterator[tuple[Action, ...]]:
        """Yield the schedule of a policy if it is the fastest so far."""
        if policy in self._tried:
            return
        self._tried.add(policy)
        schedule = evict(self._index, self.budget_bytes, policy, below_us=self._best_us)
        if schedule is None:
            return
        time_us = simulate(self._step, schedule, budget_bytes=self.budget_bytes).step_us
        if time_us < self._best_us:
            self._best, self._best_us, self.policy = schedule, time_us, policy
            yield schedule

    def change(self) -> EvictionPolicy | None:
        """Return the next change: keep, or swap, what the best schedule recomputes for the longest time."""
        if self._best is None:
            return None
        repetitions: Counter[int] = Counter()
        first: set[int] = set()
        for action in self._best:
            if isinstance(action, Compute):
                if action.operation in first:
                    repetitions[action.operation] += 1
                first.add(action.operation)
        operations = self._step.operations
        order = sorted(repetitions, key=lambda index: -repetitions[index] * operations[index].time_us)
        # Large changes first, then single operations.
        for size in dict.fromkeys((max(1, len(order) // 8), 1)):
            for first_index in range(0, len(order), size):
                chosen = order[first_index : first_index + size]
                tensors = frozenset(tensor for index in chosen for tensor in operations[index].outputs)
                for policy in self._changes(tensors):
                    if policy not in self._tried:
                        return policy
        return None

    def _changes(self, tensors: frozenset[int]) -> Iterator[EvictionPolicy]:
        """Yield the policies that treat some tensors differently."""
        if self._step.link is not None:
            yield replace(self.policy, swapped=self.policy.swapped | tensors)
        yield replace(self.policy, pinned=self.policy.pinned | tensors)
