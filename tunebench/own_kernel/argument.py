"""Arguments of a user's kernel: arrays with their role, shape and type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from tunebench._figure import significant
from tunebench.dtype import DType, numpy_dtype
from tunebench.errors import InputError, UnknownName

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array

__all__ = ["Argument", "InOut", "Input", "Output", "Scratch", "check_range", "drawn", "dtype_of"]

StoredType = Literal["f32", "f16", "bf16", "e4m3", "i8", "i32", "i64", "bool"]
"""Types of arrays; kernels with arrays of 64-bit floats are not supported."""

_WHOLE = ("i8", "i32", "i64")
"""Types whose values are whole numbers."""

_TYPE_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "float": "f32",
    "int": "i32",
}


def dtype_of(dtype: Any, name: str) -> DType:
    """Return a type by its name here, in NumPy or in C.

    Args:
        dtype: Such as ``"f32"``, ``"float32"`` or ``numpy.float32``.
        name: Name of the argument, for messages.

    Raises:
        UnknownName: There is no such type.
    """
    text = getattr(dtype, "__name__", None) or str(dtype)
    stored: Any = _TYPE_NAMES.get(text, text)
    if stored not in get_args(StoredType):
        raise UnknownName(f"type of argument {name}", text, get_args(StoredType))
    return stored  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Array:
    """An array argument: an array, or its shape and type.

    Attributes:
        shape: Extents: whole numbers, or expressions of whole-number arguments such as ``"2*n"``; or an
            array with the values.
        dtype: Type of the elements; of an array, its own.
    """

    shape: Any
    dtype: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Input(_Array):
    """An array that the kernel reads and does not write; without values it is drawn at random.

    Attributes:
        low: Smallest value to draw. None is the smallest of an integer type; a real type needs both ends.
        high: Whole numbers drawn are below it, real ones at most it. None is the largest of an integer type.
        partly: Whether the kernel may leave elements unread; the array is then no part of the lower bound.
    """

    low: float | None = None
    high: float | None = None
    partly: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Output(_Array):
    """An array of which the kernel writes every element, and reads none."""


@dataclass(frozen=True, slots=True, eq=False)
class InOut(_Array):
    """An array that the kernel changes. It is restored before every launch, and verified after it.

    A copy restores it, and is a part of the measured time. The result is called by the name with `_out`.

    Attributes:
        low: As in `Input`.
        high: As in `Input`.
    """

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Scratch(_Array):
    """An array for intermediate values, whose contents are undefined before and after a launch."""


Role = Literal["input", "output", "inout", "scratch", "size", "number"]
"""`size` is a whole number, a dimension of the workload; `number` is a constant real number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument as a generated operator declares it.

    Attributes:
        name: Its name.
        role: What the kernel does with it.
        dtype: Type of the elements; of a size, `i32` or `i64`.
        shape: Extents of an array: a whole number, or an expression of sizes.
        dimension: Dimension of the workload with its value (a size) or shape; None if `shape` has it.
        value: A constant number.
        file: File with the values of an array, in the folder of the generated module; None draws them.
        low: As in `Input`.
        high: As in `Input`.
        partly: As in `Input`.
    """

    name: str
    role: Role
    dtype: DType
    shape: tuple[int | str, ...] = ()
    dimension: str | None = None
    value: float | None = None
    file: str | None = None
    low: float | None = None
    high: float | None = None
    partly: bool = False

    @property
    def result(self) -> str:
        """Name of the tensor with the result of an output or in-out array."""
        return f"{self.name}_out" if self.role == "inout" else self.name

    def written(self) -> str:
        """Return the text of this argument in a generated module."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return f"Argument({', '.join(f'{name}={value!r}' for name, value in given.items())})"


ROLES: Mapping[type[_Array], Role] = {
    Input: "input",
    Output: "output",
    InOut: "inout",
    Scratch: "scratch",
}
"""Role of each kind of array."""


def drawn(argument: Argument, shape: tuple[int, ...], rng: numpy.random.Generator) -> Array | None:
    """Return random values of the range of an argument; None if any value may be drawn.

    Args:
        argument: The argument; its range was checked by `check_range`.
        shape: Extents of the array.
        rng: Source of random numbers.
    """
    limits = _limits(argument.dtype, argument.low, argument.high)
    if limits is None:
        return None
    if argument.dtype in _WHOLE:
        low, high = map(int, limits)
        return rng.integers(low, high, shape, dtype=numpy_dtype(argument.dtype))
    values: Array = rng.uniform(*limits, shape).astype(numpy_dtype(argument.dtype))
    return values


def check_range(argument: Argument) -> None:
    """Check the range of values to draw of an argument.

    Raises:
        InputError: The range is empty, has a missing end, or exceeds the type.
    """
    name, dtype = argument.name, argument.dtype
    limits = _limits(dtype, argument.low, argument.high)
    if limits is None:
        return
    if dtype == "bool":
        raise InputError(f"argument {name} is bool, which takes neither low nor high")
    low, high = limits
    if None in limits:
        raise InputError(f"argument {name} of type {dtype} needs both low and high, such as low=0, high=1")
    if dtype in _WHOLE:
        lowest, highest = _limits(dtype, None, 0)[0], _limits(dtype, 0, None)[1]  # type: ignore[index]
        if not (float(low).is_integer() and float(high).is_integer()):
            raise InputError(f"argument {name} is {dtype} and needs whole low and high, got {low} and {high}")
    else:
        highest = float(_finite(dtype))
        lowest = -highest
    if not lowest <= low < high <= highest:
        raise InputError(
            f"argument {name} of type {dtype} needs {significant(lowest, 6)} <= low < high <= "
            f"{significant(highest, 6)}, got low={low} and high={high}"
        )


def _limits(dtype: DType, low: float | None, high: float | None) -> tuple[Any, Any] | None:
    """Return the ends of a range, those of the type for missing ones of an integer type."""
    if low is None and high is None:
        return None
    if dtype not in _WHOLE:
        return low, high
    bits = 8 * numpy_dtype(dtype).itemsize
    return -(2 ** (bits - 1)) if low is None else low, 2 ** (bits - 1) if high is None else high


def _finite(dtype: DType) -> Any:
    """Return the largest finite value of a real type."""
    import ml_dtypes

    return ml_dtypes.finfo(numpy_dtype(dtype)).max


def array_of(value: Any, name: str) -> tuple[Array | None, tuple[int | str, ...], DType]:
    """Return the values (None if only described), the shape and the type of an array argument.

    Raises:
        InputError: Shape or type are missing or malformed.
    """
    shape = value.shape if isinstance(value, _Array) else value
    dtype = value.dtype if isinstance(value, _Array) else None
    if hasattr(shape, "dtype"):
        import numpy as np

        array = np.ascontiguousarray(shape)
        if dtype is not None and dtype_of(dtype, name) != dtype_of(array.dtype, name):
            raise InputError(f"argument {name} is an array of {array.dtype}, but declared as {dtype}")
        return array, array.shape, dtype_of(array.dtype, name)
    if dtype is None:
        if not isinstance(value, _Array):
            raise InputError(
                f"argument {name} must be an Input, Output, InOut or Scratch, an array or a number; "
                f"got {value!r}"
            )
        raise InputError(f"argument {name} needs a type, such as {type(value).__name__}({shape!r}, 'f32')")
    extents = (shape,) if isinstance(shape, int | str) else tuple(shape)
    extents = tuple(extent if isinstance(extent, str) else _extent(extent, name) for extent in extents)
    if not extents:
        raise InputError(f"argument {name} needs a shape with one extent or more; pass a number as it is")
    return None, extents, dtype_of(dtype, name)


def _extent(extent: Any, name: str) -> int:
    if isinstance(extent, bool) or not hasattr(extent, "__index__") or extent.__index__() < 1:
        raise InputError(
            f"argument {name} has extent {extent!r}; each must be a whole number of 1 or more, or an "
            "expression"
        )
    return int(extent)
