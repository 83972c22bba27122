"""Simulation of a pipeline schedule: when each action runs, and what each rank holds.

A rank executes its actions in order. Passes occupy the rank; the other actions start a transfer and do not
wait for it. A pass waits for what it needs: the output of the stage before, the gradient from the next stage,
its evicted activations, its gathered parameters. A transfer starts when both sides have issued it (if the
schedule is not explicit, the other side always has), when the bytes exist, and when the sender's and the
receiver's link have ended earlier transfers.

Memory: activations count from the start of the forward pass; a received tensor counts from the issue of the
receive, a sent one until its transfer ends, an evicted one on both sides while it is copied.

A transfer is resolved in the order of issue times, so ranks are advanced by a queue ordered by time
(discrete-event simulation).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tunebench._lazy import np
from tunebench.errors import InputError
from tunebench.training.schedules import _engine as engine
from tunebench.training.schedules.action import ActionKind, PipelineAction
from tunebench.training.schedules.costs import Interconnect, PipelineCosts, StageCosts
from tunebench.training.schedules.schedule import PipelineSchedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MemoryTimeline", "PipelineSimulation", "Transfer", "simulate_pipeline"]


class Transfer(NamedTuple):
    """One transfer between ranks.

    Attributes:
        kind: ``SEND_F``, ``SEND_B``, ``EVICT`` or ``LOAD``.
        stage: Stage whose output, gradient or activations are transferred.
        microbatch: Micro-batch.
        source: Rank that sends.
        target: Rank that receives.
        start_us: Start.
        end_us: End.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    source: int
    target: int
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Bytes that a rank holds over the step.

    Attributes:
        times_us: Times of changes, ascending.
        nbytes: Bytes from each time on, static ones included.
    """

    times_us: NDArray[np.float64]
    nbytes: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        """Most bytes at any time."""
        return int(self.nbytes.max())


@dataclass(frozen=True, kw_only=True)
class PipelineSimulation:
    """Times and memory of a schedule.

    Attributes:
        schedule: The schedule.
        starts_us: Start of each action of each rank; of a transfer, the time of its issue.
        ends_us: End of each action of each rank.
        busy_us: Time in passes, of each rank.
        span_us: Time of each rank from its first pass to the end of its last one.
        waits_us: Time that each rank waits, by the kind of transfer that it waits for.
        memory: Memory of each rank.
        step_us: End of the last pass or transfer.
        copies: Times and routes of transfers, as arrays.
    """

    schedule: PipelineSchedule = field(repr=False)
    starts_us: tuple[NDArray[np.float64], ...] = field(repr=False)
    ends_us: tuple[NDArray[np.float64], ...] = field(repr=False)
    busy_us: tuple[float, ...]
    span_us: tuple[float, ...]
    waits_us: tuple[dict[ActionKind, float], ...]
    memory: tuple[MemoryTimeline, ...] = field(repr=False)
    step_us: float
    copies: _Copies = field(repr=False)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes that each rank holds."""
        return tuple(timeline.peak_bytes for timeline in self.memory)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers, by their start."""
        return self.copies.listed(self.schedule.microbatches)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks run no pass, in the mean over ranks."""
        return 1.0 - sum(self.busy_us) / (self.step_us * len(self.busy_us)) if self.step_us else 0.0

    @property
    def exposed_us(self) -> float:
        """Most time that a rank waits for evictions and loads."""
        kinds = (ActionKind.EVICT, ActionKind.LOAD)
        return max(sum(waits.get(kind, 0.0) for kind in kinds) for waits in self.waits_us)


def simulate_pipeline(schedule: PipelineSchedule, costs: PipelineCosts) -> PipelineSimulation:
    """Return when each action of a schedule runs, and the memory of each rank.

    Args:
        schedule: The schedule, with or without explicit transfers.
        costs: Costs of its stages.

    Raises:
        InputError: if the costs are of another number of stages or ranks, a rank issues an action that cannot
            run there, ranks wait for each other for ever, or a pass is missing. The message names the action.
    """
    state = _state(schedule, costs)
    result, rank = engine.advance_all(state)
    if result > engine.WAITING:
        raise _misplaced(schedule, state, result, rank)
    _require_complete(schedule, state)
    return _result(schedule, costs, state)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Starts, ends (4, slots), and routes (4, stages, 3) of the transfers of a simulation."""

    started: NDArray[np.float64]
    arrived: NDArray[np.float64]
    routes: NDArray[np.int64]

    def listed(self, microbatches: int) -> tuple[Transfer, ...]:
        """Return the transfers that happened between different ranks, by their start."""
        transfers = []
        for copy, slot in zip(*np.nonzero(self.arrived >= 0), strict=True):
            stage, microbatch = divmod(int(slot), microbatches)
            source, target = (int(endpoint) for endpoint in self.routes[copy, stage, :2])
            kind = engine.COPIES[copy]
            start, end = float(self.started[copy, slot]), float(self.arrived[copy, slot])
            transfers.append(Transfer(kind, _producer(copy, stage), microbatch, source, target, start, end))
        return tuple(sorted(transfers, key=lambda transfer: transfer.start_us))


# ------------------------------------------------------------------------------------------------ input


def _state(schedule: PipelineSchedule, costs: PipelineCosts) -> engine.SimulationState:
    """Return the state before the first action."""
    ranks, stages, slots = schedule.ranks, schedule.stages, schedule.stages * schedule.microbatches
    if len(costs.stages) != stages:
        raise InputError(
            f"schedule {schedule.name} has {stages} stages, and the costs are of {len(costs.stages)}"
        )
    first, kinds, action_slots = schedule.encoded
    routes, copy_us = _routes(schedule, costs)
    actions = len(kinds)
    return engine.SimulationState(
        explicit=schedule.explicit,
        microbatches=schedule.microbatches,
        first=first,
        kinds=kinds,
        slots=action_slots,
        placement=np.array(schedule.placement, dtype=np.int64),
        acceptors=np.array(schedule.acceptors or range(ranks), dtype=np.int64),
        times=np.array([_times(stage) for stage in costs.stages], dtype=np.float64),
        sizes=np.array([_sizes(stage) for stage in costs.stages], dtype=np.int64),
        routes=routes,
        copy_us=copy_us,
        position=first[:-1].copy(),
        clock=np.zeros(ranks),
        to_send=np.full((ranks, 2), engine.NOBODY),
        forward_end=np.full(slots, engine.NEVER),
        input_end=np.full(slots, engine.NEVER),
        weight_end=np.full(slots, engine.NEVER),
        issued=np.full((4, slots), engine.NEVER),
        started=np.full((4, slots), engine.NEVER),
        arrived=np.full((4, slots), engine.NEVER),
        waiters=np.full((4, slots), engine.NOBODY),
        runnable=np.ones(ranks, dtype=np.bool_),
        send_free=np.zeros((ranks, 2)),
        receive_free=np.zeros((ranks, 2)),
        gathered=np.full(stages, engine.NEVER),
        collective_free=np.zeros(ranks),
        starts=np.zeros(actions),
        ends=np.zeros(actions),
        waits=np.zeros((ranks, 5)),
        # An action changes memory at most four times.
        change_rank=np.zeros(4 * actions, dtype=np.int64),
        change_us=np.zeros(4 * actions),
        change_bytes=np.zeros(4 * actions, dtype=np.int64),
        changes=np.zeros(1, dtype=np.int64),
    )


def _times(stage: StageCosts) -> tuple[float, ...]:
    return (
        stage.forward_us,
        stage.full_backward_us,
        stage.input_gradient_us,
        stage.weight_gradient_us,
        stage.unshard_us,
        stage.reduce_us,
    )


def _sizes(stage: StageCosts) -> tuple[int, ...]:
    return stage.activation_bytes, stage.retained, stage.send_bytes, stage.evicted, stage.unsharded_bytes


def _routes(
    schedule: PipelineSchedule, costs: PipelineCosts
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return source, target and kind of link of each copy of each stage, and its time."""
    links = costs.interconnect or Interconnect.instant(schedule.ranks)
    if len(links.nodes) != schedule.ranks:
        raise InputError(f"the interconnect has {len(links.nodes)} ranks, and the schedule {schedule.ranks}")
    placement, stages = schedule.placement, costs.stages
    last = len(placement) - 1
    routes = np.zeros((4, len(placement), 3), dtype=np.int64)
    copy_us = np.zeros((4, len(placement)))
    for stage, rank in enumerate(placement):
        acceptor = schedule.acceptors[rank] if schedule.acceptors else rank
        copies = (
            (placement[max(stage - 1, 0)], rank, stages[max(stage - 1, 0)].send_bytes),
            (placement[min(stage + 1, last)], rank, stages[stage].send_bytes),
            (rank, acceptor, stages[stage].evicted),
            (acceptor, rank, stages[stage].evicted),
        )
        for copy, (source, target, nbytes) in enumerate(copies):
            routes[copy, stage] = source, target, links.nodes[source] != links.nodes[target]
            copy_us[copy, stage] = links.transfer_us(nbytes, source, target)
        for copy, sender in ((engine.OUTPUT, max(stage - 1, 0)), (engine.GRADIENT, stage)):
            given_us = stages[sender].send_us
            if given_us is not None:
                copy_us[copy, stage] = given_us
    return routes, copy_us


# ----------------------------------------------------------------------------------------------- errors


def _misplaced(
    schedule: PipelineSchedule, state: engine.SimulationState, result: int, rank: int
) -> InputError:
    """Return the error of an action that cannot be executed where it is."""
    action = schedule.actions[rank][int(state.position[rank] - state.first[rank])]
    stage = action.stage
    forward = action.kind is ActionKind.FORWARD
    gradient = action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT)
    why = {
        engine.TWICE: "it is the second one",
        engine.BEFORE_FORWARD: f"{_at(stage - forward, 'F', action)} is not before it",
        engine.BEFORE_INPUT_GRADIENT: f"{_at(stage + gradient, 'I', action)} or "
        f"{_at(stage + gradient, 'B', action)} is not before it",
        engine.NOT_EVICTED: f"{_at(stage, 'EVICT', action)} is not before it",
        engine.NOT_LOADED: f"its activations are evicted, and {_at(stage, 'LOAD', action)} is not before it",
        engine.TOO_LATE_TO_EVICT: "its activations are not needed any more, or were evicted before",
        engine.NOT_GATHERED: f"{stage}UNSHARD is not before it",
    }[result]
    return InputError(f"schedule {schedule.name}: rank {rank} cannot execute {action}: {why}")


def _at(stage: int, kind: str, action: PipelineAction) -> PipelineAction:
    return PipelineAction(stage, ActionKind(kind), action.microbatch)


def _require_complete(schedule: PipelineSchedule, state: engine.SimulationState) -> None:
    """Raise InputError if ranks wait for each other, or passes are missing."""
    waiting = {
        int(state.waiters[copy, slot]): (int(copy), int(slot))
        for copy, slot in zip(*np.nonzero(state.waiters >= 0), strict=True)
    }
    if waiting:
        lines = [
            _waits(schedule, state, rank, *awaited_copy) for rank, awaited_copy in sorted(waiting.items())
        ]
        raise InputError(f"schedule {schedule.name}: deadlock: {'; '.join(lines)}")
    end_times = {ActionKind.FORWARD: state.forward_end}
    if schedule.trains:
        end_times |= {ActionKind.BACKWARD: state.input_end, ActionKind.WEIGHT_GRADIENT: state.weight_end}
    for kind, times in end_times.items():
        absent = np.flatnonzero(times < 0)
        if absent.size:
            stage, microbatch = divmod(int(absent[0]), schedule.microbatches)
            raise InputError(
                f"schedule {schedule.name}: {PipelineAction(stage, kind, microbatch)} is missing on rank "
                f"{schedule.placement[stage]}"
            )


def _waits(schedule: PipelineSchedule, state: engine.SimulationState, rank: int, copy: int, slot: int) -> str:
    """Return what a rank waits for, and who has to issue it."""
    stage, microbatch = divmod(slot, schedule.microbatches)
    source, target = (int(endpoint) for endpoint in state.routes[copy, stage, :2])
    if schedule.explicit:
        kinds = _SIDES[copy]
        sends = PipelineAction(_producer(copy, stage), kinds[0], microbatch)
        receives = PipelineAction(stage, kinds[1], microbatch)
        awaited = f"{sends} of rank {source} and {receives} of rank {target}"
    else:
        produces = ActionKind.FORWARD if copy == engine.OUTPUT else ActionKind.BACKWARD
        awaited = f"{PipelineAction(_producer(copy, stage), produces, microbatch)} of rank {source}"
    action = schedule.actions[rank][int(state.position[rank] - state.first[rank])]
    return f"rank {rank} waits at {action} for {awaited}"


_SIDES = (
    (ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD),
    (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD),
    (ActionKind.EVICT, ActionKind.ACCEPT),
    (ActionKind.RETURN, ActionKind.LOAD),
)
"""Actions of the two sides of each copy."""


def _producer(copy: int, consumer: int) -> int:
    """Return the stage whose action sends a copy."""
    return consumer + {engine.OUTPUT: -1, engine.GRADIENT: 1}.get(copy, 0)


# ----------------------------------------------------------------------------------------------- result


def _result(
    schedule: PipelineSchedule, costs: PipelineCosts, state: engine.SimulationState
) -> PipelineSimulation:
    parts = [slice(*bounds) for bounds in itertools.pairwise(state.first.tolist())]
    # Codes follow the order of `ActionKind`, whose first four members are the passes.
    computes = state.kinds <= engine.KIND[ActionKind.WEIGHT_GRADIENT]
    busy, spans = [], []
    for part in parts:
        starts, ends = state.starts[part][computes[part]], state.ends[part][computes[part]]
        busy.append(float((ends - starts).sum()))
        spans.append(float(ends.max() - starts.min()) if ends.size else 0.0)
    last = max(state.clock.max(), state.collective_free.max(), state.arrived.max())
    return PipelineSimulation(
        schedule=schedule,
        starts_us=tuple(state.starts[part] for part in parts),
        ends_us=tuple(state.ends[part] for part in parts),
        busy_us=tuple(busy),
        span_us=tuple(spans),
        waits_us=tuple(dict(zip(_WAITS, row, strict=True)) for row in state.waits.tolist()),
        memory=_memory(costs.static_bytes(schedule.placement), state),
        step_us=float(last),
        copies=_Copies(started=state.started, arrived=state.arrived, routes=state.routes),
    )


_WAITS = (*engine.COPIES, ActionKind.UNSHARD)


def _memory(static_bytes: tuple[int, ...], state: engine.SimulationState) -> tuple[MemoryTimeline, ...]:
    """Return the memory of each rank; changes at one time keep the order in which they happened."""
    count = int(state.changes[0])
    ranks, times = state.change_rank[:count], state.change_us[:count]
    order = np.lexsort((times, ranks))
    bounds = np.searchsorted(ranks[order], np.arange(len(static_bytes) + 1))
    timelines = []
    for static, (begin, end) in zip(static_bytes, itertools.pairwise(bounds.tolist()), strict=True):
        rank_changes = order[begin:end]
        nbytes = static + np.cumsum(state.change_bytes[rank_changes])
        timelines.append(
            MemoryTimeline(
                times_us=np.concatenate([[0.0], times[rank_changes]]),
                nbytes=np.concatenate([[static], nbytes]),
            )
        )
    return tuple(timelines)
