"""softmax by NumPy and by torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.measure.libraries import Call, single
from tunebench.workloads.operators.softmax import Softmax

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]

Tensors = Mapping[str, Any]


def numpy_call(workload: Softmax, inputs: Mapping[str, Array]) -> Call:
    """Normalise by NumPy."""
    tensors = single(inputs)
    return lambda: _numpy(workload, tensors)


def _numpy(workload: Softmax, t: Tensors) -> Array:
    z = t["x"] * t["scale"] if workload.has_scale else t["x"]
    if workload.has_mask:
        z = z + t["mask"]
    e: Array = np.exp(z - z.max(axis=1, keepdims=True))
    e /= e.sum(axis=1, keepdims=True)
    return e


def torch_calls(workload: Softmax, t: Tensors) -> dict[str, Call]:
    """Return torch's softmax, after what the prologue says."""
    return {"torch": lambda: _torch(workload, t)}


def _torch(workload: Softmax, t: Tensors) -> Any:
    z = t["x"] * t["scale"] if workload.has_scale else t["x"]
    if workload.has_mask:
        z = z + t["mask"]
    return z.softmax(dim=1)
