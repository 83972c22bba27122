"""Forward attention by NumPy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors
from tunebench.libraries._attention_mask import hidden_keys, sdpa_arguments
from tunebench.workloads.operators.attention import HIDDEN_ROW_LSE, Attention

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["by_cudnn", "by_numpy", "by_torch"]


def by_numpy(workload: Attention, t: Tensors) -> tuple[Array, Array]:
    """Return o and lse, computed from all scores at once."""
    # Heads that share keys follow one another: (batch, heads_k, group * seq_q, head_dim).
    rows = t["q"].reshape(workload.batch, workload.heads_k, -1, workload.head_dim)
    scores = rows * np.float32(workload.scale) @ t["k"].swapaxes(2, 3)
    if workload.has_bias:
        shape = (workload.batch, workload.heads, workload.seq_q, workload.seq_k)
        scores += np.broadcast_to(t["bias"], shape).reshape(scores.shape)
    if workload.causal:
        scores[..., np.tile(hidden_keys(workload), (workload.group, 1))] = -np.inf
    top = scores.max(axis=3, keepdims=True)
    if workload.has_bias:
        top = np.maximum(top, np.float32(HIDDEN_ROW_LSE))
    e: Array = np.exp(scores - top)
    total = e.sum(axis=3, keepdims=True)
    total[total == 0] = 1  # of a row that sees no key
    o, lse = workload.outputs()
    return ((e @ t["v"]) / total).reshape(o.shape), (top + np.log(total)).reshape(lse.shape)


def by_torch(workload: Attention, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's scaled_dot_product_attention, which does not return lse; on a GPU cuDNN's, too.

    torch chooses its kernel itself; cuDNN's kernels reject some workloads.
    """
    fused = _fused(workload, t)
    if not t["q"].is_cuda or workload.dtype == "f32":
        return {"torch": fused}
    return {"torch": fused, "torch-cudnn": by_cudnn(fused)}


def _fused(workload: Attention, t: Tensors) -> LibraryCall:
    from torch.nn.functional import scaled_dot_product_attention

    options = sdpa_arguments(workload, t)
    return lambda: scaled_dot_product_attention(t["q"], t["k"], t["v"], **options)


def by_cudnn(call: LibraryCall) -> LibraryCall:
    """Return the same program with cuDNN's kernels only, which raise if they reject the workload."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def run() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return call()

    return run
