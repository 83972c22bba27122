"""Properties of strided operands from which kernels choose axes, and the least operations of an element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tunebench.dtype import itemsize
from tunebench.kernels.common.expression import least_of_tree
from tunebench.workloads.operators._strided import StridedOperand, StridedWorkload
from tunebench.workloads.operators.strided_reduction import StridedReduction

__all__ = [
    "capped",
    "is_distinct",
    "lane_axis",
    "lane_cost",
    "least_of_element",
    "own_elements",
    "second_axis",
    "shrunk",
    "transposed_axis",
]

S = TypeVar("S", bound=StridedWorkload)

FAR = 16
"""Elements between two loads beyond which a larger distance makes no difference."""


def transposed_axis(workload: StridedWorkload, lane: int) -> int | None:
    """Return the axis of adjacent elements of the largest operand in another layout; None if there is none.

    Args:
        workload: The workload.
        lane: The axis along which operands should be contiguous.
    """
    found: dict[int, int] = {}
    for operand in workload.maps.values():
        extents, strides = operand.index.shape, operand.index.strides
        steps = {
            axis: abs(step)
            for axis, (extent, step) in enumerate(zip(extents, strides, strict=True))
            if extent > 1 and step
        }
        nearest = min(steps, key=lambda axis: (steps[axis], -axis), default=lane)
        if steps.get(lane, 0) > steps.get(nearest, 0):
            read = operand.index.touched() * itemsize(operand.dtype)
            found[nearest] = found.get(nearest, 0) + read
    return max(found, key=lambda axis: found[axis], default=None)


def second_axis(workload: StridedWorkload) -> int | None:
    """Return the axis that kernels tile in addition to the last one; None if there is no other."""
    last = len(workload.extents) - 1
    transposed = transposed_axis(workload, last)
    return transposed if transposed is not None or not last else last - 1


def least_of_element(workload: StridedWorkload, *, may_be_0: bool) -> tuple[float, dict[str, int]]:
    """Return the least multiply-adds of an element, and the least calls of each function by name.

    Steps that depend on no operand of a different value at each index may be computed once for many.

    Args:
        workload: The workload.
        may_be_0: Whether to include operations on operands that are 0 where they do not exist; a kernel may
            leave them out there.
    """
    distinct = {name for name, operand in workload.maps.items() if is_distinct(operand)}
    left_out = {name for name, operand in workload.maps.items() if operand.index.guards and not may_be_0}
    return least_of_tree(workload.tree, distinct, left_out)


def lane_axis(workload: StridedReduction, *, reduced: bool) -> int | None:
    """Return the best axis for adjacent lanes among the reduced axes or the others; None without any.

    Args:
        workload: The workload.
        reduced: Whether lanes have elements of one result.
    """
    kept = len(workload.extents) - workload.axes
    axes = range(kept, len(workload.extents)) if reduced else range(kept)
    return min(axes, key=lambda axis: (lane_cost(workload, axis), -axis), default=None)


def lane_cost(workload: StridedReduction, axis: int) -> float:
    """Return the approximate bytes that are read for an element if adjacent lanes are along an axis.

    Short axes use a part of the lanes only. Elements that are `FAR` or more apart are in different sectors.
    """
    each = sum(
        itemsize(operand.dtype) * (min(abs(operand.index.strides[axis]), FAR) or 0.25)
        for operand in workload.maps.values()
    )
    return each * (1 + FAR / workload.extents[axis])


def is_distinct(operand: StridedOperand) -> bool:
    """Return whether an operand has a stride along every axis: none of its values is known to be shared."""
    steps = zip(operand.index.strides, operand.index.shape, strict=True)
    return all(step for step, extent in steps if extent > 1)


def own_elements(operand: StridedOperand) -> bool:
    """Return whether all elements exist, and each is at an offset of its own."""
    index = operand.index
    return not index.guards and is_distinct(operand) and index.touched() == index.elements


def shrunk(workload: S, most: Mapping[int, int], multiple: int = 1) -> S:
    """Return a workload with smaller extents and the same strides.

    Args:
        workload: The workload.
        most: Largest extent of some axes; others stay, and each keeps two indices at least.
        multiple: Extents that are multiples of this number stay so.
    """
    extents = []
    for axis, extent in enumerate(workload.extents):
        least = max(2, most.get(axis, extent))
        rounded = -(-least // multiple) * multiple if extent % multiple == 0 else least
        extents.append(min(extent, rounded))
    return dataclasses.replace(workload, shape="x".join(map(str, extents)))


def capped(workload: StridedWorkload, axes: Sequence[int], elements: int) -> dict[int, int]:
    """Return extents of axes with a product of about `elements`; axes without guards shrink first."""
    extents = {axis: workload.extents[axis] for axis in axes}
    guarded = {
        axis
        for operand in workload.maps.values()
        for guard in operand.index.guards
        for axis in axes
        if guard.coefficients[axis]
    }
    for axis in sorted(axes, key=lambda axis: (axis in guarded, axis)):
        total = math.prod(extents.values())
        if total > elements:
            extents[axis] = max(2, -(-extents[axis] * elements // total))
    return extents
