"""strided_elementwise by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.strided_elementwise import StridedElementwise


class LibraryStridedElementwise(LibraryGpu[StridedElementwise]):
    """Strided expressions by torch."""

    operator = StridedElementwise
    programs = {"torch": TORCH}


VARIANT = LibraryStridedElementwise()
