"""A lower bound of the time of any schedule within a budget, from bytes and times."""

from __future__ import annotations

import math

import numpy as np

from tunebench.training.memory.step import TrainingStep

__all__ = ["least_bytes", "lower_bound_us"]


_MOMENTS = 128
"""Moments of a large step to bound: those most above the budget, and as many evenly spaced ones."""


def least_bytes(step: TrainingStep) -> int:
    """Return a lower bound of the peak of any schedule: the largest operation, or all results together.

    With a link to the host some schedule attains it, because every other tensor can be on the host.

    Args:
        step: The training step.
    """
    results = step.resident_bytes + step.bytes_of(step.results)
    return max(results, *(step.working_bytes(operation) for operation in step.operations))


def lower_bound_us(step: TrainingStep, budget_bytes: int) -> float:
    """Return a lower bound in microseconds of the time of any schedule within a budget.

    While an operation runs for the first time, tensors that were written before and that later operations use
    for the first time exceed the budget by some bytes. At least these bytes are absent at that moment. Each
    absent tensor is either written again after the moment, which takes at least the time of its operation, or
    copied out before and copied in after it. The cheapest choice, with fractions of tensors allowed, bounds
    the time; the bound is the largest over all moments.

    Args:
        step: The training step.
        budget_bytes: Bytes that the device has.
    """
    times = np.array([operation.time_us for operation in step.operations])
    sizes = np.array([0 if tensor.resident else tensor.size_bytes for tensor in step.tensors], dtype=float)
    born, last = _lifetimes(step)
    producers = step.producers()
    producer = np.array([producers.get(tensor, 0) for tensor in range(len(sizes))])
    again_us = np.array([o.time_us if o.recomputable else math.inf for o in step.operations])
    before_us = np.concatenate([[0.0], np.cumsum(times)])
    total_us = float(before_us[-1])
    excess = _excess_bytes(step, sizes, born, last, budget_bytes)

    def bound_us(moment: int) -> float:
        """Return the bound of a moment."""
        operation = step.operations[moment]
        # What is written before the moment and read after it, and not needed by the operation itself.
        across = (born < moment) & (last > moment) & (sizes > 0)
        across[[*operation.inputs, *operation.outputs]] = False
        kinds = np.flatnonzero(across)
        # Outputs of one operation are restored by running it once: they count as one tensor of all their
        # bytes.
        group_bytes = np.bincount(producer[kinds], weights=sizes[kinds], minlength=len(times))
        groups = np.flatnonzero(group_bytes)
        before = float(before_us[moment])
        return _split(step, again_us[groups], group_bytes[groups], float(excess[moment]), before, total_us)

    best_us = total_us
    for moment in _moments(excess):
        # Rounding must not lift the bound above the time of an optimal schedule.
        best_us = max(best_us, bound_us(moment) * (1 - 1e-9))
    return best_us


def _excess_bytes(
    step: TrainingStep, sizes: np.ndarray, born: np.ndarray, last: np.ndarray, budget_bytes: int
) -> np.ndarray:
    """Return the bytes above the budget at the first run of each operation without a plan."""
    # Tensors alive across each operation, as a running sum of births and deaths.
    change = np.zeros(len(step.operations) + 2)
    across = last > born + 1
    np.add.at(change, born[across] + 1, sizes[across])
    np.add.at(change, last[across], -sizes[across])
    alive = np.cumsum(change)
    excess = np.empty(len(step.operations))
    for moment, operation in enumerate(step.operations):
        read_across = (born[list({*operation.inputs})] < moment) & (last[list({*operation.inputs})] > moment)
        inside = float(sizes[list({*operation.inputs})][read_across].sum())
        excess[moment] = step.working_bytes(operation) + alive[moment] - inside - budget_bytes
    return excess


def _moments(excess: np.ndarray) -> list[int]:
    """Return moments to take the bound of: all above the budget, or of many the ones spread over the step."""
    above = np.flatnonzero(excess > 0)
    if len(above) <= 2 * _MOMENTS:
        chosen = above
    else:
        highest = above[np.argsort(-excess[above], kind="stable")[:_MOMENTS]]
        chosen = np.union1d(highest, above[np.linspace(0, len(above) - 1, _MOMENTS).astype(int)])
    moments: list[int] = chosen.tolist()
    return moments


def _lifetimes(step: TrainingStep) -> tuple[np.ndarray, np.ndarray]:
    """Return the first writer and the last reader of each tensor; -1 without a reader."""
    born = np.full(len(step.tensors), len(step.operations))
    last = np.full(len(step.tensors), -1)
    for index, operation in enumerate(step.operations):
        born[list(operation.outputs)] = index
        last[list(operation.inputs)] = index
    last[list(step.results)] = len(step.operations)
    return born, last


def _split(
    step: TrainingStep, costs: np.ndarray, sizes: np.ndarray, excess: float, before_us: float, total_us: float
) -> float:
    """Return the least time over all divisions of the excess bytes between recomputation and copies."""
    order = np.argsort(costs / sizes, kind="stable")
    order = order[np.isfinite(costs[order])]
    knots = np.concatenate([[0.0], np.cumsum(sizes[order])])
    again_us = np.concatenate([[0.0], np.cumsum(costs[order])])
    after_us = total_us - before_us
    # The fewest microseconds per byte first: with fractions allowed, this greedy choice is optimal (a
    # fractional knapsack).
    if step.link is None:
        return math.inf if knots[-1] < excess else total_us + float(np.interp(excess, knots, again_us))
    out, back = 1e-3 / step.link.to_host_gb_s, 1e-3 / step.link.to_device_gb_s
    most_bytes = min(excess, float(knots[-1]))
    # Find where the way back takes as long as the operations after the moment, by bisection.
    low, high = 0.0, most_bytes
    for _ in range(60):
        middle = (low + high) / 2
        gain = after_us + float(np.interp(middle, knots, again_us)) - (excess - middle) * back
        low, high = (middle, high) if gain < 0 else (low, middle)
    # The time is piecewise linear and convex in the recomputed bytes: its minimum is at a knot, or where
    # one direction of the link starts to take longer than the operations.
    points = np.clip(np.array([*knots, excess - before_us / out, low, high]), 0.0, most_bytes)
    swapped = excess - points
    first_us = np.maximum(before_us, swapped * out)
    second_us = np.maximum(after_us + np.interp(points, knots, again_us), swapped * back)
    return float((first_us + second_us).min())
