"""Memory layout of tensors, and broadcasting between them, from shapes and strides alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from tunebench.workload import Workload

if TYPE_CHECKING:
    from tunebench.graph.node import Broadcast

__all__ = [
    "channel_broadcast",
    "has_workload_layout",
    "innermost_extent",
    "is_dense",
    "matrix_order",
    "memory_format",
    "operand_broadcast",
    "reduced_axis",
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
    return "vector" if images.is_contiguous(memory_format=torch.channels_last) else "channel"


def reduced_axis(tensor: Any, axes: Any) -> Literal["cols", "rows"] | None:
    """Return whether axes are innermost in memory (``cols``) or outermost (``rows``); None if neither."""
    chosen = {axis % tensor.dim() for axis in axes} if axes else set(range(tensor.dim()))
    wide = (axis for axis in range(tensor.dim()) if tensor.shape[axis] > 1)
    inside = [axis in chosen for axis in sorted(wide, key=tensor.stride, reverse=True)]
    if inside == sorted(inside):
        return "cols"
    return "rows" if inside == sorted(inside, reverse=True) else None


def has_workload_layout(workload: Workload, tensor: Any) -> bool:
    """Return whether a tensor has the memory layout that a workload's kernels expect."""
    if workload.operator in (
        "gemm",
        "elementwise",
        "reduction",
        "batchnorm_stats",
    ):  # the workload states the order
        return is_dense(tensor)
    return bool(tensor.is_contiguous(memory_format=memory_format(workload, tensor)))


def memory_format(workload: Workload, tensor: Any) -> torch.memory_format:
    """Return the memory format of a workload's tensors."""
    last = getattr(workload, "layout", "") == "nhwc" and tensor.dim() == 4
    return torch.channels_last if last else torch.contiguous_format


def matrix_order(tensor: torch.Tensor) -> Literal["n", "t"] | None:
    """Return whether rows (``n``) or columns (``t``) of the last two axes are contiguous; None if neither."""
    if tensor.is_contiguous():
        return "n"
    return "t" if tensor.ndim > 1 and tensor.transpose(-2, -1).is_contiguous() else None
