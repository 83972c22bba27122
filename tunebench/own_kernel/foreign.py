"""What descriptions of other tuners have in common: a problem size, its divisors, options of nvcc."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tunebench.errors import InputError
from tunebench.own_kernel._portable import OfMapping

__all__ = ["OfMapping", "block_of", "device_flags", "grid_of", "with_constants"]

_AXES = "xyz"


def grid_of(
    problem_size: Any, divisors: Sequence[Any], block_names: Sequence[str], parameters: Sequence[str]
) -> OfMapping:
    """Return the blocks in x, y, z: the problem size over the product of the divisors, rounded up.

    Args:
        problem_size: A number or an expression of parameters for each dimension, one of them, or a function
            of the parameters.
        divisors: For x, y and z: expressions of parameters, a function of the parameters, or None, which
            stands for the parameter in `block_names`.
        block_names: Parameters with the threads of a block in x, y and z.
        parameters: All parameters.

    Raises:
        InputError: There are more than three dimensions.
    """
    functions: dict[str, Callable[..., Any]] = {}
    if callable(problem_size):
        functions["problem_size"] = problem_size
        sizes = [f"_extents(problem_size(parameters))[{axis}]" for axis in range(3)]
        sizes = [size.replace("_extents", _EXTENTS) for size in sizes]
    else:
        extents = problem_size if isinstance(problem_size, tuple | list) else (problem_size,)
        if not 1 <= len(extents) <= 3:
            raise InputError(f"problem_size must have one to three dimensions, got {problem_size!r}")
        sizes = [str(extent if isinstance(extent, str) else int(extent)) for extent in (*extents, 1, 1)[:3]]
    blocks = []
    for axis, divisor in zip(_AXES, (*divisors, None, None, None)[:3], strict=True):
        size, name = sizes[_AXES.index(axis)], (*block_names, *_AXES)[_AXES.index(axis)]
        if callable(divisor):
            functions[f"grid_div_{axis}"] = divisor
            product = f"grid_div_{axis}(parameters)"
        else:
            names = [name] if divisor is None and name in parameters else divisor or []
            product = (
                " * ".join(f"({name})" for name in ([names] if isinstance(names, str) else names)) or "1"
            )
        blocks.append(f"int(math.ceil(({size}) / ({product})))")
    return OfMapping(functions=functions, expression=f"({', '.join(blocks)})")


_EXTENTS = "(lambda size: (*(size if isinstance(size, (tuple, list)) else (size,)), 1, 1))"
"""Function that returns a problem size of one to three dimensions with three."""


def block_of(block_names: Sequence[str], parameters: Sequence[str]) -> str:
    """Return the threads of a block in x, y, z as an expression; 1 where there is no parameter.

    Args:
        block_names: Parameters with the threads in x, y and z.
        parameters: All parameters.
    """
    return f"({''.join(f'{name if name in parameters else 1}, ' for name in block_names)})"


def device_flags(flags: Iterable[str]) -> list[str]:
    """Return options of nvcc without those for the host, the architecture, and standards before C++17.

    Args:
        flags: The options.
    """
    return [flag for flag in flags if not flag.startswith(_NOT_OF_DEVICE)]


_NOT_OF_DEVICE = (
    *("-arch", "--gpu-architecture", "-gencode", "-O", "-Xcompiler", "-lineinfo", "-l", "-L"),
    *("-std=c++11", "-std=c++14", "--std=c++11", "--std=c++14"),
)


def with_constants(source: str, constants: Mapping[str, Any]) -> str:
    """Return a source whose constant memory contains given values, as initialisers of its declarations.

    Args:
        source: CUDA C++.
        constants: Array of each symbol, by name; at most 64 KiB together.

    Raises:
        InputError: A symbol is not declared as ``__constant__`` array, or the values are too large.
    """
    if sum(array.nbytes for array in constants.values()) > _CONSTANT_BYTES:
        raise InputError(f"constant memory has {_CONSTANT_BYTES} bytes; pass larger arrays as arguments")
    for name, array in constants.items():
        values = ", ".join(_literal(value) for value in array.ravel().tolist())
        declared = re.compile(rf"(__constant__[^;={{}}()]*?\b{re.escape(name)}\s*(?:\[[^\]]*\]\s*)+);")
        source, count = declared.subn(rf"\1 = {{{values}}};", source)
        if count != 1:
            raise InputError(f"the source declares no array `__constant__ … {name}[…];`, or several")
    return source


def _literal(value: float | int) -> str:
    return f"{value!r}f" if isinstance(value, float) else str(int(value))


_CONSTANT_BYTES = 64 << 10
"""Constant memory of every NVIDIA GPU. Source: CUDA C++ programming guide, technical specifications."""
