"""Expressions by NumPy and by torch: one operation after the other, as in a program without fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunebench._lazy import np
from tunebench.expression import Apply, Name, Node, Number, parse, steps
from tunebench.workloads.operators._expression_workload import ExpressionWorkload

__all__ = [
    "Operations",
    "numpy_function",
    "numpy_operations",
    "program",
    "spread",
    "torch_function",
    "torch_operations",
    "values",
]

Operations = Mapping[str, Callable[..., Any]]

ARITHMETIC: Operations = {
    "neg": lambda x: -x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
}


def numpy_operations() -> Operations:
    """Return NumPy's operations, which lack erf and gelu."""
    return {
        **ARITHMETIC,
        "abs": np.abs,
        "exp": np.exp,
        "log": np.log,
        "max": np.maximum,
        "min": np.minimum,
        "relu": lambda x: np.maximum(x, np.float32(0)),
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "sqrt": np.sqrt,
        "square": np.square,
        "step": lambda x: (x > 0).astype(np.float32),
        "tanh": np.tanh,
    }


def torch_operations(device: Any) -> Operations:
    """Return torch's operations, for tensors on a device and for numbers."""
    import torch
    from torch.nn import functional

    @functools.cache  # created in the first run: later runs copy nothing to the device
    def number(value: float) -> Any:
        return torch.tensor(value, device=device)

    def with_tensor(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: function(*(x if torch.is_tensor(x) else number(x) for x in given))

    return {
        **ARITHMETIC,
        "gelu": with_tensor(functional.gelu),
        "max": with_tensor(torch.maximum),
        "min": with_tensor(torch.minimum),
        "relu": with_tensor(torch.relu),
        "silu": with_tensor(functional.silu),
        "step": with_tensor(lambda x: (x > 0).to(x.dtype)),
        **{
            name: with_tensor(getattr(torch, name))
            for name in ("abs", "erf", "exp", "log", "rsqrt", "sigmoid", "sqrt", "square", "tanh")
        },
    }


def program(tree: Node, operations: Operations) -> tuple[tuple[Node, ...], Callable[[Sequence[Any]], Any]]:
    """Return the inputs and numbers of an expression, and a function of their values that computes it.

    Equal operations run once. Operands are resolved beforehand, since small workloads would show that time.
    """
    ordered = steps(tree)
    nodes = (*(x for step in ordered for x in step.arguments), tree)
    leaves = tuple(dict.fromkeys(x for x in nodes if not isinstance(x, Apply)))
    places = {node: place for place, node in enumerate((*leaves, *ordered))}
    calls = [(operations[step.operation], [places[x] for x in step.arguments]) for step in ordered]

    def run(given: Sequence[Any]) -> Any:
        values = list(given)
        for operation, arguments in calls:
            values.append(operation(*(values[place] for place in arguments)))
        return values[-1]

    return leaves, run


def spread(workload: ExpressionWorkload, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs in shapes that broadcast over the matrix: one element per row becomes a column."""
    columns = set(workload.column_names)
    return {name: tensor[:, None] if name in columns else tensor for name, tensor in tensors.items()}


def values(leaves: Sequence[Node], tensors: Mapping[str, Any], number: Callable[[float], Any]) -> list[Any]:
    """Return the values of leaves: tensors, and numbers in a library's type.

    Args:
        leaves: Inputs and numbers of an expression, from `program`.
        tensors: Tensors by name.
        number: Converts a number to the library's type.
    """
    return [number(x.value) if isinstance(x, Number) else tensors[x.name] for x in leaves]  # type: ignore[union-attr]


def numpy_function(expression: str) -> Callable[[Any], Any] | None:
    """Return an expression in x as a function of an f32 array; None if NumPy lacks an operation of it."""
    tree, operations = parse(expression), numpy_operations()
    if any(step.operation not in operations for step in steps(tree)):
        return None
    return _of_x(tree, operations, np.float32)


def torch_function(expression: str, device: Any) -> Callable[[Any], Any]:
    """Return an expression in x as a function of a tensor; torch rounds each step to its type."""
    return _of_x(parse(expression), torch_operations(device), float)


def _of_x(tree: Node, operations: Operations, number: Callable[[float], Any]) -> Callable[[Any], Any]:
    leaves, run = program(tree, operations)
    values = [number(leaf.value) if isinstance(leaf, Number) else None for leaf in leaves]
    at = leaves.index(Name("x"))
    before, behind = values[:at], values[at + 1 :]
    return lambda x: run([*before, x, *behind])
