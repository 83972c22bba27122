"""layernorm by NumPy and by torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.measure.libraries import Call, single
from tunebench.workloads.operators.layernorm import LayerNorm

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]

Tensors = Mapping[str, Any]


def numpy_call(workload: LayerNorm, inputs: Mapping[str, Array]) -> Call:
    """Normalise by NumPy."""
    tensors = single(inputs)
    return lambda: _numpy(workload, tensors)


def _numpy(workload: LayerNorm, t: Tensors) -> Array:
    x = t["x"]
    centred = x - x.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((centred * centred).mean(axis=1, keepdims=True) + workload.eps)
    y: Array = centred * scale * t["gamma"] + t["beta"]
    return y


def torch_calls(workload: LayerNorm, t: Tensors) -> dict[str, Call]:
    """Return torch's layer_norm."""
    from torch.nn import functional

    shape = (workload.cols,)
    return {"torch": lambda: functional.layer_norm(t["x"], shape, t["gamma"], t["beta"], workload.eps)}
