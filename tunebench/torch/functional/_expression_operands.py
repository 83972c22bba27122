"""Operands of expressions, for the operators elementwise and reduction."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tunebench.activation import ACTIVATIONS
from tunebench.errors import InputError
from tunebench.expression import Name, Node, Number, canonical, names, parse
from tunebench.torch._tensor import DTYPES
from tunebench.torch.functional.custom_op import (
    CustomOp,
    OpCall,
    OperandView,
    dispatch,
    is_differentiated,
    run_by_torch,
)

__all__ = [
    "MOST_TENSORS",
    "SCHEMA",
    "ExpressionOperands",
    "dimensions",
    "dispatch_expression",
    "element",
    "evaluate",
    "matrix_call",
    "order",
    "shape_of",
    "whole",
]

MOST_TENSORS = 8
"""Most tensors of an expression."""
SCHEMA = ", ".join(
    [
        "Tensor t0",
        *(f"Tensor? t{i}" for i in range(1, MOST_TENSORS)),
        "str expression, str vectors, str columns, str scalars, float[] values",
    ]
)
"""Schema of the parameters of an expression."""

FUNCTIONS: dict[str, Any] = {
    "abs": torch.abs,
    "cos": torch.cos,
    "sin": torch.sin,
    "erf": torch.erf,
    "exp": torch.exp,
    "log": torch.log,
    "max": torch.maximum,
    "min": torch.minimum,
    "round": torch.round,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "step": lambda x: (x > 0).to(x.dtype),
    "neg": torch.neg,
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "eq": lambda x, y: torch.eq(x, y).to(x.dtype),
    "le": lambda x, y: torch.le(x, y).to(x.dtype),
    "lt": lambda x, y: torch.lt(x, y).to(x.dtype),
    "ne": lambda x, y: torch.ne(x, y).to(x.dtype),
    "where": lambda c, x, y: torch.where(c != 0, x, y),
    **{
        record.name: operator.attrgetter(record.torch)(torch)
        for record in ACTIVATIONS.values()
        if record.is_function
    },
}


def evaluate(node: Node, operands: Mapping[str, Any]) -> Any:
    """Evaluate an expression by torch, one operation at a time."""
    if isinstance(node, Name):
        return operands[node.name]
    if isinstance(node, Number):
        return node.value
    arguments = [evaluate(argument, operands) for argument in node.arguments]
    if not any(isinstance(argument, Tensor) for argument in arguments):
        return _evaluate_numbers(node.operation, arguments)
    like = next(argument for argument in arguments if isinstance(argument, Tensor))
    as_tensors = [a if isinstance(a, Tensor) else like.new_tensor(a) for a in arguments]
    return FUNCTIONS[node.operation](*as_tensors)


def _evaluate_numbers(operation: str, arguments: list[float]) -> float:
    return float(FUNCTIONS[operation](*(torch.tensor(a, dtype=torch.float64) for a in arguments)))


@dataclass(frozen=True, slots=True)
class ExpressionOperands:
    """Values of the names in an expression.

    Attributes:
        text: Canonical text of the expression.
        tensors: Its tensors, in the order in which their names first appear.
        numbers: Its numbers, each with its name.
    """

    text: str
    tensors: tuple[Tensor, ...]
    numbers: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, expression: str, operands: Mapping[str, Tensor | float]) -> ExpressionOperands:
        """Match operands with the names of an expression.

        Args:
            expression: Text of the expression.
            operands: Tensor or number of each name.

        Raises:
            InputError: if a name has no operand, an operand no name, or the expression is invalid.
        """
        text = canonical(expression)
        used = _names(text)
        if set(used) != set(operands):
            raise InputError(
                f"{text} has the names {', '.join(used)}, but the operands are {', '.join(operands)}"
            )
        values = [(name, operands[name]) for name in used]
        return cls(
            text,
            tuple(value for _, value in values if isinstance(value, Tensor)),
            tuple((name, value) for name, value in values if not isinstance(value, Tensor)),
        )


def dispatch_expression(
    op: CustomOp,
    function: str,
    expression_operands: ExpressionOperands,
    attributes: tuple[Any, ...],
    call_of: Callable[..., OpCall | str],
    fallback: Callable[[], Tensor],
    pick: Callable[[Any], Any] | None = None,
) -> Tensor:
    """Run an expression by a tuned kernel or by torch; see `dispatch` for the arguments."""
    count = len(expression_operands.tensors)
    if not 0 < count <= MOST_TENSORS:
        return run_by_torch(function, f"no tensors, or more than {MOST_TENSORS}", fallback)
    if is_differentiated(expression_operands.tensors):
        return run_by_torch(function, "gradients of expressions are computed by torch", fallback)
    operands = (*expression_operands.tensors, *[None] * (MOST_TENSORS - count))
    attributes = (expression_operands.text, expression_operands.numbers, *attributes)
    return dispatch(op, function, operands, attributes, call_of, fallback, pick)


def matrix_call(
    padded: Sequence[Any],
    text: str,
    numbers: Sequence[tuple[str, float]],
    inner: int,
    result: tuple[int, ...],
    *attributes: str,
) -> OpCall | str:
    """Return the operator call of an expression of a matrix, or why its operands do not form one.

    The last `inner` axes are the matrix's columns. A tensor with the shape of those axes is a vector. A
    tensor with extents of 1 in their place is a column, with one element per row.

    Args:
        padded: Tensors, or None for those that are absent.
        text: Canonical text of the expression.
        numbers: Numbers of the expression with their names.
        inner: Number of axes that are columns.
        result: Shape of the result.
        attributes: The operator's arguments after those of the expression.
    """
    tensors = [tensor for tensor in padded if tensor is not None]
    shape = shape_of(tensors)
    outer, last = shape[: len(shape) - inner], shape[len(shape) - inner :]
    numbered = {name for name, _ in numbers}
    vectors: list[str] = []
    columns: list[str] = []
    views: list[OperandView | None] = []
    for name, tensor in zip((n for n in _names(text) if n not in numbered), tensors, strict=True):
        if tensor.shape == shape:
            views.append(OperandView((math.prod(outer), math.prod(last))))
        elif tensor.shape == last:
            vectors.append(name)
            views.append(OperandView((math.prod(last),)))
        elif tensor.shape == (*outer, *[1] * inner):
            columns.append(name)
            views.append(OperandView((math.prod(outer),)))
        else:
            return "shapes that are neither equal nor those of a vector or a column"
    is_dense = all(tensor.is_contiguous() for tensor in tensors)
    values = [float(value) for _, value in numbers]
    described = (text, "+".join(vectors), "+".join(columns), "+".join(sorted(numbered)), values)
    views += [None] * (MOST_TENSORS - len(tensors))
    copy_reason = None if is_dense else "elements that are not contiguous"
    return OpCall(tuple(views), (*described, *attributes), result, copy_reason)


def shape_of(tensors: Sequence[Any]) -> tuple[int, ...]:
    """Return the shape of the largest tensor."""
    present: list[Tensor] = [tensor for tensor in tensors if tensor is not None]
    return tuple(max(present, key=lambda tensor: (tensor.numel(), tensor.ndim)).shape)


def dimensions(*arguments: Any) -> dict[str, Any]:
    """Return the workload dimensions of an operator call from its arguments."""
    *padded, text, vectors, columns, scalars, _ = arguments
    first = whole(padded)
    rows, cols = first.shape
    return {
        "rows": rows,
        "cols": cols,
        "dtype": DTYPES[first.dtype],
        "expression": text,
        "vectors": vectors,
        "columns": columns,
        "scalars": scalars,
    }


def whole(tensors: Any) -> Tensor:
    """Return the first tensor that is a matrix."""
    return next(tensor for tensor in tensors if tensor is not None and tensor.ndim == 2)


def order(*arguments: Any) -> list[Any]:
    """Return the kernel's inputs, in the order in which their names first appear."""
    *padded, text, _, _, scalars, values = arguments
    tensors = iter([tensor for tensor in padded if tensor is not None])
    numbers = iter(values)
    listed = set(filter(None, scalars.split("+")))
    return [next(numbers) if name in listed else next(tensors) for name in _names(text)]


def element(*arguments: Any) -> Tensor:
    """Evaluate the expression by torch, from the operator's arguments."""
    *_, text, _, columns, _, _ = arguments
    listed = set(filter(None, columns.split("+")))
    values = dict(zip(_names(text), order(*arguments), strict=True))
    spread = {name: value[:, None] if name in listed else value for name, value in values.items()}
    result: Tensor = evaluate(parse(text), spread)
    return result


@functools.cache
def _names(text: str) -> tuple[str, ...]:
    return names(parse(text))
