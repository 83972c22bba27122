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
    arrivals = {(each.kind, each.stage, each.microbatch): each for each in simulation.transfers}
    places: dict[tuple[ActionKind, int, int], _Place] = {}
    own = [_own_actions(simulation, rank, arrivals, places) for rank in range(schedule.ranks)]
    foreign: list[list[_Foreign]] = [[] for _ in range(schedule.ranks)]
    for key, each in arrivals.items():
        rank, kind, stage = _other_side(each)
        action = PipelineAction(stage, kind, each.microbatch)
        ready_us = 0.0
        if each.kind is ActionKind.LOAD:
            ready_us = arrivals[ActionKind.EVICT, stage, each.microbatch].end_us
            released = action._replace(kind=ActionKind.RELEASE)
            # The acceptor frees its copy once it has been sent back.
            foreign[rank].append(_Foreign(_Place(each.end_us, rank, -1), released, each.end_us))
        foreign[rank].append(_Foreign(places[key], action, ready_us))
    merged = (_merged(mine, sorted(others)) for mine, others in zip(own, foreign, strict=True))
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
    places: dict[tuple[ActionKind, int, int], _Place],
) -> list[_Own]:
    """Return a rank's actions with its sends, and note the place of each transfer that it starts."""
    found: list[_Own] = []
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
            places[key] = _Place(ready_us, source, index)
            found.append(_Own(action, start_us, end_us, places[key]))
            continue
        found.append(_Own(action, start_us, end_us, None))
        sends = _send_after(action)
        if sends is not None and (sends.kind, sends.stage, sends.microbatch) in arrivals:
            place = _Place(end_us, rank, index)
            places[sends.kind, sends.stage, sends.microbatch] = place
            found.append(_Own(sends, end_us, end_us, place))
    return found


def _send_after(action: PipelineAction) -> PipelineAction | None:
    """Return the send of a pass's result."""
    if action.kind is ActionKind.FORWARD:
        return action._replace(kind=ActionKind.SEND_FORWARD)
    if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT):
        return action._replace(kind=ActionKind.SEND_BACKWARD)
    return None


def _other_side(each: Transfer) -> tuple[int, ActionKind, int]:
    """Return the rank whose list lacks its side of a transfer, and the kind and stage of that action."""
    if each.kind is ActionKind.SEND_FORWARD:
        return each.target, ActionKind.RECEIVE_FORWARD, each.stage + 1
    if each.kind is ActionKind.SEND_BACKWARD:
        return each.target, ActionKind.RECEIVE_BACKWARD, each.stage - 1
    if each.kind is ActionKind.EVICT:
        return each.target, ActionKind.ACCEPT, each.stage
    return each.source, ActionKind.RETURN, each.stage


def _merged(own: list[_Own], others: list[_Foreign]) -> tuple[PipelineAction, ...]:
    """Return one list: transfers in their order, before the pass during which their bytes exist."""
    merged: list[PipelineAction] = []
    releases = [each for each in others if each.action.kind is ActionKind.RELEASE][::-1]
    waiting = [each for each in others if each.action.kind is not ActionKind.RELEASE][::-1]
    place_of = {each.action: each.place for each in waiting}
    for mine in own:
        # A receive must precede the pass that needs it, even if it then makes the rank wait.
        needed = place_of.get(_needed(mine.action))
        while waiting:
            each = waiting[-1]
            if mine.place is not None:
                before = each.place < mine.place
            else:
                before = each.place.time_us < mine.end_us and each.ready_us <= mine.start_us
            if not before and (needed is None or each.place > needed):
                break
            merged.append(waiting.pop().action)
        while releases and mine.place is None and releases[-1].ready_us <= mine.start_us:
            merged.append(releases.pop().action)
        merged.append(mine.action)
    return (*merged, *(each.action for each in (*waiting[::-1], *releases[::-1])))


def _needed(action: PipelineAction) -> PipelineAction:
    """Return the receive that a pass needs; for other actions one that no rank has."""
    kind = ActionKind.RECEIVE_FORWARD if action.kind is ActionKind.FORWARD else ActionKind.RECEIVE_BACKWARD
    return action._replace(kind=kind)
