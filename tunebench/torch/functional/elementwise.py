"""Elementwise expressions in one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tunebench.expression import parse
from tunebench.torch._tensor import unsupported_reason
from tunebench.torch.functional import _expression_operands as expressions
from tunebench.torch.functional.custom_op import CustomOp, OpCall
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
    matched = expressions.ExpressionOperands.of(expression, operands)

    def fallback() -> Tensor:
        result: Tensor = expressions.evaluate(parse(matched.text), operands)
        return result

    return expressions.dispatch_expression(ELEMENTWISE, "elementwise", matched, (), _call_of, fallback)


def _call_of(*arguments: Any) -> OpCall | str:
    *padded, text, numbers = arguments
    reason = unsupported_reason(padded)
    if reason is not None:
        return reason
    shape = expressions.shape_of(padded)
    return expressions.matrix_call(padded, text, numbers, 1, shape) if shape else "numbers alone"


def _fake(*arguments: Any) -> Tensor:
    first = expressions.whole(arguments[: expressions.MOST_TENSORS])
    return first.new_empty(first.shape)


ELEMENTWISE = CustomOp(
    f"elementwise({expressions.SCHEMA}) -> Tensor",
    expressions.MOST_TENSORS,
    lambda *arguments: Elementwise.from_dimensions(expressions.dimensions(*arguments)),
    expressions.element,
    _fake,
    order=expressions.order,
    key=lambda *attributes: (*attributes[:-1], len(attributes[-1])),
)
