"""Placeholders: tensors that have a shape, strides and a type, and whose values are computed elsewhere.

A placeholder is a plain tensor on the processor without memory, because programs and torch itself ask for the
exact type and the device of a tensor. The function mode of the iteration handles every call that gets one.
Code that reaches the dispatcher or the memory otherwise, such as another thread, gets an error of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tunebench.torch.coexecution._call import TensorSpec

__all__ = ["become", "placeholder"]


class _Placeholder(Tensor):  # type: ignore[misc]  # torch does not type it
    """The class in which placeholders are made."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute: the values are not here."""
        raise RuntimeError(f"{func} got a tensor without values")


_MAKE = Tensor._make_wrapper_subclass
_CPU = torch.device("cpu")


def placeholder(spec: TensorSpec) -> Tensor:
    """Return a new placeholder with the shape, strides and type of a spec."""
    made: Tensor = _MAKE(
        _Placeholder, spec.shape, spec.stride, spec.offset, None, spec.dtype, torch.strided, _CPU
    )
    made.__class__ = Tensor
    return made


def become(promised: Tensor, real: Tensor) -> None:
    """Turn a placeholder into a tensor with values: the object, its attributes and references remain.

    Args:
        promised: The placeholder.
        real: The tensor; it must not be used afterwards.
    """
    try:
        torch._C._swap_tensor_impl(promised, real)
    except RuntimeError:  # others hold the tensor, such as autograd: promise a view of it instead
        torch._C._swap_tensor_impl(promised, real.view_as(real) if real.requires_grad else real.detach())
