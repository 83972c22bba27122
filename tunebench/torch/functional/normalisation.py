"""Normalisation of rows, optionally of a sum that is returned too, and its gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.errors import InputError
from tunebench.expression import LARGEST, SMALLEST
from tunebench.torch._tensor import DTYPES, unsupported_reason
from tunebench.torch.functional._autocast import cast_to_float32, is_autocast_enabled
from tunebench.torch.functional.custom_op import (
    CustomOp,
    OpCall,
    OperandView,
    dispatch,
    is_differentiated,
    not_twice,
)
from tunebench.workloads.common.norm import EPS
from tunebench.workloads.operators.layernorm import LayerNorm
from tunebench.workloads.operators.rmsnorm import RmsNorm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


Extent = Sequence[int]


def layer_norm(
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Extent,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """Normalise the last axes, as `torch.nn.functional.layer_norm` does.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: Extents of the last axes.
        weight: Factor, shaped `normalized_shape`; without it torch runs the call.
        bias: Summand, shaped `normalized_shape`; without it torch runs the call.
        eps: Added to the variance.
    """
    x, w, b = cast_to_float32(input, weight, bias)
    attributes = (tuple(normalized_shape), eps, True, is_differentiated((x, w, b)))

    def fallback() -> Tensor:
        return functional.layer_norm(x, list(normalized_shape), w, b, eps)

    return dispatch(NORM, "layer_norm", (x, w, b, None, None), attributes, _call_of, fallback, _first)


def rms_norm(
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Extent,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Divide by the root mean square of the last axes, as `torch.nn.functional.rms_norm` does.

    Args:
        input: (..., *normalized_shape).
        normalized_shape: Extents of the last axes.
        weight: Factor, shaped `normalized_shape`; without it torch runs the call.
        eps: Added to the mean square; if None, torch runs the call with its default.
    """
    attributes = (tuple(normalized_shape), eps, False, is_differentiated((input, weight)))

    def fallback() -> Tensor:
        return functional.rms_norm(input, list(normalized_shape), weight, eps)

    return dispatch(
        NORM, "rms_norm", (input, weight, None, None, None), attributes, _call_of, fallback, _first
    )


def add_layer_norm(
    input: Tensor,  # noqa: A002 - torch's name
    residual: Tensor,
    normalized_shape: Extent,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = EPS,
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise ``input + input_bias + residual``, as a residual stream does.

    Args:
        input: (..., *normalized_shape).
        residual: Shaped like `input`.
        normalized_shape: Extents of the last axes.
        weight: Factor, shaped `normalized_shape`.
        bias: Summand, shaped `normalized_shape`.
        eps: Added to the variance.
        input_bias: Added to each row of the input, shaped `normalized_shape`.

    Returns:
        The normalised sum, and the sum.
    """
    x, rest, w, b, added = cast_to_float32(input, residual, weight, bias, input_bias)
    attributes = (tuple(normalized_shape), eps, True, is_differentiated((x, w, b, added, rest)))

    def fallback() -> tuple[Tensor, Tensor]:
        z = (x if added is None else x + added) + rest
        return functional.layer_norm(z, list(normalized_shape), w, b, eps), z

    return dispatch(NORM, "add_layer_norm", (x, w, b, added, rest), attributes, _call_of, fallback, _both)  # type: ignore[no-any-return]


def add_rms_norm(
    input: Tensor,  # noqa: A002 - torch's name
    residual: Tensor,
    normalized_shape: Extent,
    weight: Tensor | None = None,
    eps: float | None = EPS,
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of ``input + residual``, and the sum.

    Args:
        input: (..., *normalized_shape).
        residual: Shaped like `input`.
        normalized_shape: Extents of the last axes.
        weight: Factor, shaped `normalized_shape`.
        eps: Added to the mean square.
    """
    attributes = (tuple(normalized_shape), eps, False, is_differentiated((input, weight, residual)))

    def fallback() -> tuple[Tensor, Tensor]:
        z = input + residual
        return functional.rms_norm(z, list(normalized_shape), weight, eps), z

    operands = (input, weight, None, None, residual)
    return dispatch(NORM, "add_rms_norm", operands, attributes, _call_of, fallback, _both)  # type: ignore[no-any-return]


def _first(results: Any) -> Tensor:
    y: Tensor = results if isinstance(results, Tensor) else results[0]
    return y


def _both(results: Any) -> tuple[Tensor, Tensor]:
    y, z = results[:2]
    return y, z.reshape(y.shape)


def _call_of(x: Tensor, w: Any, b: Any, added: Any, residual: Any, *attributes: Any) -> OpCall | str:
    shape, eps, centred, stats = attributes
    reason = unsupported_reason((x, w, b, added, residual))
    if reason is not None:
        return reason
    if w is None or (centred and b is None):
        return "a normalisation without weight" + (" and bias" if centred else "")
    if eps is None or not SMALLEST <= eps <= LARGEST:
        return f"kernels need a positive eps, not {eps}"
    if not centred and x.is_cuda and is_autocast_enabled(x):
        return "autocast"
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        return "rows with another shape than normalized_shape"
    for vector in (w, b, added):
        if vector is not None and (tuple(vector.shape) != shape or not vector.is_contiguous()):
            return "weights that are not contiguous or have another shape than normalized_shape"
    copy_reason = None
    if residual is not None and residual.shape != x.shape:
        return "a residual with another shape than the input"
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        copy_reason = "rows that are not contiguous"
    cols = math.prod(shape)
    matrix, vector = OperandView((x.numel() // cols, cols)), OperandView((cols,))
    return OpCall((matrix, vector, vector, vector, matrix), (stats, float(eps)), tuple(x.shape), copy_reason)


# -- the operators -------------------------------------------------------------------------------------------


def _workload(x: Tensor, gamma: Tensor, beta: Any, bias: Any, residual: Any, stats: bool, eps: float) -> Any:
    parts = [name for name, operand in (("bias", bias), ("residual", residual)) if operand is not None]
    if parts == ["bias"]:
        raise InputError("kernels add a bias only together with a residual")
    rows, cols = x.shape
    sizes: dict[str, Any] = {"rows": rows, "cols": cols, "dtype": DTYPES[x.dtype], "stats": stats}
    kind = RmsNorm if beta is None else LayerNorm
    return kind.from_dimensions({**sizes, "eps": eps, "prologue": "+".join(parts) or "none"})


def _gradients(workload: Any) -> tuple[Any, ...]:
    return (workload.changed(direction="backward", prologue="none", stats=False, eps=EPS),)


def _workload_backward(x: Tensor, gamma: Tensor, mean: Any, rstd: Tensor, dy: Tensor) -> Any:
    kind = RmsNorm if mean is None else LayerNorm
    rows, cols = x.shape
    return kind.from_dimensions(
        {"rows": rows, "cols": cols, "dtype": DTYPES[x.dtype], "direction": "backward"}
    )


def _fallback(x: Tensor, gamma: Tensor, beta: Any, bias: Any, residual: Any, stats: bool, eps: float) -> Any:
    z = x if bias is None else x + bias
    z = z if residual is None else z + residual
    shape = list(gamma.shape)
    if beta is None:
        y = functional.rms_norm(z, shape, gamma, eps)
    else:
        y = functional.layer_norm(z, shape, gamma, beta, eps)
    return _packed(x, y, z, _statistics(z, beta is not None, eps) if stats else (), residual is not None)


def _statistics(z: Tensor, centred: bool, eps: float) -> tuple[Tensor, ...]:
    """Return the mean (if rows are centred) and the factor of each row, in float32."""
    rows = z.float()
    if not centred:
        return (torch.rsqrt(rows.square().mean(-1) + eps),)
    variance, mean = torch.var_mean(rows, -1, correction=0)
    return mean, torch.rsqrt(variance + eps)


def _packed(x: Tensor, y: Tensor, z: Any, statistics: tuple[Tensor, ...], summed: bool) -> tuple[Tensor, ...]:
    """Return y, z, mean and rstd; those that do not exist are empty tensors."""
    mean = statistics[0] if len(statistics) > 1 else x.new_empty(0, dtype=torch.float32)
    rstd = statistics[-1] if statistics else x.new_empty(0, dtype=torch.float32)
    return y, z if summed else x.new_empty(0), mean, rstd


def _finish(
    results: Any, x: Tensor, gamma: Tensor, beta: Any, bias: Any, residual: Any, stats: bool, eps: float
) -> Any:
    y, *further = (results,) if isinstance(results, Tensor) else results
    summed = residual is not None
    return _packed(x, y, further[0] if summed else None, tuple(further[summed:]), summed)


def _fake(x: Tensor, gamma: Tensor, beta: Any, bias: Any, residual: Any, stats: bool, eps: float) -> Any:
    y, z = (x.new_empty(x.shape) for _ in range(2))
    count = 0 if not stats else 1 if beta is None else 2
    statistics = tuple(x.new_empty(x.shape[:1], dtype=torch.float32) for _ in range(count))
    return _packed(x, y, z, statistics, residual is not None)


def _fallback_backward(x: Tensor, gamma: Tensor, mean: Any, rstd: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients by torch's kernel, or by their formulas for RMS normalisation."""
    if mean is None:
        return _of_rms(x, gamma, rstd, dy)
    # torch's statistics have the type of x on a CPU, and float32 on a GPU.
    statistics_dtype = torch.float32 if x.is_cuda else x.dtype
    statistics = (mean.to(statistics_dtype)[:, None], rstd.to(statistics_dtype)[:, None])
    shape, output_mask = list(gamma.shape), [True, True, True]
    made = torch.ops.aten.native_layer_norm_backward(dy, x, shape, *statistics, gamma, gamma, output_mask)
    return tuple(made)


def _of_rms(x: Tensor, gamma: Tensor, rstd: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    factor, slope = rstd[:, None], dy.float()
    normal, g = x.float() * factor, slope * gamma.float()
    dx = factor * (g - normal * (g * normal).mean(-1, keepdim=True))
    dgamma = (slope * normal).sum(0)
    return dx.to(x.dtype), dgamma.to(x.dtype), x.new_empty(0)


def _fake_backward(x: Tensor, gamma: Tensor, mean: Any, rstd: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    dbeta = x.new_empty(0 if mean is None else gamma.shape)
    return x.new_empty(x.shape), gamma.new_empty(gamma.shape), dbeta


def _finish_backward(results: Any, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(results) if len(results) == 3 else (*results, x.new_empty(0))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, gamma, beta, bias, residual, stats, eps = inputs
    _, z, mean, rstd = output
    ctx.centred, ctx.summed = beta is not None, residual is not None
    ctx.has_bias, ctx.has_stats, ctx.eps = bias is not None, stats, eps
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(z if ctx.summed else x, gamma, mean, rstd)


def _backward(ctx: Any, dy: Tensor, dz: Any, *unused: Any) -> tuple[Any, ...]:
    z, gamma, mean, rstd = ctx.saved_tensors
    if not ctx.has_stats:
        *first, rstd = _statistics(z, ctx.centred, ctx.eps)
        mean = first[0] if first else mean
    dx, dgamma, dbeta = NORM_BACKWARD(z, gamma, mean if ctx.centred else None, rstd, dy)
    if ctx.summed and dz is not None:
        dx = dx + dz
    dbias = dx.sum(0) if ctx.has_bias and ctx.needs_input_grad[3] else None
    return dx, dgamma, dbeta if ctx.centred else None, dbias, dx if ctx.summed else None, None, None


NORM = CustomOp(
    "norm(Tensor x, Tensor gamma, Tensor? beta, Tensor? bias, Tensor? residual, bool stats, float eps)"
    " -> (Tensor y, Tensor z, Tensor mean, Tensor rstd)",
    5,
    _workload,
    _fallback,
    _fake,
    gradients=_gradients,
    finish=_finish,
    backward=_backward,
    save=_save,
)
NORM_BACKWARD = CustomOp(
    "norm_backward(Tensor x, Tensor gamma, Tensor? mean, Tensor rstd, Tensor dy)"
    " -> (Tensor dx, Tensor dgamma, Tensor dbeta)",
    5,
    _workload_backward,
    _fallback_backward,
    _fake_backward,
    finish=_finish_backward,
    backward=not_twice("normalisation"),
)
