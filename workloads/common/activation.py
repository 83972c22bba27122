"""Elementwise activations in float64 and how they propagate errors, for operators with an activation.

An activation is a name of `tunebench.activation`, or any expression in `x` (see `tunebench.expression`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.activation import ACTIVATIONS
from tunebench.dtype import DType, unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import names, parse
from tunebench.workloads.common.expression_value import FUNCTIONS, evaluate, span
from tunebench.workloads.common.expression_workload import LARGEST_OUT

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = [
    "IDENTITY",
    "activated",
    "apply",
    "check",
    "reach",
    "roundings",
    "spread",
]

IDENTITY = "x"
"""The identity expression."""


def apply(activation: str, x: Array64) -> Array64:
    """Return an activation of each element of x, in float64.

    Args:
        activation: A name of `tunebench.activation`, or none.
        x: The arguments.
    """
    if activation == "none":
        return x
    record = ACTIVATIONS[activation]
    if not record.is_function:
        return evaluate(parse(record.definition), {"x": x})[0]
    result: Array64 = FUNCTIONS[activation].value(np, x)
    return result


def roundings(activation: str) -> int:
    """Return the error of an activation at an exact x, in roundings to f32 per unit of |x|.

    It is 0 if `activated` includes the error.

    Args:
        activation: A name of `tunebench.activation`, or none.
    """
    return 0 if activation == "none" else ACTIVATIONS[activation].roundings


def activated(
    activation: str, value: Array64, scale: Array64, eps: float, out: DType
) -> tuple[Array64, Array64]:
    """Return an activation of sums with errors up to ``eps * scale``, and its error in units of `eps`.

    Args:
        activation: A name of `tunebench.activation`, or none.
        value: The sums in float64.
        scale: Error of each sum in units of `eps`.
        eps: Relative error of accumulation.
        out: Type to which the result is rounded.
    """
    if activation == "none":
        return value, scale
    record = ACTIVATIONS[activation]
    if record.slope is None:
        return spread(record.expression, value, scale, eps, out)
    return apply(activation, value), scale * record.slope


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
