"""Named schedules of a pipeline, without split backward passes.

Sources: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019;
Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019 (1F1B), and "Efficient
large-scale language model training on GPU clusters using Megatron-LM", 2021 (1F1B with a flush after each
batch, as here, and interleaved 1F1B); Lamy-Poirier, "Breadth-first pipeline parallelism", 2022 (looped
breadth-first).
"""

from __future__ import annotations

import itertools

from tunebench.errors import InputError
from tunebench.training.schedules.action import ActionKind, PipelineAction
from tunebench.training.schedules.schedule import PipelineSchedule, looped_placement

__all__ = [
    "alternating_order",
    "bubble",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "microbatch_groups",
    "one_f_one_b",
]

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


def bubble(stages: int, microbatches: int) -> float:
    """Return the idle share of a rank's time in GPipe and 1F1B, for equal stages and instant transfers."""
    return (stages - 1) / (microbatches + stages - 1)


def gpipe(ranks: int, microbatches: int, *, trains: bool = True) -> PipelineSchedule:
    """Return the schedule with all forward passes before all backward passes.

    Args:
        ranks: Number of ranks, each with one stage.
        microbatches: Number of micro-batches.
        trains: Whether there are backward passes.
    """
    _check(ranks, microbatches)
    kinds = (F, B) if trains else (F,)
    return PipelineSchedule(
        name="gpipe" if trains else "forward",
        microbatches=microbatches,
        placement=looped_placement(ranks),
        actions=tuple(
            tuple(
                PipelineAction(rank, kind, microbatch) for kind in kinds for microbatch in range(microbatches)
            )
            for rank in range(ranks)
        ),
    )


def one_f_one_b(ranks: int, microbatches: int) -> PipelineSchedule:
    """Return the schedule with one backward pass after each forward pass, as early as possible (1F1B).

    Rank x has at most ``ranks - x`` micro-batches in flight.
    """
    return PipelineSchedule(
        name="1f1b",
        microbatches=microbatches,
        placement=looped_placement(ranks),
        actions=alternating_order(ranks, microbatches),
    )


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """Return 1F1B for ranks with several stages each, which go around the ranks.

    Micro-batches pass all stages of a rank in groups of at least `ranks`, if there are as many.

    Args:
        ranks: Number of ranks.
        microbatches: Number of micro-batches.
        chunks: Stages of each rank.
    """
    if chunks == 1:
        return one_f_one_b(ranks, microbatches)
    return PipelineSchedule(
        name="interleaved-1f1b",
        microbatches=microbatches,
        placement=looped_placement(ranks, chunks),
        actions=alternating_order(ranks, microbatches, chunks, per_hop=2),
    )


def alternating_order(
    ranks: int, microbatches: int, chunks: int = 1, *, per_hop: int = 1
) -> tuple[tuple[PipelineAction, ...], ...]:
    """Return the actions of each rank if forward and backward passes alternate after a warm-up.

    Args:
        ranks: Number of ranks.
        microbatches: Number of micro-batches.
        chunks: Stages of each rank, which go around the ranks.
        per_hop: Forward passes of the warm-up that a rank has more than the next rank.
    """
    _check(ranks, microbatches, chunks)
    groups = microbatch_groups(ranks, microbatches)
    forward = _in_groups(groups, range(chunks))
    backward = _in_groups(groups, range(chunks - 1, -1, -1))
    return tuple(
        _alternating(
            [PipelineAction(chunk * ranks + rank, F, microbatch) for chunk, microbatch in forward],
            [PipelineAction(chunk * ranks + rank, B, microbatch) for chunk, microbatch in backward],
            # The warm-up: the first group through all chunks but the last, `per_hop` passes for each rank
            # behind this one, and the pass that the first gradient follows.
            warm_up=(chunks - 1) * groups[0] + per_hop * (ranks - 1 - rank) + 1,
        )
        for rank in range(ranks)
    )


def microbatch_groups(ranks: int, microbatches: int) -> list[int]:
    """Return the sizes of groups of micro-batches: at least `ranks` each, if there are as many."""
    count = max(1, microbatches // ranks)
    return [microbatches // count + (index < microbatches % count) for index in range(count)]


def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> PipelineSchedule:
    """Return the schedule that runs all micro-batches through a stage before the rank's next stage."""
    _check(ranks, microbatches, chunks)
    return PipelineSchedule(
        name="looped-bfs",
        microbatches=microbatches,
        placement=looped_placement(ranks, chunks),
        actions=tuple(
            (
                *(
                    PipelineAction(chunk * ranks + rank, F, microbatch)
                    for chunk in range(chunks)
                    for microbatch in range(microbatches)
                ),
                *(
                    PipelineAction(chunk * ranks + rank, B, microbatch)
                    for chunk in reversed(range(chunks))
                    for microbatch in range(microbatches)
                ),
            )
            for rank in range(ranks)
        ),
    )


def _in_groups(groups: list[int], chunks: range) -> list[tuple[int, int]]:
    """Return chunk and micro-batch of each pass in order: each group of micro-batches through all chunks."""
    boundaries = list(itertools.accumulate(groups, initial=0))
    return [
        (chunk, microbatch)
        for first, end in itertools.pairwise(boundaries)
        for chunk in chunks
        for microbatch in range(first, end)
    ]


def _alternating(
    forward: list[PipelineAction], backward: list[PipelineAction], warm_up: int
) -> tuple[PipelineAction, ...]:
    """Return `warm_up` forward passes, then a backward pass after each forward pass."""
    warm_up = min(warm_up, len(forward))
    # The steady state: one backward pass, one forward pass. What is left of the backward passes follows.
    pairs = (action for pair in zip(backward, forward[warm_up:], strict=False) for action in pair)
    return (*forward[:warm_up], *pairs, *backward[len(forward) - warm_up :])


def _check(ranks: int, microbatches: int, chunks: int = 1) -> None:
    if min(ranks, microbatches, chunks) < 1:
        raise InputError(
            f"expected at least one rank, micro-batch and chunk, got {ranks}, {microbatches} and {chunks}"
        )
