"""Types of workload dimensions: their valid values and their text form.

Operators annotate their fields with the types here, a `Literal`, or `bool`. The annotation determines the
text of a value, its parsing, the values that are rejected, and the placeholder in an operator's usage.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from tunebench import expression
from tunebench.activation import ACTIVATIONS
from tunebench.errors import InputError, UnknownName, quoted
from tunebench.expression import LARGEST, SMALLEST

__all__ = [
    "MAX_SIZE",
    "ActivationName",
    "AtLeast",
    "Count",
    "Expression",
    "Kind",
    "Name",
    "Names",
    "Operands",
    "Positive",
    "Shape",
    "Size",
    "checked",
    "defaults_to",
    "items_of",
    "placeholder",
    "text_of",
    "value_of",
]

MAX_SIZE = 2**31 - 1
"""Largest value of one integer dimension: kernels index a dimension with 32 bits."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Lower limit of an integer dimension."""

    minimum: int


Size = Annotated[int, AtLeast(1)]
"""A size: a whole number, 1 or more."""
Count = Annotated[int, AtLeast(0)]
"""An amount that may be 0, such as padding."""
Positive = Annotated[float, "positive"]
"""A positive f32 number that is not a size, such as the epsilon that is added to a variance."""
ActivationName = Annotated[str, "activation"]
"""A name in `tunebench.activation.ACTIVATIONS`."""
Name = Annotated[str, "name"]
"""A registered name: letters, digits, `_`, `-`, `.` and `+`."""

Names = Annotated[str, "names"]
"""Names of inputs, joined by `+`, each once; stored in alphabetical order."""
Expression = Annotated[str, "expression"]
"""An elementwise expression such as `gelu(x+bias)*y`; stored in canonical form.

See `tunebench.expression` for the grammar.
"""

Shape = Annotated[str, "shape"]
"""Extents joined by `x`, such as `8x512x768`."""
Operands = Annotated[str, "operands"]
"""Operands of an expression with their types and strides, such as `x.f16.64_1`, joined by `+`."""

_NAME = re.compile(r"[A-Za-z0-9_.+-]+")
_NAMES = re.compile(r"(?:[A-Za-z][A-Za-z0-9_]*(?:\+[A-Za-z][A-Za-z0-9_]*)*)?")
_PLACEHOLDERS = {
    "expression": "EXPRESSION",
    "names": "NAME+NAME",
    "operands": "NAME.TYPE.STRIDES+NAME.TYPE.STRIDES",
    "shape": "NxN",
}
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def defaults_to(dimension: str) -> Any:
    """Declare a dimension whose default is the value of an earlier one (`out` follows `dtype`).

    Args:
        dimension: Name of the earlier dimension.

    Returns:
        A dataclass field.
    """
    return dataclasses.field(default=None, metadata={"follows": dimension})


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a dimension, parsed once from its annotation.

    Attributes:
        base: The Python type; None for a `Literal` or an `ActivationName`.
        note: Marker that distinguishes dimensions stored as text, such as ``"names"``.
        values: Values of a `Literal` or names of activations; empty for a number or another text.
        minimum: Lower limit of a number.
    """

    base: Any
    note: Any
    values: tuple[Any, ...]
    minimum: int

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """Return the kind that the annotation of a dimension declares."""
        if get_origin(hint) is Literal:
            return cls(base=None, note=None, values=get_args(hint), minimum=0)
        if hint == ActivationName:
            return cls(base=None, note=None, values=tuple(ACTIVATIONS), minimum=0)
        base, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        minimum = next((note.minimum for note in notes if isinstance(note, AtLeast)), 0)
        return cls(base=base, note=notes[0] if notes else None, values=(), minimum=minimum)


def text_of(value: Any) -> str:
    """Return a value as text; for a real number the shortest text that parses to it: `1e-6`, `0.001`."""
    if isinstance(value, float):
        return re.sub(r"e([-+])0", r"e\1", repr(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def placeholder(kind: Kind) -> str:
    """Return the placeholder for a value in an operator's usage, such as ``N`` or ``true|false``."""
    if kind.values:
        return "|".join(map(str, kind.values))
    if kind.base is bool:
        return "true|false"
    if kind.base is float:
        return "NUMBER"
    return _PLACEHOLDERS.get(kind.note, "NAME") if kind.base is str else "N"


def items_of(text: str) -> list[str]:
    """Split `m=64,n=64,…` at the commas outside parentheses."""
    if "(" not in text:
        return text.split(",")
    items, depth = [""], 0
    for character in text:
        depth = max(0, depth + (character == "(") - (character == ")"))
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return items


def value_of(operator: str, name: str, value: Any, kind: Kind) -> Any:
    """Parse a dimension given as text; return a value that is not text unchanged.

    Args:
        operator: Name of the operator, for error messages.
        name: Name of the dimension, for error messages.
        value: Text to parse, or a value.
        kind: Kind of the dimension.

    Returns:
        The value, whose range is not checked yet (see `checked`).

    Raises:
        InputError: The text is not a value of this kind.
    """
    if not isinstance(value, str):
        return value
    if kind.base is bool:
        if value.lower() in {"true", "false", "1", "0"}:
            return value.lower() in {"true", "1"}
        raise InputError(f"{operator}: {name}={quoted(value)} must be true or false")
    if kind.base is int:
        if not re.fullmatch(r"-?[0-9]+", value) or len(value) > 12:
            raise InputError(f"{operator}: {name}={quoted(value)} must be a whole number up to {MAX_SIZE}")
        return int(value)
    if kind.base is float:
        if not _NUMBER.fullmatch(value):
            raise InputError(f"{operator}: {name}={quoted(value)} must be a number such as 1e-6")
        return float(value)
    return value


def checked(operator: str, name: str, value: Any, kind: Kind) -> Any:
    """Return the value of a dimension in canonical form.

    Args:
        operator: Name of the operator, for error messages.
        name: Name of the dimension, for error messages.
        value: Value to check.
        kind: Kind of the dimension.

    Raises:
        InputError: The value is not valid for this kind.
        UnknownName: The value is not one of the kind's listed values.
    """
    if kind.note == "expression" and isinstance(value, str):
        try:
            return expression.canonical(value)
        except InputError as error:
            raise InputError(f"{operator}: {name}: {error}") from None
    if kind.note == "names" and isinstance(value, str):
        names = sorted(filter(None, value.split("+")))
        if not _NAMES.fullmatch(value) or len(set(names)) != len(names):
            raise InputError(f"{operator}: {name}={quoted(value)} must be names joined by +, each once")
        return "+".join(names)
    if kind.base is float:
        return _positive(operator, name, value)
    _check_dimension(operator, name, value, kind)
    return value


def _positive(operator: str, name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not SMALLEST <= value <= LARGEST:
        raise InputError(f"{operator}: {name}={quoted(value)} must be a number from {SMALLEST} to {LARGEST}")
    return float(value)


def _check_dimension(operator: str, name: str, value: Any, kind: Kind) -> None:
    if kind.values:
        if value not in kind.values:
            raise UnknownName(f"value of {operator} dimension {name}", str(value), map(str, kind.values))
    elif kind.base is bool:
        if not isinstance(value, bool):
            raise InputError(f"{operator}: {name}={quoted(value)} must be true or false")
    elif kind.base is int:
        if isinstance(value, bool) or not isinstance(value, int) or not kind.minimum <= value <= MAX_SIZE:
            raise InputError(
                f"{operator}: {name}={quoted(value)} must be a whole number from {kind.minimum} to {MAX_SIZE}"
            )
    elif not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputError(f"{operator}: {name}={quoted(value)} must be a name of letters, digits, _ . + or -")
