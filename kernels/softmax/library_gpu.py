"""softmax by libraries of the GPU."""

from __future__ import annotations

from tunebench.kernels.common.library import LibraryProgram
from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.kernels.softmax._torch_softmax import bare, is_bare, write_bare
from tunebench.workloads.operators.softmax import Softmax


class LibrarySoftmax(LibraryGpu[Softmax]):
    """softmax, its logarithm and their gradients by torch."""

    operator = Softmax
    programs = {
        "torch_out": LibraryProgram(
            "torch", bare, "torch.ops.aten._softmax and the like", is_bare, write_bare
        ),
        "torch": TORCH,
    }


VARIANT = LibrarySoftmax()
