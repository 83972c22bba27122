"""Scaled dot-product attention and its gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.torch._layout import bias_axes
from tunebench.torch._tensor import DTYPES, unsupported_reason
from tunebench.torch.functional._autocast import cast_to_autocast
from tunebench.torch.functional.custom_op import (
    CustomOp,
    OpCall,
    OperandView,
    dispatch,
    is_differentiated,
    not_twice,
)
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

    torch runs calls with dropout, and calls that need the gradient of a mask.

    Args:
        query: (..., heads, queries, head_dim).
        key: (..., heads, keys, head_dim).
        value: Shaped like `key`.
        attn_mask: Added to the scores, if given; broadcast to (..., heads, queries, keys). Where a boolean
            mask is False, keys are hidden. A query without keys has the result 0.
        dropout_p: If not 0, torch runs the call.
        is_causal: Whether query i attends only to the keys up to i.
        scale: Factor of the scores; default 1 / sqrt(head_dim).
        enable_gqa: Whether several query heads may share a key head.
    """
    q, k, v, mask = cast_to_autocast(query, key, value, attn_mask)
    bias = mask
    if type(mask) is Tensor:
        bias = _as_bias(mask, q.dtype)
        mask = bias if mask.dtype == torch.bool else mask  # torch would convert it a second time

    def fallback() -> Tensor:
        return functional.scaled_dot_product_attention(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    function = "scaled_dot_product_attention"
    attributes = (dropout_p, is_causal, scale, enable_gqa, is_differentiated((mask,)))
    return dispatch(
        ATTENTION, function, (q, k, v, bias), attributes, _call_of, fallback, lambda results: results[0]
    )


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as a float bias of the scores, with extent 1 along axes of stride 0."""
    for axis, (extent, step) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if extent > 1 and step == 0:
            mask = mask.narrow(axis, 0, 1)
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _call_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *attributes: Any) -> OpCall | str:
    dropout, causal, scale, grouped, differentiates_mask = attributes
    reason = unsupported_reason((q, k, v, mask))
    if reason is not None:
        return reason
    if dropout:
        return "dropout"
    if q.ndim < 3 or k.ndim != q.ndim or v.shape != k.shape or q.shape[-1] != k.shape[-1]:
        return "queries, keys and values of different kinds"
    dim, seq_q, seq_k = q.shape[-1], q.shape[-2], k.shape[-2]
    if scale is not None and math.isclose(scale, dim**-0.5, rel_tol=1e-6):
        scale = None
    heads, heads_k = q.shape[-3], k.shape[-3]
    if q.shape[:-3] != k.shape[:-3] or (heads != heads_k and (not grouped or heads % heads_k)):
        return "numbers of heads that do not match"
    batch = math.prod(q.shape[:-3])
    bias = None
    if mask is not None:
        if causal or differentiates_mask:
            return "a causal mask and another one" if causal else "a gradient of the mask"
        bias = _bias_shape(mask, tuple(q.shape[:-3]), (heads, seq_q, seq_k))
        if bias is None:
            return f"a mask of shape {tuple(mask.shape)}"
    copy_reason = None
    if not all(operand is None or operand.is_contiguous() for operand in (q, k, v, mask)):
        copy_reason = "heads that are not contiguous"
    keys = OperandView((batch, heads_k, seq_k, dim))
    views = (OperandView((batch, heads, seq_q, dim)), keys, keys, None if bias is None else OperandView(bias))
    return OpCall(views, (causal, scale), tuple(q.shape), copy_reason)


def _bias_shape(mask: Tensor, lead: tuple[int, ...], scores: tuple[int, int, int]) -> tuple[int, ...] | None:
    """Return the shape of a mask as (batch or 1, heads or 1, queries or 1, keys), or None if it does not fit.

    Args:
        mask: The mask.
        lead: Extents of the axes before the heads, which make up the batch.
        scores: Extents of heads, queries and keys.
    """
    shape = (1,) * (len(lead) + 3 - mask.dim()) + tuple(mask.shape)
    batches, (heads, seq_q, seq_k) = shape[:-3], shape[-3:]
    fits = heads in (1, scores[0]) and seq_q in (1, scores[1]) and seq_k == scores[2]
    if not fits or len(batches) != len(lead) or (batches != lead and math.prod(batches) != 1):
        return None
    return (math.prod(batches), *shape[-3:])


# -- the operators -------------------------------------------------------------------------------------------


def _workload(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Attention:
    batch, heads, seq_q, dim = q.shape
    scaling: dict[str, Any] = {} if scale is None else {"scale": scale}
    return Attention(
        batch=batch,
        heads=heads,
        seq_q=seq_q,
        head_dim=dim,
        dtype=DTYPES[q.dtype],  # type: ignore[arg-type]
        seq_k=k.shape[2],
        heads_k=k.shape[1],
        causal=causal,
        bias="none" if bias is None else bias_axes(bias, (*q.shape[:3], k.shape[2])),  # type: ignore[arg-type]
        align="first" if causal and seq_q != k.shape[2] else "last",
        **scaling,
    )


def _workload_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, *others: Any
) -> Any:
    return _workload(q, k, v, *others).changed(direction="backward")


def _repeated(q: Tensor, k: Tensor) -> Tensor:
    """Return keys with one head per head of the queries."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def _padded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return a bias expanded to all scores, with rows at multiples of 16 elements, as torch needs on GPUs."""
    if bias is None:
        return None
    seq_k = k.shape[2]
    aligned = functional.pad(bias, (0, -seq_k % 16))[..., :seq_k]
    return aligned.expand(*q.shape[:3], seq_k)


def _fallback(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention by those kernels of torch that also return the log-sum-exp."""
    aten, k, v = torch.ops.aten, _repeated(q, k), _repeated(q, v)
    if q.is_cuda:
        mask = _padded(bias, q, k)
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, 0.0, causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # torch pads it to whole blocks
    else:
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    return o.contiguous(), lse.float().contiguous()


def _fallback_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Return gradients by torch's kernels; the gradients of a shared key head are summed."""
    aten, keys, values = torch.ops.aten, _repeated(q, k), _repeated(q, v)
    if q.is_cuda:  # torch expects a padded log-sum-exp: compute it again
        mask = _padded(bias, q, keys)
        forward = aten._scaled_dot_product_efficient_attention
        recomputed = forward(q, keys, values, mask, True, 0.0, causal, scale=scale)
        needs_gradient = [True, True, True, False]
        operands = (do, q, keys, values, mask, *recomputed, 0.0, needs_gradient, causal)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(*operands, scale=scale)
    else:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        operands = (do, q, keys, values, o, lse, 0.0, causal)
        dq, dk, dv = backward(*operands, attn_mask=bias, scale=scale)
    if keys is not k:
        dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _fake(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, bias, *ctx.attributes = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, bias)


def _backward(ctx: Any, do: Tensor, unused: Any) -> tuple[Any, ...]:
    if ctx.needs_input_grad[3]:
        raise RuntimeError(
            "tunebench's attention has no gradient of a mask; call tunebench.torch's "
            "scaled_dot_product_attention, which leaves such calls to torch"
        )
    *saved, bias = ctx.saved_tensors
    return (*ATTENTION_BACKWARD(*saved, do, bias, *ctx.attributes), None, None, None)


ATTENTION = CustomOp(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias, bool causal, float? scale)"
    " -> (Tensor o, Tensor lse)",
    4,
    _workload,
    _fallback,
    _fake,
    gradients=lambda workload: (workload.changed(direction="backward"),),
    backward=_backward,
    save=_save,
)
ATTENTION_BACKWARD = CustomOp(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, Tensor? bias,"
    " bool causal, float? scale) -> (Tensor dq, Tensor dk, Tensor dv)",
    7,
    _workload_backward,
    _fallback_backward,
    lambda q, k, v, *others: tuple(t.new_empty(t.shape) for t in (q, k, v)),
    backward=not_twice("attention"),
)
