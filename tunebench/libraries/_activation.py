"""Activations by NumPy and by torch."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.activation import ACTIVATIONS
from tunebench.libraries._expression import numpy_function, torch_function

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_activation", "torch_activation"]


def _silu(x: Array) -> None:
    x *= 0.5 * (1 + np.tanh(0.5 * x))  # this form cannot overflow


def _gelu(x: Array) -> None:  # NumPy has no erf, and the tanh form is faster than computing it
    x *= 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: Array) -> None:
    np.maximum(x, 0, out=x)


def _sigmoid(x: Array) -> None:
    x[...] = 0.5 * (1 + np.tanh(0.5 * x))


_IN_PLACE: Mapping[str, Callable[[Array], None]] = {
    "none": lambda x: None,
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "sigmoid": _sigmoid,
}
"""Activations that are faster in place than as NumPy's operations of their definition, by name."""


_BY_EXPRESSION = {record.expression: record for record in ACTIVATIONS.values()}


def numpy_activation(activation: str) -> Callable[[Array], None] | None:
    """Return an in-place activation of an f32 array, or None if NumPy lacks one of its functions.

    Args:
        activation: A name, none, or an expression in x.
    """
    if activation in _IN_PLACE:
        return _IN_PLACE[activation]
    record = ACTIVATIONS.get(activation)
    function = numpy_function(record.expression if record else activation)
    if function is None:
        return None

    def apply(x: Array) -> None:
        x[...] = function(x)

    return apply


def torch_activation(activation: str, device: Any = None) -> Callable[[Any], Any]:
    """Return torch's activation of a tensor.

    Args:
        activation: A name, none, or an expression in x; that of a name is computed by one function.
        device: Device of the tensor, for an expression.
    """
    import torch

    if activation == "none":
        return lambda x: x
    record = _BY_EXPRESSION.get(activation) or ACTIVATIONS.get(activation)
    if record is None:
        return torch_function(activation, device)
    return functools.partial(operator.attrgetter(record.torch)(torch), **record.arguments)
