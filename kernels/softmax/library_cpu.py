"""softmax by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu, LibraryProgram
from tunebench.kernels.softmax._torch_softmax import bare, is_bare, write_bare
from tunebench.workloads.operators.softmax import Softmax


class LibrarySoftmax(LibraryCpu[Softmax]):
    """softmax, its logarithm and their gradients by torch."""

    operator = Softmax
    programs = {
        "torch": TORCH,
        "torch_out": LibraryProgram(
            "torch", bare, "torch.ops.aten._softmax and the like", is_bare, write_bare
        ),
    }


VARIANT = LibrarySoftmax()
