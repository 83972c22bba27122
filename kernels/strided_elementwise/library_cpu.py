"""strided expressions by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.strided_elementwise import StridedElementwise


class LibraryStridedElementwise(LibraryCpu[StridedElementwise]):
    """Strided expressions by torch."""

    operator = StridedElementwise
    programs = {"torch": TORCH}


VARIANT = LibraryStridedElementwise()
