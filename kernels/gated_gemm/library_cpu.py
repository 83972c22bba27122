"""gated_gemm by libraries of the processor: two products, and the product of their elements."""

from __future__ import annotations

from typing import Any

from tunebench.kernels.common.library_cpu import NUMPY_PRODUCT, TORCH, Compute, LibraryCpu, LibraryProgram
from tunebench.kernels.common.onednn import computes, post_operation, primitive
from tunebench.libraries import Tensors
from tunebench.workloads.operators.gated_gemm import GatedGemm


def _onednn(workload: GatedGemm) -> Compute:
    """Return two linear layers: one with its activation, one with the product of elements."""
    post = post_operation(workload.activation)
    assert post is not None, workload
    linear = primitive("_linear_pointwise")
    unary, binary = linear.default, linear.binary

    def run(t: Tensors) -> Any:
        gate, up = (t[b].t() if workload.trans == "nn" else t[b] for b in ("b_gate", "b_up"))
        return binary(t["a"], unary(t["a"], gate, None, *post), up, None, "mul")

    return run


def _is_linear(workload: GatedGemm) -> bool:
    return workload.dtype != "bf16" and computes(workload) and post_operation(workload.activation) is not None


class LibraryGatedGemm(LibraryCpu[GatedGemm]):
    """Gated layers by torch, oneDNN and NumPy's BLAS."""

    operator = GatedGemm
    programs = {
        "torch": TORCH,
        "onednn": LibraryProgram(
            "torch",
            _onednn,
            "torch.ops.mkldnn._linear_pointwise",
            _is_linear,
            is_traceable=True,
        ),
        "numpy": NUMPY_PRODUCT,
    }

    def least_fma(self, workload: GatedGemm) -> float:
        """Return those of f32; 16-bit types have faster instructions."""
        return 2.0 * workload.m * workload.n * workload.k * (workload.dtype == "f32")


VARIANT = LibraryGatedGemm()
