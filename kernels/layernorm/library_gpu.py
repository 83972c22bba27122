"""layernorm by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.layernorm import LayerNorm


class LibraryLayerNorm(LibraryGpu[LayerNorm]):
    """layernorm and its gradients by torch."""

    operator = LayerNorm
    programs = {"torch": TORCH}


VARIANT = LibraryLayerNorm()
