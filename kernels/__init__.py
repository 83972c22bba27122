"""How it can be done: every variant, found by walking this package, entry points and users' files.

One variant a module in a folder named as its operator; the module defines `VARIANT`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType
from typing import Any

from tunebench.errors import InputError, UnknownName
from tunebench.variant import Variant
from tunebench.workload import Workload
from tunebench.workloads import register as register_operator

__all__ = [
    "ENTRY_POINTS",
    "headers",
    "include",
    "load_file",
    "loaded_files",
    "module_name",
    "variant",
    "variants",
]

ENTRY_POINTS = "tunebench.variants"
"""Entry-point group under which a package offers modules that define `VARIANT`."""

_USER = "tunebench_user_"
"""Begins the names of modules that users' files are loaded as."""

_loaded: dict[str, Variant[Any]] = {}
_files: list[str] = []


def _folders() -> tuple[str, ...]:
    """Return the operators that have a folder here; `common` holds what several of them share."""
    return tuple(
        folder.name for folder in pkgutil.iter_modules(__path__) if folder.ispkg and folder.name != "common"
    )


@functools.cache
def _shipped(folder: str) -> dict[str, Variant[Any]]:
    """Import the variants of one operator, and no others: a lookup pays for what it names."""
    found: dict[str, Variant[Any]] = {}
    package = importlib.import_module(f"{__name__}.{folder}")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            _add(found, importlib.import_module(module.name))
    return found


@functools.cache
def _plugins() -> dict[str, Variant[Any]]:
    found: dict[str, Variant[Any]] = {}
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        module = entry_point.load()
        register_operator(module)
        _add(found, module)
    return found


def _add(found: dict[str, Variant[Any]], module: ModuleType) -> Variant[Any]:
    variant = getattr(module, "VARIANT", None)
    if not isinstance(variant, Variant):
        raise InputError(f"{module.__name__} must define VARIANT, an instance of a Variant subclass")
    if found.setdefault(variant.key, variant) is not variant:
        raise InputError(f"{module.__name__}: variant {variant.key!r} exists already; choose another name")
    return variant


def _known(operator: str | None = None) -> dict[str, Variant[Any]]:
    folders = [folder for folder in _folders() if operator in (None, folder)]
    shipped = {key: found for folder in folders for key, found in _shipped(folder).items()}
    others = {**_plugins(), **_loaded}
    return shipped | {k: v for k, v in others.items() if operator in (None, v.operator.operator)}


def variants(workload: Workload | str | None = None) -> tuple[Variant[Any], ...]:
    """Return the variants of an operator (given by name or by a workload), or all there are."""
    name = workload.operator if isinstance(workload, Workload) else workload
    return tuple(_known(name).values())


def variant(key: str) -> Variant[Any]:
    """Return a variant by its key `operator/name`.

    Raises:
        UnknownName: listing the variants there are.
    """
    known = _known(key.partition("/")[0])
    if key not in known:
        raise UnknownName("variant", key, _known())
    return known[key]


def load_file(path: str | Path) -> Variant[Any]:
    """Load a user's variant, and the operator beside it if the file defines one.

    The same file loads once a process; workers load it by the same name, so that its objects travel.

    Raises:
        InputError: if it cannot be imported or defines no `VARIANT`.
    """
    file = Path(path).resolve()
    name = module_name(file)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None or not file.is_file():
            raise InputError(f"variant file {path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            register_operator(module)
            given = getattr(module, "VARIANT", None)
            if isinstance(given, Variant) and given.key in _known(given.operator.operator):
                raise InputError(f"variant {given.key!r} exists already; choose another name")
            _add(_loaded, module)
            _files.append(str(file))
        except Exception as error:  # a user's file may raise anything; the reason is kept
            del sys.modules[name]
            raise InputError(f"variant file {path}: {type(error).__name__}: {error}") from error
    loaded: Variant[Any] = sys.modules[name].VARIANT
    return loaded


def module_name(path: str | Path) -> str:
    """Return the name that a user's file is loaded by, which objects of it travel under.

    A copy on another machine, whose file has that name, is loaded by the same.
    """
    file = Path(path).resolve()
    if file.stem.startswith(_USER):
        return file.stem
    return f"{_USER}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def loaded_files() -> tuple[str, ...]:
    """Return the users' files loaded in this process; its workers must load the same."""
    return tuple(_files)


@functools.cache
def headers() -> dict[str, str]:
    """Return the folder of every CUDA C++ header of this package by the header's file name."""
    found: dict[str, str] = {}
    for folder in ("common", *_folders()):
        for file in resources.files(f"{__name__}.{folder}").iterdir():
            if file.name.endswith(".cuh") and found.setdefault(file.name, folder) != folder:
                raise InputError(
                    f"two CUDA headers are named {file.name}: in {found[file.name]} and in {folder}"
                )
    return found


@functools.cache
def include(name: str) -> str:
    """Return the text of a CUDA C++ header of this package, without its `#pragma once`.

    Args:
        name: File name, such as ``types.cuh``; names are unique among the folders.

    Raises:
        UnknownName: if no folder has such a header.
    """
    folder = headers().get(name)
    if folder is None:
        raise UnknownName("CUDA header", name, headers())
    text = resources.files(f"{__name__}.{folder}").joinpath(name).read_text(encoding="utf-8")
    return text.replace("#pragma once\n", "", 1)
