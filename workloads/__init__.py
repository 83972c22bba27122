"""What is computed: operators, suites, and the text form of a workload.

One operator a module in `operators/`, named as the module; one suite a TOML file in `suites/`. A user's
file adds operators with `register`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import tomllib
from dataclasses import dataclass
from importlib import resources
from types import ModuleType
from typing import Any

from tunebench.errors import InputError, UnknownName
from tunebench.workload import Workload
from tunebench.workloads import operators as _operators

__all__ = ["Layer", "operator", "operators", "parse", "register", "suite", "suites", "workload"]

_registered: dict[str, type[Workload]] = {}


def _module_names() -> tuple[str, ...]:
    return tuple(m.name for m in pkgutil.iter_modules(_operators.__path__) if not m.name.startswith("_"))


def _operator_in(module: ModuleType) -> type[Workload] | None:
    """Return the one operator a module defines, or None."""
    found = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Workload)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(found) > 1:
        raise InputError(f"{module.__name__} defines more than one operator: {found}")
    return found[0] if found else None


@functools.cache
def _shipped(name: str) -> type[Workload]:
    """Import one operator's module, and no other: a lookup pays for what it names."""
    cls = _operator_in(importlib.import_module(f"{_operators.__name__}.{name}"))
    if cls is None or cls.operator != name:
        raise InputError(f"module {name} must define one operator of that name, found {cls}")
    return cls


def operator(name: str) -> type[Workload]:
    """Return an operator's class by its name.

    Raises:
        UnknownName: listing the operators there are.
    """
    if name in _registered:
        return _registered[name]
    if name in _module_names():
        return _shipped(name)
    raise UnknownName("operator", name, {*_module_names(), *_registered})


def operators() -> dict[str, type[Workload]]:
    """Return every operator by name, shipped ones first."""
    return {name: _shipped(name) for name in sorted(_module_names())} | _registered


def register(module: ModuleType) -> type[Workload] | None:
    """Add the operator that a user's module defines, if it defines one.

    Raises:
        InputError: if its name is taken by another.
    """
    cls = _operator_in(module)
    if cls is None:
        return None
    taken = cls.operator in _module_names() or _registered.get(cls.operator, cls) is not cls
    if taken:
        raise InputError(f"{module.__name__}: operator {cls.operator!r} exists already; choose another name")
    _registered[cls.operator] = cls
    return cls


def workload(operator_name: str, **dimensions: Any) -> Workload:
    """Return an operator at one size: `workload("gemm", m=64, n=64, k=64, dtype="f16")`.

    Raises:
        InputError: if the operator or a dimension is unknown, missing or out of range.
    """
    return operator(operator_name).from_dimensions(dimensions)


def parse(text: str) -> Workload:
    """Read a workload: `gemm:m=64,n=64,k=64,dtype=f16`, or `resnet50/conv3_1,n=32` of a suite.

    Raises:
        InputError: saying what is wrong and what exists.
    """
    text = text.strip()
    head, colon, dimensions = text.partition(":")
    if colon:
        return operator(head).parse_dimensions(dimensions)
    suite_name, slash, rest = text.partition("/")
    if not slash:
        raise InputError(
            f"workload {text!r} is neither operator:dimension=value,… nor suite/layer; "
            f"operators: {', '.join(operators())}; suites: {', '.join(suites())}"
        )
    layer_name, _, changes = rest.partition(",")
    layers = {layer.name: layer for layer in suite(suite_name)}
    if layer_name not in layers:
        raise UnknownName(f"layer of {suite_name}", layer_name, layers)
    return layers[layer_name].with_changes(changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One problem of a network: a workload and how often one pass runs it."""

    name: str
    text: str
    count: int = 1

    @property
    def workload(self) -> Workload:
        """The problem at its batch size as listed."""
        return parse(self.text)

    def with_changes(self, changes: str) -> Workload:
        """Return the problem with some dimensions replaced (`n=32`)."""
        base = self.workload
        given = dict(item.split("=", 1) for item in str(base).partition(":")[2].split(","))
        for item in filter(None, changes.split(",")):
            name, equals, value = item.partition("=")
            if not equals:
                raise InputError(f"{item!r} is not of the form dimension=value")
            given[name] = value
        return type(base).from_dimensions(given)


def suites() -> tuple[str, ...]:
    """Return the names of the suites."""
    folder = resources.files(__name__).joinpath("suites")
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


@functools.cache
def suite(name: str) -> tuple[Layer, ...]:
    """Return the layers of a suite, in network order, each name once.

    Raises:
        UnknownName: listing the suites there are.
    """
    if name not in suites():
        raise UnknownName("suite", name, suites())
    text = resources.files(__name__).joinpath("suites", f"{name}.toml").read_text(encoding="utf-8")
    return tuple(
        Layer(name=layer, text=entry["workload"], count=entry.get("count", 1))
        for layer, entry in tomllib.loads(text)["layer"].items()
    )
