"""softmax by libraries of the processor."""

from __future__ import annotations

from tunebench.kernels.common.library_cpu import TORCH, Compute, LibraryCpu, LibraryProgram, Write
from tunebench.workloads.operators.softmax import Softmax


def _bare(workload: Softmax) -> Compute:
    """Return torch's softmax, or its gradient."""
    import torch

    aten = torch.ops.aten
    if workload.is_backward:
        gradient = aten._log_softmax_backward_data if workload.log else aten._softmax_backward_data
        return lambda t: gradient.default(t["dy"], t["y"], 1, t["y"].dtype)
    compute = aten._log_softmax.default if workload.log else aten._softmax.default
    return lambda t: compute(t["x"], 1, False)


def _write_bare(workload: Softmax) -> Write:
    """Return torch's softmax, or its gradient, written into the output."""
    import torch

    aten = torch.ops.aten
    if workload.is_backward:
        gradient = aten._log_softmax_backward_data if workload.log else aten._softmax_backward_data
        name = "out" if workload.log else "grad_input"
        return lambda t, dx: gradient.out(t["dy"], t["y"], 1, dx.dtype, **{name: dx})
    compute = aten._log_softmax.out if workload.log else aten._softmax.out
    return lambda t, y: compute(t["x"], 1, False, out=y)


def _is_bare(workload: Softmax) -> bool:
    return not (workload.has_scale or workload.has_mask)


class LibrarySoftmax(LibraryCpu[Softmax]):
    """softmax, its logarithm and their gradients by torch."""

    operator = Softmax
    programs = {
        "torch": TORCH,
        "torch_out": LibraryProgram(
            "torch", _bare, "torch.ops.aten._softmax and the like", _is_bare, _write_bare
        ),
    }


VARIANT = LibrarySoftmax()
