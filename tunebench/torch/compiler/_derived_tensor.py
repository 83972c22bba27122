"""Tensors that are computed from parameters or inputs before each call of a kernel.

They are not kept between calls: torch offers no sign of all changes of a parameter, such as `.data.mul_`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

__all__ = [
    "DerivedTensor",
    "batch_norm_scale",
    "batch_norm_shift",
    "filter_slice",
    "group_offsets",
    "zero_bias",
]


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A tensor that is a function of other tensors.

    Attributes:
        parts: FX nodes of the other tensors.
        compute: Returns the tensor from the others.
    """

    parts: tuple[fx.Node, ...]
    compute: Callable[..., Tensor]


def batch_norm_scale(
    weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return the factor of each channel in a batch normalisation by constant running statistics."""
    return (weight * torch.rsqrt(variance + eps)).to(dtype)


def batch_norm_shift(
    weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return the summand of each channel in a batch normalisation by constant running statistics."""
    return torch.addcmul(bias, mean, weight * torch.rsqrt(variance + eps), value=-1).to(dtype)


def filter_slice(filters: Tensor, *, first: int, end: int) -> Tensor:
    """Return the filters of some input channels, channels last: (k, end - first, r, s)."""
    return filters[:, first:end].contiguous(memory_format=torch.channels_last)


def group_offsets(ends: Tensor) -> Tensor:
    """Return the start of each group of rows and the end of the last one: (groups + 1,) i32.

    Args:
        ends: End of each group: (groups,).
    """
    return torch.nn.functional.pad(ends.to(torch.int32), (1, 0))


def zero_bias(filters: Tensor) -> Tensor:
    """Return a bias of zeros, one per filter: (k,)."""
    return filters.new_zeros(filters.shape[0])
