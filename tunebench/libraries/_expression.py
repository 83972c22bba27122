"""Expressions by NumPy and by torch: one operation after the other, as in a program without fusion."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tunebench._lazy import np
from tunebench.activation import ACTIVATIONS
from tunebench.expression import Apply, Name, Node, Number, names, parse, steps
from tunebench.libraries import Tensors
from tunebench.workloads.common.expression_workload import ExpressionWorkload

__all__ = [
    "Library",
    "numpy_function",
    "numpy_library",
    "spread",
    "torch_function",
    "torch_library",
]

Operations = Mapping[str, Callable[..., Any]]

ARITHMETIC: Operations = {
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "eq": lambda x, y: (x == y) * 1.0,
    "le": lambda x, y: (x <= y) * 1.0,
    "lt": lambda x, y: (x < y) * 1.0,
    "ne": lambda x, y: (x != y) * 1.0,
}


class Library(NamedTuple):
    """A library that computes expressions.

    Attributes:
        operations: Its operations, by name.
        number: Converts a number to its type.
    """

    operations: Operations
    number: Callable[[float], Any]

    def function(self, tree: Node, tensors: Tensors) -> Callable[..., Any]:
        """Return a function that computes an expression.

        Equal operations run once. Operands are resolved beforehand: small workloads would show that time.

        Args:
            tree: The expression.
            tensors: Tensors by name; the function takes inputs that are missing here as its arguments, in
                the order in which the expression first uses them.
        """
        ordered = steps(tree)
        nodes = (*(x for step in ordered for x in step.arguments), tree)
        leaves = dict.fromkeys(x for x in nodes if not isinstance(x, Apply))
        free = [Name(name) for name in names(tree) if name not in tensors]
        constants = {
            x: self.number(x.value) if isinstance(x, Number) else tensors[x.name]
            for x in leaves
            if x not in free
        }
        slots = {node: slot for slot, node in enumerate((*constants, *free, *ordered))}
        calls = [(self.operations[step.operation], [slots[x] for x in step.arguments]) for step in ordered]

        def run(*arguments: Any) -> Any:
            values = [*constants.values(), *arguments]
            for operation, operands in calls:
                values.append(operation(*(values[slot] for slot in operands)))
            return values[-1]

        return run


def numpy_library(*trees: Node) -> Library | None:
    """Return NumPy's operations, or None if an expression needs erf or gelu, which NumPy lacks."""
    operations: Operations = {
        **ARITHMETIC,
        "abs": np.abs,
        "exp": np.exp,
        "log": np.log,
        "max": np.maximum,
        "min": np.minimum,
        "relu": lambda x: np.maximum(x, np.float32(0)),
        "round": np.rint,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "sqrt": np.sqrt,
        "square": np.square,
        "step": lambda x: (x > 0).astype(np.float32),
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "where": lambda c, x, y: np.where(c != 0, x, y),
    }
    lacks = any(step.operation not in operations for tree in trees for step in steps(tree))
    return None if lacks else Library(operations, np.float32)


def torch_library(device: Any) -> Library:
    """Return torch's operations, for tensors on a device and for numbers."""
    import torch

    @functools.cache  # created in the first run: later runs copy nothing to the device
    def number(value: float) -> Any:
        return torch.tensor(value, device=device)

    def with_tensor(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: function(*(x if torch.is_tensor(x) else number(x) for x in operands))

    operations = {
        **ARITHMETIC,
        "max": with_tensor(torch.maximum),
        "min": with_tensor(torch.minimum),
        "step": with_tensor(lambda x: (x > 0).to(x.dtype)),
        "where": with_tensor(lambda c, x, y: torch.where(c != 0, x, y)),
        **{
            name: with_tensor(getattr(torch, name))
            for name in ("abs", "cos", "erf", "exp", "log", "round", "rsqrt", "sin", "sqrt", "square")
        },
        **{
            record.name: with_tensor(operator.attrgetter(record.torch)(torch))
            for record in ACTIVATIONS.values()
            if record.is_function
        },
    }
    return Library(operations, float)


def spread(workload: ExpressionWorkload, tensors: Tensors) -> dict[str, Any]:
    """Return inputs in shapes that broadcast over the matrix: one element per row becomes a column."""
    columns = set(workload.column_names)
    return {name: tensor[:, None] if name in columns else tensor for name, tensor in tensors.items()}


def numpy_function(expression: str) -> Callable[[Any], Any] | None:
    """Return an expression in x as a function of an f32 array; None if NumPy lacks an operation of it."""
    tree = parse(expression)
    library = numpy_library(tree)
    return None if library is None else library.function(tree, {})


def torch_function(expression: str, device: Any) -> Callable[[Any], Any]:
    """Return an expression in x as a function of a tensor; torch rounds each step to its type."""
    return torch_library(device).function(parse(expression), {})
