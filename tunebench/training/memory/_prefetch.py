"""Start the copies of a schedule earlier, so that operations run at the same time."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np

from tunebench.training.memory.schedule import Action, Compute, CopyIn, CopyOut, Free, with_frees
from tunebench.training.memory.simulation import simulate
from tunebench.training.memory.step import TrainingStep

__all__ = ["overlapped"]


def overlapped(step: TrainingStep, actions: Sequence[Action], budget_bytes: int) -> tuple[Action, ...]:
    """Return the actions with copies started earlier, within a budget.

    A copy to the host starts when its tensor is written. A copy to the device starts just early enough to
    hide its time, or later if memory is short.

    Args:
        step: The training step.
        actions: A valid schedule within the budget.
        budget_bytes: Bytes that the device has.
    """
    swapped = {action.tensor for action in actions if isinstance(action, CopyOut)}
    # `with_frees` frees all other tensors as early as possible. A swapped one must stay until its copy has
    # ended.
    relevant = [action for action in actions if not isinstance(action, Free) or action.tensor in swapped]
    schedule = with_frees(step, _copies_out_first(step, relevant))
    return _copies_in_first(step, schedule, budget_bytes) if swapped else schedule


def _copies_out_first(step: TrainingStep, actions: Sequence[Action]) -> list[Action]:
    """Return the actions with each copy to the host directly after the first run that writes its tensor."""
    leaving = {action.tensor for action in actions if isinstance(action, CopyOut)}
    earlier: list[Action] = []
    for action in actions:
        if isinstance(action, CopyOut):
            continue
        earlier.append(action)
        if isinstance(action, Compute):
            outputs = step.operations[action.operation].outputs
            earlier.extend(CopyOut(tensor) for tensor in outputs if tensor in leaving)
            leaving.difference_update(outputs)
    return earlier


def _copies_in_first(step: TrainingStep, schedule: Sequence[Action], budget_bytes: int) -> tuple[Action, ...]:
    """Return the schedule with copies to the device moved forward where memory allows."""
    link = step.link
    assert link is not None
    # `used` counts the bytes during each action, workspace included; `after` those that remain behind it.
    used = np.array(simulate(step, schedule, budget_bytes=budget_bytes).bytes_during)
    runs = [step.operations[action.operation] if isinstance(action, Compute) else None for action in schedule]
    clock_us = list(itertools.accumulate((run.time_us if run else 0.0 for run in runs), initial=0.0))
    after = used - np.array([run.workspace_bytes if run else 0 for run in runs])
    moved: list[list[Action]] = [[] for _ in schedule]
    moved_bytes = np.zeros(len(schedule), dtype=np.int64)
    absent_since = _freed_before(schedule)
    next_start_us = clock_us[-1]
    # The last copy first: the link is busy from a copy's start on, so each one must end before the next
    # starts.
    for index in reversed(range(len(schedule))):
        action = schedule[index]
        if not isinstance(action, CopyIn):
            continue
        size_bytes = step.tensors[action.tensor].size_bytes
        start_us = min(clock_us[index], next_start_us) - link.to_device_us(size_bytes)
        # The last action that starts before the copy should, after the tensor was freed.
        low = max(1, absent_since[index] + 1, bisect.bisect_right(clock_us, start_us, 0, index + 1) - 1)
        before = after[low - 1 : index - 1] + moved_bytes[low:index]
        full = np.flatnonzero(np.maximum(used[low:index], before) + size_bytes > budget_bytes)
        target = min(index, low + (int(full[-1]) + 1 if len(full) else 0))
        used[target:index] += size_bytes
        after[target:index] += size_bytes
        next_start_us = min(start_us, clock_us[target])
        # Copies are visited backwards, so that inserting in front keeps their order of issue.
        moved[target].insert(0, action)
        moved_bytes[target] += size_bytes
    result: list[Action] = []
    for index, action in enumerate(schedule):
        result.extend(moved[index])
        if not isinstance(action, CopyIn):
            result.append(action)
    return tuple(result)


def _freed_before(schedule: Sequence[Action]) -> dict[int, int]:
    """Return the place of the last `Free` of the tensor of each copy to the device before it."""
    freed: dict[int, int] = {}
    before = {}
    for index, action in enumerate(schedule):
        if isinstance(action, Free):
            freed[action.tensor] = index
        elif isinstance(action, CopyIn):
            before[index] = freed[action.tensor]
    return before
