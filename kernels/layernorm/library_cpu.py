"""layernorm and its gradients by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu
from tunebench.workloads.operators.layernorm import LayerNorm


class LibraryLayerNorm(LibraryCpu[LayerNorm]):
    """layernorm and its gradients by torch."""

    operator = LayerNorm
    programs = {"torch": TORCH}


VARIANT = LibraryLayerNorm()
