"""Casts that torch.autocast applies to arguments of torch's functions, for those of tunebench.torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_to_autocast", "cast_to_float32", "is_autocast_enabled"]


def is_autocast_enabled(tensor: Tensor) -> bool:
    """Return whether autocast is on for a tensor's device."""
    return bool(torch.is_autocast_enabled(tensor.device.type))


def cast_to_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors in autocast's type, as torch casts operands of products; unchanged if it is off."""
    first = tensors[0]
    if (
        not torch._C._is_any_autocast_enabled()
        or not isinstance(first, Tensor)
        or not is_autocast_enabled(first)
    ):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(tensor.to(dtype) if _is_eligible(tensor) else tensor for tensor in tensors)


def _is_eligible(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64


def cast_to_float32(*tensors: Any, on_cpu: bool = False) -> tuple[Any, ...]:
    """Return tensors in float32 where autocast computes in float32: on GPUs, and on CPUs if `on_cpu`."""
    first = tensors[0]
    if (
        not torch._C._is_any_autocast_enabled()
        or not isinstance(first, Tensor)
        or not is_autocast_enabled(first)
    ):
        return tensors
    if first.device.type == "cpu" and not on_cpu:
        return tensors
    return tuple(tensor.float() if _is_eligible(tensor) else tensor for tensor in tensors)
