"""gemm by libraries of the processor.

torch multiplies f32 by MKL, whose fastest code is for processors of its vendor; oneDNN does not distinguish.
"""

from __future__ import annotations

from typing import Any

from tunebench.dtype import storage
from tunebench.kernels.common.library_cpu import NUMPY, TORCH, Compute, LibraryCpu, LibraryProgram, Write
from tunebench.kernels.common.onednn import computes, post_operation
from tunebench.libraries import Tensors
from tunebench.workloads.operators.gemm import Gemm


def _onednn(workload: Gemm) -> Compute:
    """Return one linear layer with its bias, and its activation or the residual; then a residual after one."""
    linear = _linear(workload)
    if _adds_last(workload):
        return lambda t: linear(t).add_(t["residual"][0])
    return linear


def _write_onednn(workload: Gemm) -> Write:
    import torch

    linear = _linear(workload)
    if _adds_last(workload):
        return lambda t, c: torch.add(linear(t), t["residual"][0], out=c[0])
    return lambda t, c: c[0].copy_(linear(t))


def _adds_last(workload: Gemm) -> bool:
    """Return whether the residual is added after the primitive, which has one post-operation."""
    return workload.has_residual and workload.activation != "none"


def _linear(workload: Gemm) -> Compute:
    """Return the primitive with one post-operation."""
    import torch

    post = post_operation(workload.activation)
    assert post is not None, workload
    linear = torch.ops.mkldnn._linear_pointwise
    unary, binary = linear.default, linear.binary
    adds = workload.has_residual and not _adds_last(workload)

    def run(t: Tensors) -> Any:
        a, filters = t["a"][0], t["b"][0]
        if workload.trans[0] == "t":
            a = a.t()
        if workload.trans[1] == "n":
            filters = filters.t()
        if adds:
            return binary(a, t["residual"][0], filters, t.get("bias"), "add")
        return unary(a, filters, t.get("bias"), *post)

    return run


def _is_linear(workload: Gemm) -> bool:
    rounded_once = workload.dtype == "f32" or not _adds_last(workload)
    offered = computes(workload) and post_operation(workload.activation) is not None
    return workload.batch == 1 and rounded_once and offered


def _plain(workload: Gemm) -> Compute:
    """Return the product of torch."""
    import torch

    multiply = torch.mm if workload.batch == 1 else torch.bmm
    return lambda t: multiply(*_factors(workload, t))


def _write_plain(workload: Gemm) -> Write:
    import torch

    if workload.batch == 1:
        return lambda t, c: torch.mm(*_factors(workload, t), out=c[0])
    return lambda t, c: torch.bmm(*_factors(workload, t), out=c)


def _factors(workload: Gemm, t: Tensors) -> tuple[Any, Any]:
    """Return views of a and b that torch multiplies."""
    a = t["a"] if workload.trans[0] == "n" else t["a"].transpose(1, 2)
    b = t["b"] if workload.trans[1] == "n" else t["b"].transpose(1, 2)
    return (a[0], b[0]) if workload.batch == 1 else (a, b)


def _is_plain(workload: Gemm) -> bool:
    stored = storage(workload.dtype)
    bare = workload.epilogue == "none" and workload.activation == "none" and not workload.has_pre
    return bare and stored in ("f32", "f16", "bf16") and workload.out == stored


class LibraryGemm(LibraryCpu[Gemm]):
    """Products by torch, oneDNN and NumPy's BLAS."""

    operator = Gemm
    programs = {
        "torch": TORCH,
        "torch_mm": LibraryProgram("torch", _plain, "torch.mm or torch.bmm", _is_plain, _write_plain),
        "onednn": LibraryProgram(
            "torch", _onednn, "torch.ops.mkldnn._linear_pointwise", _is_linear, _write_onednn
        ),
        "numpy": NUMPY,
    }

    def least_fma(self, workload: Gemm) -> float:
        """Return those of f32; 16-bit types have faster instructions."""
        return float(workload.batch * workload.m * workload.n * workload.k) * (workload.dtype == "f32")


VARIANT = LibraryGemm()
