"""softmax by libraries of the processor."""

from __future__ import annotations

from collections.abc import Callable

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu, LibraryProgram
from tunebench.libraries import Tensors
from tunebench.workloads.operators.softmax import Softmax


def _in_place(workload: Softmax, t: Tensors) -> Callable[[], object]:
    """Return torch's softmax, or its gradient, written into the output."""
    import torch

    aten = torch.ops.aten
    if workload.is_backward:
        dy, y, dx = t["dy"], t["y"], t["dx"]
        gradient = aten._log_softmax_backward_data if workload.log else aten._softmax_backward_data
        name = "out" if workload.log else "grad_input"
        return lambda: gradient.out(dy, y, 1, y.dtype, **{name: dx})
    compute = aten._log_softmax.out if workload.log else aten._softmax.out
    return lambda: compute(t["x"], 1, False, out=t["y"])


def _is_bare(workload: Softmax) -> bool:
    return not (workload.has_scale or workload.has_mask)


class LibrarySoftmax(LibraryCpu[Softmax]):
    """softmax, its logarithm and their gradients by torch."""

    operator = Softmax
    programs = {
        "torch": TORCH,
        "torch_out": LibraryProgram("torch", _in_place, "torch.ops.aten._softmax.out and the like", _is_bare),
    }


VARIANT = LibrarySoftmax()
