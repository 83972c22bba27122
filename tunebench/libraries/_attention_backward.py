"""The gradients of attention by NumPy and by torch."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors
from tunebench.libraries._attention_mask import hidden_keys, sdpa_arguments, torch_mask
from tunebench.workloads.operators.attention import Attention

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["by_autograd", "by_numpy", "by_torch"]


def by_numpy(workload: Attention, t: Tensors) -> tuple[Array, Array, Array]:
    """Return dq, dk and dv, computed with all scores in memory."""
    shape = (workload.batch, workload.heads_k, workload.group, workload.seq_q, workload.head_dim)
    q, o, do = (t[name].reshape(shape) for name in ("q", "o", "do"))
    k, v = t["k"][:, :, None], t["v"][:, :, None]  # of each group
    scale = np.float32(workload.scale)
    scores = scale * (q @ k.swapaxes(3, 4))
    if workload.has_bias:
        shape_of_bias = (workload.batch, workload.heads, workload.seq_q, workload.seq_k)
        scores += np.broadcast_to(t["bias"], shape_of_bias).reshape(scores.shape)
    p = np.exp(scores - t["lse"].reshape(shape[:4])[..., None])
    if workload.causal:
        p[..., hidden_keys(workload)] = 0
    ds = do @ v.swapaxes(3, 4) - (do * o).sum(axis=4, keepdims=True)
    ds *= scale * p
    dk, dv = (ds.swapaxes(3, 4) @ q).sum(axis=2), (p.swapaxes(3, 4) @ do).sum(axis=2)
    return (ds @ k).reshape(t["q"].shape), dk, dv


def by_torch(workload: Attention, t: Tensors) -> dict[str, LibraryCall]:
    """Return the function that computes torch's gradients on a CPU, or torch's autograd on a GPU.

    On a GPU torch chooses among its backends; cuDNN's is an additional program, which rejects some workloads.
    """
    if t["q"].device.type == "cpu":
        return {"torch": _of_processors(workload, t)}
    chosen = by_autograd(workload, t)
    if workload.dtype == "f32":
        return {"torch": chosen}
    return {"torch": chosen, "torch-cudnn": by_autograd(workload, t, cudnn=True)}


def _of_processors(workload: Attention, t: Tensors) -> LibraryCall:
    """Call the function directly, with o and lse as given. Its causal mask is aligned with the first key."""
    import torch

    aligned = workload.causal and workload.before == 0 and not (workload.has_bias or workload.window)
    mask = None if aligned else torch_mask(workload, t)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = (t["do"], t["q"], t["k"], t["v"], t["o"], t["lse"])
    return lambda: gradients(*inputs, 0.0, aligned, attn_mask=mask, scale=workload.scale)


def by_autograd(workload: Attention, t: Tensors, *, cudnn: bool = False) -> LibraryCall:
    """Return the repeated differentiation of torch's attention, which is computed once, in the first run.

    It computes o and lse itself, from q, k and v; the timed work is the same.

    Args:
        workload: The workload.
        t: A torch tensor for each input by name.
        cudnn: Whether to use cuDNN's kernels only, which raise if they reject the workload.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    options = sdpa_arguments(workload, t)

    @functools.cache
    def attended() -> tuple[Any, tuple[Any, ...]]:
        only = sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else contextlib.nullcontext()
        with torch.inference_mode(False), torch.enable_grad(), only:  # independent of the caller's mode
            q, k, v = (t[name].detach().requires_grad_() for name in ("q", "k", "v"))
            o = scaled_dot_product_attention(q, k, v, **options)
        return o, (q, k, v)

    def gradients() -> Any:
        o, operands = attended()
        return torch.autograd.grad(o, operands, t["do"], retain_graph=True)

    return gradients
