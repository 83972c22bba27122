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
    x *= 0.5 * (1 + np.tanh(0.5 * x))  # no power overflows


def _gelu(x: Array) -> None:  # NumPy has no erf: the tanh form costs it less than erf would
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
"""What turns an f32 array into its activation, in its place."""


def numpy_activation(activation: str) -> Callable[[Array], None] | None:
    """Return what turns an f32 array into its activation, in its place; None where NumPy has not all of it.

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
    """Return torch's function of the activation of a tensor.

    Args:
        activation: A name, or an expression in x.
        device: Of the tensor, for an expression.
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
