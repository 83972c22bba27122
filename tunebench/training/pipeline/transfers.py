"""Explicit transfers: each send and receive in the list of the rank that issues it.

All transfers have one order: by the time at which their bytes exist in the simulation of the implicit
schedule, then by the sender. Each rank issues its sides in this order, so that ranks cannot wait for each
other in a circle, also where a library matches sends and receives by their order alone. A receive is issued
before the pass that runs when its bytes exist, so that it does not delay the sender.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tunebench.training.schedules import (
    ActionKind,
    PipelineAction,
    PipelineCosts,
    PipelineSchedule,
    PipelineSimulation,
    Transfer,
    simulate_pipeline,
)

__all__ = ["with_transfers"]


class _Place(NamedTuple):
    """Position of a transfer in the order of all transfers."""

    time_us: float
    source: int
    order: int


def with_transfers(schedule: PipelineSchedule, costs: PipelineCosts) -> PipelineSchedule:
    """Return a schedule with SEND and RECV, ACCEPT and RETURN actions on the ranks that issue them.

    Args:
        schedule: The schedule; returned as it is if it is explicit.
        costs: Costs of its stages, which decide where a receive is issued.

    Raises:
        InputError: if the schedule cannot be executed.
    """
    if schedule.explicit:
        return schedule
    simulation = simulate_pipeline(schedule, costs)
    arrivals = {
        (arrival.kind, arrival.stage, arrival.microbatch): arrival for arrival in simulation.transfers
    }
    positions: dict[tuple[ActionKind, int, int], _Place] = {}
    rank_lists = [_own_actions(simulation, rank, arrivals, positions) for rank in range(schedule.ranks)]
    foreign: list[list[_Foreign]] = [[] for _ in range(schedule.ranks)]
    for key, arrival in arrivals.items():
        rank, kind, stage = _other_side(arrival)
        action = PipelineAction(stage, kind, arrival.microbatch)
        ready_us = 0.0
        if arrival.kind is ActionKind.LOAD:
            ready_us = arrivals[ActionKind.EVICT, stage, arrival.microbatch].end_us
            released = action._replace(kind=ActionKind.RELEASE)
            # The acceptor frees its copy once it has been sent back.
            foreign[rank].append(_Foreign(_Place(arrival.end_us, rank, -1), released, arrival.end_us))
        foreign[rank].append(_Foreign(positions[key], action, ready_us))
    merged = (
        _merged(rank_actions, sorted(foreign_actions))
        for rank_actions, foreign_actions in zip(rank_lists, foreign, strict=True)
    )
    return replace(schedule, actions=tuple(merged))


class _Foreign(NamedTuple):
    """An action that another rank's list causes; before `ready_us` it would make its rank wait."""

    place: _Place
    action: PipelineAction
    ready_us: float


class _Own(NamedTuple):
    """An action that a rank lists itself: a pass or a wait with its times, or its side of a transfer."""

    action: PipelineAction
    start_us: float
    end_us: float
    place: _Place | None


def _own_actions(
    simulation: PipelineSimulation,
    rank: int,
    arrivals: dict[tuple[ActionKind, int, int], Transfer],
    positions: dict[tuple[ActionKind, int, int], _Place],
) -> list[_Own]:
    """Return a rank's actions with its sends, and note the position of each transfer that it starts."""
    actions: list[_Own] = []
    schedule = simulation.schedule
    starts, ends = simulation.starts_us[rank].tolist(), simulation.ends_us[rank].tolist()
    for index, (action, start_us, end_us) in enumerate(
        zip(schedule.actions[rank], starts, ends, strict=True)
    ):
        key = (action.kind, action.stage, action.microbatch)
        if key in arrivals:
            source, ready_us = rank, end_us
            if action.kind is ActionKind.LOAD:
                source = arrivals[key].source
                evicted = arrivals[ActionKind.EVICT, action.stage, action.microbatch]
                ready_us = max(end_us, evicted.end_us)
            positions[key] = _Place(ready_us, source, index)
            actions.append(_Own(action, start_us, end_us, positions[key]))
            continue
        actions.append(_Own(action, start_us, end_us, None))
        sends = _send_after(action)
        if sends is not None and (sends.kind, sends.stage, sends.microbatch) in arrivals:
            position = _Place(end_us, rank, index)
            positions[sends.kind, sends.stage, sends.microbatch] = position
            actions.append(_Own(sends, end_us, end_us, position))
    return actions


def _send_after(action: PipelineAction) -> PipelineAction | None:
    """Return the send of a pass's result."""
    if action.kind is ActionKind.FORWARD:
        return action._replace(kind=ActionKind.SEND_FORWARD)
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        return action._replace(kind=ActionKind.SEND_BACKWARD)
    return None


def _other_side(transfer: Transfer) -> tuple[int, ActionKind, int]:
    """Return the rank whose list lacks its side of a transfer, and the kind and stage of that action."""
    if transfer.kind is ActionKind.SEND_FORWARD:
        return transfer.target, ActionKind.RECEIVE_FORWARD, transfer.stage + 1
    if transfer.kind is ActionKind.SEND_BACKWARD:
        return transfer.target, ActionKind.RECEIVE_BACKWARD, transfer.stage - 1
    if transfer.kind is ActionKind.EVICT:
        return transfer.target, ActionKind.ACCEPT, transfer.stage
    return transfer.source, ActionKind.RETURN, transfer.stage


def _merged(rank_actions: list[_Own], foreign_actions: list[_Foreign]) -> tuple[PipelineAction, ...]:
    """Return one list: transfers in their order, before the pass during which their bytes exist."""
    merged: list[PipelineAction] = []
    releases = [foreign for foreign in foreign_actions if foreign.action.kind is ActionKind.RELEASE][::-1]
    waiting = [foreign for foreign in foreign_actions if foreign.action.kind is not ActionKind.RELEASE][::-1]
    position_of = {foreign.action: foreign.place for foreign in waiting}
    for scheduled in rank_actions:
        # A receive must precede the pass that needs it, even if it then makes the rank wait.
        receive = _needed(scheduled.action)
        needed = position_of.get(receive) if receive is not None else None
        while waiting:
            next_foreign = waiting[-1]
            if scheduled.place is not None:
                before = next_foreign.place < scheduled.place
            else:
                before = (
                    next_foreign.place.time_us < scheduled.end_us
                    and next_foreign.ready_us <= scheduled.start_us
                )
            if not before and (needed is None or next_foreign.place > needed):
                break
            merged.append(waiting.pop().action)
        while releases and scheduled.place is None and releases[-1].ready_us <= scheduled.start_us:
            merged.append(releases.pop().action)
        merged.append(scheduled.action)
    return (*merged, *(foreign.action for foreign in (*waiting[::-1], *releases[::-1])))


def _needed(action: PipelineAction) -> PipelineAction | None:
    """Return the receive that a pass needs; None for other actions."""
    if action.kind is ActionKind.FORWARD:
        return action._replace(kind=ActionKind.RECEIVE_FORWARD)
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        return action._replace(kind=ActionKind.RECEIVE_BACKWARD)
    return None
