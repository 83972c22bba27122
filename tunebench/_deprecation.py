"""Old names that keep working for one version, with a warning that names the new one."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

__all__ = ["MOVED", "MovedModules", "accept_renamed_attribute", "renamed", "renamed_fields", "warn_renamed"]

T = TypeVar("T")

MOVED = {
    "tunebench.forecast.footprint": "tunebench.training.steps.footprint",
    "tunebench.forecast.parallel": "tunebench.training.steps",
    "tunebench.forecast.parallel.cluster": "tunebench.training.interconnect.cluster",
    "tunebench.forecast.parallel.collective": "tunebench.training.interconnect.collective",
    "tunebench.forecast.parallel.pipeline": "tunebench.training.schedules",
    "tunebench.forecast.utilisation": "tunebench.forecast.execution",
    "tunebench.graph.plan": "tunebench.graph.partition_plan",
    "tunebench.plan": "tunebench.training",
    "tunebench.plan.pipeline.named": "tunebench.training.schedules.registry",
    "tunebench.torch.operators": "tunebench.torch.functional",
    "tunebench.torch.operators.report": "tunebench.torch.functional.dispatch_log",
    "tunebench.training.coexecution.report": "tunebench.training.coexecution.coexecution_report",
    "tunebench.tuning.report": "tunebench.tuning.workload_report",
}
"""New name of each public module that was moved; those within a package moved with it."""


class MovedModules(MetaPathFinder, Loader):
    """Import a moved module by its old name, with a warning; all its names are those of the moved module."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return a spec for the old name of a moved module, None for any other name."""
        return ModuleSpec(fullname, self, is_package=True) if _moved_to(fullname) is not None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _MovedModule(spec.name)

    def exec_module(self, module: Any) -> None:
        """Let a module return the names of the moved one."""
        new = _moved_to(module.__name__)
        assert new is not None
        moved = importlib.import_module(new)
        warn_renamed(module.__name__, new)
        module.__getattr__ = functools.partial(getattr, moved)


class _MovedModule(ModuleType):
    """A moved module by its old name.

    Python sets it as an attribute of its package, where a function may have had the same name.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that had the name of the module, such as `tunebench.graph.plan`."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


def _moved_to(module: str) -> str | None:
    for old in sorted(MOVED, key=len, reverse=True):
        if module == old or module.startswith(f"{old}."):
            return MOVED[old] + module.removeprefix(old)
    return None


def warn_renamed(old: str, new: str, *, stacklevel: int = 3) -> None:
    """Warn that a public name has a new one.

    Args:
        old: The old name, as the caller wrote it.
        new: The name to use instead.
        stacklevel: Frames between this call and the caller's code, as `warnings.warn` counts them.
    """
    warnings.warn(
        f"{old} is deprecated and will be removed in the next version; use {new}",
        FutureWarning,
        stacklevel=stacklevel,
    )


def accept_renamed_attribute(cls: type, old: str, new: str) -> None:
    """Let a class that defines an attribute under its old name define it under the new one, with a warning.

    Args:
        cls: A new subclass; called from `__init_subclass__` of a class whose metaclass is `ABCMeta`.
        old: The old name of the attribute.
        new: The name that tunebench reads.
    """
    if old in vars(cls):
        warn_renamed(f"{cls.__name__}.{old}", new, stacklevel=5)
        setattr(cls, new, vars(cls)[old])


def renamed(
    module: str, names: Mapping[str, str], get: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that serves old names with a warning.

    Args:
        module: Name of the module.
        names: New name of each old name.
        get: Returns the value of any name that the module does not define, or raises `AttributeError`;
            None for a module that defines all its names itself.

    Returns:
        A function to assign to `__getattr__` at module level.
    """

    def getattr_renamed(name: str) -> Any:
        if name in names:
            warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
            return getattr(sys.modules[module], names[name])
        if get is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return get(name)

    return getattr_renamed


def renamed_fields(names: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that accepts and serves old field names of a dataclass, with a warning.

    Args:
        names: New field name of each old field name.
    """

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__dict__["__init__"]

        @functools.wraps(init)
        def init_renamed(self: T, *args: Any, **kwargs: Any) -> None:
            for old in names.keys() & kwargs.keys():
                warn_renamed(f"{cls.__name__}({old}=...)", f"{cls.__name__}({names[old]}=...)")
                kwargs[names[old]] = kwargs.pop(old)
            init(self, *args, **kwargs)

        def getattr_renamed(self: T, name: str) -> Any:
            if name not in names:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")
            warn_renamed(f"{cls.__name__}.{name}", f"{cls.__name__}.{names[name]}")
            return getattr(self, names[name])

        for name, method in (("__init__", init_renamed), ("__getattr__", getattr_renamed)):
            setattr(cls, name, method)
        return cls

    return decorate
