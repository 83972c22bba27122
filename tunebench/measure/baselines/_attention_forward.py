"""Forward attention by NumPy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.measure.baselines import BaselineCall, Tensors
from tunebench.workloads.operators.attention import Attention

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["by_cudnn", "by_numpy", "by_torch"]


def by_numpy(workload: Attention, t: Tensors) -> tuple[Array, Array]:
    """Return o and lse, computed from all scores at once."""
    # Heads that share keys follow one another: (batch, heads_k, group * seq_q, head_dim).
    rows = t["q"].reshape(workload.batch, workload.heads_k, -1, workload.head_dim)
    scores = rows * np.float32(workload.scale) @ t["k"].swapaxes(2, 3)
    if workload.causal:
        last = np.arange(workload.seq_q) + workload.seq_k - workload.seq_q
        scores[..., np.tile(np.arange(workload.seq_k) > last[:, None], (workload.group, 1))] = -np.inf
    top = scores.max(axis=3, keepdims=True)
    e: Array = np.exp(scores - top)
    total = e.sum(axis=3, keepdims=True)
    o, lse = workload.outputs()
    return ((e @ t["v"]) / total).reshape(o.shape), (top + np.log(total)).reshape(lse.shape)


def by_torch(workload: Attention, t: Tensors) -> dict[str, BaselineCall]:
    """Return torch's scaled_dot_product_attention, which does not return lse; on a GPU cuDNN's, too.

    torch chooses its kernel itself; cuDNN's kernels reject some workloads.
    """
    fused = _fused(workload, t)
    if not t["q"].is_cuda or workload.dtype == "f32":
        return {"torch": fused}
    return {"torch": fused, "torch-cudnn": by_cudnn(fused)}


def _fused(workload: Attention, t: Tensors) -> BaselineCall:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    square = workload.seq_q == workload.seq_k
    options: dict[str, Any] = {"enable_gqa": True} if workload.group > 1 else {}
    if workload.causal and square:
        options["is_causal"] = True
    elif workload.causal and workload.seq_q > 1:  # a single query sees all keys
        options["attn_mask"] = causal_lower_right(workload.seq_q, workload.seq_k)
    return lambda: scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)


def by_cudnn(call: BaselineCall) -> BaselineCall:
    """Return the same program with cuDNN's kernels only, which raise if they reject the workload."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return run
