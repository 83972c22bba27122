"""rmsnorm by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.rmsnorm import RmsNorm


class LibraryRmsNorm(LibraryGpu[RmsNorm]):
    """rmsnorm and its gradients by torch."""

    operator = RmsNorm
    programs = {"torch": TORCH}


VARIANT = LibraryRmsNorm()
