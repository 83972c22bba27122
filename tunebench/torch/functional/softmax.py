"""Softmax and log-softmax of rows, with an optional scale and mask, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.torch._tensor import DTYPES, unsupported_reason
from tunebench.torch.functional._autocast import cast_to_float32
from tunebench.torch.functional.custom_op import CustomOp, OpCall, OperandView, dispatch, run_by_torch
from tunebench.workloads.operators.softmax import Softmax

__all__ = ["log_softmax", "softmax"]


def softmax(
    input: Tensor,  # noqa: A002 - torch's name
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the softmax of ``scale * input + mask`` along an axis, as `torch.nn.functional.softmax` does.

    Args:
        input: Tensor of any shape.
        dim: The axis.
        dtype: Type that `input` is converted to first.
        scale: Factor of `input`.
        mask: Summand, shaped like `input`.
    """
    return _softmax("softmax", input, dim, dtype, scale, mask)


def log_softmax(
    input: Tensor,  # noqa: A002 - torch's name
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the logarithm of `softmax`, as `torch.nn.functional.log_softmax` does.

    Args:
        input: Tensor of any shape.
        dim: The axis.
        dtype: Type that `input` is converted to first.
        scale: Factor of `input`.
        mask: Summand, shaped like `input`.
    """
    return _softmax("log_softmax", input, dim, dtype, scale, mask)


def _softmax(
    name: str, x: Tensor, dim: int | None, dtype: torch.dtype | None, scale: float | None, mask: Any
) -> Tensor:
    x, mask = cast_to_float32(x if dtype is None else x.to(dtype), mask)

    def fallback() -> Tensor:
        y: Tensor = getattr(functional, name)(_with_prologue(x, mask, scale), dim, _stacklevel=6)
        return y

    if dim is None:
        return run_by_torch(name, "no axis given", fallback)
    attributes = (dim, scale, name == "log_softmax")
    return dispatch(SOFTMAX, name, (x, mask), attributes, _call_of, fallback)


def _with_prologue(x: Tensor, mask: Any, scale: float | None) -> Tensor:
    z = x if scale is None else x * scale
    return z if mask is None else z + mask


def _call_of(x: Tensor, mask: Any, dim: int, scale: float | None, log: bool) -> OpCall | str:
    reason = unsupported_reason((x, mask))
    if reason is not None:
        return reason
    if not -x.ndim <= dim < x.ndim:
        return "an axis that does not exist"
    if math.prod(x.shape[dim % x.ndim + 1 :]) != 1:
        return "rows that are not along the last axis"
    if mask is not None and mask.shape != x.shape:
        return "a mask with another shape than the input"
    copy_reason = None
    if not x.is_contiguous() or (mask is not None and not mask.is_contiguous()):
        copy_reason = "rows that are not contiguous"
    cols = x.shape[dim]
    view = OperandView((x.numel() // cols, cols))
    return OpCall((view, view), (scale, log), tuple(x.shape), copy_reason)


# -- the operators -------------------------------------------------------------------------------------------


def _workload(x: Tensor, mask: Any, scale: float | None, log: bool) -> Softmax:
    parts = [name for name, value in (("scale", scale), ("mask", mask)) if value is not None]
    rows, cols = x.shape
    return Softmax(
        rows=rows,
        cols=cols,
        dtype=DTYPES[x.dtype],  # type: ignore[arg-type]
        prologue="+".join(parts) or "none",  # type: ignore[arg-type]
        log=log,
    )


def _gradients(workload: Softmax) -> tuple[Any, ...]:
    prologue = "scale" if workload.has_scale else "none"
    return (workload.changed(direction="backward", prologue=prologue),)


def _workload_backward(y: Tensor, dy: Tensor, scale: float | None, log: bool) -> Softmax:
    return _workload(y, None, scale, log).changed(direction="backward")  # type: ignore[return-value]


def _fallback(x: Tensor, mask: Any, scale: float | None, log: bool) -> Tensor:
    z = _with_prologue(x, mask, scale)
    return functional.log_softmax(z, -1) if log else functional.softmax(z, -1)


def _fake(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fallback_backward(y: Tensor, dy: Tensor, scale: float | None, log: bool) -> Tensor:
    aten = torch.ops.aten
    backward = aten._log_softmax_backward_data if log else aten._softmax_backward_data
    dx: Tensor = backward(dy, y, -1, y.dtype)
    return dx if scale is None else dx * scale


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, _, ctx.scale, ctx.log = inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (y,) = ctx.saved_tensors
    needs_x, needs_mask = ctx.needs_input_grad[:2]
    if needs_mask:
        dz = SOFTMAX_BACKWARD(y, dy, None, ctx.log)
        return (dz if ctx.scale is None else dz * ctx.scale) if needs_x else None, dz, None, None
    return SOFTMAX_BACKWARD(y, dy, ctx.scale, ctx.log), None, None, None


def _save_backward(ctx: Any, inputs: Any, output: Tensor) -> None:
    y, dy, ctx.scale, ctx.log = inputs
    ctx.save_for_backward(y, dy)


def _backward_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    """Differentiate ``scale y (dy - sum y dy)``, or ``scale (dy - exp(y) sum dy)``, by y and dy."""
    y, dy = ctx.saved_tensors
    if ctx.scale is not None:
        g = g * ctx.scale
    if ctx.log:
        p = y.exp()
        by_y = -g * p * dy.sum(-1, keepdim=True)
        by_dy = g - (g * p).sum(-1, keepdim=True)
    else:
        along = (g * y).sum(-1, keepdim=True)
        by_y = g * (dy - (y * dy).sum(-1, keepdim=True)) - dy * along
        by_dy = y * (g - along)
    return by_y, by_dy, None, None


def _operands(x: Tensor, mask: Any, scale: float | None, log: bool) -> tuple[Any, ...]:
    """Return the kernel's inputs in its order, with the scale between the tensors."""
    return tuple(operand for operand in (x, scale, mask) if operand is not None)


SOFTMAX = CustomOp(
    "softmax(Tensor x, Tensor? mask, float? scale, bool log) -> Tensor",
    2,
    _workload,
    _fallback,
    _fake,
    gradients=_gradients,
    order=_operands,
    backward=_backward,
    save=_save,
)
SOFTMAX_BACKWARD = CustomOp(
    "softmax_backward(Tensor y, Tensor dy, float? scale, bool log) -> Tensor",
    3,
    _workload_backward,
    _fallback_backward,
    _fake,
    backward=_backward_backward,
    save=_save_backward,
)
