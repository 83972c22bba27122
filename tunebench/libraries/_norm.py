"""Sums before a normalisation."""

from __future__ import annotations

from typing import Any

from tunebench.libraries import Tensors

__all__ = ["summed"]


def summed(tensors: Tensors) -> Any:
    """Return x plus bias and residual, if there are any, as NumPy arrays or torch tensors."""
    z = tensors["x"]
    for name in ("bias", "residual"):
        if name in tensors:
            z = z + tensors[name]
    return z
