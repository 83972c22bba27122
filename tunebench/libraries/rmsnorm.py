"""rmsnorm by NumPy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.libraries._norm import summed
from tunebench.workloads.operators.rmsnorm import RmsNorm

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: RmsNorm, inputs: Tensors) -> LibraryCall:
    """Return the program that normalises, or computes the gradients, by NumPy."""
    tensors, run = single(inputs), _numpy_gradients if workload.is_backward else _numpy
    return lambda: run(workload, tensors)


def _numpy(workload: RmsNorm, t: Tensors) -> tuple[Array, ...]:
    z = summed(t)
    rstd = 1 / np.sqrt((z * z).mean(axis=1, keepdims=True) + workload.eps)
    y = z * rstd * t["gamma"]
    total = (z,) if workload.has_residual else ()
    return (y, *total, *((rstd[:, 0],) if workload.stats else ()))


def _numpy_gradients(workload: RmsNorm, t: Tensors) -> tuple[Array, ...]:
    rstd = t["rstd"][:, None]
    normal, g = t["x"] * rstd, t["dy"] * t["gamma"]
    dx = (g - normal * (g * normal).mean(axis=1, keepdims=True)) * rstd
    return dx, (t["dy"] * normal).sum(axis=0)


def torch_calls(workload: RmsNorm, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's rms_norm after the sum; with statistics, or backward, the operators it calls.

    torch has rms_norm since 2.4, those operators since later versions, the gradients' on GPUs only.
    """
    import torch

    shape = (workload.cols,)
    aten, functional = torch.ops.aten, torch.nn.functional
    if workload.is_backward:
        if not (t["x"].is_cuda and hasattr(aten, "_fused_rms_norm_backward")):
            return {"torch": lambda: _torch_gradients(t)}
        operands = (t["dy"], t["x"], shape, t["rstd"][:, None], t["gamma"], [True, True])
        return {"torch": lambda: aten._fused_rms_norm_backward(*operands)}
    if not hasattr(aten, "_fused_rms_norm") if workload.stats else not hasattr(functional, "rms_norm"):
        return {}

    def normalise() -> Any:
        z = summed(t)
        total = (z,) if workload.has_residual else ()
        if not workload.stats:
            return (functional.rms_norm(z, shape, t["gamma"], workload.eps), *total)
        y, rstd = aten._fused_rms_norm(z, shape, t["gamma"], workload.eps)
        return (y, *total, rstd)

    return {"torch": normalise}


def _torch_gradients(t: Tensors) -> tuple[Any, ...]:
    rstd = t["rstd"][:, None]
    x, dy, gamma = (t[name].to(rstd.dtype) for name in ("x", "dy", "gamma"))
    normal, g = x * rstd, dy * gamma
    dx = (g - normal * (g * normal).mean(dim=1, keepdim=True)) * rstd
    stored = t["x"].dtype
    return dx.to(stored), (dy * normal).sum(dim=0).to(stored)
