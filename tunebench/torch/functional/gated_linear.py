"""First half of a gated feed-forward layer: two products of the same rows, where one gates the other."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional

from tunebench.activation import ACTIVATIONS
from tunebench.errors import UnknownName
from tunebench.torch._layout import matrix_order
from tunebench.torch._tensor import compute_type, unsupported_reason
from tunebench.torch.functional._activation import FUNCTIONS, activation_gradient
from tunebench.torch.functional._autocast import cast_to_autocast
from tunebench.torch.functional.custom_op import CustomOp, OpCall, OperandView, dispatch
from tunebench.torch.functional.linear import FLIPPED, product
from tunebench.workloads.operators.gated_gemm import GatedGemm

__all__ = ["gated_linear"]


def gated_linear(
    input: Tensor,  # noqa: A002 - torch's name
    gate_weight: Tensor,
    up_weight: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """Return ``activation(linear(input, gate_weight)) * linear(input, up_weight)``: SwiGLU with silu.

    Args:
        input: (..., in features).
        gate_weight: (out features, in features).
        up_weight: (out features, in features).
        activation: Name of the gate's activation in `tunebench.activation`, such as `gelu` (the exact one) or
            `gelu_tanh` (its approximation).

    Raises:
        UnknownName: if there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise UnknownName("activation", activation, ACTIVATIONS)
    x, gate, up = cast_to_autocast(input, gate_weight, up_weight)

    def fallback() -> Tensor:
        gated: Tensor = FUNCTIONS[activation](functional.linear(x, gate)) * functional.linear(x, up)
        return gated

    return dispatch(GATED, "gated_linear", (x, gate, up), (activation,), _call_of, fallback)


def _call_of(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> OpCall | str:
    reason = unsupported_reason((x, gate, up))
    if reason is not None:
        return reason
    if not x.ndim or gate.ndim != 2 or gate.shape != up.shape or x.shape[-1] != gate.shape[1]:
        return "shapes that are not two layers of the same rows"
    copy_reason, order = None, matrix_order(gate) or "n"
    if not x.is_contiguous() or matrix_order(gate) is None or matrix_order(up) != order:
        copy_reason = "a matrix whose rows or columns are not contiguous"
    n, k = gate.shape
    weight = OperandView((n, k)) if order == "n" else OperandView((k, n), swap=(0, 1))
    view = OperandView((math.prod(x.shape[:-1]), k))
    attributes = ("nt" if order == "n" else "nn", activation)
    return OpCall((view, weight, weight), attributes, (*x.shape[:-1], n), copy_reason)


def _workload(a: Tensor, gate: Tensor, up: Tensor, trans: str, activation: str) -> GatedGemm:
    n = gate.shape[0] if trans == "nt" else gate.shape[1]
    sizes: dict[str, Any] = {"m": a.shape[0], "n": n, "k": a.shape[1], "dtype": compute_type(a)}
    return GatedGemm(**sizes, trans=trans, activation=activation)  # type: ignore[arg-type]


def _fallback(a: Tensor, gate: Tensor, up: Tensor, trans: str, activation: str) -> Tensor:
    left, right = (w.transpose(0, 1) if trans == "nt" else w for w in (gate, up))
    c: Tensor = FUNCTIONS[activation](a @ left) * (a @ right)
    return c


def _fake(a: Tensor, gate: Tensor, up: Tensor, trans: str, activation: str) -> Tensor:
    return a.new_empty((a.shape[0], gate.shape[0] if trans == "nt" else gate.shape[1]))


def _gradients(workload: GatedGemm) -> tuple[Any, ...]:
    """Return the products of the gradients: both sums again, then the gradients of a and of the weights."""
    w, product = workload, workload.product()
    of_a = product.changed(n=w.k, k=w.n, trans="nt" if w.trans == "nn" else "nn")
    rows, cols, trans = (w.k, w.n, "tn") if w.trans == "nn" else (w.n, w.k, "tn")
    return product, of_a, product.changed(m=rows, n=cols, k=w.m, trans=trans)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    a, gate, up, ctx.trans, ctx.activation = inputs
    ctx.save_for_backward(a, gate, up)


def _backward(ctx: Any, dc: Tensor) -> tuple[Any, ...]:
    """Return the gradients; both sums are recomputed by differentiable operators."""
    a, gate, up = ctx.saved_tensors
    sums_gate, sums_up = (_product(a, w, ctx.trans) for w in (gate, up))
    dgate = activation_gradient(ctx.activation, sums_gate, dc * sums_up)
    dup = dc * FUNCTIONS[ctx.activation](sums_gate)
    back = "n" + FLIPPED[ctx.trans[1]]
    da = _product(dgate, gate, back) + _product(dup, up, back) if ctx.needs_input_grad[0] else None
    weights = []
    for needed, slope in zip(ctx.needs_input_grad[1:3], (dgate, dup), strict=True):
        pair = (a, slope) if ctx.trans == "nn" else (slope, a)
        weights.append(_product(*pair, "tn") if needed else None)
    return (da, *weights, None, None)


def _product(a: Tensor, b: Tensor, trans: str) -> Any:
    return product(a[None], b[None], trans).squeeze(0)


GATED = CustomOp(
    "gated_gemm(Tensor a, Tensor b_gate, Tensor b_up, str trans, str activation) -> Tensor",
    3,
    _workload,
    _fallback,
    _fake,
    gradients=_gradients,
    backward=_backward,
    save=_save,
)
