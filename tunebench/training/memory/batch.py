"""The largest batch whose training step fits, found with few profiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tunebench.errors import InputError
from tunebench.training.memory.step import TrainingStep

__all__ = ["largest_batch", "step_at"]

MOST_BATCH = 1 << 30
"""Largest batch of a search."""


def step_at(first: TrainingStep, second: TrainingStep, position: float) -> TrainingStep | None:
    """Return a step with sizes and times on the line through those of two steps.

    Bytes of a model are linear in the batch, times nearly so.

    Args:
        first: The step at position 0.
        second: The step at position 1.
        position: The position, which may be outside 0 and 1.

    Returns:
        The step; none if the steps have different operations.
    """

    def between(low: float, high: float) -> float:
        return max(0.0, low + position * (high - low))

    if [operation.name for operation in first.operations] != [
        operation.name for operation in second.operations
    ]:
        return None
    if any(
        (first_operation.inputs, first_operation.outputs)
        != (second_operation.inputs, second_operation.outputs)
        for first_operation, second_operation in zip(first.operations, second.operations, strict=True)
    ):
        return None
    tensors = tuple(
        replace(first_tensor, size_bytes=round(between(first_tensor.size_bytes, second_tensor.size_bytes)))
        for first_tensor, second_tensor in zip(first.tensors, second.tensors, strict=True)
    )
    operations = tuple(
        replace(
            first_operation,
            time_us=between(first_operation.time_us, second_operation.time_us),
            workspace_bytes=round(between(first_operation.workspace_bytes, second_operation.workspace_bytes)),
        )
        for first_operation, second_operation in zip(first.operations, second.operations, strict=True)
    )
    return replace(first, tensors=tensors, operations=operations)


def largest_batch(fits: Callable[[int], bool], start: int, *, resolution: float = 0.0) -> int:
    """Return the largest batch that fits, or 0 if not even a batch of 1 does.

    Args:
        fits: Whether a batch fits; if one does, every smaller one should.
        start: Batch to try first.
        resolution: Fraction of a batch that the result may be too small.

    Raises:
        InputError: Batches of any size fit.
    """
    low, high, stride = 0, start, max(1, start // 32)
    # Upwards with growing strides, from a guess that is usually close; each call of `fits` profiles a step.
    while high <= MOST_BATCH and fits(high):
        low, high, stride = high, high + stride, 2 * stride
    if high > MOST_BATCH:
        raise InputError(f"a batch of {low} fits: the memory of the step does not grow with the batch")
    # Nothing fitted yet: downwards, until something fits or a batch of 1 does not.
    while low == 0 and high > 1:
        smaller = max(1, high - stride)
        if fits(smaller):
            low = smaller
        else:
            high, stride = smaller, 2 * stride
    # Invariant: `low` fits or is 0, and `high` does not fit.
    while high - low > max(1, resolution * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
