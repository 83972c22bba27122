"""grouped_gemm by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import NUMPY, TORCH, LibraryCpu
from tunebench.workloads.operators.grouped_gemm import GroupedGemm


class LibraryGroupedGemm(LibraryCpu[GroupedGemm]):
    """grouped_gemm by torch and by NumPy."""

    operator = GroupedGemm
    programs = {"torch": TORCH, "numpy": NUMPY}


VARIANT = LibraryGroupedGemm()
