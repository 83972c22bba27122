"""Sums, means, maxima and minima of an expression in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tunebench.errors import InputError, UnknownName
from tunebench.expression import canonical, names, parse
from tunebench.torch._tensor import unsupported_reason
from tunebench.torch.operators._custom_op import CustomOp, OpCall, dispatch, is_differentiated, run_by_torch
from tunebench.torch.operators._expression_operands import (
    MOST_TENSORS,
    SCHEMA,
    ExpressionOperands,
    dimensions,
    element,
    evaluate,
    matrix_operands,
    order,
    shape_of,
    whole,
)
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
    given, end = ExpressionOperands.of(expression, operands), canonical(then)
    if reduce not in LIBRARY:
        raise UnknownName("reduction", str(reduce), LIBRARY)
    if len(names(parse(end))) != 1:
        raise InputError(f"then={end} must have exactly one name, that of the result, such as rsqrt(x+1e-5)")
    axes = None if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)

    def fallback() -> Tensor:
        return _by_torch(evaluate(parse(given.text), operands), reduce, axes, end)

    if not 0 < len(given.tensors) <= MOST_TENSORS:
        return run_by_torch("reduce", f"no tensors, or more than {MOST_TENSORS}", fallback)
    if is_differentiated(given.tensors):
        return run_by_torch("reduce", "gradients of expressions are computed by torch", fallback)
    attributes = (given.text, given.numbers, reduce, axes, end)
    pick = _single if axes is None or len(axes) == len(shape_of(given.tensors)) else None
    return dispatch(REDUCTION, "reduce", given.padded, attributes, _call_of, fallback, pick)


def _by_torch(elements: Tensor, reduce: str, axes: tuple[int, ...] | None, end: str) -> Tensor:
    over = tuple(range(elements.ndim)) if axes is None else axes
    reduced = LIBRARY[reduce](elements, dim=over)
    result: Tensor = evaluate(parse(end), {names(parse(end))[0]: reduced})
    return result


def _single(result: Tensor) -> Tensor:
    return result.reshape(())


def _call_of(*given: Any) -> OpCall | str:
    *padded, text, numbers, reduce, axes, end = given
    reason = unsupported_reason(padded)
    if reason is not None:
        return reason
    extents = len(shape_of(padded))
    if not extents or any(not -extents <= axis < extents for axis in axes or ()):
        return "axes that do not exist"
    over = tuple(range(extents)) if axes is None else tuple(sorted({axis % extents for axis in axes}))
    is_last = over == tuple(range(extents - len(over), extents))
    if not is_last and over != tuple(range(len(over))):
        return "axes that are neither the first nor the last"
    found = matrix_operands(padded, text, numbers, inner=len(over) if is_last else extents - len(over))
    if isinstance(found, str):
        return found
    attributes = (*found.attributes, reduce, "cols" if is_last else "rows", end)
    return OpCall(found.views, attributes, found.outer if is_last else found.inner, found.copy_reason)


def _workload(*arguments: Any) -> Reduction:
    *elements, reduce, axis, end = arguments
    found = Reduction.from_dimensions(
        {**dimensions(tuple(elements)), "reduce": reduce, "axis": axis, "then": end}
    )
    assert isinstance(found, Reduction)
    return found


def _fallback(*arguments: Any) -> Tensor:
    *elements, reduce, axis, end = arguments
    return _by_torch(element(tuple(elements)), reduce, (1,) if axis == "cols" else (0,), end)


def _fake(*arguments: Any) -> Tensor:
    first = whole(arguments[:MOST_TENSORS])
    return first.new_empty(first.shape[0 if arguments[-2] == "cols" else 1])


REDUCTION = CustomOp(
    f"reduction({SCHEMA}, str reduce, str axis, str then) -> Tensor",
    MOST_TENSORS,
    _workload,
    _fallback,
    _fake,
    order=lambda *arguments: order(arguments[:-3]),
    key=lambda *attributes: (*attributes[:4], len(attributes[4]), *attributes[5:]),
)
