"""A schedule of a large training step within a budget, by greedy eviction with knowledge of the whole step.

`evict` executes the step once. When the next operation does not fit the budget, it frees the tensors that
are cheapest to restore per byte and per time until their next use (the order of Dynamic Tensor
Rematerialization, arXiv 2006.09616, but with the real next uses). Tensors in the swapped set are copied to
the host first and copied back for their next use; all others are recomputed from what is on the device or
on the host. A tensor whose recomputation does not fit the budget is swapped instead.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tunebench.training.memory._prefetch import overlapped
from tunebench.training.memory.schedule import Action, Compute, CopyIn, CopyOut, Free, unplanned
from tunebench.training.memory.simulation import simulate
from tunebench.training.memory.step import TrainingStep

__all__ = ["EvictionPolicy", "Restoration", "StepIndex", "evict"]

_BATCH = 1 / 256
"""Fraction of the budget to free at once, so that large steps take fewer rounds."""

_CHOSEN = 32
"""Most tensors to free before their costs are compared again."""

_NO_TIME_US = 1e-12
"""Added to times that may be 0, so that free operations still have an order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPolicy:
    """What `evict` does when memory is short.

    Attributes:
        swapped: Tensors that are copied to the host rather than recomputed.
        pinned: Tensors that are never freed before their last use.
        reserve_bytes: Bytes to leave unused before the peak of the step without a plan.
        foresight: Power of the time until the next use by which the cost of freeing a tensor is divided.
    """

    swapped: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    reserve_bytes: int = 0
    foresight: float = 1.0


class StepIndex:
    """The producers, readers and times of a step, for many executions of it.

    Attributes:
        step: The training step.
        producer: The operation that writes each tensor; -1 for resident tensors.
        size: Bytes of each tensor.
        reads: Tensors that each operation reads and that are not resident.
        outputs: Tensors that each operation writes.
        output_bytes: Bytes that each operation allocates, workspace included.
        readers: Operations that read each tensor, in order.
        uses: The same operations, and the number of operations if the step returns the tensor.
        clock_us: Time before each operation without a plan, and the time of the step.
    """

    def __init__(self, step: TrainingStep) -> None:
        self.step = step
        tensors, operations = len(step.tensors), step.operations
        self.producer = [-1] * tensors
        self.size = [tensor.size_bytes for tensor in step.tensors]
        self.reads = [step.movable(operation.inputs) for operation in operations]
        self.outputs = [operation.outputs for operation in operations]
        self.output_bytes = [
            step.bytes_of(operation.outputs) + operation.workspace_bytes for operation in operations
        ]
        self.readers: list[list[int]] = [[] for _ in range(tensors)]
        for index, operation in enumerate(operations):
            for tensor in operation.outputs:
                self.producer[tensor] = index
            for tensor in self.reads[index]:
                self.readers[tensor].append(index)
        self.uses = [list(readers) for readers in self.readers]
        for tensor in step.movable(step.results):
            self.uses[tensor].append(len(operations))
        times = (operation.time_us for operation in operations)
        self.clock_us = list(itertools.accumulate(times, initial=0.0))

    @cached_property
    def largest_bytes(self) -> int:
        """Least bytes on the device while the largest operation runs."""
        return max(self.step.working_bytes(operation) for operation in self.step.operations)

    @cached_property
    def peak_stage(self) -> int:
        """The operation at which the step without a plan has its peak."""
        actions = unplanned(self.step)
        used = simulate(self.step, actions).bytes_during
        computed = [
            (size, -action.operation)
            for action, size in zip(actions, used, strict=True)
            if isinstance(action, Compute)
        ]
        return -max(computed)[1]


def evict(
    step: TrainingStep | StepIndex,
    budget_bytes: int,
    policy: EvictionPolicy,
    *,
    below_us: float = math.inf,
) -> tuple[Action, ...] | None:
    """Return a schedule within a budget, or none if the policy finds none.

    Args:
        step: The training step, or its index, which many calls can share.
        budget_bytes: Bytes that the device has.
        policy: What to swap, to keep and to leave unused.
        below_us: Stop as soon as the operations take this time or more.
    """
    index = step if isinstance(step, StepIndex) else StepIndex(step)
    swapped = set(policy.swapped)
    while True:
        execution = _Execution(index, budget_bytes, replace(policy, swapped=frozenset(swapped)))
        execution.spare_us = below_us - index.clock_us[-1]
        try:
            actions = execution.execute()
        except _TooSlow:
            return None
        except _NoRoom as fault:
            # A recomputation does not fit: swap the tensors that it restores. Without a link, or if these
            # are swapped already, no change is left.
            more = fault.wanted - swapped
            if index.step.link is None or not more:
                return None
            swapped |= more
            continue
        return overlapped(index.step, actions, budget_bytes)


class _TooSlow(Exception):
    """The operations take too long."""


class _NoRoom(Exception):
    """An operation does not fit the budget with what it needs.

    Attributes:
        wanted: Tensors that were to be recomputed.
    """

    def __init__(self, recomputed: set[int]) -> None:
        super().__init__()
        self.wanted = recomputed


class Restoration:
    """Which tensors are on the device, what it costs to restore each, and when each is needed next.

    Both are kept up to date when a tensor comes or goes, so that an eviction compares them at once. The
    arrays of numbers share their memory with NumPy.

    Attributes:
        present: Whether each tensor is on the device.
        on_host: Whether each tensor is on the host.
        cost_us: Time to restore each tensor if it were absent, as of the last `update_costs`.
        need_us: Time on the clock of the index at which each tensor is read next, or another one that it
            restores; infinite if never.
    """

    def __init__(self, index: StepIndex, swapped: frozenset[int]) -> None:
        self._index, count = index, len(index.size)
        self._operations, self._link = index.step.operations, index.step.link
        self._swapped = swapped
        self._stage = 0
        self._moved: set[int] = set()
        self.present = bytearray(count)
        self.on_host = bytearray(count)
        self.cost_us = array("d", [math.inf]) * count
        self.need_us = array("d", [math.inf]) * count

    def swaps(self, tensor: int) -> bool:
        """Return whether a tensor is restored from the host."""
        if self._link is None:
            return False
        recomputable = self._operations[self._index.producer[tensor]].recomputable
        return bool(self.on_host[tensor]) or tensor in self._swapped or not recomputable

    def write(self, stage: int) -> None:
        """Note that an operation ran for the first time, and that its inputs are needed less."""
        self._stage = stage + 1
        for tensor in self._index.reads[stage]:
            self._refresh_need(tensor)
        for tensor in self._index.outputs[stage]:
            self.need_us[tensor] = self._own_need_us(tensor)
            self.cost_us[tensor] = self._restore_us(tensor)

    def arrive(self, tensor: int) -> None:
        """Note that a tensor is on the device."""
        self.present[tensor] = 1
        producer = self._index.producer[tensor]
        if producer < self._stage:
            self._moved.add(tensor)
            if not self.on_host[tensor]:
                for read in self._index.reads[producer]:
                    # Only an input that was needed for this tensor's sake can be needed later now.
                    if self.need_us[read] == self.need_us[tensor]:
                        self._refresh_need(read)

    def leave(self, tensor: int, *, copied: bool) -> None:
        """Note that a tensor is no longer on the device."""
        self.present[tensor] = 0
        if copied:
            self.on_host[tensor] = 1
        self.cost_us[tensor] = self._restore_us(tensor)
        # What others cost to restore is updated in one go, before the next comparison (`update_costs`).
        self._moved.add(tensor)
        if not self.on_host[tensor]:
            self._hasten(tensor)

    def _own_need_us(self, tensor: int) -> float:
        """Return when a tensor is read next."""
        uses = self._index.uses[tensor]
        next_use = bisect.bisect_left(uses, self._stage)
        return self._index.clock_us[uses[next_use]] if next_use < len(uses) else math.inf

    def _hasten(self, tensor: int) -> None:
        """Make the inputs of an absent tensor needed no later than the tensor."""
        stack = [tensor]
        while stack:
            absent = stack.pop()
            need_us = self.need_us[absent]
            for read in self._index.reads[self._index.producer[absent]]:
                if need_us < self.need_us[read]:
                    self.need_us[read] = need_us
                    if not self.present[read] and not self.on_host[read]:
                        stack.append(read)

    def _refresh_need(self, tensor: int) -> None:
        """Update when a tensor, and the tensors that restore it, are needed next; later tensors first."""
        # By descending producers: an output is settled before the inputs that restore it, so each is visited
        # once.
        changed = [(-self._index.producer[tensor], tensor)]
        while changed:
            producer, tensor = heapq.heappop(changed)
            need_us = self._own_need_us(tensor)
            for reader in self._index.readers[tensor]:
                if reader >= self._stage:
                    break
                for output in self._index.outputs[reader]:
                    if not self.present[output] and not self.on_host[output]:
                        need_us = min(need_us, self.need_us[output])
            if need_us != self.need_us[tensor]:
                self.need_us[tensor] = need_us
                if not self.present[tensor] and not self.on_host[tensor]:
                    for read in self._index.reads[-producer]:
                        heapq.heappush(changed, (-self._index.producer[read], read))

    def _restore_us(self, tensor: int) -> float:
        """Return the time to restore a tensor.

        Inputs that are absent often share what restores them, so the longest chain counts, and of the
        other inputs only the last operation.
        """
        if self._link is not None and (self.on_host[tensor] or (self.present[tensor] and self.swaps(tensor))):
            return self._link.to_device_us(self._index.size[tensor])
        producer = self._index.producer[tensor]
        operation = self._operations[producer]
        if not operation.recomputable:
            return math.inf
        total_us, longest_us = operation.time_us, 0.0
        for read in self._index.reads[producer]:
            if not self.present[read]:
                cost_us = self.cost_us[read]
                own_us = (
                    cost_us if self.on_host[read] else self._operations[self._index.producer[read]].time_us
                )
                total_us += own_us
                longest_us = max(longest_us, cost_us - own_us) if own_us < math.inf else math.inf
        return total_us + longest_us

    def update_costs(self) -> None:
        """Update the costs of tensors that are restored from moved ones; earlier tensors first."""
        moved, self._moved = self._moved, set()
        changed = [reader for tensor in moved for reader in self._index.readers[tensor]]
        heapq.heapify(changed)
        # By ascending operations: what an operation reads is settled before what it writes.
        while changed and changed[0] < self._stage:
            reader = heapq.heappop(changed)
            while changed and changed[0] == reader:
                heapq.heappop(changed)
            for output in self._index.outputs[reader]:
                cost_us = self._restore_us(output)
                if cost_us != self.cost_us[output]:
                    self.cost_us[output] = cost_us
                    if not self.present[output]:
                        for later in self._index.readers[output]:
                            heapq.heappush(changed, later)


class _Execution:
    """One execution of the step, which frees tensors when memory is short.

    Attributes:
        spare_us: Time that repeated operations may still take.
    """

    def __init__(self, index: StepIndex, budget_bytes: int, policy: EvictionPolicy) -> None:
        self._index, self._step = index, index.step
        self._budget_bytes, self._policy = budget_bytes, policy
        self._tensors = Restoration(index, policy.swapped)
        self._used_bytes = index.step.resident_bytes
        # Added to the time until the next use, so that a tensor needed right now does not divide by zero.
        self._soon_us = index.clock_us[-1] / len(index.clock_us) * 1e-3 + _NO_TIME_US
        self._pins = array("i", [0]) * len(index.size)
        self._wanted: set[int] = set()
        self._actions: list[Action] = []
        self._stage = 0
        self.spare_us = math.inf
        self._sizes = np.array(index.size, dtype=float)
        self._kept = np.array([size == 0 for size in index.size])
        self._kept[list(policy.pinned)] = True
        # Views, not copies: Python writes single elements quickly, NumPy compares all of them.
        self._is_present = np.frombuffer(self._tensors.present, dtype=bool)
        self._costs = np.frombuffer(self._tensors.cost_us)
        self._needs = np.frombuffer(self._tensors.need_us)
        self._pinned = np.frombuffer(self._pins, dtype=np.int32)

    def execute(self) -> list[Action]:
        """Return the actions."""
        for stage in range(len(self._step.operations)):
            self._stage = stage
            self._restore(self._index.reads[stage])
            self._compute(stage)
            self._tensors.write(stage)
        self._stage = len(self._step.operations)
        self._restore(self._step.movable(self._step.results))
        return self._actions

    def _restore(self, targets: tuple[int, ...]) -> None:
        """Bring tensors to the device; they stay pinned for the operation that reads them."""
        chain: set[int] = set()
        stack = [tensor for tensor in targets if not self._tensors.present[tensor]]
        while stack:
            tensor = stack.pop()
            producer = self._index.producer[tensor]
            if self._tensors.present[tensor] or self._tensors.on_host[tensor] or producer in chain:
                continue
            if not self._step.operations[producer].recomputable:
                # It is absent and may not run again: it had to be swapped.
                raise _NoRoom({tensor})
            chain.add(producer)
            stack.extend(self._index.reads[producer])
        self._wanted = {tensor for index in chain for tensor in self._index.outputs[index]}
        # Pins count readers: each run of an operation removes one pin from what it reads.
        self._pin(targets)
        for index in chain:
            self._pin(self._index.reads[index])
        self.spare_us -= sum(self._step.operations[index].time_us for index in chain)
        if self.spare_us <= 0:
            raise _TooSlow
        # Ascending operations: each one reads what earlier ones wrote.
        for index in sorted(chain):
            self._fetch(self._index.reads[index])
            self._compute(index)
        self._fetch(targets)

    def _pin(self, tensors: Iterable[int]) -> None:
        for tensor in tensors:
            self._pins[tensor] += 1

    def _fetch(self, tensors: tuple[int, ...]) -> None:
        """Copy tensors from the host."""
        for tensor in tensors:
            if not self._tensors.present[tensor]:
                self._make_room(self._index.size[tensor])
                self._actions.append(CopyIn(tensor))
                self._hold(tensor)

    def _compute(self, index: int) -> None:
        """Run an operation whose inputs are on the device."""
        for tensor in self._index.outputs[index]:
            # An operation writes all its outputs anew, also those that are still there.
            if self._tensors.present[tensor]:
                self._drop(tensor)
        self._make_room(self._index.output_bytes[index])
        self._actions.append(Compute(index))
        for tensor in self._index.outputs[index]:
            self._hold(tensor)
        for tensor in self._index.reads[index]:
            self._pins[tensor] -= 1

    def _hold(self, tensor: int) -> None:
        self._used_bytes += self._index.size[tensor]
        self._tensors.arrive(tensor)

    def _drop(self, tensor: int, *, copied: bool = False) -> None:
        self._used_bytes -= self._index.size[tensor]
        self._tensors.leave(tensor, copied=copied)

    def _make_room(self, size_bytes: int) -> None:
        """Free tensors until some bytes fit."""
        limit = self._budget_bytes
        if self._used_bytes + size_bytes > limit:
            self._free_until(limit - size_bytes)
        if self._used_bytes + size_bytes > limit:
            present = np.flatnonzero(self._is_present & (self._pinned <= 0))
            raise _NoRoom(self._wanted | set(present.tolist()))
        # Room for recomputation, left while saved tensors pile up; behind the peak there is room anyway.
        if self._policy.reserve_bytes and self._stage <= self._index.peak_stage:
            reserved = limit - self._policy.reserve_bytes - size_bytes
            if self._used_bytes > reserved:
                self._free_until(reserved)

    def _free_until(self, most_bytes: int) -> None:
        """Free tensors until at most some bytes are used, or nothing can be freed."""
        while self._used_bytes > most_bytes:
            free = np.flatnonzero(self._is_present & (self._pinned <= 0))
            needs_us = self._needs[free]
            dead = free[needs_us == math.inf].tolist()
            if dead:
                for tensor in dead:
                    self._release(tensor, copied=False)
                continue
            chosen = self._cheapest(free, needs_us)
            if not chosen:
                return
            # Free a little more than needed, because each comparison of all tensors costs more than a free.
            batch_bytes = min(most_bytes, self._used_bytes - int(self._budget_bytes * _BATCH))
            for tensor in chosen:
                if self._used_bytes <= batch_bytes:
                    break
                self._release(tensor, copied=self._tensors.swaps(tensor))

    def _cheapest(self, free: np.ndarray, needs_us: np.ndarray) -> list[int]:
        """Return the tensors that cost least per byte and time until their next use, cheapest first."""
        self._tensors.update_costs()
        costs = self._costs[free]
        possible = (costs < math.inf) & ~self._kept[free]
        free, costs = free[possible], costs[possible]
        away_us = needs_us[possible] - self._index.clock_us[self._stage] + self._soon_us
        scores = (costs + _NO_TIME_US) / (self._sizes[free] * away_us**self._policy.foresight)
        if len(free) > _CHOSEN:
            # Sort only the cheapest ones: costs change once some are freed.
            least = scores <= np.partition(scores, _CHOSEN - 1)[_CHOSEN - 1]
            free, scores = free[least], scores[least]
        chosen: list[int] = free[np.argsort(scores, kind="stable")].tolist()
        return chosen

    def _release(self, tensor: int, *, copied: bool) -> None:
        """Free a tensor, copied to the host first if it is not there."""
        copied = copied and not self._tensors.on_host[tensor]
        if copied:
            self._actions.append(CopyOut(tensor))
        self._actions.append(Free(tensor))
        self._drop(tensor, copied=copied)
