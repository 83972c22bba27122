"""softmax, its logarithm and their gradients by NumPy and by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.workloads.operators.softmax import Softmax

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: Softmax, inputs: Tensors) -> LibraryCall:
    """Return the program that normalises, or computes the gradient, by NumPy."""
    tensors = single(inputs)
    if workload.is_backward:
        return lambda: _numpy_backward(workload, tensors)
    return lambda: _numpy(workload, tensors)


def _numpy(workload: Softmax, t: Tensors) -> Array:
    z = t["x"] * t["scale"] if workload.has_scale else t["x"]
    if workload.has_mask:
        z = z + t["mask"]
    z = z - z.max(axis=1, keepdims=True)
    e: Array = np.exp(z)
    total = e.sum(axis=1, keepdims=True)
    y: Array = z - np.log(total) if workload.log else np.divide(e, total, out=e)
    return y


def _numpy_backward(workload: Softmax, t: Tensors) -> Array:
    y, dy = t["y"], t["dy"]
    if workload.log:
        dx: Array = np.exp(y)
        dx *= dy.sum(axis=1, keepdims=True)
        np.subtract(dy, dx, out=dx)
    else:
        dx = y * dy
        dx -= y * dx.sum(axis=1, keepdims=True)
    if workload.has_scale:
        dx *= t["scale"]
    return dx


def torch_calls(workload: Softmax, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's softmax after the prologue, or its gradient followed by the prologue's."""
    return {"torch": lambda: (_torch_backward if workload.is_backward else _torch)(workload, t)}


def _torch(workload: Softmax, t: Tensors) -> Any:
    z = t["x"] * t["scale"] if workload.has_scale else t["x"]
    if workload.has_mask:
        z = z + t["mask"]
    return z.log_softmax(dim=1) if workload.log else z.softmax(dim=1)


def _torch_backward(workload: Softmax, t: Tensors) -> Any:
    """Call the operators that torch's autograd calls."""
    import torch

    aten = torch.ops.aten
    gradient = aten._log_softmax_backward_data if workload.log else aten._softmax_backward_data
    dx = gradient(t["dy"], t["y"], 1, t["y"].dtype)
    return dx * t["scale"] if workload.has_scale else dx
