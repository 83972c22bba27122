"""Whether a larger micro-batch pays in 1F1B, estimated before any plan is made.

A larger micro-batch makes the kernels of a stage more efficient, and leaves fewer micro-batches to fill the
pipeline. With B sequences in a batch and p stages, a step of 1F1B takes ``(B / b + p - 1) T(b)`` for
micro-batches of b sequences, of which each takes T(b) in a stage. So the ratio of the model FLOP utilisations
(MFU) of micro-batches x and y is ``(B + y (p - 1)) / (B + x (p - 1))`` times that of a single stage.

If the larger micro-batch fits only with balanced memory, that ratio is the gain of balancing, without its
copies. Where the smaller one is already efficient (flash attention), or the larger one fits anyway (selective
recomputation), nothing is gained.

Source: Huang et al., "Re-evaluating the memory-balanced pipeline parallelism: BPipe", 2024 (arXiv
2401.02088).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tunebench.errors import InputError
from tunebench.training.schedules import PipelineCosts

__all__ = ["MicrobatchEstimate", "balanced_in_flight", "estimate_microbatches", "microbatch_speedup"]


def microbatch_speedup(batch: int, stages: int, larger: int, smaller: int, stage_speedup: float) -> float:
    """Return the speedup of 1F1B by a larger micro-batch: above 1 if it pays.

    Args:
        batch: Sequences of a batch.
        stages: Stages of the pipeline.
        larger: Sequences of the larger micro-batch.
        smaller: Sequences of the smaller micro-batch.
        stage_speedup: Time per sequence of a stage with the smaller micro-batch over that with the larger
            one, which is the ratio of their MFU.

    Raises:
        InputError: if a number is not positive.
    """
    if min(batch, stages, larger, smaller) < 1 or not stage_speedup > 0:
        raise InputError(
            f"expected positive numbers, got batch={batch}, stages={stages}, larger={larger}, "
            f"smaller={smaller}, stage_speedup={stage_speedup}"
        )
    return (batch + smaller * (stages - 1)) / (batch + larger * (stages - 1)) * stage_speedup


def balanced_in_flight(stages: int, microbatches: int) -> int:
    """Return the most micro-batches whose activations a rank keeps in 1F1B with balanced memory.

    Source: Kim et al., "BPipe: memory-balanced pipeline parallelism for training large language models",
    2023.
    """
    return min(microbatches, stages, (stages + 3) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchEstimate:
    """A micro-batch size in 1F1B, estimated without a simulation.

    Attributes:
        microbatch: Sequences of a micro-batch.
        microbatches: Micro-batches of a step.
        stage_us: Time of a micro-batch in the slowest stage, forward and backward.
        step_us: Time of a step in which all stages take that time.
        stage_speedup: Time per sequence of a stage with the smallest micro-batch over that with this one.
        speedup: Step with the smallest micro-batch over that with this one.
        peak_bytes: Most memory of a rank.
        balanced_bytes: Most memory of a rank with balanced memory.
    """

    microbatch: int
    microbatches: int
    stage_us: float
    step_us: float
    stage_speedup: float
    speedup: float
    peak_bytes: int
    balanced_bytes: int


def estimate_microbatches(
    costs: Callable[[int], PipelineCosts], batch: int, sizes: tuple[int, ...]
) -> tuple[MicrobatchEstimate, ...]:
    """Return the estimate of 1F1B for each size of micro-batches.

    Args:
        costs: Returns the costs of the stages, one on each rank, for a size of micro-batches.
        batch: Sequences of a batch.
        sizes: Sizes of micro-batches, ascending; the first one is the base of speedups.

    Raises:
        InputError: if a size does not divide the batch.
    """
    estimates: list[MicrobatchEstimate] = []
    for size in sizes:
        if size < 1 or batch % size:
            raise InputError(f"micro-batches of {size} sequences do not divide a batch of {batch}")
        pipeline_costs = costs(size)
        stages = pipeline_costs.stages
        ranks, count = len(stages), batch // size
        stage_us = max(stage.forward_us + stage.full_backward_us for stage in stages)
        base = estimates[0] if estimates else None
        # Per sequence, so that micro-batches of different sizes compare.
        faster = base.stage_us / base.microbatch * size / stage_us if base else 1.0
        balanced_count = balanced_in_flight(ranks, count)
        in_flight = [min(count, ranks - rank) for rank in range(ranks)]
        estimates.append(
            MicrobatchEstimate(
                microbatch=size,
                microbatches=count,
                stage_us=stage_us,
                step_us=(count + ranks - 1) * stage_us,
                stage_speedup=faster,
                speedup=microbatch_speedup(batch, ranks, size, base.microbatch, faster) if base else 1.0,
                peak_bytes=max(
                    stage.static_bytes + stage.activation_bytes * stored
                    for stage, stored in zip(stages, in_flight, strict=True)
                ),
                balanced_bytes=_balanced_bytes(pipeline_costs, in_flight, balanced_count),
            )
        )
    return tuple(estimates)


def _balanced_bytes(costs: PipelineCosts, in_flight: list[int], balanced_count: int) -> int:
    """Return the most memory of a rank if rank x evicts what exceeds `balanced_count` to ``p - 1 - x``."""
    rank_bytes = []
    for rank, (stage, stored) in enumerate(zip(costs.stages, in_flight, strict=True)):
        partner = len(in_flight) - 1 - rank
        accepted = max(0, in_flight[partner] - balanced_count) * costs.stages[partner].evicted
        evicted = max(0, stored - balanced_count) * stage.evicted
        rank_bytes.append(stage.static_bytes + stage.activation_bytes * stored - evicted + accepted)
    return max(rank_bytes)
