"""strided reductions by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.strided_reduction import StridedReduction


class LibraryStridedReduction(LibraryCpu[StridedReduction]):
    """Strided reductions by torch."""

    operator = StridedReduction
    programs = {"torch": TORCH}


VARIANT = LibraryStridedReduction()
