"""Elementwise expressions in one kernel."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tunebench.expression import parse
from tunebench.torch.operators._family import Family, Form, declined, is_differentiated, serve
from tunebench.torch.operators._layout import refusal
from tunebench.torch.operators._operands import (
    MOST_TENSORS,
    SCHEMA,
    Operands,
    dimensions,
    element,
    evaluate,
    order,
    seen,
    shape_of,
    whole,
)
from tunebench.workloads.operators.elementwise import Elementwise

__all__ = ["elementwise"]


def elementwise(expression: str, **operands: Tensor | float) -> Tensor:
    """Evaluate an expression such as ``"gelu(x+bias)*y"`` in one kernel.

    Its words are those of the operator elementwise.

    Args:
        expression: Names, numbers, operators and functions.
        operands: Each name's tensor or number. Tensors are of one shape, or vectors of its last extent, or of
            that shape with a last extent of 1. Where gradients are needed, torch computes the expression.

    Raises:
        InputError: if a name has no operand, an operand no name, or the expression is not one.
    """
    given = Operands.of(expression, operands)

    def library() -> Tensor:
        result: Tensor = evaluate(parse(given.text), operands)
        return result

    if not 0 < len(given.tensors) <= MOST_TENSORS:
        return declined("elementwise", f"0 tensors, or more than {MOST_TENSORS}", library)
    if is_differentiated(given.tensors):
        return declined("elementwise", "gradients of an expression are torch's", library)
    return serve(ELEMENTWISE, "elementwise", given.padded, (given.text, given.numbers), _form, library)


def _form(*given: Any) -> Form | str:
    *padded, text, numbers = given
    reason = refusal(padded)
    if reason is not None:
        return reason
    if not shape_of(padded):
        return "numbers alone"
    found = seen(padded, text, numbers, inner=1)
    if isinstance(found, str):
        return found
    return Form(found.views, found.told, (*found.outer, *found.inner), found.gathered)


def _workload(*arguments: Any) -> Elementwise:
    found = Elementwise.from_dimensions(dimensions(arguments))
    assert isinstance(found, Elementwise)
    return found


def _fake(*arguments: Any) -> Tensor:
    first = whole(arguments[:MOST_TENSORS])
    return first.new_empty(first.shape)


ELEMENTWISE = Family(
    f"elementwise({SCHEMA}) -> Tensor",
    MOST_TENSORS,
    _workload,
    lambda *arguments: element(arguments),
    _fake,
    order=lambda *arguments: order(arguments),
    key=lambda *told: (*told[:-1], len(told[-1])),
)
