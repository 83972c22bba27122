"""Modules that are imported at their first use: NumPy, others by name, and those of a package's names.

Looking up a stored answer needs an operator's dimensions but not its arithmetic, and importing NumPy takes
longer than the rest of a lookup in a fresh process (`docs/decisions/0003-import-cost.md`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

__all__ = ["LazyModule", "lazy_names", "np"]


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


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports the module of a name when the name is read.

    Args:
        package: Full name of the package.
        modules: Module of each name, relative to the package.
    """

    def getattr_lazy(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return getattr_lazy


if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")
