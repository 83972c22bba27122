"""gemm by libraries of the processor.

torch multiplies f32 by MKL, whose fastest code is for processors of its vendor; oneDNN does not distinguish.
"""

from __future__ import annotations

from typing import Any

from tunebench.kernels.common.library_cpu import (
    NUMPY_PRODUCT,
    TORCH,
    Compute,
    LibraryCpu,
    LibraryProgram,
    Write,
)
from tunebench.kernels.common.onednn import computes, post_operation, primitive
from tunebench.kernels.gemm._cpp_call import blas_call
from tunebench.kernels.gemm._torch_product import TORCH_MM, matrix
from tunebench.libraries import Tensors
from tunebench.space import Config
from tunebench.variant import CppCall
from tunebench.workloads.operators.gemm import Gemm


def _onednn(workload: Gemm) -> Compute:
    """Return one linear layer with its epilogue; a residual after an activation is added in a second step."""
    linear = _linear(workload)
    if _adds_last(workload):
        return lambda t: linear(t).add_(matrix(t["residual"]))
    return linear


def _write_onednn(workload: Gemm) -> Write:
    import torch

    linear = _linear(workload)
    if _adds_last(workload):
        return lambda t, c: torch.add(linear(t), matrix(t["residual"]), out=c[0])
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
        a, filters = matrix(t["a"]), matrix(t["b"])
        if workload.trans[0] == "t":
            a = a.t()
        if workload.trans[1] == "n":
            filters = filters.t()
        if adds:
            return binary(a, matrix(t["residual"]), filters, t.get("bias"), "add")
        return unary(a, filters, t.get("bias"), *post)

    return run


def _is_linear(workload: Gemm) -> bool:
    rounded_once = workload.dtype == "f32" or not _adds_last(workload)
    offered = computes(workload) and post_operation(workload.activation) is not None
    return workload.batch == 1 and rounded_once and offered


class LibraryGemm(LibraryCpu[Gemm]):
    """Products by torch, oneDNN and NumPy's BLAS."""

    operator = Gemm
    programs = {
        "torch": TORCH,
        "torch_mm": TORCH_MM,
        "onednn": LibraryProgram(
            "torch",
            _onednn,
            "torch.ops.mkldnn._linear_pointwise",
            _is_linear,
            _write_onednn,
            accepts_matrices=True,
            is_traceable=True,
        ),
        "numpy": NUMPY_PRODUCT,
    }

    def cpp(self, workload: Gemm, config: Config) -> CppCall | None:
        """Return the call of BLAS that NumPy makes."""
        return blas_call(workload) if config["program"] == "numpy" else None

    def least_fma(self, workload: Gemm) -> float:
        """Return those of f32; 16-bit types have faster instructions."""
        return float(workload.batch * workload.m * workload.n * workload.k) * (workload.dtype == "f32")


VARIANT = LibraryGemm()
