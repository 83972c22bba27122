"""Choice of axes for kernels by the strides of operands, and the least operations of an element."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from tunebench.dtype import itemsize
from tunebench.kernels.common.expression import least_of_tree
from tunebench.workloads.common.strided_workload import StridedOperand, StridedWorkload
from tunebench.workloads.operators.strided_reduction import StridedReduction

__all__ = [
    "best_lanes",
    "capped",
    "is_loaded_everywhere",
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
"""Distance of two loads, in elements, from which they are taken to be in different sectors."""


def transposed_axis(workload: StridedWorkload, lane: int) -> int | None:
    """Return the axis along which most bytes of transposed operands are contiguous; None if there are none.

    An operand is transposed if its stride along another axis is smaller than that along the lane axis.

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

    Steps whose operands are all broadcast may be computed once for many elements.

    Args:
        workload: The workload.
        may_be_0: Whether to include operations on operands with guards. A kernel may leave them out where
            the operand does not exist and is 0.
    """
    operands = workload.maps.items()
    distinct = frozenset(name for name, operand in operands if _is_distinct(operand))
    left_out = frozenset(name for name, operand in operands if operand.index.guards and not may_be_0)
    return least_of_tree(workload.tree, distinct, left_out)


def lane_axis(workload: StridedReduction, *, reduced: bool) -> int | None:
    """Return the axis of least `lane_cost` among the reduced axes or the others; None if there are none.

    Args:
        workload: The workload.
        reduced: Whether to choose among the reduced axes.
    """
    kept = len(workload.extents) - workload.axes
    axes = range(kept, len(workload.extents)) if reduced else range(kept)
    return min(axes, key=lambda axis: (lane_cost(workload, axis), -axis), default=None)


def best_lanes(workload: StridedReduction) -> Literal["reduced", "kept"]:
    """Return whether adjacent lanes should be along a reduced axis, or along an axis of the results."""
    along, across = (lane_axis(workload, reduced=reduced) for reduced in (True, False))
    assert along is not None
    cheaper = across is not None and lane_cost(workload, across) < lane_cost(workload, along)
    return "kept" if cheaper else "reduced"


def lane_cost(workload: StridedReduction, axis: int) -> float:
    """Return the approximate bytes that are read for an element if adjacent lanes are along an axis.

    A short axis fills only a part of the lanes. Elements `FAR` or more apart are in different sectors.
    """
    each = sum(
        itemsize(operand.dtype) * (min(abs(operand.index.strides[axis]), FAR) or 0.25)
        for operand in workload.maps.values()
    )
    return each * (1 + FAR / workload.extents[axis])


def _is_distinct(operand: StridedOperand) -> bool:
    """Return whether an operand is not broadcast: its offset depends on the index along every axis."""
    gathered = (gather.coefficients for gather in operand.index.gathers)
    columns = zip(operand.index.shape, operand.index.strides, *gathered, strict=True)
    return all(any(steps) for extent, *steps in columns if extent > 1)


def is_loaded_everywhere(operand: StridedOperand) -> bool:
    """Return whether a kernel loads an operand for each index: it is not broadcast and has no guards."""
    return not operand.index.guards and _is_distinct(operand)


def own_elements(operand: StridedOperand) -> bool:
    """Return whether all elements exist, each at a different offset."""
    is_affine = is_loaded_everywhere(operand) and not operand.index.gathers
    return is_affine and operand.index.touched() == operand.index.elements


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
