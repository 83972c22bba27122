"""Schedules of pipeline parallelism: GPipe and 1F1B, for stages and micro-batches of any duration.

With p equal stages, m micro-batches and no time to send, both schedules leave a stage idle for the share
``(p - 1) / (m + p - 1)`` of the time (`bubble`). They differ in the number of micro-batches in flight.

Sources: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019;
Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019 (1F1B), and "Efficient
large-scale language model training on GPU clusters using Megatron-LM", 2021 (1F1B with a flush after each
batch, as here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Schedule", "Timeline", "bubble", "in_flight", "order", "run_pipeline"]

Schedule = Literal["gpipe", "1f1b"]
"""``"gpipe"``: all forward passes, then all backward passes. ``"1f1b"``: one backward pass after each forward
pass, as early as possible.
"""

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """End of the last pass of each stage, in microseconds from the start of the first pass.

    Attributes:
        ends_us: End of each stage.
    """

    ends_us: tuple[float, ...]

    @property
    def us(self) -> float:
        """End of the last stage."""
        return max(self.ends_us)


def bubble(stages: int, microbatches: int) -> float:
    """Return the share of time that a stage is idle, for equal stages and sends that take no time."""
    return (stages - 1) / (microbatches + stages - 1)


def in_flight(schedule: Schedule, stage: int, stages: int, microbatches: int) -> int:
    """Return the most micro-batches whose activations a stage stores at once during training."""
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


def order(
    schedule: Schedule, stage: int, stages: int, microbatches: int, *, trains: bool = True
) -> tuple[tuple[Pass, int], ...]:
    """Return the passes of a stage in execution order, each with the index of its micro-batch.

    Args:
        schedule: The schedule.
        stage: Index of the stage.
        stages: Number of stages.
        microbatches: Number of micro-batches.
        trains: Whether there are backward passes.
    """
    forward: list[tuple[Pass, int]] = [("forward", i) for i in range(microbatches)]
    if not trains:
        return tuple(forward)
    ahead = in_flight(schedule, stage, stages, microbatches)
    backward: list[tuple[Pass, int]] = [("backward", i) for i in range(microbatches)]
    pairs = (each for both in zip(backward, forward[ahead:], strict=False) for each in both)
    return (*forward[:ahead], *pairs, *backward[microbatches - ahead :])


def run_pipeline(
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    send_us: Sequence[float],
    *,
    microbatches: int,
    schedule: Schedule = "1f1b",
    trains: bool = True,
) -> Timeline:
    """Return when each stage ends its work on one batch.

    A pass starts when the stage has ended its previous pass and the input has arrived. Sending does not block
    the sender.

    Args:
        forward_us: Forward pass of one micro-batch on each stage.
        backward_us: Backward pass of one micro-batch on each stage.
        send_us: Send from each stage to the next, and of the gradient back; one less than there are stages.
        microbatches: Number of micro-batches.
        schedule: The schedule.
        trains: Whether there are backward passes.
    """
    stages = len(forward_us)
    waiting = [list(order(schedule, s, stages, microbatches, trains=trains))[::-1] for s in range(stages)]
    done: dict[tuple[Pass, int, int], float] = {}
    clock = [0.0] * stages
    while any(waiting):
        for stage, passes in enumerate(waiting):
            while passes and (arrival := _arrival(passes[-1], stage, stages, done, send_us)) is not None:
                direction, index = passes.pop()
                takes = (forward_us if direction == "forward" else backward_us)[stage]
                clock[stage] = max(clock[stage], arrival) + takes
                done[direction, stage, index] = clock[stage]
    return Timeline(ends_us=tuple(clock))


def _arrival(
    each: tuple[Pass, int],
    stage: int,
    stages: int,
    done: dict[tuple[Pass, int, int], float],
    send_us: Sequence[float],
) -> float | None:
    """Return when the input of a pass arrives at its stage; None if that is not known yet."""
    direction, index = each
    if direction == "forward":
        before, sent = stage - 1, send_us[stage - 1] if stage else 0.0
    else:
        before, sent = stage + 1, send_us[stage] if stage + 1 < stages else 0.0
    if not 0 <= before < stages:
        return 0.0
    ended = done.get((direction, before, index))
    return None if ended is None else ended + sent
