"""reductions by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.reduction import Reduction


class LibraryReduction(LibraryCpu[Reduction]):
    """reductions by torch."""

    operator = Reduction
    programs = {"torch": TORCH}


VARIANT = LibraryReduction()
