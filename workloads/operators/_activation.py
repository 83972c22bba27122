"""Elementwise activations in float64, and how far they spread errors: shared by operators that end in one.

Some have names, and a constant slope each; any other is an expression in `x` (see `tunebench.expression`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tunebench._lazy import np
from tunebench.dtype import DType, unit_roundoff
from tunebench.errors import InputError
from tunebench.expression import Apply, Name, names, parse
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
    "take_name",
]

IDENTITY = "x"
"""The expression that leaves everything as it is."""

Activation = Literal["none", "relu", "gelu", "silu", "sigmoid"]

SLOPES: dict[str, float] = {"none": 1.0, "relu": 1.0, "gelu": 1.13, "silu": 1.1, "sigmoid": 0.25}
"""Steepest slope of each, rounded up: an error of x grows by no more.

That of gelu, Phi(x) + x phi(x), has its maximum 1.1290 at x = sqrt(2); that of silu, s + x s (1 - s) with the
logistic function s, 1.0998 at x = 2.40.
"""

STEPS: dict[str, int] = {"none": 0, "relu": 0, "gelu": 6, "silu": 6, "sigmoid": 6}
"""Roundings to f32 that computing each is worth, per unit of |x| (sigmoid: of its value and of |x| / 4).

erff is good to 2 units in the last place, and 1 + erf cancels where x is negative; the power in 1 + e**-x is
good to |x| + 2 units, where it counts, and it counts for less than half as much.
"""


def apply(activation: str, x: Array64) -> Array64:
    """Return the activation of this name of each element, in float64."""
    if activation == "none":
        return x
    result: Array64 = FUNCTIONS[activation].value(np, x)
    return result


# -- any expression ------------------------------------------------------------------------------------------


def take_name(workload: Any, places: Mapping[str, str]) -> None:
    """Let an `act` that has a name as part of an epilogue be that: one problem has one text.

    Args:
        workload: One that is being made, with dimensions `act` and `epilogue`.
        places: Epilogues with a place for a name, ``{}``, by what they are without.
    """
    tree = parse(workload.act)
    if workload.epilogue not in places or not isinstance(tree, Apply) or tree.arguments != (Name("x"),):
        return
    known = places[workload.epilogue].format(tree.operation)
    if known in workload.choices("epilogue"):
        object.__setattr__(workload, "epilogue", known)
        object.__setattr__(workload, "act", IDENTITY)


def reach(terms: int) -> float:
    """Return how large sums of `terms` products of normal numbers, and a few such numbers, may be.

    Of 1e12 of them none is expected beyond it. Source: Chernoff's bound, by the moments of a product of two
    normal numbers: exp(s**2) or less a term for s up to 1/2, which gives 4 t + sqrt(4 terms t), t = ln 1e12.
    """
    return 12.0 * math.sqrt(terms) + 160.0


def check(operator: str, expression: str, largest: float, out: DType) -> None:
    """See that an activation is an expression in x, which has a finite value up to `largest`.

    Raises:
        InputError: if it is not.
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
    """Return an activation of sums that are off by up to ``eps * scale``, and its error in units of `eps`."""
    result, error = evaluate(parse(expression), {"x": value}, {"x": eps * scale})
    # What is rounded in the end is the value with its error.
    return result, error * ((1 + unit_roundoff(out)) / eps)
