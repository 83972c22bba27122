"""oneDNN as torch offers it to its compilers: primitives with post-operations, `torch.ops.mkldnn`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tunebench.activation import name_of
from tunebench.dtype import storage

__all__ = ["PostOperation", "computes", "post_operation", "primitive"]

PostOperation = tuple[str, list[Any], str]
"""Arguments of torch's primitives: name of an operation of each element, its numbers, its algorithm."""

_POST_OPERATIONS: Mapping[str, PostOperation] = {
    "none": ("none", [], ""),
    "relu": ("relu", [], ""),
    "sigmoid": ("sigmoid", [], ""),
    "tanh": ("tanh", [], ""),
    "silu": ("swish", [], ""),
    "hardswish": ("hardswish", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
}
"""Post-operations by activation. Source: `fx_fusion` of torch's inductor, `mkldnn_fusion.py`."""


def post_operation(activation: str) -> PostOperation | None:
    """Return the post-operation of an activation; None if oneDNN has none.

    Args:
        activation: A name, none, or an expression in x.
    """
    return _POST_OPERATIONS.get(name_of(activation))


def computes(workload: Any) -> bool:
    """Return whether oneDNN may compute a product: f32 or bf16 without prologue, of one type throughout.

    Args:
        workload: A workload with `dtype`; `pre` and `out` count if it has them.
    """
    stored = storage(workload.dtype)
    unprepared = not getattr(workload, "has_pre", False)
    return stored in ("f32", "bf16") and unprepared and getattr(workload, "out", stored) == stored


def primitive(name: str) -> Any:
    """Return torch's operator of a primitive, whose results have known shapes where torch traces it.

    Args:
        name: Its name in `torch.ops.mkldnn`.
    """
    import torch

    _register_shapes()
    return getattr(torch.ops.mkldnn, name)


@functools.cache
def _register_shapes() -> None:
    """Register the shapes of results of primitives with a second operand, for which torch has none."""
    import torch

    shapes: dict[str, Callable[..., Any]] = {
        "_linear_pointwise.binary": lambda x, other, *rest: x.new_empty(other.shape),
        "_convolution_pointwise.binary": lambda x, other, *rest: torch.empty_like(other),
    }
    for name, shape in shapes.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"mkldnn::{name}", "Meta"):
            _IMPLEMENTATIONS.append(library := torch.library.Library("mkldnn", "IMPL"))
            library.impl(name, shape, "Meta")


_IMPLEMENTATIONS: list[Any] = []
"""Registrations, which end with these objects."""
