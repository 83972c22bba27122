"""attention by libraries of the GPU: torch's three implementations, called directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.kernels.common.library import Compute, LibraryProgram
from tunebench.kernels.common.library_gpu import LibraryGpu
from tunebench.libraries import Tensors
from tunebench.workloads.operators.attention import Attention


def _flash(workload: Attention) -> Compute:
    """Return FlashAttention, whose causal mask is aligned with the last key."""
    import torch

    attend = torch.ops.aten._scaled_dot_product_flash_attention.default

    def run(t: Tensors) -> tuple[Any, ...]:
        o, lse, *_ = attend(t["q"], t["k"], t["v"], 0.0, workload.causal, False, scale=workload.scale)
        return o, lse

    return run


def _flash_backward(workload: Attention) -> Compute:
    import torch

    differentiate = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    sizes = (workload.seq_q, workload.seq_k)

    def run(t: Tensors) -> tuple[Any, ...]:
        unused = torch.empty(2, dtype=torch.int64, device=t["q"].device)  # numbers of dropout
        operands = (t[name] for name in ("do", "q", "k", "v", "o", "lse"))
        rest = (None, None, *sizes, 0.0, workload.causal, unused, unused)
        return tuple(differentiate(*operands, *rest, scale=workload.scale))

    return run


def _efficient(workload: Attention) -> Compute:
    """Return memory-efficient attention, whose causal mask is aligned with the first key."""
    import torch

    attend = torch.ops.aten._scaled_dot_product_efficient_attention.default

    def run(t: Tensors) -> tuple[Any, ...]:
        k, v = (
            t[name].repeat_interleave(workload.group, 1) if workload.group > 1 else t[name] for name in "kv"
        )
        o, lse, *_ = attend(t["q"], k, v, None, True, 0.0, workload.causal, scale=workload.scale)
        return o, lse[..., : workload.seq_q]  # padded to warps

    return run


def _cudnn(workload: Attention) -> Compute:
    """Return cuDNN's attention."""
    import torch

    attend = torch.ops.aten._scaled_dot_product_cudnn_attention.default

    def run(t: Tensors) -> tuple[Any, ...]:
        operands = (t["q"], t["k"], t["v"], None, True, 0.0, workload.causal, False)
        o, lse, *_ = attend(*operands, scale=workload.scale)
        return o, lse

    return run


def _masks(first: bool, last: bool) -> Callable[[Attention], bool]:
    """Return whether a mask is one that an implementation has: aligned with the first key, or the last."""

    def suits(workload: Attention) -> bool:
        if workload.has_bias or workload.window:
            return False
        from_first, from_last = workload.before == 0, workload.before == workload.seq_k - workload.seq_q
        square = from_first and from_last
        return not workload.causal or square or (first and from_first) or (last and from_last)

    return suits


def _is_half(workload: Attention) -> bool:
    return workload.dtype in ("f16", "bf16")


def _suits_flash(workload: Attention) -> bool:
    return workload.direction == "forward" and _is_half(workload) and _masks(False, True)(workload)


def _suits_flash_backward(workload: Attention) -> bool:
    return workload.direction == "backward" and _is_half(workload) and _masks(False, True)(workload)


def _suits_efficient(workload: Attention) -> bool:
    return workload.direction == "forward" and _masks(True, False)(workload)


def _suits_cudnn(workload: Attention) -> bool:
    return workload.direction == "forward" and _is_half(workload) and _masks(False, False)(workload)


_OPERATOR = "torch.ops.aten._scaled_dot_product_{}_attention"


class LibraryAttention(LibraryGpu[Attention]):
    """Attention by FlashAttention, memory-efficient attention and cuDNN; gradients by FlashAttention.

    They are the operators that `scaled_dot_product_attention` chooses among, which return lse, too.
    """

    operator = Attention
    multiplies = True
    programs = {
        "flash": LibraryProgram("torch", _flash, _OPERATOR.format("flash"), _suits_flash, is_traceable=True),
        "cudnn": LibraryProgram("torch", _cudnn, _OPERATOR.format("cudnn"), _suits_cudnn),
        "efficient": LibraryProgram("torch", _efficient, _OPERATOR.format("efficient"), _suits_efficient),
        "flash_backward": LibraryProgram(
            "torch", _flash_backward, _OPERATOR.format("flash") + "_backward", _suits_flash_backward
        ),
    }


VARIANT = LibraryAttention()
