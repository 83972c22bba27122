"""A list scheduler of pipelines, compiled by Numba.

Each rank follows a plan: planned times of its forward passes and input gradients. Where the next pass of the
plan cannot run yet, the rank runs another one that is planned within a window, or a weight gradient. Forward
passes wait until the rank has memory for them; weight gradients free it.

Micro-batches run in order on every stage. Transfers take their time and do not wait for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from tunebench.training.schedules.action import ActionKind, PipelineAction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tunebench.training.schedules.costs import PipelineCosts

__all__ = ["ListProblem", "ListRules", "list_problem", "list_schedule", "list_times"]

_KINDS = (ActionKind.FORWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
_WHOLE = (ActionKind.FORWARD, ActionKind.BACKWARD)


class ListProblem(NamedTuple):
    """Costs of a pipeline as arrays.

    Attributes:
        placement: Rank of each stage.
        times: Forward, input gradient and weight gradient of each stage; without split passes, forward and
            backward (2 or 3, stages).
        delays: Transfer of the output of each stage, and of the gradient of it (2, stages).
        held: Memory from the forward pass, and what of it the weight gradient needs (2, stages).
        limits: Memory of each rank.
    """

    placement: NDArray[np.int64]
    times: NDArray[np.float64]
    delays: NDArray[np.float64]
    held: NDArray[np.float64]
    limits: NDArray[np.float64]


class ListRules(NamedTuple):
    """How ranks deviate from their plan.

    Attributes:
        first_window: Planned time by which a forward pass of a rank's first stages may run early.
        last_window: The same for the last stage of a rank.
        gradient_window: The same for input gradients.
        weights_first: Whether a waiting rank runs weight gradients before passes of a later planned time.
        keeps_room: Whether passes run early only if memory is left for the later stages of the rank: 1, or
            for all forward passes: 2; else 0.
        overlap: Part of a weight gradient that may delay a pass whose input is known to arrive.
    """

    first_window: float = 0.0
    last_window: float = 0.0
    gradient_window: float = 0.0
    weights_first: bool = False
    keeps_room: int = 0
    overlap: float = 1.0


def list_problem(
    placement: Sequence[int],
    costs: PipelineCosts,
    limits: Sequence[float],
    *,
    split: bool = True,
    unit_memory: bool = False,
) -> ListProblem:
    """Return the arrays of a pipeline.

    Args:
        placement: Rank of each stage.
        costs: Costs of the stages.
        limits: Memory of each rank for activations, in bytes or stages.
        split: Whether weight gradients run by themselves.
        unit_memory: Whether memory counts stages instead of bytes.
    """
    stages, links = costs.stages, costs.interconnect
    times = [
        [stage.forward_us for stage in stages],
        [stage.input_gradient_us if split else stage.full_backward_us for stage in stages],
    ]
    if split:
        times.append([stage.weight_gradient_us for stage in stages])
    delays = np.zeros((2, len(stages)))
    for index, stage in enumerate(stages[:-1]):
        source, target = placement[index], placement[index + 1]
        if source == target:
            continue
        for direction, hop in enumerate(((source, target), (target, source))):
            link_us = 0.0 if links is None else links.transfer_us(stage.send_bytes, *hop)
            delays[direction, index] = link_us if stage.send_us is None else stage.send_us
    memory = [[1.0] * len(stages)] * 2
    if not unit_memory:
        memory = [
            [float(stage.activation_bytes) for stage in stages],
            [float(stage.retained) for stage in stages],
        ]
    return ListProblem(
        placement=np.array(placement, dtype=np.int64),
        times=np.array(times),
        delays=delays,
        held=np.array(memory, dtype=np.float64),
        limits=np.array(limits, dtype=np.float64),
    )


def list_schedule(
    problem: ListProblem, planned: NDArray[np.float64], rules: ListRules
) -> tuple[tuple[PipelineAction, ...], ...] | None:
    """Return the actions of each rank; None after a deadlock.

    Args:
        problem: Costs and limits.
        planned: Planned times of forward passes and input gradients (2, stages, micro-batches).
        rules: How ranks deviate from the plan.
    """
    codes, counts, _, _ = _follow(*problem, planned, *rules)
    if counts.sum() < problem.times.shape[0] * planned[0].size:
        return None
    stages = planned.shape[1]
    kinds = _KINDS if len(problem.times) == len(_KINDS) else _WHOLE
    actions = []
    for rank, count in enumerate(counts.tolist()):
        done = [0] * (len(kinds) * stages)
        rank_actions = []
        for code in codes[rank, :count].tolist():
            rank_actions.append(PipelineAction(code % stages, kinds[code // stages], done[code]))
            done[code] += 1
        actions.append(tuple(rank_actions))
    return tuple(actions)


def list_times(problem: ListProblem, planned: NDArray[np.float64], rules: ListRules) -> tuple[float, float]:
    """Return the longest span of a rank and the end of the schedule; infinite after a deadlock."""
    _, counts, starts, ends = _follow(*problem, planned, *rules)
    if counts.sum() < problem.times.shape[0] * planned[0].size:
        return np.inf, np.inf
    return float((ends - starts).max()), float(ends.max())


@njit(cache=True)
def _follow(  # type: ignore[no-untyped-def]  # noqa: C901 (fields of ListProblem and ListRules)
    placement, times, delays, memory, limits, planned,
    first_window, last_window, gradient_window, weights_first, keeps_room, overlap,
):  # fmt: skip
    """Return codes ``kind * stages + stage`` (ranks, actions), their numbers, first starts and last ends."""
    kinds, stages = times.shape
    ranks, microbatches = limits.size, planned.shape[2]
    split = kinds == 3
    later = np.zeros(stages)
    chunks = np.zeros(ranks, np.int64)
    rank_stages = np.zeros((ranks, stages), np.int64)  # the stages of each rank
    for stage in range(stages):
        rank_stages[placement[stage], chunks[placement[stage]]] = stage
        chunks[placement[stage]] += 1
    for stage in range(stages):
        for later_stage in range(stage + 1, stages):
            if placement[later_stage] == placement[stage]:
                later[stage] += memory[0, later_stage]
    done = np.zeros((3, stages), np.int64)
    arrives = np.full((2, stages, microbatches), np.inf)
    arrives[0, 0], arrives[1, stages - 1] = 0.0, 0.0
    codes = np.zeros((ranks, kinds * stages * microbatches), np.int64)
    counts = np.zeros(ranks, np.int64)
    clock, starts, used = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    asleep = np.zeros(ranks, np.bool_)
    while True:
        rank = -1
        for candidate_rank in range(ranks):
            if not asleep[candidate_rank] and (rank < 0 or clock[candidate_rank] < clock[rank]):
                rank = candidate_rank
        if rank < 0:
            break
        now = clock[rank]

        # The next pass of the plan.
        head, head_kind, head_stage = np.inf, -1, -1
        for stage in rank_stages[rank, : chunks[rank]]:
            for kind in range(2):
                microbatch = done[kind, stage]
                if microbatch < microbatches and planned[kind, stage, microbatch] < head:
                    head, head_kind, head_stage = planned[kind, stage, microbatch], kind, stage
        kind, stage, soon, blocked = -1, -1, np.inf, False
        if head_kind == 0:
            # keeps_room=2 leaves room for the rank's later stages, or micro-batches of the first stage could
            # fill the memory and wait for each other for ever.
            room = used[rank] + memory[0, head_stage] + (later[head_stage] if keeps_room == 2 else 0.0)
            blocked = room > limits[rank]
        if head_kind >= 0 and not blocked and (head_kind == 0 or done[1, head_stage] < done[0, head_stage]):
            soon = arrives[head_kind, head_stage, done[head_kind, head_stage]]
            if soon <= now:
                kind, stage = head_kind, head_stage

        # A weight gradient, or another pass.
        if kind < 0:
            oldest = -1
            for candidate in rank_stages[rank, : chunks[rank]]:
                # Weight gradients in the order of micro-batches, of all stages of the rank together.
                pending = split and done[2, candidate] < done[1, candidate]
                if pending and (oldest < 0 or done[2, candidate] <= done[2, oldest]):
                    oldest = candidate
            if not (oldest >= 0 and (weights_first or blocked)):
                earliest = np.inf
                for candidate in rank_stages[rank, : chunks[rank]]:
                    for candidate_kind in range(2):
                        microbatch = done[candidate_kind, candidate]
                        if microbatch == microbatches:
                            continue
                        window = gradient_window
                        if candidate_kind == 0:
                            window = last_window if later[candidate] == 0 else first_window
                        if planned[candidate_kind, candidate, microbatch] > head + window:
                            continue
                        if candidate_kind == 0:
                            room = later[candidate] if keeps_room > 0 else 0.0
                            if used[rank] + memory[0, candidate] + room > limits[rank]:
                                continue
                        elif microbatch >= done[0, candidate]:
                            continue
                        if arrives[candidate_kind, candidate, microbatch] > now:
                            soon = min(soon, arrives[candidate_kind, candidate, microbatch])
                        elif planned[candidate_kind, candidate, microbatch] < earliest:
                            earliest, kind, stage = (
                                planned[candidate_kind, candidate, microbatch],
                                candidate_kind,
                                candidate,
                            )
            # A weight gradient fills the wait if enough of it fits before the next input arrives.
            if kind < 0 and oldest >= 0 and now + (1.0 - overlap) * times[2, oldest] <= soon:
                kind, stage = 2, oldest
            if kind < 0:
                # Its next input is on the way: jump to that time. Else sleep until another rank sends.
                if soon < np.inf:
                    clock[rank] = soon
                else:
                    asleep[rank] = True
                continue

        # Run it.
        if counts[rank] == 0:
            starts[rank] = now
        end = now + times[kind, stage]
        microbatch, target = done[kind, stage], -1
        if kind == 0:
            used[rank] += memory[0, stage]
            if stage + 1 < stages:
                target = stage + 1
                arrives[0, target, microbatch] = end + delays[0, stage]
        elif kind == 1:
            used[rank] -= memory[0, stage] - (memory[1, stage] if split else 0.0)
            if stage > 0:
                target = stage - 1
                arrives[1, target, microbatch] = end + delays[1, target]
        else:
            used[rank] -= memory[1, stage]
        done[kind, stage] += 1
        codes[rank, counts[rank]] = kind * stages + stage
        counts[rank] += 1
        clock[rank] = end
        if target >= 0 and asleep[placement[target]]:
            asleep[placement[target]] = False
            clock[placement[target]] = max(clock[placement[target]], arrives[kind, target, microbatch])
    return codes, counts, starts, clock
