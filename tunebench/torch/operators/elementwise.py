"""Elementwise expressions in one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tunebench.expression import parse
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
from tunebench.workloads.operators.elementwise import Elementwise

__all__ = ["elementwise"]


def elementwise(expression: str, **operands: Tensor | float) -> Tensor:
    """Evaluate an expression such as ``"gelu(x+bias)*y"`` in one kernel.

    The operator elementwise lists the functions that an expression may use.

    Args:
        expression: Names, numbers, operators and functions.
        operands: Tensor or number of each name. Tensors have the same shape, or are vectors of its last
            extent, or have that shape with a last extent of 1. torch evaluates the expression where gradients
            are needed.

    Raises:
        InputError: if a name has no operand, an operand no name, or the expression is invalid.
    """
    given = ExpressionOperands.of(expression, operands)

    def fallback() -> Tensor:
        result: Tensor = evaluate(parse(given.text), operands)
        return result

    if not 0 < len(given.tensors) <= MOST_TENSORS:
        return run_by_torch("elementwise", f"no tensors, or more than {MOST_TENSORS}", fallback)
    if is_differentiated(given.tensors):
        return run_by_torch("elementwise", "gradients of expressions are computed by torch", fallback)
    return dispatch(ELEMENTWISE, "elementwise", given.padded, (given.text, given.numbers), _call_of, fallback)


def _call_of(*given: Any) -> OpCall | str:
    *padded, text, numbers = given
    reason = unsupported_reason(padded)
    if reason is not None:
        return reason
    if not shape_of(padded):
        return "numbers alone"
    found = matrix_operands(padded, text, numbers, inner=1)
    if isinstance(found, str):
        return found
    return OpCall(found.views, found.attributes, (*found.outer, *found.inner), found.copy_reason)


def _workload(*arguments: Any) -> Elementwise:
    found = Elementwise.from_dimensions(dimensions(arguments))
    assert isinstance(found, Elementwise)
    return found


def _fake(*arguments: Any) -> Tensor:
    first = whole(arguments[:MOST_TENSORS])
    return first.new_empty(first.shape)


ELEMENTWISE = CustomOp(
    f"elementwise({SCHEMA}) -> Tensor",
    MOST_TENSORS,
    _workload,
    lambda *arguments: element(arguments),
    _fake,
    order=lambda *arguments: order(arguments),
    key=lambda *attributes: (*attributes[:-1], len(attributes[-1])),
)
