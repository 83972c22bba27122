"""reduction by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.reduction import Reduction


class LibraryReduction(LibraryGpu[Reduction]):
    """reductions by torch."""

    operator = Reduction
    programs = {"torch": TORCH}


VARIANT = LibraryReduction()
