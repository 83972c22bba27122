"""What is computed: operators, suites, and the text form of a workload.

One operator a module in `operators/`, named as the module; one suite a TOML file in `suites/`. A user's
file adds operators with `register`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from tunebench.errors import InputError, UnknownName
from tunebench.workload import Workload
from tunebench.workloads import operators as _operators
from tunebench.workloads._suite_file import is_file, read

__all__ = ["Layer", "batches", "operator", "operators", "parse", "register", "suite", "suites", "workload"]

_registered: dict[str, type[Workload]] = {}


@functools.cache
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
    layers = {layer.name: layer for layer in _layers(_suite(suite_name))}
    if layer_name not in layers:
        raise UnknownName(f"layer of {suite_name}", layer_name, layers)
    return layers[layer_name].with_changes(changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One problem of a network: a workload and how often one pass runs it.

    Attributes:
        name: Unique in its suite.
        text: The workload, in text form.
        count: How often one pass of the network runs it.
        scales: The dimension that the network's batch multiplies: n of images, m of tokens; empty if that is
            not told.
    """

    name: str
    text: str
    count: int = 1
    scales: str = ""

    @property
    def workload(self) -> Workload:
        """The problem."""
        return parse(self.text)

    def at_batch(self, batch: int) -> Layer:
        """Return this layer of a network that runs `batch` times as many samples at once.

        Raises:
            InputError: if the batch is not 1 or more, the layer does not tell what it multiplies, or the
                problem grows out of range.
        """
        if batch < 1:
            raise InputError(f"a batch must be 1 or more, got {batch}")
        if batch == 1:
            return self
        size = getattr(self.workload, self.scales, None) if self.scales else None
        if not isinstance(size, int):
            known = ", ".join(self.workload.dimensions())
            raise InputError(
                f"layer {self.name}: a batch of {batch} needs `scales`, a size that it multiplies: {known}"
            )
        return dataclasses.replace(self, text=str(self.with_changes(f"{self.scales}={size * batch}")))

    def with_changes(self, changes: str) -> Workload:
        """Return the problem with some dimensions replaced, such as `n=32`.

        Raises:
            InputError: if a change is malformed, given twice, unknown or out of range.
        """
        base = self.workload
        given = base.split_dimensions(str(base).partition(":")[2])
        return type(base).from_dimensions(given | base.split_dimensions(changes))


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
    """Return the batch sizes at which a suite is customarily run, 1 first.

    Raises:
        UnknownName: listing the suites there are.
    """
    return tuple(_suite(suite_name)["batches"])


def suite(name: str | Path, batch: int = 1) -> tuple[Layer, ...]:
    """Return the layers of a suite, in network order, each name once.

    Args:
        name: Of the suite; or the path of a file in the form of `suites/*.toml`, which ends in ``.toml``. It
            may leave out `count` (1), and `scales` if the batch is 1.
        batch: How many samples the network runs at once; any number, `batches` lists the customary ones.

    Raises:
        UnknownName: listing the suites there are.
        InputError: if the file cannot be used, the batch is not 1 or more, or a layer cannot have it.
    """
    layers = _of_file(Path(name)) if is_file(name) else _layers(_suite(str(name)))
    return tuple(layer.at_batch(batch) for layer in layers)


def _of_file(path: Path) -> tuple[Layer, ...]:
    """Return the layers of a user's file, of which nobody has made sure that they can be."""
    layers = _layers(read(path))
    for layer in layers:
        try:
            layer.workload  # noqa: B018 - to see whether it is one
        except InputError as error:
            raise InputError(f"{path}: layer {layer.name}: {error}") from None
    return layers


def _layers(told: dict[str, Any]) -> tuple[Layer, ...]:
    return tuple(
        Layer(name=name, text=entry["workload"], count=entry["count"], scales=entry["scales"])
        for name, entry in told["layer"].items()
    )
