"""cross_entropy and its gradient by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.cross_entropy import CrossEntropy


class LibraryCrossEntropy(LibraryCpu[CrossEntropy]):
    """cross_entropy and its gradient by torch."""

    operator = CrossEntropy
    programs = {"torch": TORCH}


VARIANT = LibraryCrossEntropy()
