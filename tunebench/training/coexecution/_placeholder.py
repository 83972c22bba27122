"""Placeholders: tensors that have a shape, strides and a type, and whose values are computed elsewhere.

A placeholder is a plain tensor on the processor without memory, because programs and torch itself ask for the
exact type and the device of a tensor. The function mode of the iteration handles every call that gets one.
Code that reaches the dispatcher or the memory otherwise, such as another thread, gets an error of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tunebench.training.coexecution._call import TensorSpec

__all__ = ["become", "placeholder", "placeholder_with", "spent", "without_memory"]


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
    return placeholder_with(spec.shape, spec.stride, spec.offset, spec.dtype)


def placeholder_with(shape: Sequence[int], stride: Sequence[int], offset: int, dtype: torch.dtype) -> Tensor:
    """Return a new placeholder with a shape, strides, an offset into its storage and a type."""
    made: Tensor = _MAKE(_Placeholder, shape, stride, offset, None, dtype, torch.strided, _CPU)
    made.__class__ = Tensor
    return made


def without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor on the device of torch that computes sizes only, with the sizes of another tensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


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


def spent(real: Tensor, name: str) -> Tensor:
    """Return a tensor with a history of autograd through which a backward pass has gone already.

    Another backward pass raises the error of torch.

    Args:
        real: The values.
        name: Name of the node of autograd, such as ``NllLossBackward0``.
    """
    with torch.enable_grad():
        made: Tensor = _history(name).apply(real, torch.zeros((), requires_grad=True))
    return made


@functools.cache
def _history(name: str) -> Any:
    def forward(ctx: Any, real: Tensor, leaf: Tensor) -> Tensor:
        return real.detach()

    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(_second_pass_error())

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(name.removesuffix("0").removesuffix("Backward"), (torch.autograd.Function,), methods)
    function._backward_cls.__name__ = name
    return function


@functools.cache
def _second_pass_error() -> str:
    """Return torch's message for a second backward pass."""
    with torch.enable_grad():
        root = torch.ones((), requires_grad=True).exp()
    root.backward()
    try:
        root.backward()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("torch went through a freed graph")
