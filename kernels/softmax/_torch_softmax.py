"""torch's softmax, as calls of libraries have it on processors and on GPUs."""

from __future__ import annotations

from tunebench.kernels.common.library import Compute, Write
from tunebench.workloads.operators.softmax import Softmax

__all__ = ["bare", "is_bare", "write_bare"]


def bare(workload: Softmax) -> Compute:
    """Return torch's softmax, or its gradient."""
    import torch

    aten = torch.ops.aten
    if workload.is_backward:
        gradient = aten._log_softmax_backward_data if workload.log else aten._softmax_backward_data
        return lambda t: gradient.default(t["dy"], t["y"], 1, t["y"].dtype)
    compute = aten._log_softmax.default if workload.log else aten._softmax.default
    return lambda t: compute(t["x"], 1, False)


def write_bare(workload: Softmax) -> Write:
    """Return torch's softmax, or its gradient, written into the output."""
    import torch

    aten = torch.ops.aten
    if workload.is_backward:
        gradient = aten._log_softmax_backward_data if workload.log else aten._softmax_backward_data
        name = "out" if workload.log else "grad_input"
        return lambda t, dx: gradient.out(t["dy"], t["y"], 1, dx.dtype, **{name: dx})
    compute = aten._log_softmax.out if workload.log else aten._softmax.out
    return lambda t, y: compute(t["x"], 1, False, out=y)


def is_bare(workload: Softmax) -> bool:
    """Return whether a workload has no prologue."""
    return not (workload.has_scale or workload.has_mask)
