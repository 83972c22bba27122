"""gemm by libraries of the processor.

torch multiplies f32 by MKL, whose fastest code is for processors of its vendor; oneDNN does not distinguish.
"""

from __future__ import annotations

from collections.abc import Callable

from tunebench.dtype import storage
from tunebench.kernels.common.library_cpu import NUMPY, TORCH, LibraryCpu, LibraryProgram
from tunebench.kernels.common.onednn import computes, post_operation
from tunebench.libraries import Tensors
from tunebench.workloads.operators.gemm import Gemm


def _onednn(workload: Gemm, t: Tensors) -> Callable[[], object]:
    """Return one linear layer with its bias and its activation, and then the residual."""
    import torch

    post = post_operation(workload.activation)
    assert post is not None, workload
    linear = torch.ops.mkldnn._linear_pointwise.default
    a = t["a"][0] if workload.trans[0] == "n" else t["a"][0].transpose(0, 1)
    filters = t["b"][0].transpose(0, 1) if workload.trans[1] == "n" else t["b"][0]
    bias, c = t.get("bias"), t["c"][0]
    if workload.has_residual:
        residual = t["residual"][0]
        return lambda: torch.add(linear(a, filters, bias, *post), residual, out=c)
    return lambda: c.copy_(linear(a, filters, bias, *post))


def _is_linear(workload: Gemm) -> bool:
    rounded_once = workload.dtype == "f32" or not workload.has_residual
    offered = computes(workload) and post_operation(workload.activation) is not None
    return workload.batch == 1 and rounded_once and offered


def _plain(workload: Gemm, t: Tensors) -> Callable[[], object]:
    """Return the product of torch that writes into c."""
    import torch

    a = t["a"] if workload.trans[0] == "n" else t["a"].transpose(1, 2)
    b = t["b"] if workload.trans[1] == "n" else t["b"].transpose(1, 2)
    if workload.batch == 1:
        return lambda: torch.mm(a[0], b[0], out=t["c"][0])
    return lambda: torch.bmm(a, b, out=t["c"])


def _is_plain(workload: Gemm) -> bool:
    stored = storage(workload.dtype)
    bare = workload.epilogue == "none" and workload.activation == "none" and not workload.has_pre
    return bare and stored in ("f32", "f16", "bf16") and workload.out == stored


class LibraryGemm(LibraryCpu[Gemm]):
    """Products by torch, oneDNN and NumPy's BLAS."""

    operator = Gemm
    programs = {
        "torch": TORCH,
        "torch_mm": LibraryProgram("torch", _plain, "torch.mm or torch.bmm with out", _is_plain),
        "onednn": LibraryProgram("torch", _onednn, "torch.ops.mkldnn._linear_pointwise", _is_linear),
        "numpy": NUMPY,
    }

    def least_fma(self, workload: Gemm) -> float:
        """Return those of f32; 16-bit types have faster instructions."""
        return float(workload.batch * workload.m * workload.n * workload.k) * (workload.dtype == "f32")


VARIANT = LibraryGemm()
