"""Base of strided_elementwise and strided_reduction: an expression of operands in any memory layout."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tunebench._lazy import np
from tunebench.dimension import MAX_SIZE, Expression, Operands, Shape
from tunebench.dtype import DType, itemsize
from tunebench.errors import InputError
from tunebench.expression import names
from tunebench.index_map import Guard, IndexMap, row_major, simplified
from tunebench.workload import Tensor, Traffic
from tunebench.workloads.operators._accumulation import row_blocks
from tunebench.workloads.operators._expression import Range, evaluate
from tunebench.workloads.operators._expression_workload import DrawnExpression

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = ["StridedOperand", "StridedWorkload", "operands_text", "places_of"]

TYPES = ("f32", "f16", "bf16", "bool")
"""Types of operands."""
ELEMENTS_AT_ONCE = 2**19
"""Elements evaluated at a time, approximately: temporaries of a whole workload may not fit in memory."""

_SHAPE = re.compile(r"[1-9]\d{0,9}(?:x[1-9]\d{0,9})*", re.ASCII)
_NUMBERS = r"-?\d{1,12}(?:_-?\d{1,12})*"
_OPERAND = re.compile(
    rf"(?P<name>[A-Za-z]\w*)\.(?P<dtype>{'|'.join(TYPES)})\.(?P<strides>{_NUMBERS})"
    rf"(?:\.at(?P<start>-?\d{{1,12}}))?(?P<guards>(?:\.if{_NUMBERS})*)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class StridedOperand:
    """An operand of an expression: its type, and the offset in memory of each element."""

    dtype: DType
    index: IndexMap

    def text(self, name: str) -> str:
        """Return the operand as a part of the dimension `operands`."""
        index = self.index
        parts = [name, self.dtype, _joined(index.strides)]
        parts += [f"at{index.start}"] if index.start else []
        parts += [f"if{_joined((*one.coefficients, one.start, one.extent))}" for one in index.guards]
        return ".".join(parts)


def operands_text(operands: Mapping[str, StridedOperand]) -> str:
    """Return operands by name as the dimension `operands`."""
    return "+".join(operand.text(name) for name, operand in operands.items())


def _joined(numbers: tuple[int, ...]) -> str:
    return "_".join(map(str, numbers))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("_")))


@dataclass(frozen=True, kw_only=True)
class StridedWorkload(DrawnExpression):
    """An expression over an N-dimensional index space, in f32; subclasses define the use of its values.

    `shape` is the index space, such as ``8x12x512x64``. `operands` has a part for each name of the
    expression, joined by ``+``, such as ``x0.f16.393216_64_768_1.at128.if0_0_1_0_-3_64``:

    - the name and the type; `bool` operands are 0 or 1. A result of this type is 1 unless the value is 0.
    - the strides along each axis, in elements; 0 broadcasts, and -1 reverses
    - ``at``: the offset of the first element, 0 if left out
    - ``if``: coefficients of the index along each axis, a constant and an extent. The operand is 0 where
      the sum of indices times coefficients, plus the constant, is negative or not below the extent.

    An operand is a flat tensor that ends with the last element read. Axes are merged where all operands
    permit it, so that equal computations have one text. The functions are those of elementwise.
    """

    shape: Shape
    dtype: Literal["f32", "f16", "bf16", "bool"]
    expression: Expression
    operands: Operands

    def check(self) -> None:
        """Check the operands against shape and expression, and store them with as few axes as possible."""
        operands = self._parsed()
        maps = [operand.index for operand in operands.values()]
        (*maps, _), inner = simplified([*maps, self._result_map()], self._reduced_axes())
        self._store(maps[0].shape, inner)
        types = [operand.dtype for operand in operands.values()]
        merged = dict(zip(operands, map(StridedOperand, types, maps), strict=True))
        object.__setattr__(self, "operands", operands_text(merged))
        object.__setattr__(self, "maps", merged)  # else `maps` would parse the text again
        super().check()

    def _parsed(self) -> dict[str, StridedOperand]:
        """Return the operands as given, in the order in which the expression first uses them."""
        if not _SHAPE.fullmatch(self.shape) or math.prod(self.extents) > MAX_SIZE:
            raise InputError(
                f"{self.operator}: shape={self.shape!r} must be extents of 1 or more joined by x, such as "
                f"8x512x768, of at most {MAX_SIZE} elements"
            )
        found: dict[str, StridedOperand] = {}
        for text in self.operands.split("+"):
            part = _OPERAND.fullmatch(text)
            operand = None if part is None else self._operand(part)
            if part is None or operand is None or part["name"] in found:
                raise InputError(
                    f"{self.operator}: operand {text!r} must be NAME.TYPE.STRIDES with a stride for each of "
                    f"the {len(self.extents)} axes of {self.shape}, such as x.f16."
                    f"{_joined(row_major(self.extents))}, optionally .atOFFSET and .ifCOEFFICIENTS_CONSTANT_"
                    f"EXTENT, each name once; types: {', '.join(TYPES)}"
                )
            if operand.index.offsets()[0] < 0 or operand.index.offsets()[1] >= MAX_SIZE:
                raise InputError(
                    f"{self.operator}: operand {text!r} reads offsets {operand.index.offsets()}; they must "
                    f"be from 0 to {MAX_SIZE - 1}"
                )
            found[part["name"]] = operand
        used = names(self.tree)
        if set(used) != set(found) or self.result in used:
            raise InputError(
                f"{self.operator}: operands must be the names of {self.expression}: {', '.join(used)}; got "
                f"{', '.join(found)}. No operand may be named {self.result}"
            )
        return {name: found[name] for name in used}

    def _operand(self, part: re.Match[str]) -> StridedOperand | None:
        extents, strides = self.extents, _numbers(part["strides"])
        guards = [_numbers(text) for text in part["guards"].split(".if")[1:]]
        if len(strides) != len(extents) or any(len(guard) != len(extents) + 2 for guard in guards):
            return None
        limits = tuple(Guard(guard[:-2], guard[-2], guard[-1]) for guard in guards)
        dtype: DType = part["dtype"]  # type: ignore[assignment]  # the pattern has matched a type
        return StridedOperand(dtype, IndexMap(extents, strides, int(part["start"] or 0), limits))

    def _result_map(self) -> IndexMap:
        """Return the map of the result's memory over the index space."""
        kept = self.extents[: len(self.extents) - self._reduced_axes()]
        return IndexMap(self.extents, (*row_major(kept), *(0,) * self._reduced_axes()))

    def _reduced_axes(self) -> int:
        """Return the number of innermost axes that are reduced."""
        return 0

    def _store(self, shape: tuple[int, ...], reduced: int) -> None:
        """Replace the shape, and the number of innermost axes that are reduced."""
        object.__setattr__(self, "shape", "x".join(map(str, shape)))

    # -- parts -----------------------------------------------------------------------------------------------

    @property
    def result_type(self) -> DType:
        """The type of the results."""
        return self.dtype

    @property
    def extents(self) -> tuple[int, ...]:
        """Extents of the index space."""
        return tuple(map(int, self.shape.split("x")))

    @property
    def elements(self) -> int:
        """Number of elements of the index space."""
        return math.prod(self.extents)

    @functools.cached_property
    def maps(self) -> Mapping[str, StridedOperand]:
        """Operands by name, in the order of first use."""
        return self._parsed()

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the flat memory of each operand, in the order of first use."""
        return tuple(
            Tensor(name=name, shape=(operand.index.offsets()[1] + 1,), dtype=operand.dtype)
            for name, operand in self.maps.items()
        )

    def traffic(self) -> Traffic:
        """Return the bytes of the elements that are read and written."""
        read = sum(operand.index.touched() * itemsize(operand.dtype) for operand in self.maps.values())
        return Traffic(read_bytes=read, write_bytes=sum(tensor.nbytes for tensor in self.outputs()))

    # -- reference -------------------------------------------------------------------------------------------

    def evaluated(self, inputs: Mapping[str, Array64]) -> Iterator[tuple[slice, Array64, Array64]]:
        """Yield the expression for parts of the first axis: their indices, the values, the errors of f32."""
        first, *rest = self.extents
        for part in row_blocks(first, math.prod(rest), ELEMENTS_AT_ONCE):
            given = {name: self._elements(name, inputs[name], part) for name in self.maps}
            value, error = evaluate(self.tree, given)
            shape = (part.stop - part.start, *rest)
            yield part, np.broadcast_to(value, shape), np.broadcast_to(error, shape)

    def _elements(self, name: str, memory: Array64, part: slice) -> Array64:
        """Return the elements of an operand for some indices of the first axis."""
        index = self.maps[name].index
        places, exists = places_of(index, range(part.start, part.stop))
        return np.where(exists, memory[places], 0.0) if index.guards else memory[places]

    def _ranges(self, drawn: Range) -> dict[str, Range]:
        """Return the range of each operand if values are drawn from a range."""
        return {name: _range(operand, drawn) for name, operand in self.maps.items()}


def places_of(index: IndexMap, first: range) -> tuple[Array64, Array64]:
    """Return the offset of each element, 0 where it does not exist, and whether it exists.

    Args:
        index: Map of the elements.
        first: Indices along the first axis; all along the others.
    """
    ranges = [first, *map(range, index.shape[1:])]
    places = _sum_over(ranges, index.strides, index.start)
    exists = np.ones(places.shape, dtype=bool)
    for guard in index.guards:
        limited = _sum_over(ranges, guard.coefficients, guard.start)
        exists &= (limited >= 0) & (limited < guard.extent)
    return np.where(exists, places, 0), exists


def _range(operand: StridedOperand, drawn: Range) -> Range:
    """Return the range of an operand whose memory is drawn from a range."""
    if operand.dtype == "bool":
        return (0.0, 1.0)
    return (min(drawn[0], 0.0), drawn[1]) if operand.index.guards else drawn


def _sum_over(ranges: list[range], factors: tuple[int, ...], start: int) -> Array64:
    """Return a constant plus the sum of indices times factors, for all combinations of indices."""
    total = np.full((1,) * len(ranges), start, np.int64)
    for axis, (indices, factor) in enumerate(zip(ranges, factors, strict=True)):
        steps = np.arange(indices.start, indices.stop, dtype=np.int64) * factor
        shape = [1] * len(ranges)
        shape[axis] = len(indices)
        total = total + steps.reshape(shape)
    found: Array64 = np.broadcast_to(total, tuple(map(len, ranges)))
    return found
