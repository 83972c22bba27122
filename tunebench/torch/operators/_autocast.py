"""What autocast does to arguments of torch's functions, done to those of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["is_casting", "lowered", "raised"]


def is_casting(tensor: Tensor) -> bool:
    """Tell whether autocast is on where a tensor is."""
    return bool(torch.is_autocast_enabled(tensor.device.type))


def lowered(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors in autocast's type, as torch has them for products; unchanged where it is off."""
    first = tensors[0]
    if not torch._C._is_any_autocast_enabled() or not isinstance(first, Tensor) or not is_casting(first):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(tensor.to(dtype) if _is_eligible(tensor) else tensor for tensor in tensors)


def _is_eligible(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


def raised(*tensors: Any, on_cpu: bool = False) -> tuple[Any, ...]:
    """Return tensors in float32 where autocast has torch compute so: on GPUs, and on processors if said."""
    first = tensors[0]
    if not torch._C._is_any_autocast_enabled() or not isinstance(first, Tensor) or not is_casting(first):
        return tensors
    if first.device.type == "cpu" and not on_cpu:
        return tensors
    return tuple(tensor.float() if _is_eligible(tensor) else tensor for tensor in tensors)
