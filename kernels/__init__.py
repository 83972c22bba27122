"""Registry of kernel variants: the implementations of each operator.

How a variant is found: each folder has the name of an operator, and each of its modules whose name does not
start with `_` defines one variant as `VARIANT`. `variants` also returns the variants of installed packages
(entry points of the group `tunebench.variants`) and of files that `load_file` loaded.

How to add one: create `kernels/<operator>/<name>.py` with a subclass of `CudaVariant`, `NumbaCudaVariant`,
`TritonVariant`, `NumbaCpuVariant`, `LibraryCpuVariant` or `LibraryGpuVariant` (`tunebench.variant`) and
`VARIANT = <subclass>()`. No other file changes: the contract tests of `tests/kernels` pick it up. Code that
several operators share is in `common`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType
from typing import Any

from tunebench._user_code import IMPORT_S, limited
from tunebench.errors import InputError, UnknownName, describe_error
from tunebench.variant import Variant
from tunebench.workload import Workload
from tunebench.workloads import forget as forget_operator
from tunebench.workloads import operator_scope
from tunebench.workloads import register as register_operator

__all__ = [
    "ENTRY_POINTS",
    "broken_plugins",
    "failed_files",
    "file_changes",
    "file_of",
    "files_of",
    "forget_plugins",
    "headers",
    "import_file",
    "include",
    "load_file",
    "loaded_files",
    "module_name",
    "preload",
    "replace_file",
    "variant",
    "variant_file_scope",
    "variants",
]

ENTRY_POINTS = "tunebench.variants"
"""Entry-point group of packages that offer modules with a `VARIANT`."""

_USER = "tunebench_user_"
"""Prefix of the names under which users' files are imported."""

_OWN = "A variant of your own needs its file: --variant-file, or tunebench.kernels.load_file in Python."

_loaded: dict[str, Variant[Any]] = {}
_files: list[str] = []
_failed: dict[str, str] = {}
file_changes = 0
"""How often this process loaded, replaced or unloaded users' files, for caches of answers."""
_broken_plugins: list[str] = []


@functools.cache
def _folders() -> tuple[str, ...]:
    """Return the operators that have a folder here; `common` is not an operator."""
    return tuple(
        folder.name for folder in pkgutil.iter_modules(__path__) if folder.ispkg and folder.name != "common"
    )


@functools.cache
def _shipped(folder: str) -> dict[str, Variant[Any]]:
    """Import the variants of one operator only, since a lookup must stay fast."""
    variants_by_key: dict[str, Variant[Any]] = {}
    package = importlib.import_module(f"{__name__}.{folder}")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not module.name.rpartition(".")[2].startswith("_"):
            _add(variants_by_key, importlib.import_module(module.name))
    return variants_by_key


@functools.cache
def _plugins() -> dict[str, Variant[Any]]:
    plugins: dict[str, Variant[Any]] = {}
    for entry_point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            module = entry_point.load()
            register_operator(module)
            _add(plugins, module)
        except (Exception, SystemExit) as error:  # a package of others may raise anything
            reason = f"plug-in {entry_point.name} = {entry_point.value}: {describe_error(error)}"
            _broken_plugins.append(reason)
            warnings.warn(f"{reason}; it is skipped", stacklevel=2)
    return plugins


def forget_plugins() -> None:
    """Forget the packages of the entry-point group, so that the next question about variants imports them."""
    _plugins.cache_clear()
    _broken_plugins.clear()


def broken_plugins() -> tuple[str, ...]:
    """Return why packages of the entry-point group could not be imported, one line each."""
    _plugins()
    return tuple(_broken_plugins)


def _variant_of(module: ModuleType) -> Variant[Any]:
    variant = getattr(module, "VARIANT", None)
    if not isinstance(variant, Variant):
        raise InputError(f"{module.__name__} must define VARIANT, an instance of a Variant subclass")
    return variant


def _add(variants_by_key: dict[str, Variant[Any]], module: ModuleType) -> None:
    variant = _variant_of(module)
    if variants_by_key.setdefault(variant.key, variant) is not variant:
        raise InputError(
            f"{module.__name__}: a variant named {variant.key!r} exists already; choose another name"
        )


def _known(operator: str | None = None) -> dict[str, Variant[Any]]:
    folders = [folder for folder in _folders() if operator in (None, folder)]
    shipped = {key: variant for folder in folders for key, variant in _shipped(folder).items()}
    added = {**_plugins(), **_loaded}
    return shipped | {k: v for k, v in added.items() if operator in (None, v.operator.operator)}


def variants(workload: Workload | str | None = None) -> tuple[Variant[Any], ...]:
    """Return the registered variants.

    Args:
        workload: A workload, or the name of an operator, to select variants by; None for all.
    """
    name = workload.operator if isinstance(workload, Workload) else workload
    return tuple(_known(name).values())


def variant(key: str) -> Variant[Any]:
    """Return the variant with the key `operator/name`.

    Raises:
        UnknownName: if there is no such variant; the message lists the keys.
    """
    candidates = _known(key.partition("/")[0])
    if key not in candidates:
        raise UnknownName("variant", key, _known(), _OWN)
    return candidates[key]


def load_file(path: str | Path) -> Variant[Any]:
    """Import a variant from a user's file, and its operator if the file defines one.

    A file is imported once in each process, under a name derived from its path. Worker processes use the same
    name, so that objects of the file can be pickled.

    Args:
        path: Python file that defines `VARIANT`.

    Raises:
        InputError: if the file cannot be imported, defines no `VARIANT`, or uses a name that exists already.
    """
    name = module_name(path)
    if name not in sys.modules:
        with limited(f"the import of {path}", IMPORT_S):
            _import_file(path, _check_new)
    loaded: Variant[Any] = sys.modules[name].VARIANT
    if _loaded.get(loaded.key) is not loaded:
        _loaded[loaded.key] = loaded
        _count_change()
    return loaded


def _count_change() -> None:
    global file_changes
    file_changes += 1


def replace_file(path: str | Path, operator: str) -> Variant[Any]:
    """Import a user's file in place of those that were loaded for an operator before.

    Args:
        path: Python file that defines `VARIANT`, and its operator.
        operator: Name of the operator.

    Raises:
        InputError: as `load_file`.
    """
    for key, former in [(k, v) for k, v in _loaded.items() if v.operator.operator == operator]:
        file = file_of(former)
        if file is not None and module_name(file) != module_name(path):
            del _loaded[key]
            sys.modules.pop(module_name(file), None)
            _files[:] = [loaded for loaded in _files if loaded != file]
            forget_operator(operator)
    return load_file(path)


def import_file(path: str | Path) -> None:
    """Import a user's file in a worker, and in its workers, without plug-ins: they may end it, or hang.

    Args:
        path: Python file, which `load_file` has loaded in the tuner.

    Raises:
        InputError: if the file cannot be imported or defines no `VARIANT`.
    """
    if module_name(path) not in sys.modules:
        _import_file(path, lambda variant: None)


def _import_file(path: str | Path, check: Callable[[Variant[Any]], None]) -> None:
    file = Path(path).resolve()
    name = module_name(file)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InputError(f"variant file {path}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        register_operator(module)
        check(_variant_of(module))
        _files.append(str(file))
    except BaseException as error:  # a user's file may raise anything; the message keeps it
        sys.modules.pop(name, None)
        if not isinstance(error, Exception | SystemExit):  # Ctrl-C, or the end of the time limit
            raise
        raise InputError(f"variant file {path}: {describe_error(error)}") from error


def _check_new(variant: Variant[Any]) -> None:
    if variant.key in _known(variant.operator.operator):
        raise InputError(f"a variant named {variant.key!r} exists already; choose another name")


def preload(paths: Iterable[str]) -> None:
    """Import the variants of users' files in a worker process; a file that fails is an error of its tasks.

    Args:
        paths: The files.
    """
    for path in paths:
        try:
            import_file(path)
        except InputError as error:
            _failed[module_name(path)] = str(error)


def failed_files() -> Mapping[str, str]:
    """Return why users' files could not be imported in this worker process, by module name."""
    return _failed


def module_name(path: str | Path) -> str:
    """Return the module name under which a user's file is imported.

    A copy of the file on another machine keeps this name if the copy's file name starts with it.
    """
    file = Path(path).resolve()
    if file.stem.startswith(_USER):
        return file.stem
    return f"{_USER}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def file_of(variant: Variant[Any]) -> str | None:
    """Return the user's file that defines a variant; None if it is of this package or of a plug-in."""
    return _user_file(type(variant))


def file_of_operator(workload: Workload) -> str | None:
    """Return the user's file that defines the operator of a workload; None if it is of another module."""
    return _user_file(type(workload))


def _user_file(cls: type) -> str | None:
    name = cls.__module__
    return sys.modules[name].__file__ if name.startswith(_USER) else None


def files_of(operator: str) -> tuple[str, ...]:
    """Return the users' files with a loaded variant of an operator, which commands need by `--variant-file`.

    Args:
        operator: Name of the operator.
    """
    files = (file_of(variant) for variant in _loaded.values() if variant.operator.operator == operator)
    return tuple(file for file in files if file is not None)


@contextlib.contextmanager
def variant_file_scope(*, empty: bool = False) -> Iterator[None]:
    """Unload at its end the users' files that were loaded within it, with their variants and operators.

    Args:
        empty: Whether the files that were loaded before are not loaded within it either.
    """
    variants_before, files_before = dict(_loaded), list(_files)
    modules_before = {name: module for name, module in sys.modules.items() if name.startswith(_USER)}
    with operator_scope(empty=empty):
        if empty:
            _restore({}, [], {})
        try:
            yield
        finally:
            _restore(variants_before, files_before, modules_before)


def _restore(
    variants: Mapping[str, Variant[Any]], files: Iterable[str], modules: Mapping[str, ModuleType]
) -> None:
    _loaded.clear()
    _loaded.update(variants)
    _files[:] = files
    for name in [name for name in sys.modules if name.startswith(_USER)]:
        del sys.modules[name]
    sys.modules.update(modules)
    _count_change()


def loaded_files() -> tuple[str, ...]:
    """Return the users' files that this process has loaded; its workers must load them too."""
    return tuple(_files)


@functools.cache
def headers() -> dict[str, str]:
    """Return the folder of each CUDA C++ header of this package, by file name."""
    folders: dict[str, str] = {}
    for folder in ("common", *_folders()):
        for file in resources.files(f"{__name__}.{folder}").iterdir():
            if file.name.endswith(".cuh") and folders.setdefault(file.name, folder) != folder:
                raise InputError(
                    f"found {file.name} in {folders[file.name]} and {folder}: CUDA headers need unique names"
                )
    return folders


@functools.cache
def include(name: str) -> str:
    """Return the text of a CUDA C++ header of this package, without its `#pragma once`.

    Args:
        name: File name, such as ``types.cuh``; names are unique in the package.

    Raises:
        UnknownName: if no folder contains such a header.
    """
    folder = headers().get(name)
    if folder is None:
        raise UnknownName("CUDA header", name, headers())
    text = resources.files(f"{__name__}.{folder}").joinpath(name).read_text(encoding="utf-8")
    return text.replace("#pragma once\n", "", 1)
