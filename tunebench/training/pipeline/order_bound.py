"""Lower bounds of the time of a step, for any order of the passes of each rank.

Passes and transfers are streams: one pass or transfer for each micro-batch. Micro-batches are alike, so some
fastest schedule runs each stream in the order of micro-batches. Longest paths through the streams give the
earliest start of each pass and the least time after it. No rank and no direction of a link can then end
before its work does, even if it could interrupt passes (Jackson's preemptive schedule). A micro-batch holds
activations at least for its own way from the forward pass of a stage to the gradient of it: the memory of a
rank bounds how many such times fit into a step.

Sources: Carlier, "The one-machine sequencing problem", European Journal of Operational Research 11, 1982.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from tunebench.errors import InputError
from tunebench.training.schedules import ActionKind, PipelineCosts

__all__ = ["Precedence", "Stream", "StreamGraph", "available_bytes", "step_lower_bound_us", "stream_graph"]

F, B, I, W = (  # noqa: E741
    ActionKind.FORWARD,
    ActionKind.BACKWARD,
    ActionKind.INPUT_GRADIENT,
    ActionKind.WEIGHT_GRADIENT,
)
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD

Resource = tuple[str, int, bool]
"""A rank, or a direction of its links inside or between nodes, which does one thing at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One pass of a stage, or one transfer, for each micro-batch.

    Attributes:
        kind: The pass; SEND_F or SEND_B for the transfer after it.
        stage: The stage.
        duration_us: Time of each.
        resources: What it occupies.
    """

    kind: ActionKind
    stage: int
    duration_us: float
    resources: tuple[Resource, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precedence:
    """A stream that waits for another one.

    Attributes:
        before: Index of the stream that ends first.
        after: Index of the stream that waits.
        lag_us: Least time between.
        shift: How many micro-batches later it is that waits.
    """

    before: int
    after: int
    lag_us: float = 0.0
    shift: int = 0


@dataclass(frozen=True, kw_only=True)
class StreamGraph:
    """All streams of a step.

    Attributes:
        microbatches: Number of micro-batches.
        streams: The streams, each after those that it waits for in the same micro-batch.
        precedences: Which stream waits for which.
        heads_us: Earliest start of each (streams, micro-batches).
        tails_us: Least time from its end to the end of the step (streams, micro-batches).
        memory_us: Bound of the memory of ranks.
    """

    microbatches: int
    streams: tuple[Stream, ...]
    precedences: tuple[Precedence, ...]
    heads_us: NDArray[np.float64]
    tails_us: NDArray[np.float64]
    memory_us: float = 0.0

    def by_resource(self) -> dict[Resource, list[int]]:
        """Return the streams that occupy each resource."""
        streams_of = defaultdict(list)
        for index, stream in enumerate(self.streams):
            for resource in stream.resources:
                streams_of[resource].append(index)
        return streams_of

    def lower_bound_us(self) -> float:
        """Return the greatest of the bounds of all resources and of the longest path."""
        durations = np.array([stream.duration_us for stream in self.streams])
        longest = float((self.heads_us + durations[:, None] + self.tails_us).max())
        bounds = [self._preemptive_us(resource_streams) for resource_streams in self.by_resource().values()]
        return max(longest, self.memory_us, *bounds)

    def _preemptive_us(self, resource_streams: Sequence[int]) -> float:
        """Return the end of a step in which a resource may interrupt what it does."""
        # Jackson's rule: of the passes that are ready, run the one with the longest tail. Interrupting passes
        # is allowed, which makes this the optimum of a relaxation, and so a bound.
        waiting = sorted(
            (float(self.heads_us[index, microbatch]), -float(self.tails_us[index, microbatch]), duration_us)
            for index in resource_streams
            if (duration_us := self.streams[index].duration_us) > 0
            for microbatch in range(self.microbatches)
        )
        ready: list[tuple[float, float]] = []  # the negative of its tail, and what is left
        now = end = 0.0
        for position, (head, tail, duration) in enumerate(waiting):
            now = max(now, head)
            heapq.heappush(ready, (tail, duration))
            until = waiting[position + 1][0] if position + 1 < len(waiting) else inf
            while ready and now < until:
                tail, remaining = heapq.heappop(ready)
                ran = min(remaining, until - now)
                now += ran
                if ran < remaining:
                    heapq.heappush(ready, (tail, remaining - ran))
                else:
                    end = max(end, now - tail)
        return end


def step_lower_bound_us(
    placement: Sequence[int],
    microbatches: int,
    costs: PipelineCosts,
    *,
    memory_bytes: int | None = None,
    split_backward: bool = True,
) -> float:
    """Return a time in microseconds that no order of passes beats.

    Args:
        placement: Rank of each stage.
        microbatches: Number of micro-batches.
        costs: Costs of the stages, and links.
        memory_bytes: Memory of each rank, static bytes included; None for no limit.
        split_backward: Whether gradients of the weights may run apart from those of the input.

    Raises:
        InputError: if a rank has no memory for one micro-batch.
    """
    return stream_graph(
        placement, microbatches, costs, memory_bytes=memory_bytes, split_backward=split_backward
    ).lower_bound_us()


def stream_graph(
    placement: Sequence[int],
    microbatches: int,
    costs: PipelineCosts,
    *,
    memory_bytes: int | None = None,
    split_backward: bool = True,
) -> StreamGraph:
    """Return the streams of a step; the arguments are those of `step_lower_bound_us`.

    Raises:
        InputError: if a rank has no memory for one micro-batch.
    """
    streams, precedences = _passes(placement, costs, split_backward)
    if memory_bytes is not None:
        precedences += _memory_precedences(placement, costs, memory_bytes, streams)
    # Each stream runs its micro-batches in order.
    precedences += [
        Precedence(before=stream_index, after=stream_index, shift=1) for stream_index in range(len(streams))
    ]
    heads = _longest(streams, precedences, microbatches)
    backwards = [
        Precedence(
            before=precedence.after, after=precedence.before, lag_us=precedence.lag_us, shift=precedence.shift
        )
        for precedence in precedences
    ]
    # Longest paths of the reversed graph, whose first micro-batch is the last one.
    tails = _longest(streams, backwards, microbatches)[:, ::-1]
    graph = StreamGraph(
        microbatches=microbatches,
        streams=tuple(streams),
        precedences=tuple(precedences),
        heads_us=heads,
        tails_us=tails,
    )
    if memory_bytes is None:
        return graph
    return replace(graph, memory_us=_memory_us(graph, placement, costs, memory_bytes))


def available_bytes(placement: Sequence[int], costs: PipelineCosts, memory_bytes: int) -> list[int]:
    """Return the bytes of each rank for activations.

    Raises:
        InputError: if one micro-batch does not fit a rank.
    """
    available = [memory_bytes - static for static in costs.static_bytes(placement)]
    for rank, own_bytes in enumerate(available):
        needed = sum(
            costs.stages[stage].activation_bytes for stage, owner in enumerate(placement) if owner == rank
        )
        if needed > own_bytes:
            raise InputError(
                f"rank {rank} needs {memory_bytes - own_bytes} static bytes and {needed} for one "
                f"micro-batch, and has {memory_bytes}: raise the limit, or give the rank fewer layers"
            )
    return available


class _Chain:
    """Passes and transfers of a micro-batch, in a row.

    Attributes:
        streams: The streams.
        precedences: Which waits for which.
    """

    def __init__(self, placement: Sequence[int], costs: PipelineCosts) -> None:
        self._placement, self._costs = placement, costs
        self.streams: list[Stream] = []
        self.precedences: list[Precedence] = []

    def compute(self, kind: ActionKind, stage: int, duration_us: float, after: int | None) -> int:
        """Add a pass after a stream, and return its index."""
        rank: Resource = ("rank", self._placement[stage], False)
        return self._add(
            Stream(kind=kind, stage=stage, duration_us=duration_us, resources=(rank,)), after=after
        )

    def send(self, kind: ActionKind, stage: int, target: int, after: int) -> int:
        """Add the transfer to another stage, and return its index; without one, that of the pass before."""
        source_rank, target_rank = self._placement[stage], self._placement[target]
        sender, links = self._costs.stages[min(stage, target)], self._costs.interconnect
        duration_us, between = 0.0, False
        if links is not None:
            duration_us = links.transfer_us(sender.send_bytes, source_rank, target_rank)
            between = links.nodes[source_rank] != links.nodes[target_rank]
        duration_us = duration_us if sender.send_us is None else sender.send_us
        if source_rank == target_rank or not duration_us:
            return after
        link_ends: tuple[Resource, ...] = (("send", source_rank, between), ("receive", target_rank, between))
        return self._add(
            Stream(kind=kind, stage=stage, duration_us=duration_us, resources=link_ends), after=after
        )

    def _add(self, stream: Stream, *, after: int | None) -> int:
        self.streams.append(stream)
        if after is not None:
            self.precedences.append(Precedence(before=after, after=len(self.streams) - 1))
        return len(self.streams) - 1


def _passes(
    placement: Sequence[int], costs: PipelineCosts, split: bool
) -> tuple[list[Stream], list[Precedence]]:
    """Return the passes and transfers, and which waits for which in a micro-batch."""
    chain, last, previous = _Chain(placement, costs), len(placement) - 1, None
    for index, stage in enumerate(costs.stages):
        previous = chain.compute(F, index, stage.forward_us, previous)
        if index < last:
            previous = chain.send(SEND_F, index, index + 1, previous)
    for index in range(last, -1, -1):
        stage = costs.stages[index]
        # A whole backward pass that is faster than its parts may replace them: no part is longer than it.
        whole_us = stage.full_backward_us
        gradient_us = min(stage.input_gradient_us, whole_us) if split else whole_us
        gradient = previous = chain.compute(I if split else B, index, gradient_us, previous)
        if index:
            previous = chain.send(SEND_B, index, index - 1, previous)
        if split:
            chain.compute(W, index, min(stage.weight_gradient_us, whole_us - gradient_us), gradient)
    return chain.streams, chain.precedences


def _memory_precedences(
    placement: Sequence[int], costs: PipelineCosts, memory_bytes: int, streams: Sequence[Stream]
) -> list[Precedence]:
    """Return which forward pass waits for the backward pass of an earlier micro-batch on its stage."""
    available = available_bytes(placement, costs, memory_bytes)
    forward = {stream.stage: index for index, stream in enumerate(streams) if stream.kind is F}
    gradient = {stream.stage: index for index, stream in enumerate(streams) if stream.kind in (I, B)}
    weight = {stream.stage: index for index, stream in enumerate(streams) if stream.kind is W}
    precedences = []
    for stage, (rank, cost) in enumerate(zip(placement, costs.stages, strict=True)):
        if not cost.activation_bytes:
            continue
        # At most `microbatches` of the stage fit, so forward pass i waits for the gradient of micro-batch
        # i - microbatches.
        microbatches = available[rank] // cost.activation_bytes
        # If the gradient of weights needs all activations, they are freed only after it.
        all_retained = stage in weight and cost.retained == cost.activation_bytes
        lag_us = streams[weight[stage]].duration_us if all_retained else 0.0
        precedences.append(
            Precedence(before=gradient[stage], after=forward[stage], lag_us=lag_us, shift=microbatches)
        )
    return precedences


def _memory_us(
    graph: StreamGraph, placement: Sequence[int], costs: PipelineCosts, memory_bytes: int
) -> float:
    """Return the time in which the bytes of each rank suffice for what its micro-batches hold."""
    index = {(stream.kind, stream.stage): stream_index for stream_index, stream in enumerate(graph.streams)}
    bound_us = 0.0
    for rank, rank_bytes in enumerate(available_bytes(placement, costs, memory_bytes)):
        stages = [stage for stage, owner in enumerate(placement) if owner == rank]
        # Each micro-batch holds its activations at least for its own longest path: bytes times time is at
        # least this.
        byte_us = retained_byte_us = 0.0  # bytes times microseconds of a micro-batch
        tail_us = inf
        for stage in stages:
            gradient = index[(I, stage) if (I, stage) in index else (B, stage)]
            ends_us = graph.heads_us[gradient, 0] + graph.streams[gradient].duration_us
            held_us = ends_us - graph.heads_us[index[F, stage], 0]
            byte_us += float(held_us) * costs.stages[stage].activation_bytes
            tail_us = min(tail_us, float(graph.tails_us[gradient, -1]))
            if (W, stage) in index:
                retained_byte_us += graph.streams[index[W, stage]].duration_us * costs.stages[stage].retained
        head_us = min(float(graph.heads_us[index[F, stage], 0]) for stage in stages)
        if byte_us:
            # Gradients of weights hold memory too, and need not be followed by anything.
            longest = max(
                byte_us * graph.microbatches / rank_bytes + tail_us,
                (byte_us + retained_byte_us) * graph.microbatches / rank_bytes,
            )
            bound_us = max(bound_us, head_us + longest)
    return bound_us


def _longest(
    streams: Sequence[Stream], precedences: Sequence[Precedence], microbatches: int
) -> NDArray[np.float64]:
    """Return the longest path to each pass (streams, micro-batches), its own time not included."""
    paths = np.zeros((len(streams), microbatches))
    waits = defaultdict(list)
    for precedence in precedences:
        waits[precedence.after].append(precedence)
    order = _sorted_streams(len(streams), precedences)
    for microbatch, index in itertools.product(range(microbatches), order):
        for precedence in waits[index]:
            if precedence.shift <= microbatch:
                length = (
                    paths[precedence.before, microbatch - precedence.shift]
                    + streams[precedence.before].duration_us
                )
                paths[index, microbatch] = max(paths[index, microbatch], length + precedence.lag_us)
    return paths


def _sorted_streams(count: int, precedences: Sequence[Precedence]) -> list[int]:
    """Return the streams, each after those that it waits for in the same micro-batch."""
    after = defaultdict(list)
    missing = [0] * count
    for precedence in precedences:
        if precedence.shift == 0:
            after[precedence.before].append(precedence.after)
            missing[precedence.after] += 1
    order = [index for index in range(count) if not missing[index]]
    for index in order:
        for waiting in after[index]:
            missing[waiting] -= 1
            if not missing[waiting]:
                order.append(waiting)
    return order
