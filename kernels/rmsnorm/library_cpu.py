"""rmsnorm and its gradients by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.rmsnorm import RmsNorm


class LibraryRmsNorm(LibraryCpu[RmsNorm]):
    """rmsnorm and its gradients by torch."""

    operator = RmsNorm
    programs = {"torch": TORCH}


VARIANT = LibraryRmsNorm()
