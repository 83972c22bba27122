"""Decompositions of operators into simpler ones that kernels can fuse, and attention traced as on a GPU."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._decomp import get_decompositions
from torch.nn import functional

from tunebench.torch._layout import is_static
from tunebench.torch._tensor import DTYPES

__all__ = ["DECOMPOSITIONS", "attention_as_on_gpu", "repeat_casts"]

aten = torch.ops.aten


# -- the fast path of nn.TransformerEncoder ----------------------------------------------------------------


def _native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Decompose the inference kernel of `nn.MultiheadAttention`, which has one input for q, k and v."""
    q, k, v = (
        part.unflatten(-1, (num_head, -1)).transpose(1, 2)
        for part in functional.linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1)
    )
    if mask is not None:
        mask = mask[:, None, None] if mask_type == OF_KEYS else mask
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask.bool(), -torch.inf)
    if need_weights:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
        mixed = weights @ v
        weights = weights.mean(dim=1) if average_attn_weights else weights
    else:
        weights = q.new_empty(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return functional.linear(mixed.transpose(1, 2).flatten(2), proj_weight, proj_bias), weights


OF_KEYS = 1
"""`mask_type` of a mask of shape (batch, keys)."""


def _transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Decompose the inference kernel of `nn.TransformerEncoderLayer`."""

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias, mask)
        mixed, _ = _native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *weights, need_weights=False, mask_type=mask_type
        )
        return mixed

    def feed_forward(x: Tensor) -> Tensor:
        inner = functional.linear(x, ffn_weight_1, ffn_bias_1)
        inner = functional.gelu(inner) if use_gelu else functional.relu(inner)
        return functional.linear(inner, ffn_weight_2, ffn_bias_2)

    norm1 = functools.partial(
        functional.layer_norm, normalized_shape=(embed_dim,), weight=norm_weight_1, bias=norm_bias_1, eps=eps
    )
    norm2 = functools.partial(
        functional.layer_norm, normalized_shape=(embed_dim,), weight=norm_weight_2, bias=norm_bias_2, eps=eps
    )
    if norm_first:
        x = src + attend(norm1(src))
        return x + feed_forward(norm2(x))
    x = norm1(src + attend(src))
    return norm2(x + feed_forward(x))


# -- statistics and random masks ---------------------------------------------------------------------------


def _var_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return variance and mean in two passes: the mean, then the mean square of the differences.

    As in torch, 16-bit numbers are reduced in float32.
    """
    axes = list(dim) if dim else list(range(x.dim()))
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.mean(axes, keepdim=True)
    count = math.prod(x.shape[axis] for axis in axes)
    squares = (wide - mean).square().sum(axes, keepdim=keepdim)
    divisor = max(0, count - (1 if correction is None else correction))
    variance = squares / divisor if divisor else squares * math.inf
    mean = mean if keepdim else mean.squeeze(axes)
    return variance.to(x.dtype), mean.to(x.dtype)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    **get_decompositions([aten.native_group_norm, aten.native_group_norm_backward, aten.native_dropout]),
    aten.var_mean.correction: _var_mean,
    aten._native_multi_head_attention.default: _native_multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: _transformer_encoder_layer,
}
"""Decompositions for AOTAutograd, by operator."""


# -- conversions -------------------------------------------------------------------------------------------


def repeat_casts(graph: fx.Graph) -> None:
    """Repeat conversions from 16 bits to float32, so that each operation that reads one can be fused with it.

    Such a conversion reads half the bytes that it writes, so that repeating it is cheaper than reading
    its result.

    Args:
        graph: FX graph of ATen operators; changed in place.
    """
    for node in list(graph.nodes):
        if node.target is not aten._to_copy.default or len(node.users) < 2 or not _widens(node):
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                repeated = graph.node_copy(node)
            repeated.meta = dict(node.meta)
            # What stands before the last node with the tag of forward is saved for backward.
            if tag := user.meta.get("partitioner_tag"):
                repeated.meta["partitioner_tag"] = tag
            user.replace_input_with(node, repeated)


def _widens(node: fx.Node) -> bool:
    """Return whether a node only converts 16-bit numbers to float32: same device, same strides."""
    (source,) = node.all_input_nodes
    result, read = node.meta.get("val"), source.meta.get("val")
    if not isinstance(result, Tensor) or not isinstance(read, Tensor) or not is_static(result):
        return False
    same = result.device == read.device and result.stride() == read.stride()
    return same and result.dtype == torch.float32 and read.dtype in DTYPES and read.itemsize == 2


# -- attention ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def attention_as_on_gpu() -> Iterator[None]:
    """Trace attention of tensors on the CPU as the operators that torch runs on an NVIDIA GPU.

    These are flash attention for 16-bit types without a mask, memory-efficient attention for float32 and for
    masks, and separate products and softmax for calls that neither of them supports.
    """
    call = aten.scaled_dot_product_attention.default
    before = dict(call.py_kernels)
    call.py_kernels[DispatchKey.CompositeImplicitAutograd] = _attention
    call._dispatch_cache.clear()
    try:
        yield
    finally:
        call.py_kernels.clear()
        call.py_kernels.update(before)
        call._dispatch_cache.clear()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Choose the operator by the rules of `sdp::select_sdp_backend` in torch's sdp_utils.cpp."""
    operands = (query, key, value)
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    is_plain = (
        all(operand.dim() == 4 and operand.dtype == query.dtype and operand.numel() for operand in operands)
        and all(operand.stride(-1) == 1 for operand in operands)
        and (is_half or query.dtype == torch.float32)
        and not (attn_mask is not None and is_causal)
    )
    if is_plain and attn_mask is None and is_half and _is_flash(query, key, value, is_causal):
        return _flash_attention(query, key, value, dropout_p, is_causal, scale)
    multiple = 8 if is_half else 4
    is_aligned = all(operand.shape[-1] % multiple == 0 for operand in operands)
    if is_plain and is_aligned and query.shape[1] == key.shape[1] == value.shape[1]:
        needs_gradient = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        mask = _as_bias(attn_mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


LARGEST_FLASH = 256
"""Largest head_dim that torch's flash attention supports."""


def _is_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    is_square = query.shape[2] == key.shape[2]
    same = query.shape[-1] == key.shape[-1] == value.shape[-1] <= LARGEST_FLASH
    return same and query.shape[1] % key.shape[1] == 0 and (is_square or not is_causal)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Call flash attention, with heads padded to a multiple of 8."""
    size = query.shape[-1]
    scale = size**-0.5 if scale is None and size % 8 else scale
    padded = [
        functional.pad(operand, (0, -size % 8)) if size % 8 else operand for operand in (query, key, value)
    ]
    attended: Tensor = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
    return attended[..., :size] if size % 8 else attended


def _as_bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a mask as a float bias, expanded to the shape of the scores."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), -torch.inf)
    return mask.expand(*query.shape[:-1], key.shape[-2])
