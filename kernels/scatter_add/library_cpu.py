"""scatter_add by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.scatter_add import ScatterAdd


class LibraryScatterAdd(LibraryCpu[ScatterAdd]):
    """scatter_add by torch."""

    operator = ScatterAdd
    programs = {"torch": TORCH}


VARIANT = LibraryScatterAdd()
