"""oneDNN as torch offers it to its compilers: primitives with post-operations, `torch.ops.mkldnn`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebench.activation import ACTIVATIONS
from tunebench.dtype import storage

__all__ = ["PostOperation", "computes", "post_operation"]

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

_NAMES = {record.expression: name for name, record in ACTIVATIONS.items()}


def post_operation(activation: str) -> PostOperation | None:
    """Return the post-operation of an activation; None if oneDNN has none.

    Args:
        activation: A name, none, or an expression in x.
    """
    return _POST_OPERATIONS.get(_NAMES.get(activation, activation))


def computes(workload: Any) -> bool:
    """Return whether oneDNN may compute a product: f32 or bf16 without prologue, of one type throughout.

    Args:
        workload: A workload with `dtype`; `pre` and `out` count if it has them.
    """
    stored = storage(workload.dtype)
    unprepared = not getattr(workload, "has_pre", False)
    return stored in ("f32", "bf16") and unprepared and getattr(workload, "out", stored) == stored
