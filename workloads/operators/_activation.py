"""Elementwise activations in float64, and how steep they are: shared by operators that end in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tunebench._lazy import np
from tunebench.workloads.operators._expression import FUNCTIONS

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["SLOPES", "STEPS", "Activation", "apply"]

Activation = Literal["none", "relu", "gelu", "silu", "sigmoid"]

SLOPES: dict[Activation, float] = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "silu": 1.1, "sigmoid": 0.25}
"""Steepest slope of each, rounded up: an error of x grows by no more.

That of gelu, Phi(x) + x phi(x), has its maximum 1.1290 at x = sqrt(2); that of silu, s + x s (1 - s) with the
logistic function s, 1.0998 at x = 2.40.
"""

STEPS: dict[Activation, int] = {"none": 0, "relu": 0, "gelu": 6, "silu": 6, "sigmoid": 6}
"""Roundings to f32 that computing each is worth, per unit of |x| (sigmoid: of its value and of |x| / 4).

erff is good to 2 units in the last place, and 1 + erf cancels where x is negative; the power in 1 + e**-x is
good to |x| + 2 units, where it counts, and it counts for less than half as much.
"""


def apply(activation: Activation, x: Array64) -> Array64:
    """Return the activation of this name of each element, in float64."""
    if activation == "none":
        return x
    result: Array64 = FUNCTIONS[activation].value(np, x)
    return result
