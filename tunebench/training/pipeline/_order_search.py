"""Simulated annealing of the order of passes of each rank, compiled by Numba.

An order is a row of codes ``kind * stages + stage`` for each rank; the micro-batch of a code is the number of
equal codes before it. Kind 3 is a whole backward pass in the place of an input gradient; the weight gradient
of that micro-batch is then skipped. `order_us` computes what `simulate_pipeline` computes: ranks are advanced
in the order of their clocks, and links serve transfers in the order of their issue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["OrderProblem", "anneal", "order_us"]


_SPREAD = 0.02
"""Weight of the mean end of ranks in the objective, which shows the way where the last end is unchanged."""

_DISTANCE = 3.0
"""Mean distance of a move, less one."""


class OrderProblem(NamedTuple):
    """Costs of a pipeline as arrays.

    Attributes:
        placement: Rank of each stage.
        microbatches: Number of micro-batches.
        times: Forward, input gradient and weight gradient of each stage, or forward and backward (2 or 3,
            stages).
        whole: Whole backward pass of each stage (stages); only those faster than both gradients are used.
        copies: Transfer of the output of each stage to the next, and of its gradient back (2, stages).
        links: 1 if the next stage is on another node (stages).
        held: Bytes from the forward pass, and what of it the weight gradient needs (2, stages).
        limits: Bytes of each rank for activations.
    """

    placement: NDArray[np.int64]
    microbatches: int
    times: NDArray[np.float64]
    whole: NDArray[np.float64]
    copies: NDArray[np.float64]
    links: NDArray[np.int64]
    held: NDArray[np.float64]
    limits: NDArray[np.float64]


def order_us(problem: OrderProblem, order: NDArray[np.int64], lengths: NDArray[np.int64]) -> float:
    """Return the time of a step in microseconds; infinite if ranks wait for ever.

    Args:
        problem: Costs.
        order: Codes of each rank (ranks, longest).
        lengths: Number of codes of each rank.
    """
    clock = _simulate(*problem[:6], order, lengths)
    return float(clock.max())


def anneal(
    problem: OrderProblem,
    order: NDArray[np.int64],
    lengths: NDArray[np.int64],
    *,
    moves: int,
    temperatures: tuple[float, float],
    seed: int,
) -> NDArray[np.int64]:
    """Return the best order found.

    A move puts a pass of a rank at another place, or joins or parts two gradients. Orders that exceed the
    limits are not visited.

    Args:
        problem: Costs and limits.
        order: Codes of each rank (ranks, longest), within the limits.
        lengths: Number of codes of each rank.
        moves: Number of moves.
        temperatures: First and last temperature in microseconds.
        seed: Seed of the moves.
    """
    best_order: NDArray[np.int64] = _anneal(*problem, order.copy(), lengths, moves, *temperatures, seed)
    return best_order


@njit(cache=True)
def _simulate(placement, microbatches, times, whole, copies, links, order, lengths):  # type: ignore[no-untyped-def]  # noqa: C901
    """Return the end of each rank; infinite if a pass never runs."""
    stages, ranks = placement.size, lengths.size
    pass_ends = np.full((2, stages * microbatches), -1.0)  # of forward passes and gradients
    arrived = np.full((2, stages * microbatches), -1.0)  # by the slot that consumes it
    send_free, receive_free = np.zeros((ranks, 2)), np.zeros((ranks, 2))
    clock, merged = np.zeros(ranks), np.zeros((stages, microbatches), np.bool_)
    position, done = np.zeros(ranks, np.int64), np.zeros(3 * stages, np.int64)
    runnable = np.ones(ranks, np.bool_)
    to_send, awaits = np.full((ranks, 2), -1), np.full((ranks, 2), -1)
    while True:
        # Advance the rank with the earliest clock, as long as no other rank could issue a transfer before it.
        rank, next_clock = -1, np.inf
        for other_rank in range(ranks):
            if runnable[other_rank]:
                if rank < 0 or clock[other_rank] < clock[rank]:
                    if rank >= 0:
                        next_clock = clock[rank]
                    rank = other_rank
                elif clock[other_rank] < next_clock:
                    next_clock = clock[other_rank]
        if rank < 0:
            break
        while True:
            now = clock[rank]
            if to_send[rank, 0] >= 0:
                # Another rank's clock is earlier: it may issue a transfer over the same link first.
                if next_clock < now:
                    break
                direction, slot = to_send[rank]
                to_send[rank, 0] = -1
                consumer = slot // microbatches
                hop = consumer - 1 if direction == 0 else consumer
                target, link = placement[consumer], links[hop]
                start = max(now, send_free[rank, link], receive_free[target, link])
                end = start + copies[direction, hop]
                send_free[rank, link] = receive_free[target, link] = arrived[direction, slot] = end
                if awaits[target, 0] == direction and awaits[target, 1] == slot:
                    awaits[target, 0] = -1
                    runnable[target] = True
                    next_clock = min(next_clock, clock[target])
                continue
            if position[rank] == lengths[rank]:
                runnable[rank] = False
                break
            code = order[rank, position[rank]]
            kind, stage = code // stages, code % stages
            # A whole backward pass takes the place of an input gradient; its weight gradient then takes no
            # time.
            if kind == 3:
                kind, code = 1, stages + stage
                merged[stage, done[code]] = True
                pass_us = whole[stage]
            else:
                pass_us = times[kind, stage]
            slot = stage * microbatches + done[code]
            if kind == 2 and merged[stage, done[code]]:
                pass_us = 0.0
            if kind < 2:
                # The stage that it waits for, and the stage that waits for it.
                source, target = (stage - 1, stage + 1) if kind == 0 else (stage + 1, stage - 1)
                if kind == 1 and pass_ends[0, slot] < 0:
                    return np.full(ranks, np.inf)
                if 0 <= source < stages:
                    if placement[source] == rank:
                        if pass_ends[kind, source * microbatches + done[code]] < 0:
                            return np.full(ranks, np.inf)
                    elif arrived[kind, slot] < 0:
                        awaits[rank, 0], awaits[rank, 1] = kind, slot
                        runnable[rank] = False
                        break
                    else:
                        now = max(now, arrived[kind, slot])
                pass_ends[kind, slot] = now + pass_us
                if 0 <= target < stages and placement[target] != rank:
                    to_send[rank, 0] = kind
                    to_send[rank, 1] = target * microbatches + done[code]
            clock[rank] = now + pass_us
            done[code] += 1
            position[rank] += 1
    for other_rank in range(ranks):
        if position[other_rank] < lengths[other_rank]:
            clock[:] = np.inf
    return clock


@njit(cache=True)
def _fits(row, length, stages, memory, limit, split, done, merged):  # type: ignore[no-untyped-def]
    """Return whether a row has gradients after their passes, and its activations fit."""
    done[:] = 0
    merged[:] = False
    used = 0.0
    for position in range(length):
        code = row[position]
        kind, stage = code // stages, code % stages
        whole = kind == 3 or not split
        if kind == 3:
            kind, code = 1, stages + stage
            merged[stage, done[code]] = True
        # Micro-batches are in order: the n-th gradient needs n passes of the kind before it on the same
        # stage.
        if kind > 0 and done[code] >= done[code - stages]:
            return False
        if kind == 0:
            used += memory[0, stage]
            if used > limit:
                return False
        elif kind == 1:
            used -= memory[0, stage] - (0.0 if whole else memory[1, stage])
        elif not merged[stage, done[code]]:
            used -= memory[1, stage]
        done[code] += 1
    return True


@njit(cache=True)
def _anneal(  # type: ignore[no-untyped-def]  # noqa: C901
    placement, microbatches, times, whole, copies, links, memory, limits,
    order, lengths, moves, first_temperature, last_temperature, seed,
):  # fmt: skip
    np.random.seed(seed)
    stages, ranks, split = placement.size, lengths.size, times.shape[0] == 3
    best, row = order.copy(), order[0].copy()
    done, merged = np.zeros(3 * stages, np.int64), np.zeros((stages, microbatches), np.bool_)
    current = least = np.inf
    rank, length = -1, 0
    for move in range(-1, moves):
        # The first round only computes the time of the given order.
        fits = True
        if move >= 0:
            rank = np.random.randint(ranks)
            length = lengths[rank]
            source = np.random.randint(length)
            distance = 1 + int(-np.log(1.0 - np.random.random()) * _DISTANCE)
            step = 1 if np.random.random() < 0.5 else -1
            target = source + step * distance
            if target < 0 or target >= length:
                continue
            for position in range(length):
                row[position] = order[rank, position]
            kind, stage = row[source] // stages, row[source] % stages
            changes = split and kind % 2 == 1 and whole[stage] < times[1, stage] + times[2, stage]
            if changes and np.random.random() < 0.5:
                # Input gradient (1) and whole backward pass (3) change into each other.
                order[rank, source] = (4 - kind) * stages + stage
            else:
                changes = False
                for position in range(source, target, step):
                    order[rank, position] = row[position + step]
                    # Moving a code past equal ones changes nothing, because micro-batches are counted, not
                    # stored.
                    changes = changes or row[position + step] != row[source]
                order[rank, target] = row[source]
            fits = changes and _fits(order[rank], length, stages, memory, limits[rank], split, done, merged)
        value = np.inf
        if fits:
            clock = _simulate(placement, microbatches, times, whole, copies, links, order, lengths)
            # Most moves leave the last end as it is; the mean shows which of them come closer to an
            # improvement.
            value = clock.max() + _SPREAD * clock.mean()
        temperature = first_temperature * (last_temperature / first_temperature) ** (move / moves)
        # An order that does not fit has an infinite value, and is undone.
        if value <= current or np.random.random() < np.exp((current - value) / temperature):
            current = value
            if value < least:
                least = value
                for copied_rank in range(ranks):
                    for position in range(lengths[copied_rank]):
                        best[copied_rank, position] = order[copied_rank, position]
        else:
            for position in range(length):
                order[rank, position] = row[position]
    return best
