"""scatter_add by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.scatter_add import ScatterAdd


class LibraryScatterAdd(LibraryGpu[ScatterAdd]):
    """scatter_add by torch."""

    operator = ScatterAdd
    programs = {"torch": TORCH}


VARIANT = LibraryScatterAdd()
