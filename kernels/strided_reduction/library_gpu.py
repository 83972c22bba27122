"""strided_reduction by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.strided_reduction import StridedReduction


class LibraryStridedReduction(LibraryGpu[StridedReduction]):
    """Strided reductions by torch."""

    operator = StridedReduction
    programs = {"torch": TORCH}


VARIANT = LibraryStridedReduction()
