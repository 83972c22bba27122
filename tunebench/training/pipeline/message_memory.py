"""Upper bound of the memory of a pipeline's ranks for any times of passes and transfers.

The simulation frees a message when its simulated transfer ends. If the receiver is later than simulated, the
sender keeps more messages. Here a sent message counts until it must have arrived: until the sender has
received a message that another rank could only send after the sent one was used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tunebench.errors import InputError
from tunebench.training.schedules import ActionKind, PipelineAction, PipelineCosts, PipelineSchedule

__all__ = ["ended_sends", "most_bytes"]

K = ActionKind
_SENDS = {K.SEND_FORWARD: 1, K.SEND_BACKWARD: -1}
"""Kinds of messages, and how many stages after the one that sends them is the one that uses them."""


class _Send(NamedTuple):
    """A message: the rank that uses it, and the position of the pass that does."""

    peer: int
    used_at: int


def ended_sends(schedule: PipelineSchedule) -> tuple[tuple[int, ...], ...]:
    """Return for each action how many of its rank's earlier sends must have ended when it runs.

    Sends are counted in the order in which the rank issues them: one has ended if it and all before it have
    arrived, in every execution of the schedule, when what the action waits for has arrived.

    Args:
        schedule: The schedule, with explicit transfers.

    Raises:
        InputError: if ranks wait for each other for ever.
    """
    uses = _uses(schedule)
    # For each rank, the number of actions of each rank that have certainly ended.
    clocks = [[0] * schedule.ranks for _ in range(schedule.ranks)]
    sent: dict[PipelineAction, list[int]] = {}
    pending: list[list[_Send]] = [[] for _ in range(schedule.ranks)]
    counts: list[list[int]] = [[] for _ in range(schedule.ranks)]
    advanced = True
    while advanced:
        advanced = False
        for rank, actions in enumerate(schedule.actions):
            clock, sends = clocks[rank], pending[rank]
            while len(counts[rank]) < len(actions):
                action = actions[len(counts[rank])]
                awaited = _awaited(schedule, action, rank)
                if awaited is not None and awaited not in sent:
                    break
                if awaited is not None:
                    clock[:] = map(max, clock, sent[awaited])
                ended = counts[rank][-1] if counts[rank] else 0
                while ended < len(sends) and clock[sends[ended].peer] > sends[ended].used_at:
                    ended += 1
                counts[rank].append(ended)
                clock[rank] = len(counts[rank])
                if action.kind in _SENDS:
                    sent[action] = clock.copy()
                    sends.append(uses.get(action, _Send(rank, len(actions))))
                advanced = True
    if any(len(count) < len(actions) for count, actions in zip(counts, schedule.actions, strict=True)):
        raise InputError(f"schedule {schedule.name}: ranks wait for each other")
    return tuple(map(tuple, counts))


def _uses(schedule: PipelineSchedule) -> dict[PipelineAction, _Send]:
    """Return the use of each message, by the action that sends it."""
    return {
        awaited: _Send(rank, position)
        for rank, actions in enumerate(schedule.actions)
        for position, action in enumerate(actions)
        if (awaited := _awaited(schedule, action, rank)) is not None
    }


def _awaited(schedule: PipelineSchedule, action: PipelineAction, rank: int) -> PipelineAction | None:
    """Return the send for which a pass waits; none if it needs nothing of another rank."""
    if action.kind is K.FORWARD:
        sent = PipelineAction(action.stage - 1, K.SEND_FORWARD, action.microbatch)
    elif action.kind in (K.BACKWARD, K.INPUT_GRADIENT):
        sent = PipelineAction(action.stage + 1, K.SEND_BACKWARD, action.microbatch)
    else:
        return None
    of_other_rank = 0 <= sent.stage < schedule.stages and schedule.placement[sent.stage] != rank
    return sent if of_other_rank else None


def most_bytes(schedule: PipelineSchedule, costs: PipelineCosts) -> tuple[int, ...]:
    """Return the most bytes that each rank can hold, whatever the times of passes and transfers.

    Args:
        schedule: The schedule, with explicit transfers.
        costs: Costs of its stages; only their bytes matter.

    Raises:
        InputError: if ranks wait for each other for ever.
    """
    static = costs.static_bytes(schedule.placement)
    ended = ended_sends(schedule)
    most = []
    for rank, static_bytes in enumerate(static):
        rank_bytes = peak_bytes = static_bytes
        for change in _changes(schedule, costs, rank, ended[rank]):
            rank_bytes += change
            peak_bytes = max(peak_bytes, rank_bytes)
        most.append(peak_bytes)
    return tuple(most)


def _changes(
    schedule: PipelineSchedule, costs: PipelineCosts, rank: int, ended: tuple[int, ...]
) -> Iterator[int]:
    """Yield the changes of a rank's memory in bytes, in the order of its actions."""
    messages: list[int] = []
    freed = 0
    for action, count in zip(schedule.actions[rank], ended, strict=True):
        yield -sum(messages[freed:count])
        freed = count
        stage = costs.stages[action.stage]
        awaited = _awaited(schedule, action, rank)
        received = 0 if awaited is None else _message_bytes(schedule, costs, awaited.stage, action.stage)
        match action.kind:
            case K.FORWARD:
                yield stage.activation_bytes - received
                yield _message_bytes(schedule, costs, action.stage, action.stage + 1)
            case K.BACKWARD | K.INPUT_GRADIENT:
                retained = stage.retained if action.kind is K.INPUT_GRADIENT else 0
                yield retained - stage.activation_bytes - received
                yield _message_bytes(schedule, costs, action.stage, action.stage - 1)
            case K.WEIGHT_GRADIENT:
                yield -stage.retained
            case K.SEND_FORWARD | K.SEND_BACKWARD:
                following = action.stage + _SENDS[action.kind]
                messages.append(_message_bytes(schedule, costs, action.stage, following))
            case K.RECEIVE_FORWARD:
                yield _message_bytes(schedule, costs, action.stage - 1, action.stage)
            case K.RECEIVE_BACKWARD:
                yield _message_bytes(schedule, costs, action.stage + 1, action.stage)
            case K.ACCEPT | K.LOAD:
                yield stage.evicted
            case K.RELEASE:
                yield -stage.evicted


def _message_bytes(schedule: PipelineSchedule, costs: PipelineCosts, source: int, target: int) -> int:
    """Return the bytes of an output or of its gradient between two stages; 0 on one rank."""
    if not 0 <= target < schedule.stages or schedule.placement[source] == schedule.placement[target]:
        return 0
    return costs.stages[min(source, target)].send_bytes
