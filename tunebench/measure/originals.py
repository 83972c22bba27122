"""Detection of functions that a kernel's Python code replaced in the measuring process.

User code runs in the process that times and verifies it. `Originals` remembers what the modules that time and
verify contain before user code is loaded, names what was replaced since, and restores it. It detects the
known ways to fake a time or a reference; it is no sandbox.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from operator import call, is_not
from typing import Any

from tunebench import _lazy

__all__ = ["Originals"]

_MODULES = (
    *("builtins", "gc", "itertools", "json", "math", "os", "pickle", "random", "secrets", "signal"),
    *("statistics", "struct", "threading", "time", "numpy", "numpy.random"),
)
_PACKAGES = ("tunebench.measure", "tunebench.workload", "tunebench.workloads", "tunebench.outcome")
_CODE = ("__code__", "__defaults__", "__kwdefaults__")


class Originals:
    """References to the functions that time and verify, taken before user code runs.

    Only modules that are imported now are covered.
    """

    def __init__(self) -> None:
        covered = [module for name, module in list(sys.modules.items()) if _is_covered(name)]
        self._held = [(owner, name, value) for module in covered for owner, name, value in _contents(module)]
        self._held += [(_lazy.np, name, value) for name, value in vars(_lazy.np).items() if callable(value)]
        self._reads = [_reader(owner, name) for owner, name, _ in self._held]
        self._values = [value for _, _, value in self._held]

    def restore(self) -> str | None:
        """Restore everything that was replaced.

        Returns:
            The name of the first function that was replaced, such as ``"time.perf_counter_ns"``, or None.
        """
        replaced = None
        # In C: thousands of functions are compared twice per measurement.
        differs = list(map(is_not, map(call, self._reads), self._values))
        for owner, name, value in itertools.compress(self._held, differs):
            replaced = replaced or f"{_name_of(owner)}.{name}"
            setattr(owner, name, value)
        return replaced


def _is_covered(name: str) -> bool:
    return name in _MODULES or name in _PACKAGES or name.startswith(tuple(f"{p}." for p in _PACKAGES))


def _contents(module: types.ModuleType) -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions and classes of a module, the functions of its classes, and the code of each."""
    for name, value in list(vars(module).items()):
        if not callable(value):
            continue
        yield module, name, value
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, types.FunctionType):
            yield from _code_of(value)
        elif isinstance(value, type):
            for attribute, member in list(vars(value).items()):
                if isinstance(member, types.FunctionType):
                    yield value, attribute, member
                    yield from _code_of(member)
                elif isinstance(member, property | classmethod | staticmethod):
                    yield value, attribute, member


def _code_of(function: types.FunctionType) -> Iterator[tuple[Any, str, Any]]:
    for name in _CODE:
        yield function, name, getattr(function, name)


def _reader(owner: Any, name: str) -> Callable[[], Any]:
    """Return a function that returns the present value of a name."""
    if name in _CODE:
        return functools.partial(getattr, owner, name)
    return functools.partial(vars(owner).get, name)


def _name_of(owner: Any) -> str:
    if owner is _lazy.np:
        return "numpy"
    module = getattr(owner, "__module__", None)
    return f"{module}.{owner.__qualname__}" if module else str(owner.__name__)
