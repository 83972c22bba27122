"""Elementwise prologues of matrix products, for gemm and conv2d.

A prologue is an expression in `x`, an element of the left operand, and optionally in `scale` and `shift`,
which hold one number for each k (each input channel): the inputs `pre_scale` and `pre_shift`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tunebench._figure import significant
from tunebench._lazy import np
from tunebench.dtype import DType, numpy_dtype, storage
from tunebench.errors import InputError
from tunebench.expression import Name, names, parse, write
from tunebench.workload import Tensor, Workload
from tunebench.workloads.common.accumulation import row_blocks
from tunebench.workloads.common.expression_value import Range, evaluate, span
from tunebench.workloads.common.expression_workload import ELEMENTS_AT_ONCE, LARGEST_OUT, substitute
from tunebench.workloads.operators.elementwise import Elementwise

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["PREFIX", "applied", "chain", "check", "draw", "is_finite_at_zero", "reach", "tensors", "vectors"]

PREFIX = "pre_"
"""Prefix of the names of the prologue's inputs."""

_RANGES: Mapping[str, Range] = {"x": (-8.0, 8.0), "scale": (0.5, 1.5), "shift": (-1.0, 1.0)}
"""Range from which each name is drawn; out of 1e12 normal numbers none is expected beyond 8."""


def vectors(expression: str) -> tuple[str, ...]:
    """Return which of scale and shift an expression uses, in this order."""
    used = names(parse(expression))
    return tuple(name for name in ("scale", "shift") if name in used)


def tensors(expression: str, extent: int, dtype: DType) -> tuple[Tensor, ...]:
    """Return the inputs of a prologue in addition to x.

    Args:
        expression: The prologue.
        extent: Length of each input.
        dtype: Type of each input.
    """
    return tuple(Tensor(name=PREFIX + name, shape=(extent,), dtype=dtype) for name in vectors(expression))


def draw(tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
    """Draw scale and shift from the ranges that `check` verifies; return None for any other tensor."""
    if not tensor.name.startswith(PREFIX):
        return None
    drawn: Array = rng.uniform(*_RANGES[tensor.name.removeprefix(PREFIX)], tensor.shape)
    return drawn.astype(numpy_dtype(tensor.dtype))


def _largest(expression: str) -> float:
    """Return the largest magnitude of a prologue; infinity if it may have no value."""
    image = span(parse(expression), _RANGES)
    return math.inf if image is None else max(map(abs, image))


def reach(expression: str, terms: int) -> float:
    """Return the limit of the magnitude of sums of `terms` products of a prologue with normal numbers.

    A few normal numbers added are included. Out of 1e12 sums none is expected to exceed the limit. Reason:
    for any values of the prologue, such a sum is a normal number with a deviation of at most sqrt(terms)
    times the largest value.
    """
    return 8.0 * _largest(expression) * math.sqrt(terms) + 16.0


def check(operator: str, expression: str, dtype: DType, out: DType, terms: int, factor: float = 1.0) -> None:
    """Check that a prologue is an expression in x, scale and shift whose values and sums are finite.

    Args:
        operator: Operator name, for messages.
        expression: The prologue.
        dtype: Type in which products are computed.
        out: Type of the result.
        terms: Number of products per sum.
        factor: Largest factor applied to sums.

    Raises:
        InputError: If the expression has other names, may have no finite value, or the type admits no
            prologue.
    """
    if dtype in ("e4m3", "i8"):
        raise InputError(
            f"{operator}: {dtype} is multiplied as it is, got pre={expression}; f32, tf32, f16 and bf16 can "
            "have a function ahead of the product"
        )
    used = names(parse(expression))
    if "x" not in used or not set(used) <= _RANGES.keys():
        raise InputError(
            f"{operator}: pre={expression} must be an expression in x, and in scale and shift if need be; "
            f"it has {', '.join(used) or 'none'}"
        )
    if _largest(expression) > LARGEST_OUT.get(dtype, 3.4e38):
        raise InputError(
            f"{operator}: pre={expression} may divide by 0, leave the domain of log, sqrt or rsqrt, or "
            f"overflow f32 or {dtype}, where x is within 8 of 0, scale in {_RANGES['scale']} and shift in "
            f"{_RANGES['shift']}: nothing could be checked. Keep arguments positive (abs(x)+0.01), or limit "
            "them (min, max)"
        )
    largest_sum = factor * reach(expression, terms)
    if largest_sum > LARGEST_OUT.get(out, 3.4e38):
        raise InputError(
            f"{operator}: sums of pre={expression} may be up to {significant(largest_sum, 3)}, more than "
            f"the largest {out}; limit the values (min, max), or choose a wider out="
        )


def is_finite_at_zero(expression: str) -> bool:
    """Return whether the prologue has a value where all its inputs are 0, as in padding."""
    return span(parse(expression), dict.fromkeys(_RANGES, (0.0, 0.0))) is not None


def applied(
    expression: str, x: Array64, numbers: Mapping[str, Array64], dtype: DType
) -> tuple[Array64, Array64]:
    """Return the operand after the prologue, and the error bound of a kernel's operand.

    A kernel computes the prologue in f32 and rounds to the storage type of the operand, like an elementwise
    kernel that writes it to memory. Rounding is monotone: an element differs only if its error crosses a
    rounding boundary.

    Args:
        expression: The prologue.
        x: The operand, any shape.
        numbers: Scale and shift, broadcastable to x.
        dtype: Type in which products are computed.

    Returns:
        Value and error bound, both of the shape of x.
    """
    tree, stored = parse(expression), numpy_dtype(storage(dtype))
    value, error = np.empty((2, *x.shape))
    whole = {name: np.broadcast_to(number, x.shape) for name, number in numbers.items()}
    for part in row_blocks(len(x), x[:1].size, ELEMENTS_AT_ONCE):
        operands = {"x": x[part], **{name: number[part] for name, number in whole.items()}}
        exact, off = evaluate(tree, operands)
        if storage(dtype) == "f32":
            value[part], error[part] = exact, off
            continue
        with np.errstate(over="ignore"):
            low, at, high = (v.astype(stored).astype(np.float64) for v in (exact - off, exact, exact + off))
        value[part], error[part] = at, np.maximum(high - at, at - low)
    return value, error


def chain(
    expression: str,
    x: Tensor,
    shape: tuple[int, int],
    lies: Literal["vectors", "columns"],
) -> Workload:
    """Return the prologue as a separate elementwise workload with the same inputs.

    Args:
        expression: The prologue.
        x: The operand.
        shape: Rows and columns of the operand, seen as a matrix.
        lies: Whether scale and shift hold a number for each column (`vectors`) or for each row (`columns`).

    Raises:
        InputError: If the text of the workload is too long.
    """
    called = {Name("x"): Name(x.name), **{Name(v): Name(PREFIX + v) for v in vectors(expression)}}
    dimensions: dict[str, Any] = {"rows": shape[0], "cols": shape[1], "dtype": x.dtype}
    dimensions["expression"] = write(substitute(parse(expression), called))  # type: ignore[arg-type]
    dimensions[lies] = "+".join(PREFIX + name for name in vectors(expression))
    return Elementwise.from_dimensions(dimensions)
