"""elementwise by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.elementwise import Elementwise


class LibraryElementwise(LibraryGpu[Elementwise]):
    """elementwise expressions by torch."""

    operator = Elementwise
    programs = {"torch": TORCH}


VARIANT = LibraryElementwise()
