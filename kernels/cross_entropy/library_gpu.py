"""cross_entropy by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.cross_entropy import CrossEntropy


class LibraryCrossEntropy(LibraryGpu[CrossEntropy]):
    """cross_entropy and its gradient by torch."""

    operator = CrossEntropy
    programs = {"torch": TORCH}


VARIANT = LibraryCrossEntropy()
