"""Kernels in Triton as text: a module of their own, with everything that they use.

Triton's interpreter sees no names of enclosing functions, so that the module defines all at its top level.
"""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any

from tunebench.errors import InputError
from tunebench.own_kernel._portable import assigned, is_installed, node_of, used_names

__all__ = ["jit_function", "triton_module"]


def jit_function(value: Any) -> FunctionType | None:
    """Return the function that Triton decorates, also below `triton.autotune`; None if there is none."""
    while any(base.__module__.startswith("triton.runtime.") for base in type(value).__mro__):
        value = value.fn
        if isinstance(value, FunctionType):
            return value
    return None


def triton_module(function: FunctionType, role: str) -> str:
    """Return the text of a module that defines a kernel in Triton, and what it uses.

    Args:
        function: The kernel without decorators, as `jit_function` returns it.
        role: What it is, for messages.

    Raises:
        InputError: It has no source, or uses a value that has no text.
    """
    lines = ["import triton", "import triton.language as _language"]
    _define_jit(function, role, lines, {})
    return "\n".join(lines) + "\n"


def _define_jit(function: FunctionType, role: str, lines: list[str], values: dict[str, Any]) -> None:
    """Append the definition of a function for Triton, after those of the names that it uses."""
    node = node_of(function, role, annotated=True)
    values[function.__name__] = function
    jit = [item for item in node.decorator_list if ast.unparse(item).partition("(")[0].endswith("jit")]
    node.decorator_list = jit
    used = used_names(node, function)
    node.decorator_list = jit or [ast.parse("triton.jit", mode="eval").body]
    for name, value in used.items():
        inner = jit_function(value)
        if name in values:
            if repr(values[name]) != repr(inner or value):
                raise InputError(f"{role}: {name} has different values in the functions that it calls")
        elif inner is None or is_installed(inner.__code__.co_filename):
            values[name] = value
            lines += [line for line in assigned(name, value, role, ()) if line not in lines]
        elif inner.__name__ == name:
            _define_jit(inner, role, lines, values)
        else:
            raise InputError(f"{role} calls {inner.__name__} by the name {name}; call it by its own name")
    lines.append(ast.unparse(node))
