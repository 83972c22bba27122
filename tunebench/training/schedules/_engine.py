"""The discrete-event simulation of a pipeline, compiled by Numba: see `simulation` for what it means.

A slot is a micro-batch on a stage, ``stage * microbatches + microbatch``. Outputs and gradients are named by
the slot that consumes them, evictions and loads by the slot whose activations they copy. Ranks are advanced
in the order of their clocks, so that transfers are resolved in the order in which they are issued.

One function holds the loop: Numba compiles it in seconds, and many functions with this many arrays in
minutes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from tunebench.training.schedules.action import ActionKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "BEFORE_FORWARD",
    "BEFORE_INPUT_GRADIENT",
    "COPIES",
    "DONE",
    "EVICTION",
    "GRADIENT",
    "LOADING",
    "NOT_EVICTED",
    "NOT_GATHERED",
    "NOT_LOADED",
    "OUTPUT",
    "TOO_LATE_TO_EVICT",
    "TWICE",
    "WAITING",
    "SimulationState",
    "advance_all",
]

KIND = {kind: code for code, kind in enumerate(ActionKind)}
"""Code of each kind of action."""

_FORWARD, _BACKWARD, _INPUT, _WEIGHT = (
    KIND[ActionKind.FORWARD],
    KIND[ActionKind.BACKWARD],
    KIND[ActionKind.INPUT_GRADIENT],
    KIND[ActionKind.WEIGHT_GRADIENT],
)
_SEND_F, _RECV_F, _SEND_B, _RECV_B = (
    KIND[ActionKind.SEND_FORWARD],
    KIND[ActionKind.RECEIVE_FORWARD],
    KIND[ActionKind.SEND_BACKWARD],
    KIND[ActionKind.RECEIVE_BACKWARD],
)
_EVICT, _ACCEPT, _RETURN, _LOAD, _RELEASE = (
    KIND[ActionKind.EVICT],
    KIND[ActionKind.ACCEPT],
    KIND[ActionKind.RETURN],
    KIND[ActionKind.LOAD],
    KIND[ActionKind.RELEASE],
)
_UNSHARD, _RESHARD, _REDUCE = (
    KIND[ActionKind.UNSHARD],
    KIND[ActionKind.RESHARD],
    KIND[ActionKind.REDUCE_GRADIENTS],
)

COPIES = (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD, ActionKind.EVICT, ActionKind.LOAD)
"""Kinds of transfers, in the order of the tables."""
OUTPUT, GRADIENT, EVICTION, LOADING = range(4)
PARAMETERS = 4
"""Column of `SimulationState.waits` for gathered parameters."""

NEVER = -1.0
NOBODY = -1

(
    DONE,
    WAITING,
    TWICE,
    BEFORE_FORWARD,
    BEFORE_INPUT_GRADIENT,
    NOT_EVICTED,
    NOT_LOADED,
    TOO_LATE_TO_EVICT,
    NOT_GATHERED,
) = range(9)
"""Results of an action: done, waiting for a copy, or why it cannot be executed."""


class SimulationState(NamedTuple):
    """Inputs and tables of a simulation.

    Attributes:
        explicit: Whether transfers are issued by both sides.
        microbatches: Number of micro-batches.
        first: Index of each rank's first action, and the number of all actions.
        kinds: Code of each action's kind, rank by rank.
        slots: Slot of each action.
        placement: Rank of each stage.
        acceptors: Rank that accepts the evictions of each rank.
        times: Forward, full backward, input gradient, weight gradient, all-gather and reduction of each
            stage, in microseconds (stages, 6).
        sizes: Activations, retained, sent, evicted and gathered bytes of each stage (stages, 5).
        routes: Source, target and kind of link of each copy of each stage (4, stages, 3).
        copy_us: Time of each copy of each stage (4, stages).
        position: Index of each rank's next action.
        clock: Time of each rank.
        to_send: Copy and slot that each rank issues at its clock by itself (ranks, 2).
        forward_end, input_end, weight_end: End of the passes of each slot.
        issued: When the first side of each copy was issued (4, slots).
        started, arrived: Start and end of each copy (4, slots).
        waiters: Rank that waits for each copy (4, slots).
        runnable: Whether each rank can be advanced.
        send_free, receive_free: When each rank's links are free (ranks, 2).
        gathered: When the parameters of each stage have arrived.
        collective_free: When each rank's stream of collectives is free.
        starts, ends: Times of each action.
        waits: Time that each rank waits, by the kind of copy, the last for parameters (ranks, 5).
        change_rank, change_us, change_bytes: Changes of memory.
        changes: Number of these changes (1).
    """

    explicit: bool
    microbatches: int
    first: NDArray[np.int64]
    kinds: NDArray[np.int8]
    slots: NDArray[np.int64]
    placement: NDArray[np.int64]
    acceptors: NDArray[np.int64]
    times: NDArray[np.float64]
    sizes: NDArray[np.int64]
    routes: NDArray[np.int64]
    copy_us: NDArray[np.float64]
    position: NDArray[np.int64]
    clock: NDArray[np.float64]
    to_send: NDArray[np.int64]
    forward_end: NDArray[np.float64]
    input_end: NDArray[np.float64]
    weight_end: NDArray[np.float64]
    issued: NDArray[np.float64]
    started: NDArray[np.float64]
    arrived: NDArray[np.float64]
    waiters: NDArray[np.int64]
    runnable: NDArray[np.bool_]
    send_free: NDArray[np.float64]
    receive_free: NDArray[np.float64]
    gathered: NDArray[np.float64]
    collective_free: NDArray[np.float64]
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    waits: NDArray[np.float64]
    change_rank: NDArray[np.int64]
    change_us: NDArray[np.float64]
    change_bytes: NDArray[np.int64]
    changes: NDArray[np.int64]


@njit(cache=True)
def _loop(  # type: ignore[no-untyped-def]  # noqa: C901 (fields of SimulationState)
    explicit, microbatches, first, kinds, slots, placement, acceptors, times, sizes, routes, copy_us,
    position, clock, to_send, forward_end, input_end, weight_end, issued, started, arrived, waiters, runnable,
    send_free, receive_free, gathered, collective_free, starts, ends, waits,
    change_rank, change_us, change_bytes, changes,
):  # fmt: skip
    """Execute actions until all ranks have ended or wait, or one fails; return the last result and its rank.

    The arguments are the fields of `SimulationState`, in their order, with their shapes and units. Those up
    to `copy_us` are only read. The others are changed in place, so that a call continues from the state that
    the last one left.

    Invariants: `position[rank]` lies from `first[rank]` to `first[rank + 1]`, and no clock decreases. A time
    of a pass, or of the arrival of a copy, is negative until it is known, and is set once. A rank that waits
    for a copy is in `waiters` and is not runnable; the arrival of the copy makes it runnable. Changes of
    memory before `changes[0]` are final, and their arrays have room for those of all actions.
    """
    ranks, last_stage, count = clock.size, placement.size - 1, changes[0]
    result, rank = DONE, NOBODY
    while result <= WAITING:
        # The runnable rank whose clock is first, and the clock of the next one.
        rank, next_clock = NOBODY, np.inf
        for other_rank in range(ranks):
            if runnable[other_rank]:
                if rank == NOBODY or clock[other_rank] < clock[rank]:
                    if rank != NOBODY:
                        next_clock = clock[rank]
                    rank = other_rank
                elif clock[other_rank] < next_clock:
                    next_clock = clock[other_rank]
        if rank == NOBODY:
            break
        result = DONE
        while result == DONE:
            action_index, now = position[rank], clock[rank]
            # A copy to start now, if there is one: its kind, its slot and when its bytes exist.
            copy, copied, ready = NOBODY, 0, now
            if to_send[rank, 0] == NOBODY and action_index == first[rank + 1]:
                runnable[rank] = False
                break
            # Passes only touch their own rank. A transfer occupies links that others share, so it must be
            # issued in the order of clocks: if another rank is behind, let it catch up first.
            if (to_send[rank, 0] != NOBODY or kinds[action_index] > _WEIGHT) and next_clock < now:
                break
            takes, kind, slot, stage = 0.0, NOBODY, 0, 0
            before = count
            if to_send[rank, 0] != NOBODY:
                copy, copied = to_send[rank]
                to_send[rank, 0] = NOBODY
            else:
                kind, slot = kinds[action_index], slots[action_index]
                stage = slot // microbatches
            awaited = NOBODY  # the copy that a pass waits for
            # A forward pass frees this buffer when it starts, because its activations include the input; a
            # gradient when it ends.
            received = 0  # bytes that the pass takes from a receive buffer

            # ------------------------------------------------------------------------------ passes
            if kind == _FORWARD:
                if forward_end[slot] >= 0:
                    result = TWICE
                elif stage > 0 and placement[stage - 1] == rank:
                    if forward_end[slot - microbatches] < 0:
                        result = BEFORE_FORWARD
                elif stage > 0:
                    awaited, received = OUTPUT, sizes[stage - 1, 2]
            elif kind in (_BACKWARD, _INPUT):
                if forward_end[slot] < 0:
                    result = BEFORE_FORWARD
                elif input_end[slot] >= 0:
                    result = TWICE
                elif stage < last_stage and placement[stage + 1] == rank:
                    if input_end[slot + microbatches] < 0:
                        result = BEFORE_INPUT_GRADIENT
                elif stage < last_stage:
                    awaited, received = GRADIENT, sizes[stage, 2]
            elif kind == _WEIGHT:
                if input_end[slot] < 0:
                    result = BEFORE_INPUT_GRADIENT
                elif weight_end[slot] >= 0:
                    result = TWICE
            elif kind == _RETURN:
                awaited = EVICTION
            elif kind == _RELEASE:
                awaited = EVICTION if placement[stage] == rank else LOADING
            if result == DONE and awaited != NOBODY:
                if arrived[awaited, slot] < 0:
                    waiters[awaited, slot] = rank
                    result = WAITING
                elif arrived[awaited, slot] > now:
                    waits[rank, awaited] += arrived[awaited, slot] - now
                    now = clock[rank] = arrived[awaited, slot]
            # A gradient of evicted activations waits for their load.
            if result == DONE and _BACKWARD <= kind <= _WEIGHT and issued[EVICTION, slot] >= 0:
                if issued[LOADING, slot] < 0:
                    result = NOT_LOADED
                elif arrived[LOADING, slot] < 0:
                    waiters[LOADING, slot] = rank
                    result = WAITING
                elif arrived[LOADING, slot] > now:
                    waits[rank, LOADING] += arrived[LOADING, slot] - now
                    now = clock[rank] = arrived[LOADING, slot]
            # Forward pass and input gradient need gathered parameters, the gradient of weights does not.
            if result == DONE and 0 <= kind < _WEIGHT and times[stage, 4] > 0:
                if gathered[stage] < 0:
                    result = NOT_GATHERED
                elif gathered[stage] > now:
                    waits[rank, PARAMETERS] += gathered[stage] - now
                    now = clock[rank] = gathered[stage]
            if result != DONE:
                if result == WAITING:
                    runnable[rank] = False
                break
            memory_change = 0  # change of the rank's memory at its clock
            if kind == _FORWARD:
                takes = times[stage, 0]
                memory_change = sizes[stage, 0] - received
                forward_end[slot] = now + takes
                if stage < last_stage and placement[stage + 1] != rank:
                    change_rank[count], change_us[count] = rank, now + takes
                    change_bytes[count] = sizes[stage, 2]
                    count += 1
                    if not explicit:
                        to_send[rank, 0], to_send[rank, 1] = OUTPUT, slot + microbatches
            elif kind in (_BACKWARD, _INPUT):
                takes = times[stage, 1 if kind == _BACKWARD else 2]
                input_end[slot] = now + takes
                freed = sizes[stage, 0]
                if kind == _BACKWARD:
                    weight_end[slot] = now + takes
                else:
                    freed -= sizes[stage, 1]
                change_rank[count], change_us[count] = rank, now + takes
                change_bytes[count] = -freed - received
                count += 1
                if stage > 0 and placement[stage - 1] != rank:
                    change_rank[count], change_us[count] = rank, now + takes
                    change_bytes[count] = sizes[stage - 1, 2]
                    count += 1
                    if not explicit:
                        to_send[rank, 0], to_send[rank, 1] = GRADIENT, slot - microbatches
            elif kind == _WEIGHT:
                takes = times[stage, 3]
                weight_end[slot] = now + takes
                change_rank[count], change_us[count] = rank, now + takes
                change_bytes[count] = -sizes[stage, 1]
                count += 1

            # --------------------------------------------------------------------------- transfers
            elif kind == _SEND_F:
                copy, copied = OUTPUT, slot + microbatches
                if forward_end[slot] < 0:
                    result = BEFORE_FORWARD
            elif kind == _SEND_B:
                copy, copied = GRADIENT, slot - microbatches
                if input_end[slot] < 0:
                    result = BEFORE_INPUT_GRADIENT
            elif kind == _RECV_F:
                copy, copied, memory_change = OUTPUT, slot, sizes[stage - 1, 2]
            elif kind == _RECV_B:
                copy, copied, memory_change = GRADIENT, slot, sizes[stage, 2]
            elif kind == _EVICT:
                copy, copied = EVICTION, slot
                if forward_end[slot] < 0:
                    result = BEFORE_FORWARD
                elif weight_end[slot] >= 0 or issued[LOADING, slot] >= 0:
                    result = TOO_LATE_TO_EVICT
            elif kind == _ACCEPT:
                copy, copied, memory_change = EVICTION, slot, sizes[stage, 3]
            elif kind == _RETURN:
                copy, copied = LOADING, slot
            elif kind == _LOAD:
                copy, copied, memory_change = LOADING, slot, sizes[stage, 3]
                if issued[EVICTION, slot] < 0:
                    result = NOT_EVICTED
                elif not explicit:
                    ready = max(now, arrived[EVICTION, slot])
            elif kind == _RELEASE:
                memory_change = -sizes[stage, 3]
            elif kind == _RESHARD:
                memory_change = -sizes[stage, 4]
                if gathered[stage] < 0:
                    result = NOT_GATHERED
                gathered[stage] = NEVER
            elif kind == _UNSHARD:
                memory_change = sizes[stage, 4]
                gathered[stage] = collective_free[rank] = max(now, collective_free[rank]) + times[stage, 4]
            elif kind == _REDUCE:
                collective_free[rank] = max(now, collective_free[rank]) + times[stage, 5]
            if copy != NOBODY and arrived[copy, copied] >= 0:
                result = TWICE
            if result != DONE:
                count = before
                break
            if memory_change != 0:
                change_rank[count], change_us[count], change_bytes[count] = rank, now, memory_change
                count += 1
            if kind != NOBODY:
                starts[action_index], ends[action_index] = now, now + takes
                clock[rank] = now + takes
                position[rank] = action_index + 1

            # ------------------------------------------------------------- the start of a transfer
            if copy != NOBODY:
                # The first of both sides: the transfer starts when the other side is issued too.
                if explicit and issued[copy, copied] < 0:
                    issued[copy, copied] = now
                    continue
                # One transfer at a time occupies the sender's and the receiver's side of a link.
                consumer = copied // microbatches
                source, target, link = (
                    routes[copy, consumer, 0],
                    routes[copy, consumer, 1],
                    routes[copy, consumer, 2],
                )
                start = end = ready
                if copy_us[copy, consumer] > 0:
                    start = max(ready, max(send_free[source, link], receive_free[target, link]))
                    end = start + copy_us[copy, consumer]
                    send_free[source, link] = receive_free[target, link] = end
                issued[copy, copied], started[copy, copied], arrived[copy, copied] = ready, start, end
                if copy <= GRADIENT:
                    nbytes = sizes[consumer if copy == GRADIENT else consumer - 1, 2]
                    change_rank[count], change_us[count], change_bytes[count] = source, end, -nbytes
                    count += 1
                    if not explicit:
                        change_rank[count], change_us[count], change_bytes[count] = target, start, nbytes
                        count += 1
                elif not explicit:
                    acceptor = target if copy == EVICTION else source
                    change_rank[count], change_us[count] = acceptor, now if copy == EVICTION else end
                    change_bytes[count] = sizes[consumer, 3] * (1 if copy == EVICTION else -1)
                    count += 1
                waiter = waiters[copy, copied]
                if waiter != NOBODY:
                    waiters[copy, copied] = NOBODY
                    runnable[waiter] = True
                    next_clock = min(next_clock, clock[waiter])
    changes[0] = count
    return result, rank


def advance_all(state: SimulationState) -> tuple[int, int]:
    """Execute actions until all ranks have ended or wait; return what stopped a rank, and the rank."""
    result, rank = _loop(*state)
    return int(result), int(rank)
