"""Memory layout of tensors, and broadcasting between them, from shapes and strides alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from tunebench.errors import InputError
from tunebench.index_map import IndexMap
from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.graph.node import Broadcast

__all__ = [
    "bias_axes",
    "channel_broadcast",
    "has_strides",
    "innermost_extent",
    "is_dense",
    "is_static",
    "kernel_strides",
    "matrix_order",
    "operand_broadcast",
    "reduced_axis",
    "reduced_strides",
    "reduction_map",
    "strides_in_order",
    "typical_tensor",
]


def is_dense(tensor: Any) -> bool:
    """Return whether the elements fill their memory without gaps, in any order of the axes."""
    axes = sorted(
        ((stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1)
    )
    expected = 1
    for stride, extent in axes:
        if stride != expected:
            return False
        expected *= extent
    return True


def is_static(tensor: torch.Tensor) -> bool:
    """Return whether a traced tensor has constant sizes and strides."""
    return all(isinstance(extent, int) for extent in (*tensor.shape, *tensor.stride()))


def typical_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a traced tensor with the sizes and strides of the call that was traced, which no guard reads.

    Raises:
        InputError: if a size depends on data.
    """
    if is_static(tensor):
        return tensor
    shape, strides = ([_typical(extent) for extent in extents] for extents in (tensor.shape, tensor.stride()))
    with unset_fake_temporarily(), FakeTensorMode():
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


def _typical(extent: int | torch.SymInt) -> int:
    size = extent if isinstance(extent, int) else extent.node.hint
    if size is None:
        raise InputError("sizes that depend on data")
    return int(size)


def innermost_extent(tensor: Any) -> int:
    """Return the extent of the innermost axis in memory; 1 for a scalar."""
    axes = [
        (stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1
    ]
    return int(min(axes)[1]) if axes else 1


def operand_broadcast(tensor: Any, result: Any) -> Broadcast | None:
    """Return how an operand is broadcast to a result, or None if kernels do not support it."""
    if tensor.numel() == 1:
        return "scalar"
    if not is_dense(tensor):
        return None
    lead = result.dim() - tensor.dim()
    active = [axis for axis in range(result.dim()) if axis >= lead and tensor.shape[axis - lead] > 1]
    wide = [axis for axis in range(result.dim()) if result.shape[axis] > 1]
    if active == wide:
        same = all(tensor.stride(axis - lead) == result.stride(axis) for axis in active)
        return "whole" if same else None
    if active == [min(wide, key=result.stride)]:
        return "vector"
    if active == [1] and result.dim() == 4 and result.is_contiguous():
        return "channel"
    outer = sorted(wide, key=result.stride, reverse=True)[: len(active)]
    in_order = sorted(active, key=lambda axis: tensor.stride(axis - lead), reverse=True)
    return "row" if active and in_order == outer else None


def channel_broadcast(images: Any) -> Broadcast:
    """Return how one number per channel is broadcast to images."""
    if images.is_contiguous() and images.shape[2:].numel() > 1:
        return "channel"
    return "vector" if images.movedim(1, -1).is_contiguous() else "channel"


def _reduced_axes(tensor: Any, axes: Any) -> set[int]:
    """Return the axes of a reduction, none of them negative; all axes if none are given."""
    return {axis % tensor.dim() for axis in axes} if axes else set(range(tensor.dim()))


def reduced_axis(tensor: Any, axes: Any) -> Literal["cols", "rows"] | None:
    """Return whether axes are innermost in memory (``cols``) or outermost (``rows``); None if neither."""
    chosen = _reduced_axes(tensor, axes)
    wide = (axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1)
    inside = [axis in chosen for axis in sorted(wide, key=tensor.stride, reverse=True)]
    if inside == sorted(inside):
        return "cols"
    return "rows" if inside == sorted(inside, reverse=True) else None


def reduced_strides(tensor: Any, axes: Any, result: Any) -> tuple[int, ...]:
    """Return the strides of a reduction's result that keeps the order of the operand's axes in memory."""
    chosen = _reduced_axes(tensor, axes)
    remaining = [axis for axis in range(tensor.dim()) if result.dim() == tensor.dim() or axis not in chosen]
    order = sorted(
        range(len(remaining)), key=lambda position: tensor.stride(remaining[position]), reverse=True
    )
    return strides_in_order(result.shape, order)


def bias_axes(mask: Any, scores: Sequence[int]) -> str | None:
    """Return the axes of attention scores that a mask has in memory, as workloads name them: `hqk`.

    Args:
        mask: Mask in torch's shape; axes of stride 0 are broadcast.
        scores: Extents of batch, heads, queries and keys.

    Returns:
        The axes, or None if the mask is not broadcast to the scores or is the same for all keys.
    """
    lead = len(scores) - mask.dim()
    if lead < 0 or any(
        extent not in (1, whole) for extent, whole in zip(mask.shape, scores[lead:], strict=True)
    ):
        return None
    steps = zip(_BIAS_AXES[lead:], mask.shape, mask.stride(), strict=True)
    axes = "".join(axis for axis, extent, step in steps if extent > 1 and step)
    if scores[-1] == 1:
        return f"{axes}k"
    return axes if axes.endswith("k") else None


def reduction_map(tensor: Any, axes: Any, result: Any) -> tuple[IndexMap, int]:
    """Return the place in memory of each element of a reduction's operand, and the number of reduced axes.

    The kept axes come first, in the order of the result's memory; then the reduced axes, in that of the
    operand's memory.

    Args:
        tensor: The operand.
        axes: The reduced axes; all if there are none.
        result: The result, which may keep the reduced axes with one element.
    """
    chosen = _reduced_axes(tensor, axes)
    remaining = [axis for axis in range(tensor.dim()) if axis not in chosen]
    result_axes = remaining if result.dim() == tensor.dim() else range(len(remaining))
    outer = [
        axis
        for _, axis in sorted(
            zip(result_axes, remaining, strict=True), key=lambda pair: -result.stride(pair[0])
        )
    ]
    inner = sorted(chosen, key=tensor.stride, reverse=True)
    order = [*outer, *inner]
    shape = tuple(int(tensor.shape[axis]) for axis in order)
    return IndexMap(shape, tuple(int(tensor.stride(axis)) for axis in order)), len(inner)


def kernel_strides(workload: Workload, name: str, tensor: Any) -> tuple[int, ...]:
    """Return the strides with which the kernels of a workload read or write one of its tensors.

    This is the only statement of the order of axes that kernels expect; other tensors are copied. A stride of
    0 means that the kernel broadcasts the tensor along that axis, and reads a single element there.

    Args:
        workload: The workload.
        name: Name of its tensor.
        tensor: The tensor in torch's shape.
    """
    if workload.operator in _ORDERLESS and is_dense(tensor):
        return tuple(tensor.stride())
    if workload.operator == "attention" and name == "bias":
        axes = _BIAS_AXES[-tensor.dim() :]
        has_axis = [axis in workload.bias for axis in axes]  # type: ignore[attr-defined]
        extents = [extent if keep else 1 for extent, keep in zip(tensor.shape, has_axis, strict=True)]
        dense = strides_in_order(extents, range(len(extents)))
        return tuple(stride if keep else 0 for stride, keep in zip(dense, has_axis, strict=True))
    order = list(range(tensor.dim()))
    if getattr(workload, "layout", "") == "nhwc" and tensor.dim() > 2:
        order = [0, *order[2:], 1]
    elif name in _MATRICES and getattr(workload, "trans", "nn")[_MATRICES[name]] == "t":
        order[-2:] = order[:-3:-1]
    return strides_in_order(tensor.shape, order)


_ORDERLESS = frozenset({"batchnorm_stats", "elementwise", "reduction"})
"""Operators that read all elements in the order of memory; the workload states the extents in that order."""

_BIAS_AXES = "bhqk"
"""Axes of attention scores, as `Attention.bias` names them."""

_MATRICES = {"a": 0, "b": 1, "b_gate": 1, "b_up": 1}
"""Place of each matrix of a product in `trans`, which states whether its columns are contiguous."""


def strides_in_order(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose axes have an order in memory, outermost first."""
    strides, step = [0] * len(shape), 1
    for axis in reversed(list(order)):
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def has_strides(tensor: Any, strides: Sequence[int]) -> bool:
    """Return whether a tensor's elements are where strides place them; axes of extent 1 do not matter."""
    steps = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(extent == 1 or step == expected for extent, step, expected in steps)


def matrix_order(tensor: torch.Tensor) -> Literal["n", "t"] | None:
    """Return whether rows (``n``) or columns (``t``) of the last two axes are contiguous; None if neither."""
    if tensor.is_contiguous():
        return "n"
    return "t" if tensor.ndim > 1 and tensor.transpose(-2, -1).is_contiguous() else None
