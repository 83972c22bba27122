"""Evaluation of expressions one number at a time, independent of the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tunebench.expression import Name, Number

MEANINGS: dict[str, Callable[..., float]] = {
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": max,
    "min": min,
    "abs": abs,
    "erf": math.erf,
    "exp": math.exp,
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "log": math.log,
    "relu": lambda x: max(x, 0.0),
    "round": lambda x: float(round(x)),
    "rsqrt": lambda x: x**-0.5,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "sqrt": math.sqrt,
    "square": lambda x: x**2,
    "step": lambda x: 1.0 if x > 0 else 0.0,
    "sin": math.sin,
    "cos": math.cos,
    "tanh": math.tanh,
    "eq": lambda x, y: float(x == y),
    "le": lambda x, y: float(x <= y),
    "lt": lambda x, y: float(x < y),
    "ne": lambda x, y: float(x != y),
    "where": lambda c, x, y: x if c != 0 else y,
}


def meant(tree: Any, inputs: Mapping[str, float]) -> float:
    """Compute the value of an expression in f64."""
    if isinstance(tree, Name):
        return inputs[tree.name]
    if isinstance(tree, Number):
        return tree.value
    return MEANINGS[tree.operation](*(meant(argument, inputs) for argument in tree.arguments))


def rounded(tree: Any, inputs: Mapping[str, Any]) -> Any:
    """Compute in f32 with each operation rounded, like a kernel without contraction."""
    if isinstance(tree, Name):
        return np.asarray(inputs[tree.name], np.float32)
    if isinstance(tree, Number):
        return np.float32(tree.value)
    arguments = [np.asarray(rounded(argument, inputs), np.float64) for argument in tree.arguments]
    values = np.vectorize(MEANINGS[tree.operation], otypes=[np.float64])(*arguments)
    return values.astype(np.float32)
