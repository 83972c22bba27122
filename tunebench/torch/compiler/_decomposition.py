"""Operators that are traced as simpler ones, which kernels fuse with their neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions

from tunebench.torch._tensor import DTYPES

__all__ = ["DECOMPOSITIONS", "repeat_casts"]

aten = torch.ops.aten


def _var_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return variance and mean in two passes: the mean, then the mean square of the differences.

    As in torch, 16-bit numbers are reduced in float32.
    """
    axes = list(dim) if dim else list(range(x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    count = math.prod(x.shape[axis] for axis in axes)
    squares = (wide - mean).square().sum(axes, keepdim=keepdim)
    divisor = max(0, count - (1 if correction is None else correction))
    variance = squares / divisor if divisor else squares * math.inf
    mean = mean if keepdim else mean.squeeze(axes)
    return variance.to(x.dtype), mean.to(x.dtype)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    **get_decompositions([aten.native_group_norm, aten.native_group_norm_backward, aten.native_dropout]),
    aten.var_mean.correction: _var_mean,
}
"""Decompositions for AOTAutograd, by operator."""


def repeat_casts(graph: fx.Graph) -> None:
    """Repeat each conversion to float32 for each operation that reads it, so that it can be fused into each.

    Such a conversion reads half the bytes that it writes: it is cheaper to repeat it than to read its result.
    """
    for node in list(graph.nodes):
        if node.target is not aten._to_copy.default or len(node.users) < 2 or not _widens(node):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                again = graph.node_copy(node)
            again.meta = dict(node.meta)
            user.replace_input_with(node, again)


def _widens(node: fx.Node) -> bool:
    """Return whether a call converts 16-bit numbers to float32, and nothing else."""
    (source,) = node.all_input_nodes
    result, read = node.meta.get("val"), source.meta.get("val")
    if not isinstance(result, Tensor) or not isinstance(read, Tensor):
        return False
    same = result.device == read.device and result.stride() == read.stride()
    return same and result.dtype == torch.float32 and read.dtype in DTYPES and read.itemsize == 2
