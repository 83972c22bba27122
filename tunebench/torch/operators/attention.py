"""Scaled dot-product attention and its gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.torch._tensor import DTYPES, unsupported_reason
from tunebench.torch.operators._autocast import cast_to_autocast
from tunebench.torch.operators._custom_op import CustomOp, OpCall, OperandView, dispatch, not_twice
from tunebench.workloads.operators.attention import Attention

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention, as `torch.nn.functional.scaled_dot_product_attention` does.

    torch runs calls with a mask, dropout or a scale other than ``1 / sqrt(head_dim)``. It also runs causal
    calls with different numbers of keys and queries: torch aligns the mask with the first key, tuned kernels
    with the last.

    Args:
        query: (..., heads, queries, head_dim).
        key: (..., heads, keys, head_dim).
        value: Shaped like `key`.
        attn_mask: If given, torch runs the call.
        dropout_p: If not 0, torch runs the call.
        is_causal: Whether each query attends only to earlier keys.
        scale: Factor of the scores; default 1 / sqrt(head_dim).
        enable_gqa: Whether several query heads may share a key head.
    """
    q, k, v = cast_to_autocast(query, key, value)

    def fallback() -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    attributes = (attn_mask is not None, dropout_p, is_causal, scale, enable_gqa)
    function = "scaled_dot_product_attention"
    return dispatch(
        ATTENTION, function, (q, k, v), attributes, _call_of, fallback, lambda results: results[0]
    )


def _call_of(q: Tensor, k: Tensor, v: Tensor, *attributes: Any) -> OpCall | str:
    has_mask, dropout, causal, scale, grouped = attributes
    reason = unsupported_reason((q, k, v))
    if reason is not None:
        return reason
    if has_mask or dropout:
        return "a mask" if has_mask else "dropout"
    if q.ndim < 3 or k.ndim != q.ndim or v.shape != k.shape or q.shape[-1] != k.shape[-1]:
        return "queries, keys and values of different kinds"
    dim, seq_q, seq_k = q.shape[-1], q.shape[-2], k.shape[-2]
    if scale is not None and not math.isclose(scale, dim**-0.5, rel_tol=1e-6):
        return f"kernels scale scores by 1 / sqrt(head_dim), not by {scale}"
    if causal and seq_q != seq_k:
        return "a causal mask with different numbers of keys and queries"
    heads, heads_k = q.shape[-3], k.shape[-3]
    if q.shape[:-3] != k.shape[:-3] or (heads != heads_k and (not grouped or heads % heads_k)):
        return "numbers of heads that do not match"
    batch = math.prod(q.shape[:-3])
    copy_reason = None
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        copy_reason = "heads that are not contiguous"
    keys = OperandView((batch, heads_k, seq_k, dim))
    return OpCall(
        (OperandView((batch, heads, seq_q, dim)), keys, keys), (causal,), tuple(q.shape), copy_reason
    )


# -- the operators -------------------------------------------------------------------------------------------


def _workload(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Attention:
    batch, heads, seq_q, dim = q.shape
    return Attention(
        batch=batch,
        heads=heads,
        seq_q=seq_q,
        head_dim=dim,
        dtype=DTYPES[q.dtype],  # type: ignore[arg-type]
        seq_k=k.shape[2],
        heads_k=k.shape[1],
        causal=causal,
    )


def _workload_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool
) -> Any:
    return _workload(q, k, v, causal).changed(direction="backward")


def _repeated(q: Tensor, k: Tensor) -> Tensor:
    """Return keys with one head per head of the queries."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _fallback(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Compute attention by those kernels of torch that also return the log-sum-exp."""
    aten, k, v = torch.ops.aten, _repeated(q, k), _repeated(q, v)
    if q.is_cuda:
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        lse = lse[..., : q.shape[2]]  # torch pads it to whole blocks
    else:
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return o.contiguous(), lse.float().contiguous()


def _fallback_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    """Return gradients by torch's kernels; the gradients of a shared key head are summed."""
    aten, keys, values = torch.ops.aten, _repeated(q, k), _repeated(q, v)
    if q.is_cuda:  # torch expects a padded log-sum-exp: compute it again
        again = aten._scaled_dot_product_efficient_attention(q, keys, values, None, True, 0.0, causal)
        wanted = [True, True, True, False]
        operands = (do, q, keys, values, None, *again, 0.0, wanted, causal)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(*operands)
    else:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(do, q, keys, values, o, lse, 0.0, causal)
    if keys is not k:
        dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _fake(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    *operands, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*operands, *output)


def _backward(ctx: Any, do: Tensor, unused: Any) -> tuple[Any, ...]:
    return (*ATTENTION_BACKWARD(*ctx.saved_tensors, do, ctx.causal), None)


ATTENTION = CustomOp(
    "attention(Tensor q, Tensor k, Tensor v, bool causal) -> (Tensor o, Tensor lse)",
    3,
    _workload,
    _fallback,
    _fake,
    gradients=lambda workload: (workload.changed(direction="backward"),),
    backward=_backward,
    save=_save,
)
ATTENTION_BACKWARD = CustomOp(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, bool causal)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    6,
    _workload_backward,
    _fallback_backward,
    lambda q, k, v, *others: tuple(t.new_empty(t.shape) for t in (q, k, v)),
    backward=not_twice("attention"),
)
