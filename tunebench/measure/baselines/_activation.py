"""Activations by NumPy and by torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.measure.baselines._expression import numpy_function, torch_function

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["NUMPY_ACTIVATIONS", "numpy_activation", "torch_activation"]


def _silu(x: Array) -> None:
    x *= 0.5 * (1 + np.tanh(0.5 * x))  # this form cannot overflow


def _gelu(x: Array) -> None:  # NumPy has no erf, and the tanh form is faster than computing it
    x *= 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: Array) -> None:
    np.maximum(x, 0, out=x)


def _sigmoid(x: Array) -> None:
    x[...] = 0.5 * (1 + np.tanh(0.5 * x))


NUMPY_ACTIVATIONS: Mapping[str, Callable[[Array], None]] = {
    "none": lambda x: None,
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "sigmoid": _sigmoid,
}
"""In-place activations of an f32 array, by name."""


def numpy_activation(activation: str) -> Callable[[Array], None] | None:
    """Return an in-place activation of an f32 array, or None if NumPy lacks one of its functions.

    Args:
        activation: A name, or an expression in x.
    """
    if activation in NUMPY_ACTIVATIONS:
        return NUMPY_ACTIVATIONS[activation]
    function = numpy_function(activation)
    if function is None:
        return None

    def apply(x: Array) -> None:
        x[...] = function(x)

    return apply


def torch_activation(activation: str, device: Any = None) -> Callable[[Any], Any]:
    """Return torch's activation of a tensor.

    Args:
        activation: A name, or an expression in x.
        device: Device of the tensor, for an expression.
    """
    import torch
    from torch.nn import functional

    functions: dict[str, Callable[[Any], Any]] = {
        "none": lambda x: x,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "relu": functional.relu,
        "sigmoid": torch.sigmoid,
    }
    return functions[activation] if activation in functions else torch_function(activation, device)
