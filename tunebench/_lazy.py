"""Modules that are imported at their first use: NumPy, and others by name.

Looking up a stored answer needs an operator's dimensions but not its arithmetic, and importing NumPy takes
longer than the rest of a lookup in a fresh process (`docs/decisions/0003-import-cost.md`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "np"]


class LazyModule:
    """A module that is imported when one of its names is read.

    Args:
        name: Full name of the module.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")
