"""layernorm by NumPy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.libraries._norm import summed
from tunebench.workloads.operators.layernorm import LayerNorm

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: LayerNorm, inputs: Tensors) -> LibraryCall:
    """Return the program that normalises, or computes the gradients, by NumPy."""
    tensors, run = single(inputs), _numpy_gradients if workload.is_backward else _numpy
    return lambda: run(workload, tensors)


def _numpy(workload: LayerNorm, t: Tensors) -> tuple[Array, ...]:
    z = summed(t)
    mean = z.mean(axis=1, keepdims=True)
    centred = z - mean
    rstd = 1 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + workload.eps)
    y = centred * rstd * t["gamma"] + t["beta"]
    total = (z,) if workload.has_residual else ()
    return (y, *total, *((mean[:, 0], rstd[:, 0]) if workload.stats else ()))


def _numpy_gradients(workload: LayerNorm, t: Tensors) -> tuple[Array, ...]:
    rstd = t["rstd"][:, None]
    normal, g = (t["x"] - t["mean"][:, None]) * rstd, t["dy"] * t["gamma"]
    along = (g * normal).mean(axis=1, keepdims=True)
    dx = (g - g.mean(axis=1, keepdims=True) - normal * along) * rstd
    return dx, (t["dy"] * normal).sum(axis=0), t["dy"].sum(axis=0)


def torch_calls(workload: LayerNorm, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's layer_norm after the sums; with statistics, or backward, the operators it calls."""
    import torch

    shape = (workload.cols,)
    aten, functional = torch.ops.aten, torch.nn.functional
    if workload.is_backward:
        # torch keeps statistics in the type of x on a CPU, and in f32 on a GPU.
        statistics_dtype = t["mean"].dtype if t["x"].is_cuda else t["x"].dtype
        mean, rstd = (t[name].to(statistics_dtype)[:, None] for name in ("mean", "rstd"))
        # Only the presence of beta counts.
        operands = (t["dy"], t["x"], shape, mean, rstd, t["gamma"], t["gamma"], [True, True, True])
        return {"torch": lambda: aten.native_layer_norm_backward(*operands)}

    def normalise() -> Any:
        z = summed(t)
        total = (z,) if workload.has_residual else ()
        if not workload.stats:
            return (functional.layer_norm(z, shape, t["gamma"], t["beta"], workload.eps), *total)
        y, mean, rstd = aten.native_layer_norm(z, shape, t["gamma"], t["beta"], workload.eps)
        return (y, *total, mean, rstd)

    return {"torch": normalise}
