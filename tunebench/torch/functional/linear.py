"""Matrix products: `matmul`, `linear` with an epilogue, and their gradients by more products."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.torch._layout import matrix_order
from tunebench.torch._tensor import compute_type, unsupported_reason
from tunebench.torch.functional._activation import (
    activation_gradient,
    apply_activation,
    canonical_activation,
    expression,
)
from tunebench.torch.functional._autocast import cast_to_autocast
from tunebench.torch.functional.custom_op import CustomOp, OpCall, OperandView, dispatch, is_differentiated
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["FLIPPED", "linear", "matmul", "product"]

FLIPPED = {"n": "t", "t": "n"}


def matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 - torch's name
    """Multiply matrices, as `torch.matmul` does."""
    a, b = cast_to_autocast(input, other)
    return dispatch(GEMM, "matmul", (a, b, None, None), (), _matmul_call, lambda: torch.matmul(a, b))


def linear(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Apply a linear layer, as `torch.nn.functional.linear` does, with an optional epilogue.

    Args:
        input: (..., in features).
        weight: (out features, in features).
        bias: (out features,).
        activation: Applied to the sums: a name in `tunebench.activation` such as `relu`, `gelu` (exact) or
            `silu`, or an expression in x such as ``"max(min(x,6),0)"`` (see the operator elementwise). torch
            applies all but relu where gradients are needed.
        residual: Shaped like the result; added last.

    Raises:
        InputError: if the activation is invalid.
    """
    x, w, added, rest = cast_to_autocast(input, weight, bias, residual)
    activation = canonical_activation(activation)

    def fallback() -> Tensor:
        y = apply_activation(activation, functional.linear(x, w, added))
        return y if rest is None else y + rest

    needs_sums = activation not in ("none", "relu") or (activation == "relu" and rest is not None)
    if needs_sums and is_differentiated((x, w, added, rest)):
        y = apply_activation(activation, linear(x, w, added))
        return y if rest is None else y + rest
    return dispatch(GEMM, "linear", (x, w, added, rest), (activation,), _linear_call, fallback)


# -- operator calls ------------------------------------------------------------------------------------------


def _matmul_call(a: Tensor, b: Tensor, *absent: None) -> OpCall | str:
    reason = unsupported_reason((a, b))
    if reason is not None:
        return reason
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        return "shapes that cannot be multiplied"
    m, k = a.shape[-2] if a.ndim > 1 else 1, a.shape[-1]
    n = b.shape[-1] if b.ndim > 1 else 1
    copy_reason = (
        None if matrix_order(a) and matrix_order(b) else "a matrix whose rows or columns are not contiguous"
    )
    order_a, order_b = matrix_order(a) or "n", matrix_order(b) or "n"
    lead_a, lead_b = a.shape[:-2], b.shape[:-2]
    try:
        lead = torch.broadcast_shapes(lead_a, lead_b)
    except RuntimeError:
        return "batches that cannot be broadcast"
    shape = (*lead, *a.shape[-2:-1], *((n,) if b.ndim > 1 else ()))
    if order_a == "n" and math.prod(lead_b) == 1:  # the rows of all matrices share b
        view_a, view_b = OperandView((1, math.prod(lead) * m, k)), _stored(order_b, (), (), 1, k, n)
    else:
        batch = math.prod(lead)
        view_a = _stored(order_a, lead, lead_a, batch, m, k)
        view_b = _stored(order_b, lead, lead_b, batch, k, n)
    return OpCall((view_a, view_b, None, None), (order_a + order_b, "none"), shape, copy_reason)


def _stored(order: str, lead: Any, own_extents: Any, batch: int, rows: int, cols: int) -> OperandView:
    """Return the view of a batch of matrices in memory order, expanded to the batch."""
    stored = (rows, cols) if order == "n" else (cols, rows)
    swap = None if order == "n" else (-2, -1)
    if math.prod(own_extents) == batch:
        return OperandView((batch, *stored), swap=swap)
    return OperandView((batch, *stored), swap=swap, expand=(*lead, *stored), is_copied=True)


def _linear_call(x: Tensor, w: Tensor, bias: Any, residual: Any, activation: str) -> OpCall | str:
    reason = unsupported_reason((x, w, bias, residual))
    if reason is not None:
        return reason
    if not x.ndim or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        return "shapes that torch's linear does not multiply in one product"
    copy_reason = None
    if matrix_order(w) is None or not x.is_contiguous():
        copy_reason = "a matrix whose rows or columns are not contiguous"
    order, (n, k) = matrix_order(w) or "n", w.shape
    shape = (*x.shape[:-1], n)
    m = math.prod(x.shape[:-1])
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        return "a bias that is not a contiguous vector with one number per feature"
    if residual is not None and residual.shape != shape:
        return "a residual with another shape than the result"
    if residual is not None and not residual.is_contiguous():
        copy_reason = "a residual with another layout than the result"
    view_w = OperandView((1, n, k) if order == "n" else (1, k, n), swap=None if order == "n" else (0, 1))
    views = (OperandView((1, m, k)), view_w, None, OperandView((1, m, n)))
    return OpCall(views, ("nt" if order == "n" else "nn", activation), shape, copy_reason)


# -- the operator --------------------------------------------------------------------------------------------


def _workload(a: Tensor, b: Tensor, bias: Any, residual: Any, trans: str, activation: str) -> Gemm:
    m, k = a.shape[1:] if trans[0] == "n" else reversed(a.shape[1:])
    n = b.shape[2] if trans[1] == "n" else b.shape[1]
    parts = [name for name, value in (("bias", bias), ("residual", residual)) if value is not None]
    sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "batch": a.shape[0], "dtype": compute_type(a)}
    epilogue: Any = "+".join(parts) or "none"
    return Gemm(**sizes, trans=trans, epilogue=epilogue, act=expression(activation))  # type: ignore[arg-type]


def _fallback(a: Tensor, b: Tensor, bias: Any, residual: Any, trans: str, activation: str) -> Tensor:
    left = a if trans[0] == "n" else a.transpose(1, 2)
    right = b if trans[1] == "n" else b.transpose(1, 2)
    if a.shape[0] == 1:
        product = functional.linear(left[0], right[0].transpose(0, 1), bias).unsqueeze(0)
    else:
        product = torch.bmm(left, right) if bias is None else torch.bmm(left, right) + bias
    y = apply_activation(activation, product)
    return y if residual is None else y + residual


def _fake(a: Tensor, b: Tensor, bias: Any, residual: Any, trans: str, activation: str) -> Tensor:
    m = a.shape[1] if trans[0] == "n" else a.shape[2]
    n = b.shape[2] if trans[1] == "n" else b.shape[1]
    return a.new_empty((a.shape[0], m, n))


def _gradients(workload: Gemm) -> tuple[Gemm, ...]:
    """Return the products that compute the gradients of a and b."""
    m, n, k, (first, second) = workload.m, workload.n, workload.k, workload.trans
    of_a = (m, k, n, "n" + FLIPPED[second]) if first == "n" else (k, m, n, second + "t")
    of_b = (k, n, m, FLIPPED[first] + "n") if second == "n" else (n, k, m, "t" + first)
    return tuple(
        Gemm(m=rows, n=cols, k=depth, dtype=workload.dtype, batch=workload.batch, trans=trans)  # type: ignore[arg-type]
        for rows, cols, depth, trans in (of_a, of_b)
    )


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    a, b, bias, residual, ctx.trans, ctx.activation = inputs
    ctx.keeps_output = ctx.activation == "relu" and residual is None
    saved = () if ctx.activation == "none" else (output,) if ctx.keeps_output else (bias,)
    ctx.save_for_backward(a, b, *saved)


def _backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
    """Return the gradients of all arguments; unsaved sums before an activation are recomputed."""
    a, b, *saved = ctx.saved_tensors
    dz = dc
    if ctx.keeps_output:
        dz = dc * (saved[0] > 0)
    elif ctx.activation != "none":
        dz = activation_gradient(ctx.activation, GEMM(a, b, saved[0], None, ctx.trans, "none"), dc)
    needs_a, needs_b, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    first, second = ctx.trans
    da = db = dbias = None
    if needs_a:
        da = product(dz, b, "n" + FLIPPED[second]) if first == "n" else product(b, dz, second + "t")
    if needs_b:
        db = product(a, dz, FLIPPED[first] + "n") if second == "n" else product(dz, a, "t" + first)
    if needs_bias:
        dbias = dz.sum((0, 1))
    return da, db, dbias, dc if needs_residual else None, None, None


def product(a: Tensor, b: Tensor, trans: str) -> Any:
    """Return a batch of matrix products in the given memory orders, by an operator with gradients."""
    return GEMM(a.contiguous(), b.contiguous(), None, None, trans, "none")


GEMM = CustomOp(
    "gemm(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str trans, str activation) -> Tensor",
    4,
    _workload,
    _fallback,
    _fake,
    gradients=_gradients,
    backward=_backward,
    save=_save,
)
