"""Float64 values of expressions and error bounds of their evaluation in f32.

Every node has a value and an error bound for each element. An operation propagates the errors of its
arguments, multiplied by its slope, and adds its own rounding. The bounds hold for the order of evaluation
in the text, including contraction of a product and a sum to one fused multiply-add (which rounds less).

Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition, 2002, chapter 3 (running
error analysis).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import unit_roundoff
from tunebench.expression import Apply, Name, Node, Number, steps

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["COMPARISONS", "FUNCTIONS", "Function", "Range", "evaluate", "flops", "span"]

U = unit_roundoff("f32")
FLUSHED = 2.0**-124
"""Smallest normal f32, 2**-126: smaller results may become 0."""
LARGEST = 3.4e38
"""Largest finite f32: larger values overflow."""
LEAST = 2.0**-10
"""Least divisor, and least argument of log, sqrt and rsqrt, for drawn inputs: errors grow below it."""

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Function:
    """A function of one argument.

    Attributes:
        value: Returns the value at x with the functions of `math` (for a number) or of NumPy (for an array).
        spread: Returns the largest change of the value where x changes by up to e; infinite where x - e is
            outside the domain.
        rounding: Returns the largest error of an implementation at an exact x, in units of f32's roundoff: a
            few units in the last place of the terms that it adds.
        flops: FLOPs of the textbook form, where an exponential or a root counts as one.
        domain: Range of arguments to which drawn inputs may lead.
        turns: Arguments of the extrema, if the function is not monotone.
        image: Range of the values, for a periodic function.
    """

    value: Callable[[Any, Any], Any]
    spread: Callable[[Any, Any], Any]
    rounding: Callable[[Any, Any], Any]
    flops: int
    domain: Range = (-LARGEST, LARGEST)
    turns: tuple[float, ...] = ()
    image: Range | None = None


def _no_rounding(x: Any, v: Any) -> Any:
    return 0.0


def _erf(m: Any, x: Any) -> Any:
    if m is math:
        return math.erf(x)
    return np.fromiter(map(math.erf, x.flat), np.float64, x.size).reshape(x.shape)


def _up_to(x: Any, e: Any, slope: Callable[[Any], Any]) -> Any:
    """Return the change for an error e, by the slope nearest to 0, for slopes that decrease away from 0."""
    with np.errstate(over="ignore"):
        return e * slope(np.maximum(np.abs(x) - e, 0.0))


def _sigmoid(m: Any, x: Any) -> Any:
    return m.exp((x - abs(x)) / 2) / (1 + m.exp(-abs(x)))  # does not overflow for either sign


def _gelu(m: Any, x: Any) -> Any:
    """Return ``x * (1 + erf(x / sqrt(2))) / 2``.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    # erfc keeps the relative accuracy that 1 + erf loses where x is negative. NumPy has neither function.
    t = x * -math.sqrt(0.5)
    if m is math:
        return 0.5 * x * math.erfc(t)
    return 0.5 * x * np.fromiter(map(math.erfc, t.flat), np.float64, t.size).reshape(t.shape)


def _silu(m: Any, x: Any) -> Any:
    """Return ``x / (1 + exp(-x))``.

    Source: Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function approximation
    in reinforcement learning", 2017.
    """
    return x * _sigmoid(m, x)


def _within(x: Any, e: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return the change where x - e is positive, infinity elsewhere."""
    inside = x > e
    with np.errstate(all="ignore"):
        return np.where(inside, change(np.where(inside, x, 1.0), np.where(inside, e, 0.0)), np.inf)


FUNCTIONS: Mapping[str, Function] = {
    "abs": Function(lambda m, x: abs(x), lambda x, e: e, _no_rounding, 1, turns=(0.0,)),
    "cos": Function(
        lambda m, x: m.cos(x), lambda x, e: np.minimum(e, 2.0), lambda x, v: 8 * abs(v), 1, image=(-1.0, 1.0)
    ),
    "erf": Function(
        _erf,
        lambda x, e: _up_to(x, e, lambda m: 2 / math.sqrt(math.pi) * np.exp(-m * m)),
        lambda x, v: 8 * abs(v),
        1,
    ),
    "exp": Function(
        lambda m, x: m.exp(x),
        lambda x, e: np.exp(x) * np.expm1(e),
        # The implementation first multiplies the argument by log2 e; the rounding is proportional to the
        # argument.
        lambda x, v: (6 + 2 * abs(x)) * v,
        1,
        domain=(-LARGEST, 80.0),
    ),
    "gelu": Function(
        _gelu,
        lambda x, e: 1.13 * e,  # the steepest slope is 1.129, at sqrt(2)
        lambda x, v: 8 * abs(x),  # the error of the distribution function is absolute
        5,
        turns=(-0.7517916,),
    ),
    "log": Function(
        lambda m, x: m.log(x),
        lambda x, e: _within(x, e, lambda x, e: -np.log1p(-e / x)),
        lambda x, v: 4 * abs(v),
        1,
        domain=(LEAST, LARGEST),
    ),
    "relu": Function(lambda m, x: (x + abs(x)) / 2, lambda x, e: e, _no_rounding, 1),
    "round": Function(
        lambda m, x: np.rint(x),
        # It is monotone: the ends of the interval bound the error.
        lambda x, e: np.maximum(np.rint(x + e) - np.rint(x), np.rint(x) - np.rint(x - e)),
        _no_rounding,
        1,
    ),
    "rsqrt": Function(
        lambda m, x: 1 / m.sqrt(x),
        lambda x, e: _within(x, e, lambda x, e: 1 / np.sqrt(x - e) - 1 / np.sqrt(x)),
        lambda x, v: 6 * v,
        2,
        domain=(LEAST, LARGEST),
    ),
    "sigmoid": Function(
        _sigmoid,
        # The slope of the logarithm of the value is at most 1; the slope itself is half that of tanh(x / 2).
        lambda x, e: np.minimum(
            _sigmoid(np, x) * np.expm1(e), _up_to(x, e, lambda m: 0.25 / np.cosh(m / 2) ** 2)
        ),
        lambda x, v: (10 + 2 * abs(x)) * v,
        4,
    ),
    "silu": Function(
        _silu,
        lambda x, e: 1.1 * e,  # the steepest slope is 1.0998, at 2.3994
        # The logistic function may underflow to 0 before the product.
        lambda x, v: (12 + 2 * abs(x)) * abs(v) + abs(x) * (FLUSHED / U),
        5,
        turns=(-1.2784645,),
    ),
    "sin": Function(
        lambda m, x: m.sin(x), lambda x, e: np.minimum(e, 2.0), lambda x, v: 8 * abs(v), 1, image=(-1.0, 1.0)
    ),
    "sqrt": Function(
        lambda m, x: m.sqrt(x),
        lambda x, e: _within(x, e, lambda x, e: e / (np.sqrt(x) + np.sqrt(x - e))),
        lambda x, v: 2 * v,
        1,
        domain=(LEAST, LARGEST),
    ),
    "square": Function(
        lambda m, x: x * x, lambda x, e: e * (2 * abs(x) + e), lambda x, v: v, 1, turns=(0.0,)
    ),
    "step": Function(
        lambda m, x: (x > 0) * 1.0,
        lambda x, e: np.where((np.abs(x) <= e) & (e > 0), 1.0, 0.0),
        _no_rounding,
        1,
    ),
    "tanh": Function(
        lambda m, x: m.tanh(x),
        lambda x, e: _up_to(x, e, lambda m: 1 / np.cosh(m) ** 2),
        lambda x, v: 8 * abs(v),
        1,
    ),
}


COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "le": operator.le,
    "lt": operator.lt,
    "ne": operator.ne,
}
"""Functions of two arguments that are 1 where they hold, else 0."""


# -- value and error -----------------------------------------------------------------------------------------


def evaluate(
    node: Node, inputs: Mapping[str, Array64], errors: Mapping[str, Array64] | None = None
) -> tuple[Array64, Array64]:
    """Return the value in float64 and a bound of the error in f32, broadcast over the inputs.

    Args:
        node: The expression.
        inputs: Values by input name.
        errors: Error bounds of the inputs, by name; an input without one is exact.

    Returns:
        Value and error bound, both of the broadcast shape.
    """
    if isinstance(node, Name):
        return inputs[node.name], (errors or {}).get(node.name, np.zeros(()))
    if isinstance(node, Number):
        rounded = float(np.float32(node.value))
        return np.asarray(node.value), np.asarray(abs(rounded - node.value))
    arguments = [evaluate(argument, inputs, errors) for argument in node.arguments]
    with np.errstate(all="ignore"):  # errors become infinite where there is no bound
        return _applied(node.operation, *arguments)


def _applied(operation: str, *arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    if operation == "where":
        return _selected(*arguments)
    (x, dx), (y, dy) = arguments[0], arguments[-1]
    if operation in FUNCTIONS:
        function = FUNCTIONS[operation]
        value, passed_on = function.value(np, x), function.spread(x, dx)
        rounding = function.rounding(np.abs(x) + dx, np.abs(value) + passed_on)
        return value, passed_on + U * rounding + FLUSHED
    if operation == "neg":
        return -x, dx
    if operation in COMPARISONS:
        value = COMPARISONS[operation](x, y) * 1.0
        return value, np.where((dx + dy > 0) & (np.abs(x - y) <= dx + dy), 1.0, 0.0)
    if operation in ("max", "min"):
        choose = np.maximum if operation == "max" else np.minimum
        value = choose(x, y)  # max and min are monotone in both arguments: the interval ends bound the error
        return value, np.maximum(choose(x + dx, y + dy) - value, value - choose(x - dx, y - dy))
    if operation in ("add", "sub"):
        value, passed_on = (x + y if operation == "add" else x - y), dx + dy
    elif operation == "mul":
        value, passed_on = x * y, np.abs(x) * dy + np.abs(y) * dx + dx * dy
    else:
        value, rest = x / y, np.abs(y) - dy
        passed_on = np.where(rest > 0, (dx + np.abs(value) * dy) / np.where(rest > 0, rest, 1.0), np.inf)
    units = 4 if operation == "div" else 1  # compilers may replace a division by a reciprocal and a product
    return value, passed_on + units * U * (np.abs(value) + passed_on) + FLUSHED


def _selected(condition: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Return the value and error of `where`; if the condition is uncertain, either value may be chosen."""
    (c, dc), (x, dx), (y, dy) = condition, first, second
    error = np.where(c != 0, dx, dy)
    either = np.maximum(dx, dy) + np.abs(x - y)
    return np.where(c != 0, x, y), np.where((dc > 0) & (np.abs(c) <= dc), either, error)


def flops(node: Node) -> int:
    """Return the FLOPs per element; a sign costs nothing, and a repeated subexpression counts once."""
    counts = {"neg": 0}
    return sum(
        FUNCTIONS[step.operation].flops if step.operation in FUNCTIONS else counts.get(step.operation, 1)
        for step in steps(node)
    )


# -- ranges --------------------------------------------------------------------------------------------------


def span(node: Node, ranges: Mapping[str, Range], least: float = LEAST) -> Range | None:
    """Return the range of values of an expression, or None if it may leave a domain or overflow.

    Args:
        node: The expression.
        ranges: Range of each input, by name.
        least: Least divisor, and least argument of log, sqrt and rsqrt, to accept.
    """
    if isinstance(node, Name):
        return ranges[node.name]
    if isinstance(node, Number):
        return (node.value, node.value)
    arguments = [span(argument, ranges, least) for argument in node.arguments]
    argument_ranges = [argument_range for argument_range in arguments if argument_range is not None]
    return _image(node, argument_ranges, least) if len(argument_ranges) == len(arguments) else None


def _image(node: Apply, arguments: list[Range], least: float) -> Range | None:
    (low, high), (first, last) = arguments[0], arguments[-1]
    if node.operation in FUNCTIONS:
        function = FUNCTIONS[node.operation]
        lowest = least if function.domain[0] > 0 else function.domain[0]
        if low < lowest or high > function.domain[1]:
            return None
        if function.image is not None:
            return function.image
        turns = [turn for turn in function.turns if low < turn < high]
        values = [function.value(math, float(x)) for x in (low, high, *turns)]
    elif node.operation == "div" and first < least and last > -least:
        return None
    elif node.operation == "neg":
        values = [-low, -high]
    elif node.operation in COMPARISONS:
        values = [0.0, 1.0]
    elif node.operation == "where":
        values = [end for chosen in arguments[1:] for end in chosen]
    else:
        operate = _OPERATIONS[node.operation]
        values = [operate(x, y) for x in (low, high) for y in (first, last)]
    return (min(values), max(values)) if max(map(abs, values)) <= LARGEST else None


_OPERATIONS: Mapping[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "max": max,
    "min": min,
}
