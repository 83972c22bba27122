"""Matrix products: `matmul`, `linear` with what may follow it, and their gradients by more products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.torch.operators._activation import activated, expression, settled, through
from tunebench.torch.operators._autocast import lowered
from tunebench.torch.operators._family import Family, Form, View, is_differentiated, serve
from tunebench.torch.operators._layout import folded, matrix, refusal
from tunebench.torch.operators._memory import compute_type
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["linear", "matmul"]

FLIPPED = {"n": "t", "t": "n"}


def matmul(input: Tensor, other: Tensor) -> Tensor:  # noqa: A002 - torch's name
    """Multiply matrices, as `torch.matmul` does."""
    a, b = lowered(input, other)
    return serve(GEMM, "matmul", (a, b, None, None), (), _matmul_form, lambda: torch.matmul(a, b))


def linear(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Apply a linear layer, as `torch.nn.functional.linear` does, with what follows it.

    Args:
        input: (..., in features).
        weight: (out features, in features).
        bias: (out features,).
        activation: Applied to the sums: `relu`, `gelu` (the exact one), `silu`, or an expression in x such as
            ``"max(min(x,6),0)"`` (see the operator elementwise). Where gradients are needed, all but relu are
            torch's, in kernels of their own.
        residual: Added last, shaped like the result.

    Raises:
        InputError: if the activation is none.
    """
    x, w, added, rest = lowered(input, weight, bias, residual)
    activation = settled(activation)

    def library() -> Tensor:
        y = activated(activation, functional.linear(x, w, added))
        return y if rest is None else y + rest

    needs_sums = activation not in ("none", "relu") or (activation == "relu" and rest is not None)
    if needs_sums and is_differentiated((x, w, added, rest)):
        y = activated(activation, linear(x, w, added))
        return y if rest is None else y + rest
    return serve(GEMM, "linear", (x, w, added, rest), (activation,), _linear_form, library)


# -- forms ---------------------------------------------------------------------------------------------------


def _matmul_form(a: Tensor, b: Tensor, *absent: None) -> Form | str:
    reason = refusal((a, b))
    if reason is not None:
        return reason
    if not a.ndim or not b.ndim or a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        return "no matrices that can be multiplied"
    m, k = a.shape[-2] if a.ndim > 1 else 1, a.shape[-1]
    n = b.shape[-1] if b.ndim > 1 else 1
    gathered = None if matrix(a) and matrix(b) else "a matrix whose rows or columns do not lie side by side"
    order_a, order_b = matrix(a) or "n", matrix(b) or "n"
    lead_a, lead_b = a.shape[:-2], b.shape[:-2]
    try:
        lead = torch.broadcast_shapes(lead_a, lead_b)
    except RuntimeError:
        return "batches that do not go together"
    shape = (*lead, *a.shape[-2:-1], *((n,) if b.ndim > 1 else ()))
    if order_a == "n" and folded(lead_b) == 1:  # rows of all matrices share b
        view_a, view_b = View((1, folded(lead) * m, k)), _stored(order_b, (), (), 1, k, n)
    else:
        batch = folded(lead)
        view_a = _stored(order_a, lead, lead_a, batch, m, k)
        view_b = _stored(order_b, lead, lead_b, batch, k, n)
    return Form((view_a, view_b, None, None), (order_a + order_b, "none"), shape, gathered)


def _stored(order: str, lead: Any, own: Any, batch: int, rows: int, cols: int) -> View:
    """Return the view of a batch of matrices as they lie in memory, expanded if there are fewer."""
    stored = (rows, cols) if order == "n" else (cols, rows)
    swap = None if order == "n" else (-2, -1)
    if folded(own) == batch:
        return View((batch, *stored), swap=swap)
    return View((batch, *stored), swap=swap, expand=(*lead, *stored), is_copied=True)


def _linear_form(x: Tensor, w: Tensor, bias: Any, residual: Any, activation: str) -> Form | str:
    reason = refusal((x, w, bias, residual))
    if reason is not None:
        return reason
    if not x.ndim or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        return "no layer that torch's linear has in one product"
    gathered = None
    if matrix(w) is None or not x.is_contiguous():
        gathered = "a matrix whose rows or columns do not lie side by side"
    order, (n, k) = matrix(w) or "n", w.shape
    shape = (*x.shape[:-1], n)
    m = folded(x.shape[:-1])
    if bias is not None and (bias.shape != (n,) or not bias.is_contiguous()):
        return "a bias that is no vector of one number a feature"
    if residual is not None and residual.shape != shape:
        return "a residual that is not shaped like the result"
    if residual is not None and not residual.is_contiguous():
        gathered = "a residual that is not laid out like the result"
    view_w = View((1, n, k) if order == "n" else (1, k, n), swap=None if order == "n" else (0, 1))
    views = (View((1, m, k)), view_w, None, View((1, m, n)))
    return Form(views, ("nt" if order == "n" else "nn", activation), shape, gathered)


# -- the operator --------------------------------------------------------------------------------------------


def _workload(a: Tensor, b: Tensor, bias: Any, residual: Any, trans: str, activation: str) -> Gemm:
    m, k = a.shape[1:] if trans[0] == "n" else reversed(a.shape[1:])
    n = b.shape[2] if trans[1] == "n" else b.shape[1]
    parts = [name for name, given in (("bias", bias), ("residual", residual)) if given is not None]
    sizes: dict[str, Any] = {"m": m, "n": n, "k": k, "batch": a.shape[0], "dtype": compute_type(a)}
    epilogue: Any = "+".join(parts) or "none"
    return Gemm(**sizes, trans=trans, epilogue=epilogue, act=expression(activation))  # type: ignore[arg-type]


def _library(a: Tensor, b: Tensor, bias: Any, residual: Any, trans: str, activation: str) -> Tensor:
    left = a if trans[0] == "n" else a.transpose(1, 2)
    right = b if trans[1] == "n" else b.transpose(1, 2)
    if a.shape[0] == 1:
        product = functional.linear(left[0], right[0].transpose(0, 1), bias).unsqueeze(0)
    else:
        product = torch.bmm(left, right) if bias is None else torch.bmm(left, right) + bias
    y = activated(activation, product)
    return y if residual is None else y + residual


def _fake(a: Tensor, b: Tensor, bias: Any, residual: Any, trans: str, activation: str) -> Tensor:
    m = a.shape[1] if trans[0] == "n" else a.shape[2]
    n = b.shape[2] if trans[1] == "n" else b.shape[1]
    return a.new_empty((a.shape[0], m, n))


def _gradients(workload: Gemm) -> tuple[Gemm, ...]:
    """Return the products that the gradients of a and b are."""
    m, n, k, (first, second) = workload.m, workload.n, workload.k, workload.trans
    of_a = (m, k, n, "n" + FLIPPED[second]) if first == "n" else (k, m, n, second + "t")
    of_b = (k, n, m, FLIPPED[first] + "n") if second == "n" else (n, k, m, "t" + first)
    return tuple(
        Gemm(m=rows, n=cols, k=depth, dtype=workload.dtype, batch=workload.batch, trans=trans)  # type: ignore[arg-type]
        for rows, cols, depth, trans in (of_a, of_b)
    )


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    a, b, bias, _, ctx.trans, ctx.activation = inputs
    if ctx.activation == "none":
        ctx.save_for_backward(a, b)
    elif ctx.activation == "relu" and inputs[3] is None:
        ctx.save_for_backward(a, b, output)
    else:
        ctx.save_for_backward(a, b, bias)
    ctx.keeps_output = ctx.activation == "relu" and inputs[3] is None


def _backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
    """Return gradients of all arguments; what was before an activation is computed again, if not kept."""
    a, b, *kept = ctx.saved_tensors
    dz = dc
    if ctx.keeps_output:
        dz = dc * (kept[0] > 0)
    elif ctx.activation != "none":
        dz = through(ctx.activation, GEMM(a, b, kept[0], None, ctx.trans, "none"), dc)
    needs_a, needs_b, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    first, second = ctx.trans
    da = db = dbias = None
    if needs_a:
        pair = (dz, b, "n" + FLIPPED[second]) if first == "n" else (b, dz, second + "t")
        da = _product(*pair)
    if needs_b:
        pair = (a, dz, FLIPPED[first] + "n") if second == "n" else (dz, a, "t" + first)
        db = _product(*pair)
    if needs_bias:
        dbias = dz.sum((0, 1))
    return da, db, dbias, dc if needs_residual else None, None, None


def _product(a: Tensor, b: Tensor, trans: str) -> Any:
    return GEMM(a.contiguous(), b.contiguous(), None, None, trans, "none")


GEMM = Family(
    "gemm(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str trans, str activation) -> Tensor",
    4,
    _workload,
    _library,
    _fake,
    gradients=_gradients,
)
GEMM.differentiate(_backward, _save)
