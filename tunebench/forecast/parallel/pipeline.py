"""When the stages of a pipeline work: GPipe and 1F1B, over stages and micro-batches of any durations.

With p alike stages and m micro-batches, and nothing to send, both leave a stage idle for the share
``(p - 1) / (m + p - 1)`` of the time (`bubble`); they differ in how many micro-batches a stage must remember.

Sources: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019;
Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019 (1F1B), and
"Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021 (1F1B that ends each
batch before the next one, as here).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Schedule", "Timeline", "bubble", "in_flight", "order", "run_pipeline"]

Schedule = Literal["gpipe", "1f1b"]
"""``"gpipe"``: all micro-batches forward, then all backward. ``"1f1b"``: one backward after each forward, as
soon as there is one.
"""

Pass = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When each stage ends its last pass, from the beginning of the first stage's first; microseconds.

    Attributes:
        ends_us: Of each stage.
    """

    ends_us: tuple[float, ...]

    @property
    def us(self) -> float:
        """When the last of them ends."""
        return max(self.ends_us)


def bubble(stages: int, microbatches: int) -> float:
    """Return the share of the time that a stage is idle, if stages are alike and sending costs nothing."""
    return (stages - 1) / (microbatches + stages - 1)


def in_flight(schedule: Schedule, stage: int, stages: int, microbatches: int) -> int:
    """Return how many micro-batches a stage has to remember at once, when it trains."""
    return microbatches if schedule == "gpipe" else min(microbatches, stages - stage)


def order(
    schedule: Schedule, stage: int, stages: int, microbatches: int, *, trains: bool = True
) -> tuple[tuple[Pass, int], ...]:
    """Return the passes of a stage in the order it makes them, each with its micro-batch.

    Args:
        schedule: What comes first.
        stage: Which one, counted from 0.
        stages: How many there are.
        microbatches: Likewise.
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
    """Return when stages end their work on one batch.

    A pass begins when the stage has ended the one before and what it needs has arrived; sending does not hold
    up the sender.

    Args:
        forward_us: Of one micro-batch on each stage.
        backward_us: Likewise.
        send_us: From each stage to the next, and of its gradient back: one less than there are stages.
        microbatches: How many there are.
        schedule: Which passes come first.
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
    """Return when what a pass needs is on its stage; None if that is not known yet."""
    direction, index = each
    if direction == "forward":
        before, sent = stage - 1, send_us[stage - 1] if stage else 0.0
    else:
        before, sent = stage + 1, send_us[stage] if stage + 1 < stages else 0.0
    if not 0 <= before < stages:
        return 0.0
    ended = done.get((direction, before, index))
    return None if ended is None else ended + sent
