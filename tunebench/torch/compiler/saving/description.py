"""What a saved model needs, as plain data: versions, and sizes, layouts and types of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tunebench import __version__

__all__ = ["described", "versions"]


def versions() -> dict[str, str]:
    """Return the versions of the packages that a saved model needs."""
    return {"tunebench": __version__, "torch": str(torch.__version__)}


def described(value: Any) -> dict[str, Any]:
    """Return size, layout and type of a tensor, or the value of another input, as plain data.

    Args:
        value: The input.
    """
    if not isinstance(value, Tensor):
        return {"value": repr(value)}
    return {"shape": list(value.shape), "strides": list(value.stride()), "dtype": str(value.dtype)[6:]}
