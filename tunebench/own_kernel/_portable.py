"""Functions as source text that another process can run without the script that defined them.

A function is found in its file by its position, and written with the values of the names that it uses:
numbers and text as literals, modules and library functions as imports, functions of the script as text.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import sysconfig
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tunebench.errors import InputError, UnknownName, quoted

__all__ = ["OfMapping", "Portable", "assigned", "is_installed", "node_of", "portable", "used_names"]

_LARGEST_ARRAY = 4096
"""Most elements of an array that a function may use by name."""

_TRITON_VALUES = {"constexpr": "value", "dtype": "name"}
"""Classes of values that kernels in Triton use by name, and the attribute that makes an equal one."""

_BY_NAME = {
    "ceil_div": "from tunebench.variant import ceil_div",
    "math": "import math",
    "np": "import numpy as np",
}
"""Names that every expression may use, and their imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portable:
    """A function as text.

    Attributes:
        arguments: Names that it is called with, all by keyword.
        body: Lines of a function without arguments that returns it.
    """

    arguments: tuple[str, ...]
    body: str

    def written(self, name: str) -> str:
        """Return the definition of a function of this name that returns it."""
        return f"def {name}():\n{textwrap.indent(self.body, '    ')}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfMapping:
    """Functions that take all parameters as one mapping, and an expression that calls them.

    Attributes:
        functions: The functions by the name that the expression uses.
        expression: Python expression of the functions, of the mapping `parameters`, and of parameters.
    """

    functions: Mapping[str, Callable[..., Any]]
    expression: str

    def portable(self, role: str, names: Sequence[str]) -> Portable:
        """Return the function of the parameters as text (see `portable`)."""
        lines = []
        for name, function in self.functions.items():
            code = getattr(function, "__code__", None)
            if code is None or code.co_argcount != 1:
                raise InputError(f"{role}: {name} must be a function of one argument, the parameters")
            inner = portable(function, f"{role}: {name}", code.co_varnames[:1], {})
            lines += [inner.written(f"_make_{name}"), f"{name} = _make_{name}()"]
        mapping = f"dict({', '.join(f'{name}={name}' for name in names)})"
        lines.append(f"return lambda {', '.join(names)}: (lambda parameters: {self.expression})({mapping})")
        body = "\n".join(["import math", *lines])
        return Portable(arguments=tuple(names), body=body)


def portable(
    function: Callable[..., Any] | OfMapping | str,
    role: str,
    names: Collection[str],
    sizes: Mapping[str, int],
    constants: Collection[str] = (),
    changed: Sequence[str] = (),
) -> Portable:
    """Return a function or an expression as text.

    Args:
        function: The function, functions of one mapping, or a Python expression.
        role: What it is, for messages: ``grid``.
        names: Names that its arguments may have.
        sizes: Arguments of the kernel that it may use without declaring them, with their values.
        constants: Arguments to remove from it: the function that returns it has them instead.
        changed: Arrays that it changes: its first arguments are their originals, named `_before`, which it
            copies.

    Raises:
        InputError: It has no source, or uses a value that has no text.
        UnknownName: It has another argument, or uses an undefined name.
    """
    if isinstance(function, str):
        return _expression(function, role, names)
    if isinstance(function, OfMapping):
        return function.portable(role, [name for name in names if name not in sizes])
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType):
        raise InputError(
            f"{role} must be a function, a lambda or an expression, got {type(function).__name__}"
        )
    node = node_of(function, role)
    if isinstance(node, ast.FunctionDef):
        node.decorator_list = []
    taken = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    required = _required(node.args)
    for name in taken:
        if name not in names and name in required:
            raise UnknownName(f"argument of {role}", name, names)
    used = used_names(node, function)
    free = [name for name in used if name in sizes and name not in taken]
    for name in free:
        _check_size(role, name, used[name], sizes[name])
    captured = {name: value for name, value in used.items() if name not in free}
    lines = [line for name, value in captured.items() for line in assigned(name, value, role, (function,))]
    node.args.kwonlyargs += [ast.arg(name) for name in free]
    node.args.kw_defaults += [None] * len(free)
    _remove(node.args, constants)
    if changed:
        node.args.args[:0] = [ast.arg(f"{name}_before") for name in changed]
        node.body[:0] = ast.parse("\n".join(f"{name}[...] = {name}_before" for name in changed)).body
    lines += _returned(node)
    arguments = tuple(name for name in (*taken, *free) if name in names and name not in constants)
    return Portable(arguments=arguments, body="\n".join(lines))


def _required(arguments: ast.arguments) -> set[str]:
    """Return the names of the arguments without a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = positional[: len(positional) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {item.arg for item in (*required, *(item for item, default in pairs if default is None))}


def _check_size(role: str, name: str, value: Any, size: int) -> None:
    if value != size:
        raise InputError(
            f"{role} uses {name}, which is {value!r} in your program and {size} as an argument of the "
            "kernel; use another name for one of them"
        )


def _expression(text: str, role: str, names: Collection[str]) -> Portable:
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise InputError(f"{role}: {quoted(text)} is not a Python expression: {error.msg}") from None
    used = dict.fromkeys(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    arguments = tuple(name for name in used if name in names)
    for name in used:
        if name not in names and name not in bound and name not in _BY_NAME and not hasattr(builtins, name):
            raise UnknownName(f"name in {role}", name, [*names, *_BY_NAME])
    lines = [text for name, text in _BY_NAME.items() if name in used and name not in names]
    lines.append(f"return lambda {', '.join(arguments)}: {ast.unparse(tree)}")
    return Portable(arguments=arguments, body="\n".join(lines))


# -- finding a function in its file ------------------------------------------------------------------------


def node_of(function: FunctionType, role: str, *, annotated: bool = False) -> Any:
    """Return the syntax tree of a function or a lambda, without docstring, and without annotations."""
    code = function.__code__
    try:
        lines, _ = inspect.findsource(code)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError):
        raise InputError(
            f"{role}: the source of {function.__qualname__} is not in a file; write it as a string, or put "
            "your program into a file"
        ) from None
    node: Any
    if code.co_name == "<lambda>":
        node = _lambda_at(tree, code)
    else:
        named = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name)
        node = next((n for n in named if _first_line(n) == code.co_firstlineno), None)
    if node is None:
        raise InputError(
            f"{role}: {function.__qualname__} is not in {code.co_filename} any more; run it again"
        )
    if not annotated:
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            argument.annotation = None
    if isinstance(node, ast.FunctionDef):
        node.returns = None
        if len(node.body) > 1 and ast.get_docstring(node, clean=False) is not None:
            node.body.pop(0)
    return node


def _first_line(node: ast.FunctionDef) -> int:
    return min(node.lineno, *(decorator.lineno for decorator in node.decorator_list), node.lineno)


def _lambda_at(tree: ast.AST, code: CodeType) -> ast.Lambda | None:
    """Return the smallest lambda around the instructions of `code`."""
    spots = [
        (line, column)
        for line, _, column, _ in code.co_positions()
        if line is not None and column is not None and (line, column) != (code.co_firstlineno, 0)
    ]
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and all((node.lineno, node.col_offset) <= spot for spot in spots)
        and all(spot <= (node.end_lineno or 0, node.end_col_offset or 0) for spot in spots)
    ]
    return max(around, key=lambda node: (node.lineno, node.col_offset), default=None)


def used_names(node: Any, function: FunctionType) -> dict[str, Any]:
    """Return the values of the names that a function uses and does not define."""
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    bound = {item.arg for item in ast.walk(node) if isinstance(item, ast.arg)}
    bound |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
    imported = (item for item in ast.walk(node) if isinstance(item, ast.alias))
    bound |= {(item.asname or item.name).partition(".")[0] for item in imported}
    values = {}
    for item in ast.walk(node):
        if not isinstance(item, ast.Name) or item.id in bound or item.id in values:
            continue
        if item.id in closure:
            values[item.id] = closure[item.id].cell_contents
        elif item.id in function.__globals__:
            values[item.id] = function.__globals__[item.id]
        elif not hasattr(builtins, item.id):
            raise InputError(f"{function.__qualname__} uses {item.id}, which is not defined")
    return values


def _remove(arguments: ast.arguments, names: Collection[str]) -> None:
    """Remove arguments, with their defaults, from a signature."""
    if not names:
        return
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    pairs = list(zip(positional, [*missing, *arguments.defaults], strict=True))
    kept = [(item, default) for item, default in pairs if item.arg not in names]
    arguments.posonlyargs, arguments.args = [], [item for item, _ in kept]
    arguments.defaults = [default for _, default in kept if default is not None]
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    left = [(item, default) for item, default in keyword if item.arg not in names]
    arguments.kwonlyargs, arguments.kw_defaults = [i for i, _ in left], [d for _, d in left]


def _returned(node: Any) -> list[str]:
    if isinstance(node, ast.Lambda):
        return [f"return {ast.unparse(node)}"]
    return [ast.unparse(node), f"return {node.name}"]


# -- values by text ---------------------------------------------------------------------------------------


def assigned(name: str, value: Any, role: str, callers: tuple[Any, ...]) -> list[str]:
    """Return the lines that give a name its value."""
    if isinstance(value, ModuleType):
        return [f"import {value.__name__}{'' if name == value.__name__ else f' as {name}'}"]
    function = getattr(value, "py_func", value)
    if hasattr(value, "cache_parameters"):  # of functools.cache, which is written as a decorator
        function = value.__wrapped__
    if any(function is caller for caller in callers):
        return []
    home = str(getattr(value, "__module__", None) or type(value).__module__)
    qualified = getattr(value, "__qualname__", None) or str(getattr(value, "__name__", value))
    if isinstance(function, FunctionType) and not is_installed(function.__code__.co_filename):
        return _helper(name, function, role, callers)
    if callable(value) and qualified.isidentifier() and _has(home, qualified, value):
        alias = "" if name == qualified else f" as {name}"
        return [f"from {home} import {qualified}{alias}"]
    text = _literal(value)
    if text is None:
        raise InputError(
            f"{role} uses {name}, a {type(value).__name__}: it may use numbers, text, small arrays, modules "
            "and functions; pass arrays as arguments of the kernel"
        )
    used = [module for module in ("numpy", "triton.language") if f"{module}." in text]
    return [*(f"import {module}" for module in used), f"{name} = {text}"]


def _helper(name: str, function: FunctionType, role: str, callers: tuple[Any, ...]) -> list[str]:
    """Return the lines that define a function of the user's program, with its decorators."""
    node = node_of(function, role)
    used = used_names(node, function)
    lines = [
        line
        for used_name, value in used.items()
        for line in assigned(used_name, value, role, (*callers, function))
    ]
    lines += _returned(node)
    body = textwrap.indent("\n".join(lines), "    ")
    return [f"def _make_{name}():", *body.splitlines(), f"{name} = _make_{name}()"]


def is_installed(file: str) -> bool:
    """Return whether a file belongs to the standard library or an installed package."""
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders.append(str(Path(__file__).resolve().parents[1]))  # a checkout of this package
    path = Path(file).resolve()
    return any(path.is_relative_to(Path(folder).resolve()) for folder in folders)


def _has(module: str, name: str, value: Any) -> bool:
    import sys

    loaded = sys.modules.get(module)
    file = getattr(loaded, "__file__", None)
    return getattr(loaded, name, None) is value and (file is None or is_installed(file))


def _literal(value: Any) -> str | None:
    """Return a value as text, or None if it has none."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
    if isinstance(value, list | tuple | set | frozenset):
        items = [_literal(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
        comma = "," if len(items) == 1 else ""
        return None if None in items else f"{type(value).__name__}(({', '.join(map(str, items))}{comma}))"
    if isinstance(value, dict):
        pairs = [(_literal(key), _literal(item)) for key, item in value.items()]
        return None if None in sum(pairs, ()) else f"{{{', '.join(f'{k}: {v}' for k, v in pairs)}}}"
    if type(value).__module__.startswith("triton.language.") and type(value).__name__ in _TRITON_VALUES:
        text = _literal(getattr(value, _TRITON_VALUES[type(value).__name__]))
        return None if text is None else f"triton.language.{type(value).__name__}({text})"
    if type(value).__module__ == "numpy" and hasattr(value, "tolist") and value.size <= _LARGEST_ARRAY:
        text = _literal(value.tolist())
        return None if text is None else f"numpy.array({text}, dtype={str(value.dtype)!r})[()]"
    return None
