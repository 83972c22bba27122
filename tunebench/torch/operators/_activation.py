"""Activations after a product or a convolution: by name, or as an expression in x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.errors import InputError
from tunebench.expression import Node, canonical, names, parse
from tunebench.torch.operators._expression_operands import evaluate
from tunebench.workloads.operators._activation import IDENTITY

__all__ = ["ACTIVATIONS", "activation_gradient", "apply_activation", "canonical_activation", "expression"]

ACTIVATIONS: dict[str, Any] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
"""Activations with a name; gelu is the exact one, not the tanh approximation."""


def canonical_activation(activation: str) -> str:
    """Return the canonical text of an activation.

    Raises:
        InputError: if it is neither a name nor an expression in x.
    """
    return activation if activation in ACTIVATIONS else _canonical(activation)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _canonical(text: str) -> str:
    canonical_text = canonical(text)
    if names(parse(canonical_text)) != ("x",):
        raise InputError(
            f"an activation must be one of {', '.join(ACTIVATIONS)} or an expression in x alone, "
            f"got {canonical_text}"
        )
    return canonical_text


def expression(activation: str) -> str:
    """Return an activation as workloads write it: its name applied to x, or its expression."""
    if activation == "none":
        return IDENTITY
    return f"{activation}(x)" if activation in ACTIVATIONS else activation


def apply_activation(activation: str, z: Tensor) -> Tensor:
    """Apply an activation by torch."""
    function = ACTIVATIONS.get(activation)
    made: Tensor = evaluate(_tree(activation), {"x": z}) if function is None else function(z)
    return made


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # which Dynamo cannot read
def _tree(text: str) -> Node:
    return parse(text)


def activation_gradient(activation: str, z: Tensor, dy: Tensor) -> Tensor:
    """Return the gradient before an activation; it can be differentiated again."""
    is_differentiated = torch.is_grad_enabled()
    if activation == "relu":
        return dy * (z > 0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(dy, z)
    if (
        activation == "silu" and not is_differentiated
    ):  # torch has the second gradient of silu, but not of silu_backward
        return torch.ops.aten.silu_backward(dy, z)
    with torch.enable_grad():
        before = z if z.requires_grad else z.detach().requires_grad_()
        (dz,) = torch.autograd.grad(
            apply_activation(activation, before), before, dy, create_graph=is_differentiated
        )
    return dz
