"""Activations after a product or a convolution: by name, or as an expression in x."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from tunebench.activation import ACTIVATIONS, Activation
from tunebench.errors import InputError
from tunebench.expression import Node, canonical, names, parse
from tunebench.torch.functional._expression_operands import evaluate
from tunebench.workloads.common.activation import IDENTITY

__all__ = ["FUNCTIONS", "activation_gradient", "apply_activation", "canonical_activation", "expression"]


def _function(record: Activation) -> Callable[[Tensor], Tensor]:
    function: Callable[..., Tensor] = operator.attrgetter(record.torch)(torch)
    return functools.partial(function, **record.arguments) if record.arguments else function


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    **{name: _function(record) for name, record in ACTIVATIONS.items()},
}
"""Functions of torch by the name of the activation; gelu is the exact one, gelu_tanh the approximation."""

_NAMES = {record.expression: name for name, record in ACTIVATIONS.items()}


def canonical_activation(activation: str) -> str:
    """Return the name of an activation, or its canonical text if it has none.

    Args:
        activation: A name or an expression in x.

    Raises:
        InputError: if it is neither a name nor an expression in x.
    """
    return activation if activation in FUNCTIONS else _canonical(activation)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _canonical(text: str) -> str:
    canonical_text = canonical(text)
    if names(parse(canonical_text)) != ("x",):
        raise InputError(
            f"an activation must be one of {', '.join(FUNCTIONS)} or an expression in x alone, "
            f"got {canonical_text}"
        )
    return _NAMES.get(canonical_text, canonical_text)


def expression(activation: str) -> str:
    """Return an activation as workloads write it: an expression in x."""
    if activation == "none":
        return IDENTITY
    return ACTIVATIONS[activation].expression if activation in ACTIVATIONS else activation


def apply_activation(activation: str, z: Tensor) -> Tensor:
    """Apply an activation by torch."""
    function = FUNCTIONS.get(activation)
    made: Tensor = evaluate(_tree(activation), {"x": z}) if function is None else function(z)
    return made


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # which Dynamo cannot read
def _tree(text: str) -> Node:
    return parse(text)


def activation_gradient(activation: str, z: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient before an activation; it can be differentiated again."""
    is_differentiated = torch.is_grad_enabled()
    if activation == "relu":
        return dy.masked_fill(z <= 0, 0)
    record = ACTIVATIONS.get(activation)
    if record is not None and record.backward and not is_differentiated:
        # PyTorch cannot differentiate all of these operators again.
        backward = getattr(torch.ops.aten, record.backward)
        argument = FUNCTIONS[activation](z) if record.reads_result else z
        from_operator: Tensor = backward(dy, argument, **record.arguments)
        return from_operator
    with torch.enable_grad():
        before = z if z.requires_grad else z.detach().requires_grad_()
        (dz,) = torch.autograd.grad(
            apply_activation(activation, before), before, dy, create_graph=is_differentiated
        )
    return dz
