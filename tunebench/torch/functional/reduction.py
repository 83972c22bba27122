"""Sums, means, maxima and minima of an expression in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tunebench.errors import InputError, UnknownName
from tunebench.expression import canonical, names, parse
from tunebench.torch._tensor import unsupported_reason
from tunebench.torch.functional import _expression_operands as expressions
from tunebench.torch.functional.custom_op import CustomOp, OpCall
from tunebench.workload import Workload
from tunebench.workloads.operators.reduction import Reduction

__all__ = ["reduce"]

Axes = int | Sequence[int] | None

LIBRARY: dict[str, Any] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}


def reduce(
    expression: str,
    *,
    reduce: Literal["sum", "mean", "max", "min"] = "sum",
    axis: Axes = None,
    then: str = "x",
    **operands: Tensor | float,
) -> Tensor:
    """Reduce an expression such as ``"square(x-mean)"`` over axes, in one kernel.

    The operator elementwise lists the functions that an expression may use.

    Args:
        expression: Names, numbers, operators and functions.
        reduce: The reduction.
        axis: One axis or several; all if None. A kernel reduces the first or the last axes, torch any others.
        then: Expression of each result with one name, such as ``"rsqrt(x+1e-5)"``.
        operands: Tensor or number of each name. Tensors have the same shape, or the shape of the reduced or
            of the kept axes, or extents of 1 in their place. torch computes the reduction where gradients are
            needed.

    Raises:
        InputError: if a name has no operand, an operand no name, `then` not exactly one name, or an
            expression is invalid.
        UnknownName: if the reduction is unknown.
    """
    matched, end = expressions.ExpressionOperands.of(expression, operands), canonical(then)
    if reduce not in LIBRARY:
        raise UnknownName("reduction", str(reduce), LIBRARY)
    if len(names(parse(end))) != 1:
        raise InputError(f"then={end} must have exactly one name, that of the result, such as rsqrt(x+1e-5)")
    axes = None if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)

    def fallback() -> Tensor:
        return _by_torch(expressions.evaluate(parse(matched.text), operands), reduce, axes, end)

    is_single = axes is None or len(axes) == max((tensor.ndim for tensor in matched.tensors), default=0)
    pick = _single if is_single else None
    return expressions.dispatch_expression(
        REDUCTION, "reduce", matched, (reduce, axes, end), _call_of, fallback, pick
    )


def _by_torch(elements: Tensor, reduce: str, axes: tuple[int, ...] | None, end: str) -> Tensor:
    over = tuple(range(elements.ndim)) if axes is None else axes
    reduced = LIBRARY[reduce](elements, dim=over)
    result: Tensor = expressions.evaluate(parse(end), {names(parse(end))[0]: reduced})
    return result


def _single(result: Tensor) -> Tensor:
    return result.reshape(())


def _call_of(*arguments: Any) -> OpCall | str:
    *padded, text, numbers, reduce, axes, end = arguments
    reason = unsupported_reason(padded)
    if reason is not None:
        return reason
    shape = expressions.shape_of(padded)
    extents = len(shape)
    if not extents or any(not -extents <= axis < extents for axis in axes or ()):
        return "axes that do not exist"
    over = tuple(range(extents)) if axes is None else tuple(sorted({axis % extents for axis in axes}))
    is_last = over == tuple(range(extents - len(over), extents))
    if not is_last and over != tuple(range(len(over))):
        return "axes that are neither the first nor the last"
    inner, kept_extents = len(over), shape[: extents - len(over)]
    if not is_last:
        inner, kept_extents = extents - len(over), shape[len(over) :]
    side = "cols" if is_last else "rows"
    return expressions.matrix_call(padded, text, numbers, inner, kept_extents, reduce, side, end)


def _workload(*arguments: Any) -> Workload:
    *elements, reduce, axis, end = arguments
    sizes = expressions.dimensions(*elements)
    return Reduction.from_dimensions({**sizes, "reduce": reduce, "axis": axis, "then": end})


def _fallback(*arguments: Any) -> Tensor:
    *elements, reduce, axis, end = arguments
    return _by_torch(expressions.element(*elements), reduce, (1,) if axis == "cols" else (0,), end)


def _fake(*arguments: Any) -> Tensor:
    first = expressions.whole(arguments[: expressions.MOST_TENSORS])
    return first.new_empty(first.shape[0 if arguments[-2] == "cols" else 1])


REDUCTION = CustomOp(
    f"reduction({expressions.SCHEMA}, str reduce, str axis, str then) -> Tensor",
    expressions.MOST_TENSORS,
    _workload,
    _fallback,
    _fake,
    order=lambda *arguments: expressions.order(*arguments[:-3]),
    key=lambda *attributes: (*attributes[:4], len(attributes[4]), *attributes[5:]),
)
