"""Masks and biases of attention as NumPy and torch arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import Tensors
from tunebench.workloads.operators.attention import Attention

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["hidden_keys", "sdpa_arguments", "torch_mask"]


def hidden_keys(workload: Attention) -> Array:
    """Return a boolean array (seq_q, seq_k), true where the causal mask hides a key from a query."""
    first, end = workload.keys_of(np.arange(workload.seq_q)[:, None])
    keys = np.arange(workload.seq_k)
    hidden: Array = (keys < first) | (keys >= end)
    return hidden


def torch_mask(workload: Attention, t: Tensors) -> Any:
    """Return the bias with minus infinity where the causal mask hides keys; None without bias and mask.

    Args:
        workload: The workload.
        t: A torch tensor for each input by name.
    """
    import torch

    if not workload.causal:
        return t.get("bias")
    hidden = torch.from_numpy(hidden_keys(workload)).to(t["q"].device)
    bias = t["bias"] if workload.has_bias else torch.zeros_like(hidden, dtype=t["q"].dtype)
    return bias.masked_fill(hidden, -torch.inf)


def sdpa_arguments(workload: Attention, t: Tensors) -> dict[str, Any]:
    """Return the arguments of torch's scaled_dot_product_attention after q, k and v.

    Args:
        workload: The workload.
        t: A torch tensor for each input by name.
    """
    from torch.nn.attention.bias import causal_lower_right

    arguments: dict[str, Any] = {"enable_gqa": True} if workload.group > 1 else {}
    if workload.scale != workload.default_of("scale", workload.head_dim):
        arguments["scale"] = workload.scale
    if workload.has_bias or workload.window:
        return {**arguments, "attn_mask": torch_mask(workload, t)}
    if workload.causal and workload.before == 0:
        return {**arguments, "is_causal": True}
    if workload.causal and workload.seq_q > 1:  # a single query sees all keys
        return {**arguments, "attn_mask": causal_lower_right(workload.seq_q, workload.seq_k)}
    return arguments
