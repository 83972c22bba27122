"""gemm by libraries of the processor.

torch multiplies f32 by MKL, whose fastest code is for processors of its vendor; oneDNN does not distinguish.
"""

from __future__ import annotations

from typing import Any

from tunebench.dtype import storage
from tunebench.kernels.common.library_cpu import NUMPY, TORCH, Compute, LibraryCpu, LibraryProgram, Write
from tunebench.kernels.common.onednn import computes, post_operation, primitive
from tunebench.libraries import Tensors
from tunebench.workloads.operators.gemm import Gemm


def _onednn(workload: Gemm) -> Compute:
    """Return one linear layer with its epilogue; a residual after an activation is added in a second step."""
    linear = _linear(workload)
    if _adds_last(workload):
        return lambda t: linear(t).add_(_matrix(t["residual"]))
    return linear


def _write_onednn(workload: Gemm) -> Write:
    import torch

    linear = _linear(workload)
    if _adds_last(workload):
        return lambda t, c: torch.add(linear(t), _matrix(t["residual"]), out=c[0])
    return lambda t, c: c[0].copy_(linear(t))


def _adds_last(workload: Gemm) -> bool:
    """Return whether the residual is added after the primitive, which has one post-operation."""
    return workload.has_residual and workload.activation != "none"


def _linear(workload: Gemm) -> Compute:
    """Return the primitive with one post-operation."""
    post = post_operation(workload.activation)
    assert post is not None, workload
    linear = primitive("_linear_pointwise")
    unary, binary = linear.default, linear.binary
    adds = workload.has_residual and not _adds_last(workload)

    def run(t: Tensors) -> Any:
        a, filters = _matrix(t["a"]), _matrix(t["b"])
        if workload.trans[0] == "t":
            a = a.t()
        if workload.trans[1] == "n":
            filters = filters.t()
        if adds:
            return binary(a, _matrix(t["residual"]), filters, t.get("bias"), "add")
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
    a, b = (_matrix(t[name]) if workload.batch == 1 else t[name] for name in "ab")
    return (
        a if workload.trans[0] == "n" else a.transpose(-2, -1),
        b if workload.trans[1] == "n" else b.transpose(-2, -1),
    )


def _matrix(tensor: Any) -> Any:
    """Return the only matrix of a batch, which may be one already."""
    return tensor if tensor.dim() == 2 else tensor[0]


def _is_plain(workload: Gemm) -> bool:
    stored = storage(workload.dtype)
    bare = workload.epilogue == "none" and workload.activation == "none" and not workload.has_pre
    return bare and stored in ("f32", "f16", "bf16") and workload.out == stored


class LibraryGemm(LibraryCpu[Gemm]):
    """Products by torch, oneDNN and NumPy's BLAS."""

    operator = Gemm
    programs = {
        "torch": TORCH,
        "torch_mm": LibraryProgram(
            "torch",
            _plain,
            "torch.mm or torch.bmm",
            _is_plain,
            _write_plain,
            accepts_matrices=True,
            is_traceable=True,
        ),
        "onednn": LibraryProgram(
            "torch",
            _onednn,
            "torch.ops.mkldnn._linear_pointwise",
            _is_linear,
            _write_onednn,
            accepts_matrices=True,
            is_traceable=True,
        ),
        "numpy": NUMPY,
    }

    def least_fma(self, workload: Gemm) -> float:
        """Return those of f32; 16-bit types have faster instructions."""
        return float(workload.batch * workload.m * workload.n * workload.k) * (workload.dtype == "f32")


VARIANT = LibraryGemm()
