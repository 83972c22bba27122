"""Elementwise activations in float64 and how they propagate errors, for operators with an activation.

An activation is one of a few names, each with a constant slope limit, or any expression in `x` (see
`tunebench.expression`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import names, parse
from tunebench.workloads.operators._expression import FUNCTIONS, evaluate, span
from tunebench.workloads.operators._expression_workload import LARGEST_OUT

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = [
    "IDENTITY",
    "SLOPES",
    "STEPS",
    "Activation",
    "apply",
    "check",
    "reach",
    "spread",
]

IDENTITY = "x"
"""The identity expression."""

Activation = Literal["none", "relu", "gelu", "silu", "sigmoid"]

SLOPES: dict[str, float] = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "silu": 1.1, "sigmoid": 0.25}
"""Steepest slope of each activation, rounded up: an error of x grows at most by this factor.

The slope of gelu, Phi(x) + x phi(x), has its maximum 1.1290 at x = sqrt(2); that of silu,
s + x s (1 - s) with the logistic function s, 1.0998 at x = 2.40.
"""

STEPS: dict[str, int] = {"none": 0, "relu": 0, "gelu": 6, "silu": 6, "sigmoid": 6}
"""Error of each activation, in roundings to f32 per unit of |x| (sigmoid: of its value and |x| / 4).

erff is accurate to 2 units in the last place, and 1 + erf cancels where x is negative. The power in
1 + e**-x is accurate to |x| + 2 units where it matters, and its weight is less than one half.
"""


def apply(activation: str, x: Array64) -> Array64:
    """Return the named activation of each element of x, in float64."""
    if activation == "none":
        return x
    result: Array64 = FUNCTIONS[activation].value(np, x)
    return result


# -- any expression ------------------------------------------------------------------------------------------


def reach(terms: int) -> float:
    """Return the limit of the magnitude of sums of `terms` products of normal numbers plus a few of them.

    Out of 1e12 sums none is expected to exceed it. Source: Chernoff's bound, by the moments of a product of
    two normal numbers: at most exp(s**2) per term for s up to 1/2, which yields 4 t + sqrt(4 terms t) with
    t = ln 1e12.
    """
    return 12.0 * math.sqrt(terms) + 160.0


def check(operator: str, expression: str, largest: float, out: DType) -> None:
    """Check that an activation is an expression in x with finite values for |x| up to `largest`.

    Args:
        operator: Operator name, for the message.
        expression: The activation.
        largest: Largest magnitude of x.
        out: Type of the result, which must hold the values.

    Raises:
        InputError: If the expression has other names, or values that are not finite.
    """
    tree = parse(expression)
    if names(tree) != ("x",):
        raise InputError(
            f"{operator}: act={expression} must be an expression in x, and x its only name; "
            f"it has {', '.join(names(tree)) or 'none'}"
        )
    image = span(tree, {"x": (-largest, largest)})
    if image is None or max(map(abs, image)) > LARGEST_OUT.get(out, math.inf):
        raise InputError(
            f"{operator}: act={expression} may divide by 0, leave the domain of log, sqrt or rsqrt, or "
            f"overflow f32 or {out}, where x is within {largest:.0f} of 0, as sums are: nothing could be "
            "checked. Keep arguments positive (abs(x)+0.01), or limit them (min, max)"
        )


def spread(
    expression: str, value: Array64, scale: Array64, eps: float, out: DType
) -> tuple[Array64, Array64]:
    """Return the activation of sums with errors up to ``eps * scale``, and its error in units of `eps`.

    Args:
        expression: The activation.
        value: The sums in float64.
        scale: Error of each sum in units of `eps`.
        eps: Relative error of accumulation.
        out: Type to which the result is rounded.
    """
    result, error = evaluate(parse(expression), {"x": value}, {"x": eps * scale})
    # The final rounding applies to the value including its error.
    return result, error * ((1 + unit_roundoff(out)) / eps)
