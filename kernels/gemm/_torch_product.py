"""torch's product of matrices, as calls of libraries have it on processors and on GPUs."""

from __future__ import annotations

from typing import Any

from tunebench.dtype import storage
from tunebench.kernels.common.library import Compute, LibraryProgram, Write
from tunebench.libraries import Tensors
from tunebench.workloads.operators.gemm import Gemm

__all__ = ["TORCH_MM", "factors", "matrix"]


def _plain(workload: Gemm) -> Compute:
    """Return the product of torch."""
    import torch

    multiply = torch.mm if workload.batch == 1 else torch.bmm
    return lambda t: multiply(*factors(workload, t))


def _write_plain(workload: Gemm) -> Write:
    """Return the product of torch, written into c."""
    import torch

    if workload.batch == 1:
        return lambda t, c: torch.mm(*factors(workload, t), out=c[0])
    return lambda t, c: torch.bmm(*factors(workload, t), out=c)


def factors(workload: Gemm, t: Tensors) -> tuple[Any, Any]:
    """Return views of a and b that torch multiplies."""
    a, b = (matrix(t[name]) if workload.batch == 1 else t[name] for name in "ab")
    return (
        a if workload.trans[0] == "n" else a.transpose(-2, -1),
        b if workload.trans[1] == "n" else b.transpose(-2, -1),
    )


def matrix(tensor: Any) -> Any:
    """Return the only matrix of a batch, which may be one already."""
    return tensor if tensor.dim() == 2 else tensor[0]


def _is_plain(workload: Gemm) -> bool:
    """Return whether a workload is a product of one type, without prologue and epilogue."""
    stored = storage(workload.dtype)
    bare = workload.epilogue == "none" and workload.activation == "none" and not workload.has_pre
    return bare and stored in ("f32", "f16", "bf16") and workload.out == stored


TORCH_MM = LibraryProgram(
    "torch",
    _plain,
    "torch.mm or torch.bmm",
    _is_plain,
    _write_plain,
    accepts_matrices=True,
    is_traceable=True,
)
"""A product without prologue and epilogue, by one call."""
