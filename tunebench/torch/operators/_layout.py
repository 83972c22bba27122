"""How tensors lie in memory, told from shapes and strides alone, so that it can be traced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tunebench.torch.operators._memory import DTYPES

__all__ = ["folded", "matrix", "refusal"]


def refusal(tensors: Sequence[Tensor | None]) -> str | None:
    """Return why no kernel takes tensors together, or None if one may."""
    there = [tensor for tensor in tensors if tensor is not None]
    first = there[0]
    for tensor in there:
        if not isinstance(tensor, Tensor):
            return f"{type(tensor).__name__} is no tensor"
        if tensor.layout != torch.strided:
            return f"a {tensor.layout} tensor"
        if tensor.dtype not in DTYPES:
            return f"kernels compute with float32, float16 and bfloat16, not {tensor.dtype}"
        if tensor.dtype != first.dtype:
            return f"tensors of different types, {first.dtype} and {tensor.dtype}"
        if tensor.device != first.device:
            return f"tensors on different devices, {first.device} and {tensor.device}"
        if tensor.numel() == 0:
            return "an empty tensor"
    return None


def matrix(tensor: Tensor) -> Literal["n", "t"] | None:
    """Return how the last two axes lie: rows after rows, columns after columns, or neither without gaps."""
    if tensor.is_contiguous():
        return "n"
    return "t" if tensor.ndim > 1 and tensor.transpose(-2, -1).is_contiguous() else None


def folded(shape: Sequence[int]) -> int:
    """Return the product of extents."""
    return math.prod(shape)
