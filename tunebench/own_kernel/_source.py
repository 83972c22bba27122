"""The source of a described kernel: its language, its text or function, and the name of the kernel."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

from tunebench.errors import InputError, UnknownName, quoted
from tunebench.own_kernel._include import with_includes
from tunebench.own_kernel.triton_text import jit_function
from tunebench.variant import strip_comments
from tunebench.workloads import operator

if TYPE_CHECKING:
    from tunebench.own_kernel.description import KernelDescription

__all__ = ["Language", "operator_name", "read_source"]

Language = Literal["cuda", "binary", "numba-cpu", "numba-cuda", "triton", "library-cpu"]

_COMPILED = (".cubin", ".fatbin", ".ptx")
"""Suffixes of compiled kernels."""

_ATTRIBUTE = re.compile(r"\b__\w+__\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
"""`__launch_bounds__(…)` and its like, which may stand before and after the type of a kernel."""

_KERNEL = re.compile(r"\b__global__\s[\w\s]*?\b(\w+)\s*\(")


def read_source(given: KernelDescription) -> tuple[Language, Any, str]:
    """Return the language, the source or function, and the name of the kernel.

    Raises:
        InputError: The source is no kernel, or its name is missing or wrong.
    """
    source, folder = given.source, None
    if isinstance(source, Path | str) and str(source).endswith(_COMPILED):
        if given.name is None:
            raise InputError("name the kernel: the symbol that `cuobjdump -symbols` shows")
        return "binary", source, given.name
    if isinstance(source, Path) or (isinstance(source, str) and source.endswith((".cu", ".cuh", ".py"))):
        path = Path(source)
        if not path.is_file():
            raise InputError(f"kernel source {path} does not exist")
        folder = path.parent
        source = _from_module(path, given.name) if path.suffix == ".py" else path.read_text(encoding="utf-8")
    if isinstance(source, str):
        source = with_includes(source, folder, given.includes)
        return "cuda", source, _kernel_name(source, given.name)
    triton_function = jit_function(source)
    function = triton_function or getattr(source, "py_func", source)
    if not isinstance(function, FunctionType):
        raise InputError(
            f"source must be a .cu file, CUDA C++ as text, or a Python function, got {type(source).__name__}"
        )
    if function.__name__ == "<lambda>":
        raise InputError("a kernel for Numba must be a function with a name, not a lambda")
    annotations = function.__annotations__.values()
    if triton_function is not None or any("constexpr" in str(value) for value in annotations):
        return "triton", function, function.__name__
    on_gpu = given.grid is not None or type(source).__module__.startswith("numba.cuda")
    if on_gpu and not given.compiled:
        raise InputError("a function that is called as it is launches by itself: leave grid out")
    name = given.name or function.__name__
    if not name.isidentifier():
        raise InputError(f"the name of a kernel for Numba must be an identifier, got {quoted(name)}")
    if not given.compiled:
        return "library-cpu", function, name
    return "numba-cuda" if on_gpu else "numba-cpu", function, name


def _from_module(path: Path, name: str | None) -> Callable[..., Any]:
    """Return a function of a Python file that the user named."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"tunebench_source_{path.stem}", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name is None or not hasattr(module, name):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownName(f"function of {path}", name or "", names)
    function: Callable[..., Any] = getattr(module, name)
    return function


def _kernel_name(source: str, name: str | None) -> str:
    names: dict[str, None] = dict.fromkeys(_KERNEL.findall(_ATTRIBUTE.sub(" ", strip_comments(source))))
    if not names:
        raise InputError("the source defines no kernel: it has no __global__ function")
    if name is None:
        if len(names) > 1:
            raise InputError(f"name the kernel; the source defines {', '.join(names)}")
        return next(iter(names))
    plain = _plain(name)
    if plain not in names:
        raise UnknownName("kernel", plain, names, "It must be a __global__ function of the source.")
    return name


def _plain(entry: str) -> str:
    """Return the name of a kernel without namespace and template arguments."""
    return entry.partition("<")[0].rpartition("::")[2].strip()


def operator_name(entry: str) -> str:
    """Return the name of the operator: that of the kernel, unless an operator of this package has it."""
    name = _plain(entry)
    try:
        module = operator(name).__module__
    except UnknownName:
        return name
    return f"{name}_kernel" if module.startswith("tunebench.workloads.") else name
