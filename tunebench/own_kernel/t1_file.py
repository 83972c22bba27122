"""Descriptions of kernels in the T1 format of the auto-tuning community, for `tunebench tune FILE.json`.

Source: "TuningSchema" (https://github.com/odgaard/TuningSchema), with the fields `ProblemSize` and `GridDivX`
to `GridDivZ` that published files add.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunebench._lazy import np
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError, UnknownName, quoted
from tunebench.own_kernel.argument import InOut, Input, Output
from tunebench.own_kernel.description import KernelDescription
from tunebench.own_kernel.foreign import device_flags, grid_of, with_constants

__all__ = ["read"]

_TYPES = {
    "bool": "bool",
    "int8": "i8",
    "uint8": "i8",
    "int": "i32",
    "int32": "i32",
    "uint32": "i32",
    "int64": "i64",
    "uint64": "i64",
    "half": "f16",
    "float": "f32",
}
"""Type here of each supported type of the format; unsigned numbers have the bits of signed ones."""

_MAX_BYTES = 64 << 20
"""Largest file."""


def read(path: str | Path) -> KernelDescription:
    """Read a description in T1 format.

    The format has no reference: results are compared with those of the default configuration. Expressions
    may contain arithmetic and comparisons only, so that reading a file runs none of its text.

    Args:
        path: JSON file; the kernel's file is relative to it.

    Raises:
        InputError: The file is missing or malformed, or describes what is not supported: another language,
            constant memory, 64-bit floats.
    """
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise InputError(f"{path} is larger than {_MAX_BYTES >> 20} MiB")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"description in T1 format {path}: {error}") from None
    try:
        return _T1(content, file.parent).description()
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise InputError(f"{path} is not in T1 format: {type(error).__name__}: {error}") from None


class _T1:
    """The parts of a file."""

    def __init__(self, content: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.kernel: Mapping[str, Any] = _member(content, "KernelSpecification")
        configurations = _member(content, "ConfigurationSpace")
        self.parameters: Sequence[Mapping[str, Any]] = _member(configurations, "TuningParameters")
        self.conditions = [_python(item["Expression"]) for item in configurations.get("Conditions") or ()]
        self.space = {item["Name"]: _values(item) for item in self.parameters}

    def description(self) -> KernelDescription:
        """Return the description."""
        if self.kernel["Language"] != "CUDA":
            raise InputError(f"language {self.kernel['Language']} is not supported: expected CUDA")
        local = self._sizes("LocalSize")
        problem = [item for item in self._problem_size() if isinstance(item, str)]
        for expression in (*self.conditions, *local, *problem):
            _check(expression, self.space)
        path = self.folder / self.kernel["KernelFile"]
        if not path.is_file():
            raise InputError(f"kernel source {path} does not exist")
        return KernelDescription(
            source=with_constants(path.read_text(encoding="utf-8"), self._constants()),
            name=self.kernel["KernelName"],
            includes=[path.parent],
            args=dict(self._arguments()),
            space=self.space,
            grid=self._grid(local),
            block=f"({', '.join(local)})",
            constraints=[text for text in self.conditions if _names(text)],
            default=self._default(),
            smem_bytes=int(self.kernel.get("SharedMemory") or 0),
            flags=device_flags(self.kernel.get("CompilerOptions") or ()),
        )

    def _sizes(self, key: str) -> list[str]:
        sizes = _member(self.kernel, key)
        return [_python(str(sizes.get(axis, "1"))) for axis in "XYZ"]

    def _grid(self, local: Sequence[str]) -> Any:
        if "ProblemSize" in self.kernel:
            divisors = [self.kernel.get(f"GridDiv{axis}") or [] for axis in "XYZ"]
            size = [_python(str(extent)) for extent in self._problem_size()]
            for expression in (item for divisor in divisors for item in divisor):
                _check(expression, self.space)
            return grid_of(size, divisors, (), tuple(self.space))
        size = self._sizes("GlobalSize")
        for expression in size:
            _check(expression, self.space)
        in_threads = self.kernel.get("GlobalSizeType") == "OpenCL"
        return grid_of(size, [[text] if in_threads else [] for text in local], (), tuple(self.space))

    def _problem_size(self) -> list[Any]:
        size = self.kernel.get("ProblemSize") or []
        return list(size) if isinstance(size, list) else [size]

    def _arguments(self) -> Any:
        """Yield the name and the argument of each entry."""
        for number, item in enumerate(_member(self.kernel, "Arguments")):
            name, memory = item.get("Name") or f"argument_{number}", _memory(item)
            if memory in _CONSTANT:
                continue
            if memory not in ("Vector", "Scalar"):
                raise InputError(f"argument {name} is in {memory} memory, which has no counterpart")
            yield name, self._argument(name, item, _type(item))

    def _constants(self) -> dict[str, Any]:
        """Return the contents of constant memory by symbol; random ones are the same each time."""
        random_numbers, constants = np.random.default_rng(0), {}
        for item in _member(self.kernel, "Arguments"):
            if _memory(item) not in _CONSTANT:
                continue
            dtype, count = numpy_dtype(_type(item)), self._count(item)
            if item.get("FillType", "Random") == "Constant":
                constants[item["Name"]] = np.full(count, item.get("FillValue", 0), dtype)
            elif dtype.kind == "f":
                constants[item["Name"]] = random_numbers.standard_normal(count).astype(dtype)
            else:
                raise InputError(f"constant {item['Name']} of {item['Type']} cannot be filled at random")
        return constants

    def _count(self, item: Mapping[str, Any]) -> int:
        sizes = {"ProblemSize": self._problem_size(), **self.space}
        return int(_evaluated(_python(str(item["Size"])), sizes))

    def _argument(self, name: str, item: Mapping[str, Any], dtype: Any) -> Any:
        value = item.get("FillValue", 0)
        if item["MemoryType"] == "Scalar":
            return float(value) if dtype in ("f16", "f32") else int(value)
        count, fill = self._count(item), item.get("FillType", "Random")
        if fill not in ("Constant", "Random"):
            raise InputError(
                f"argument {name} is filled by {fill}, which is not supported: Constant or Random"
            )
        contents = np.full(count, value, numpy_dtype(dtype)) if fill == "Constant" else count
        access = item.get("AccessType", "ReadWrite")
        if access == "WriteOnly":
            return Output(count, dtype)
        if access not in ("ReadOnly", "ReadWrite"):
            raise InputError(
                f"argument {name} has access {access}, expected ReadOnly, WriteOnly or ReadWrite"
            )
        return (Input if access == "ReadOnly" else InOut)(contents, dtype)

    def _default(self) -> dict[str, Any] | None:
        """Return the default configuration, if the file has a valid one."""
        default = {item["Name"]: item["Default"] for item in self.parameters if "Default" in item}
        is_whole = len(default) == len(self.space)
        if not is_whole or any(default[name] not in values for name, values in self.space.items()):
            return None
        return default if all(_evaluated(text, default) for text in self.conditions) else None


_CONSTANT = ("Constant", "Symbol")
"""Kinds of memory that are a symbol of the source."""


def _memory(item: Mapping[str, Any]) -> str:
    return str(item.get("MemType") or item["MemoryType"])


def _type(item: Mapping[str, Any]) -> Any:
    if item["Type"] not in _TYPES:
        raise UnknownName(f"type of argument {item.get('Name', '')}", item["Type"], _TYPES)
    return _TYPES[item["Type"]]


def _member(content: Mapping[str, Any], name: str) -> Any:
    if name not in content:
        raise InputError(f"a description in T1 format needs {name}")
    return content[name]


def _values(parameter: Mapping[str, Any]) -> list[Any]:
    """Return the values of a parameter, which the format states as the text of a list."""
    values = parameter["Values"]
    try:
        listed = ast.literal_eval(values) if isinstance(values, str) else values
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(
            f"values of {parameter['Name']} must be a list such as '[1, 2, 4]', got {quoted(values)}"
        ) from None
    return list(listed)


# -- expressions --------------------------------------------------------------------------------------------

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "abs": abs,
    "int": int,
    "ceil": math.ceil,
}
_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_COMPARED: Mapping[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def _python(expression: str) -> str:
    """Return an expression with Python's words for the operators of C."""
    return expression.replace("&&", " and ").replace("||", " or ").strip()


def _tree(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InputError(f"{quoted(expression)} is no expression") from None


def _names(expression: str) -> set[str]:
    return {node.id for node in ast.walk(_tree(expression)) if isinstance(node, ast.Name)}


def _check(expression: str, parameters: Mapping[str, Sequence[Any]]) -> None:
    """Refuse an expression that is more than arithmetic of parameters."""
    _evaluated(expression, {name: values[0] for name, values in parameters.items()})


def _evaluated(expression: str, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression of arithmetic, comparisons and a few functions."""

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str()):
                return node.value
            case ast.Name(id=name) if name in names:
                return names[name]
            case ast.Name(id=name):
                raise UnknownName(f"name in {quoted(expression)}", name, names)
            case ast.BinOp(op=operation) if type(operation) in _BINARY:
                return _BINARY[type(operation)](value(node.left), value(node.right))
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.UnaryOp(op=ast.Not()):
                return not value(node.operand)
            case ast.BoolOp(op=operation):
                values = map(value, node.values)
                return all(values) if isinstance(operation, ast.And) else any(values)
            case ast.Compare() if all(type(operation) in _COMPARED for operation in node.ops):
                terms = [value(term) for term in (node.left, *node.comparators)]
                pairs = zip(node.ops, terms, terms[1:], strict=False)
                return all(_COMPARED[type(operation)](left, right) for operation, left, right in pairs)
            case ast.Subscript():
                return value(node.value)[value(node.slice)]
            case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*map(value, node.args))
        raise InputError(f"{quoted(expression)} may contain arithmetic and comparisons only")

    return value(_tree(expression))
