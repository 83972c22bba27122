"""Activations by NumPy and by torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["IN_NUMPY", "in_torch"]


def _silu(x: Array) -> None:
    x *= 0.5 * (1 + np.tanh(0.5 * x))  # no power overflows


def _gelu(x: Array) -> None:  # NumPy has no erf: the tanh form costs it less than erf would
    x *= 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: Array) -> None:
    np.maximum(x, 0, out=x)


def _sigmoid(x: Array) -> None:
    x[...] = 0.5 * (1 + np.tanh(0.5 * x))


IN_NUMPY: Mapping[str, Callable[[Array], None]] = {
    "none": lambda x: None,
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "sigmoid": _sigmoid,
}
"""What turns an f32 array into its activation, in its place."""


def in_torch(activation: str) -> Callable[[Any], Any]:
    """Return torch's function of the activation of a tensor."""
    import torch
    from torch.nn import functional

    functions: dict[str, Callable[[Any], Any]] = {
        "none": lambda x: x,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "relu": functional.relu,
        "sigmoid": torch.sigmoid,
    }
    return functions[activation]
