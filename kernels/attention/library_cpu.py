"""attention by libraries of the processor."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench.kernels.common.library_cpu import NUMPY, TORCH, Compute, LibraryCpu, LibraryProgram, is_single
from tunebench.libraries import Tensors
from tunebench.libraries.attention import torch_mask
from tunebench.workloads.operators.attention import Attention

_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"


def _flash(workload: Attention) -> Compute:
    """Return torch's attention as the function that also returns lse."""
    import torch

    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    aligned = workload.causal and workload.before == 0 and not (workload.has_bias or workload.window)

    def run(t: Tensors) -> tuple[Any, ...]:
        mask = None if aligned else torch_mask(workload, t)
        k, v = (
            t[name].repeat_interleave(workload.group, 1) if workload.group > 1 else t[name] for name in "kv"
        )
        o, lse = attend(t["q"], k, v, 0.0, aligned, attn_mask=mask, scale=workload.scale)
        return o, lse

    return run


def _is_forward(workload: Attention) -> bool:
    return workload.direction == "forward" and _suits_torch(workload)


def _is_backward(workload: Attention) -> bool:
    return workload.direction == "backward" and _suits_torch(workload)


def _suits_torch(workload: Attention) -> bool:
    """Exclude queries whose keys may all be hidden, for which torch has other results."""
    return is_single(workload) and not workload.has_bias and workload.before >= 0


class LibraryAttention(LibraryCpu[Attention]):
    """Attention and its gradients by torch, and by NumPy with all scores in memory."""

    operator = Attention
    programs = {
        "torch": dataclasses.replace(TORCH, supports=_is_backward),
        "torch_flash": LibraryProgram("torch", _flash, _FLASH, _is_forward, is_traceable=True),
        "numpy": NUMPY,
    }

    def least_fma(self, workload: Attention) -> float:
        """Return those of f32 without a mask, whose blocks libraries skip."""
        products = 2 if workload.direction == "forward" else 5
        scores = workload.batch * workload.heads * workload.seq_q * workload.seq_k
        return float(products * scores * workload.head_dim) * (
            workload.dtype == "f32" and not workload.causal
        )


VARIANT = LibraryAttention()
