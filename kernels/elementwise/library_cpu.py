"""elementwise expressions by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.elementwise import Elementwise


class LibraryElementwise(LibraryCpu[Elementwise]):
    """elementwise expressions by torch."""

    operator = Elementwise
    programs = {"torch": TORCH}


VARIANT = LibraryElementwise()
