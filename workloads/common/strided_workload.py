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
from tunebench.dtype import DType, itemsize, numpy_dtype
from tunebench.errors import InputError, quoted
from tunebench.expression import names
from tunebench.index_map import Gather, Guard, IndexMap, row_major, simplified
from tunebench.workload import Tensor, Traffic
from tunebench.workloads.common.accumulation import row_blocks
from tunebench.workloads.common.expression_value import Range, evaluate
from tunebench.workloads.common.expression_workload import WHOLE, DrawnExpression

if TYPE_CHECKING:
    import numpy

    from tunebench.workload import Array, Array64

__all__ = ["StridedOperand", "StridedWorkload", "operands_text", "places_of"]

TYPES = ("f32", "f16", "bf16", "bool", "i8")
"""Types of operands."""
INDEX_TYPES = ("i64", "i32")
"""Types of indices that operands are gathered by."""
ELEMENTS_AT_ONCE = 2**19
"""Elements evaluated at a time, approximately: temporaries of a whole workload may not fit in memory."""

_SHAPE = re.compile(r"[1-9]\d{0,9}(?:x[1-9]\d{0,9})*", re.ASCII)
_NUMBERS = r"-?\d{1,12}(?:_-?\d{1,12})*"
_OPERAND = re.compile(
    rf"(?P<name>[A-Za-z]\w*)\.(?P<dtype>{'|'.join(TYPES)})\.(?P<strides>{_NUMBERS})"
    rf"(?:\.at(?P<start>-?\d{{1,12}}))?(?P<guards>(?:\.if{_NUMBERS})*)"
    rf"(?P<gathers>(?:\.(?:by|wrap)[A-Za-z]\w*\.(?:{'|'.join(INDEX_TYPES)})\.{_NUMBERS})*)",
    re.ASCII,
)
_GATHER = re.compile(
    rf"\.(?P<how>by|wrap)(?P<name>[A-Za-z]\w*)\.(?P<dtype>\w+)\.(?P<numbers>{_NUMBERS})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class StridedOperand:
    """An operand of an expression.

    Attributes:
        dtype: Its type.
        index: Offset in memory of each element.
        index_types: Type of the indices of each gather.
    """

    dtype: DType
    index: IndexMap
    index_types: tuple[DType, ...] = ()

    def text(self, name: str) -> str:
        """Return the operand as a part of the dimension `operands`."""
        index = self.index
        parts = [name, self.dtype, _joined(index.strides)]
        parts += [f"at{index.start}"] if index.start else []
        parts += [f"if{_joined((*guard.coefficients, guard.start, guard.extent))}" for guard in index.guards]
        for gather, dtype in zip(index.gathers, self.index_types, strict=True):
            numbers = _joined((*gather.coefficients, gather.start, gather.step, gather.extent))
            parts += [f"{'wrap' if gather.wraps else 'by'}{gather.source}", dtype, numbers]
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

    - the name and the type; `bool` operands are 0 or 1. A result of this type is 1 unless the value is 0. A
      result of type `i8` is the value without its fraction; the value must be from -128 to 127.
    - the strides along each axis, in elements; 0 broadcasts, and -1 reverses
    - ``at``: the offset of the first element, 0 if left out
    - ``if``: coefficients of the index along each axis, a constant and an extent. The operand is 0 where
      the sum of indices times coefficients, plus the constant, is negative or not below the extent.
    - ``by``: an index in memory, such as ``.byrow.i64.1_0_0_768_30522``: name and type of the tensor of
      indices, its stride along each axis, the offset of its first element, the factor of an index in the
      operand's offset, and the number of valid indices. ``wrap`` instead of ``by`` lets negative indices
      count from the end. An index is read only where the operand exists.

    An operand is a flat tensor that ends with the last element read, or for gathers with the last one that a
    valid index reads. Axes are merged where all operands permit it, so that equal computations have one text.
    The functions are those of elementwise.

    No kernel reads memory by an index that is not valid. The CPU's kernels raise `IndexError`, and kernels on
    a GPU trap, which makes the next call of CUDA's driver fail. Indices are drawn at random from all valid
    ones, and `traffic` counts the rows that they are expected to name, each once.
    """

    shape: Shape
    dtype: Literal["f32", "f16", "bf16", "bool", "i8"]
    expression: Expression
    operands: Operands

    def check(self) -> None:
        """Check the operands against shape and expression, and store them with as few axes as possible."""
        operands = self._parsed()
        maps = [operand.index for operand in operands.values()]
        (*maps, _), inner = simplified([*maps, self._result_map()], self._reduced_axes())
        self._store(maps[0].shape, inner)
        types = [operand.dtype for operand in operands.values()]
        index_types = [operand.index_types for operand in operands.values()]
        merged = dict(zip(operands, map(StridedOperand, types, maps, index_types), strict=True))
        object.__setattr__(self, "operands", operands_text(merged))
        object.__setattr__(self, "maps", merged)  # else `maps` would parse the text again
        super().check()

    def _parsed(self) -> dict[str, StridedOperand]:
        """Return the operands as given, in the order in which the expression first uses them."""
        if not _SHAPE.fullmatch(self.shape) or math.prod(self.extents) > MAX_SIZE:
            raise InputError(
                f"{self.operator}: shape={quoted(self.shape)} must be extents of 1 or more joined by x, such "
                f"as 8x512x768, of at most {MAX_SIZE} elements"
            )
        operands: dict[str, StridedOperand] = {}
        for text in self.operands.split("+"):
            part = _OPERAND.fullmatch(text)
            operand = None if part is None else self._operand(part)
            if part is None or operand is None or part["name"] in operands:
                raise InputError(
                    f"{self.operator}: operand {quoted(text)} must be NAME.TYPE.STRIDES with a stride for "
                    f"each of the {len(self.extents)} axes of {self.shape}, such as x.f16."
                    f"{_joined(row_major(self.extents))}, optionally .atOFFSET, .ifCOEFFICIENTS_CONSTANT_"
                    f"EXTENT and .byNAME.TYPE.STRIDES_OFFSET_STEP_EXTENT, each name once; types: "
                    f"{', '.join(TYPES)}"
                )
            for index in (operand.index, *map(operand.index.indices, operand.index.gathers)):
                if index.offsets()[0] < 0 or index.offsets()[1] >= MAX_SIZE:
                    raise InputError(
                        f"{self.operator}: operand {quoted(text)} reads offsets {index.offsets()}; they must "
                        f"be from 0 to {MAX_SIZE - 1}"
                    )
            operands[part["name"]] = operand
        used = names(self.tree)
        self._check_indices(operands)
        if set(used) != set(operands) or self.result in used:
            raise InputError(
                f"{self.operator}: operands must be the names of {self.expression}: {', '.join(used)}; got "
                f"{', '.join(operands)}. No operand may be named {self.result}"
            )
        return {name: operands[name] for name in used}

    def _check_indices(self, operands: Mapping[str, StridedOperand]) -> None:
        """Check that the tensors of indices have names of their own, each with one type."""
        types: dict[str, DType] = {}
        for operand in operands.values():
            for gather, dtype in zip(operand.index.gathers, operand.index_types, strict=True):
                name = gather.source
                if name in operands or name == self.result or types.setdefault(name, dtype) != dtype:
                    raise InputError(
                        f"{self.operator}: the indices {name} must have one type, and a name that no "
                        "operand has"
                    )

    def _operand(self, part: re.Match[str]) -> StridedOperand | None:
        extents, strides = self.extents, _numbers(part["strides"])
        guards = [_numbers(text) for text in part["guards"].split(".if")[1:]]
        if len(strides) != len(extents) or any(len(guard) != len(extents) + 2 for guard in guards):
            return None
        limits = tuple(Guard(guard[:-2], guard[-2], guard[-1]) for guard in guards)
        dtype: DType = part["dtype"]  # type: ignore[assignment]  # the pattern has matched a type
        gathers: list[Gather] = []
        index_types: list[DType] = []
        for match in _GATHER.finditer(part["gathers"]):
            *row, start, step, extent = _numbers(match["numbers"])
            if len(row) != len(extents) or extent < 1:
                return None
            gathers.append(Gather(match["name"], tuple(row), start, step, extent, match["how"] == "wrap"))
            index_types.append(match["dtype"])  # type: ignore[arg-type]  # one of INDEX_TYPES
        index = IndexMap(extents, strides, int(part["start"] or 0), limits, tuple(gathers))
        return StridedOperand(dtype, index, tuple(index_types))

    def _result_map(self) -> IndexMap:
        """Return the map of the result's memory over the index space."""
        result_extents = self.extents[: len(self.extents) - self._reduced_axes()]
        return IndexMap(self.extents, (*row_major(result_extents), *(0,) * self._reduced_axes()))

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

    @functools.cached_property
    def gathered(self) -> Mapping[str, tuple[DType, tuple[tuple[IndexMap, Gather], ...]]]:
        """Type and readers of each tensor of indices by name: the map of an operand, and its gather."""
        readers_of: dict[str, tuple[DType, tuple[tuple[IndexMap, Gather], ...]]] = {}
        for operand in self.maps.values():
            for gather, dtype in zip(operand.index.gathers, operand.index_types, strict=True):
                _, readers = readers_of.get(gather.source, (dtype, ()))
                readers_of[gather.source] = dtype, (*readers, (operand.index, gather))
        return readers_of

    def inputs(self) -> tuple[Tensor, ...]:
        """Return the flat memory of each operand in the order of first use, and then of the indices."""
        operands = (
            Tensor(name=name, shape=(operand.index.offsets()[1] + 1,), dtype=operand.dtype)
            for name, operand in self.maps.items()
        )
        indices = (
            Tensor(name=name, shape=(max(m.indices(g).offsets()[1] for m, g in readers) + 1,), dtype=dtype)
            for name, (dtype, readers) in self.gathered.items()
        )
        return (*operands, *indices)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of `inputs`."""
        return (*self.maps, *self.gathered)

    def traffic(self) -> Traffic:
        """Return the bytes of the elements that are read and written, with random indices."""
        read = sum(operand.index.touched() * itemsize(operand.dtype) for operand in self.maps.values())
        read += sum(
            max(index.indices(gather).touched() for index, gather in readers) * itemsize(dtype)
            for dtype, readers in self.gathered.values()
        )
        return Traffic(read_bytes=read, write_bytes=sum(tensor.nbytes for tensor in self.outputs()))

    def draw_by_rule(self, tensor: Tensor, rng: numpy.random.Generator) -> Array | None:
        """Draw indices that are valid for all of their readers; other inputs as their range demands."""
        if tensor.name not in self.gathered:
            return super().draw_by_rule(tensor, rng)
        dtype, readers = self.gathered[tensor.name]
        extent = min(gather.extent for _, gather in readers)
        first = -extent if all(gather.wraps for _, gather in readers) else 0
        drawn: Array = rng.integers(first, extent, tensor.shape).astype(numpy_dtype(dtype))
        return drawn

    # -- reference -------------------------------------------------------------------------------------------

    def evaluated(self, inputs: Mapping[str, Array64]) -> Iterator[tuple[slice, Array64, Array64]]:
        """Yield the expression for parts of the first axis: their indices, the values, the errors of f32."""
        first, *rest = self.extents
        for part in row_blocks(first, math.prod(rest), ELEMENTS_AT_ONCE):
            operands = {name: self._elements(name, inputs, part) for name in self.maps}
            value, error = evaluate(self.tree, operands)
            shape = (part.stop - part.start, *rest)
            yield part, np.broadcast_to(value, shape), np.broadcast_to(error, shape)

    def _elements(self, name: str, inputs: Mapping[str, Array64], part: slice) -> Array64:
        """Return the elements of an operand for some indices of the first axis."""
        index, memory = self.maps[name].index, inputs[name]
        offsets, exists = places_of(index, range(part.start, part.stop), inputs)
        return np.where(exists, memory[offsets], 0.0) if index.guards else memory[offsets]

    def _ranges(self, drawn: Range) -> dict[str, Range]:
        """Return the range of each operand if values are drawn from a range."""
        return {name: _range(operand, drawn) for name, operand in self.maps.items()}


def places_of(
    index: IndexMap, first: range, indices: Mapping[str, Array] | None = None
) -> tuple[Array64, Array64]:
    """Return the offset of each element, 0 where it does not exist, and whether it exists.

    Args:
        index: Map of the elements.
        first: Indices along the first axis; all along the others.
        indices: Flat memory of each tensor of indices by name.

    Raises:
        IndexError: if an index in memory is not valid.
    """
    ranges = [first, *map(range, index.shape[1:])]
    offsets = _sum_over(ranges, index.strides, index.start)
    exists = np.ones(offsets.shape, dtype=bool)
    for guard in index.guards:
        limited = _sum_over(ranges, guard.coefficients, guard.start)
        exists &= (limited >= 0) & (limited < guard.extent)
    for gather in index.gathers:
        at = np.where(exists, _sum_over(ranges, gather.coefficients, gather.start), 0)
        indexed = np.where(exists, (indices or {})[gather.source][at], 0).astype(np.int64)
        if gather.wraps:
            indexed = np.where(indexed < 0, indexed + gather.extent, indexed)
        if ((indexed < 0) | (indexed >= gather.extent)).any():
            raise IndexError(f"{gather.source} has an index out of range for {gather.extent} elements")
        offsets = offsets + indexed * gather.step
    return np.where(exists, offsets, 0), exists


def _range(operand: StridedOperand, drawn: Range) -> Range:
    """Return the range of an operand whose memory is drawn from a range."""
    if operand.dtype in WHOLE:
        return WHOLE[operand.dtype]
    return (min(drawn[0], 0.0), drawn[1]) if operand.index.guards else drawn


def _sum_over(ranges: list[range], factors: tuple[int, ...], start: int) -> Array64:
    """Return a constant plus the sum of indices times factors, for all combinations of indices."""
    total = np.full((1,) * len(ranges), start, np.int64)
    for axis, (indices, factor) in enumerate(zip(ranges, factors, strict=True)):
        steps = np.arange(indices.start, indices.stop, dtype=np.int64) * factor
        shape = [1] * len(ranges)
        shape[axis] = len(indices)
        total = total + steps.reshape(shape)
    sums: Array64 = np.broadcast_to(total, tuple(map(len, ranges)))
    return sums
