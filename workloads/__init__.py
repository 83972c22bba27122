"""Workloads: operators, suites of layers, and the text form of a workload.

Each operator is a module of the same name in `operators/`; each suite is a TOML file in `suites/`. `register`
adds an operator from a user's file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from tunebench.errors import InputError, UnknownName, quoted
from tunebench.workload import Workload
from tunebench.workloads import operators as _operators
from tunebench.workloads._suite_file import is_file, read

__all__ = [
    "Layer",
    "all_operators",
    "batches",
    "forget",
    "operator",
    "operator_scope",
    "parse",
    "register",
    "suite",
    "suites",
    "workload",
]

_registered: dict[str, type[Workload]] = {}


@functools.cache
def _module_names() -> tuple[str, ...]:
    return tuple(m.name for m in pkgutil.iter_modules(_operators.__path__) if not m.name.startswith("_"))


def _operator_in(module: ModuleType) -> type[Workload] | None:
    """Return the operator that a module defines; None if it defines none."""
    operators = [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Workload)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
    ]
    if len(operators) > 1:
        raise InputError(f"{module.__name__} defines more than one operator: {operators}")
    return operators[0] if operators else None


@functools.cache
def _shipped(name: str) -> type[Workload]:
    """Import the module of one operator only, so that a lookup does not import the others."""
    cls = _operator_in(importlib.import_module(f"{_operators.__name__}.{name}"))
    if cls is None or cls.operator != name:
        raise InputError(f"module {name} must define one operator of that name, found {cls}")
    return cls


def operator(name: str) -> type[Workload]:
    """Return the class of an operator by name.

    Raises:
        UnknownName: if there is no such operator.
    """
    if name in _registered:
        return _registered[name]
    if name in _module_names():
        return _shipped(name)
    hint = "An operator of your own needs its file: --variant-file, or tunebench.kernels.load_file in Python."
    raise UnknownName("operator", name, {*_module_names(), *_registered}, hint)


def all_operators() -> dict[str, type[Workload]]:
    """Return every operator by name, bundled ones first."""
    return {name: _shipped(name) for name in sorted(_module_names())} | _registered


def register(module: ModuleType) -> type[Workload] | None:
    """Add the operator that a user's module defines, if any.

    Raises:
        InputError: if another operator has the same name.
    """
    cls = _operator_in(module)
    if cls is None:
        return None
    taken = cls.operator in _module_names() or _registered.get(cls.operator, cls) is not cls
    if taken:
        raise InputError(f"{module.__name__}: operator {cls.operator!r} exists already; choose another name")
    _registered[cls.operator] = cls
    return cls


def forget(name: str) -> None:
    """Remove an operator of a user's file, so that another file may define it.

    Args:
        name: Name of the operator.
    """
    _registered.pop(name, None)


@contextlib.contextmanager
def operator_scope(*, empty: bool = False) -> Iterator[None]:
    """Forget at its end the operators that were registered within it.

    Args:
        empty: Whether the operators that were registered before are unknown within it.
    """
    before = dict(_registered)
    if empty:
        _registered.clear()
    try:
        yield
    finally:
        _registered.clear()
        _registered.update(before)


def workload(operator_name: str, **dimensions: Any) -> Workload:
    """Return an operator at one size: `workload("gemm", m=64, n=64, k=64, dtype="f16")`.

    Args:
        operator_name: Name of the operator.
        dimensions: Dimensions of the operator; those with a default may be left out.

    Raises:
        InputError: if the operator or a dimension is unknown, missing or out of range.
    """
    return operator(operator_name).from_dimensions(dimensions)


def parse(text: str) -> Workload:
    """Parse a workload: `gemm:m=64,n=64,k=64,dtype=f16`, or `resnet50/conv3_1,n=32` of a suite.

    Raises:
        InputError: if the text is invalid.
    """
    text = text.strip()
    head, colon, dimensions = text.partition(":")
    if colon:
        return _parsed(operator(head), dimensions)
    suite_name, slash, rest = text.partition("/")
    if not slash:
        files = {file.name for file in resources.files(__name__).joinpath("networks").iterdir()}
        model = ", but a model; name it by --model" if f"{text}.toml" in files else ""
        raise InputError(
            f"workload {quoted(text)} is neither operator:dimension=value,… nor suite/layer{model}; "
            f"operators: {', '.join(all_operators())}; suites: {', '.join(suites())}"
        )
    layer_name, _, changes = rest.partition(",")
    layers = {layer.name: layer for layer in _layers(_suite(suite_name))}
    if layer_name not in layers:
        raise UnknownName(f"layer of {suite_name}", layer_name, layers)
    return layers[layer_name].with_changes(changes)


@functools.lru_cache(maxsize=65536)
def _parsed(cls: type[Workload], dimensions: str) -> Workload:
    return cls.parse_dimensions(dimensions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer of a suite: a workload and how often one pass of the network runs it.

    Attributes:
        name: Name, unique in its suite.
        text: The workload, in text form.
        count: How often one pass of the network runs it.
        scales: Dimension that the batch size multiplies, such as n of images or m of tokens; empty if
            unknown.
    """

    name: str
    text: str
    count: int = 1
    scales: str = ""

    @property
    def workload(self) -> Workload:
        """The workload."""
        return parse(self.text)

    def at_batch(self, batch: int) -> Layer:
        """Return this layer at a batch size.

        Raises:
            InputError: if the batch is below 1, the layer has no `scales`, or the workload gets out of range.
        """
        if batch < 1:
            raise InputError(f"a batch must be 1 or more, got {batch}")
        if batch == 1:
            return self
        size = getattr(self.workload, self.scales, None) if self.scales else None
        if not isinstance(size, int):
            sizes = ", ".join(self.workload.dimensions())
            raise InputError(
                f"layer {self.name}: a batch of {batch} needs `scales`, a size that it multiplies: {sizes}"
            )
        return dataclasses.replace(self, text=str(self.with_changes(f"{self.scales}={size * batch}")))

    def with_changes(self, changes: str) -> Workload:
        """Return the workload with some dimensions replaced, such as `n=32`.

        Raises:
            InputError: if a change is malformed, repeated, unknown or out of range.
        """
        base = self.workload
        dimensions = base.split_dimensions(str(base).partition(":")[2])
        return type(base).from_dimensions(dimensions | base.split_dimensions(changes))


def suites() -> tuple[str, ...]:
    """Return the names of the suites."""
    folder = resources.files(__name__).joinpath("suites")
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


@functools.cache
def _suite(name: str) -> dict[str, Any]:
    if name not in suites():
        raise UnknownName("suite", name, suites())
    text = resources.files(__name__).joinpath("suites", f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def batches(suite_name: str) -> tuple[int, ...]:
    """Return the usual batch sizes of a suite, 1 first.

    Raises:
        UnknownName: if there is no such suite.
    """
    return tuple(_suite(suite_name)["batches"])


def suite(name: str | Path, batch: int = 1) -> tuple[Layer, ...]:
    """Return the layers of a suite, in network order, each name once.

    Args:
        name: Name of the suite, or path of a ``.toml`` file in the form of `suites/*.toml`. The file may
            leave out `count` (default 1), and `scales` if the batch is 1.
        batch: Batch size; any number. `batches` lists the usual ones.

    Raises:
        UnknownName: if there is no such suite.
        InputError: if the file is invalid, the batch is below 1, or a layer does not support the batch.
    """
    layers = _of_file(Path(name)) if is_file(name) else _layers(_suite(str(name)))
    return tuple(layer.at_batch(batch) for layer in layers)


def _of_file(path: Path) -> tuple[Layer, ...]:
    """Return the layers of a user's file, after parsing each workload."""
    layers = _layers(read(path))
    for layer in layers:
        try:
            layer.workload  # noqa: B018 - to see whether it is one
        except InputError as error:
            raise InputError(f"{path}: layer {layer.name}: {error}") from None
    return layers


def _layers(content: dict[str, Any]) -> tuple[Layer, ...]:
    return tuple(
        Layer(name=name, text=entry["workload"], count=entry["count"], scales=entry["scales"])
        for name, entry in content["layer"].items()
    )
