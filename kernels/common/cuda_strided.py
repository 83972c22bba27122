"""Strided operands in CUDA C++: coordinates from a flat index, guards, and loads of one or several elements.

Sizes and strides are constants in the source, so that divisions become multiplications.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.dtype import itemsize
from tunebench.index_map import Guard, IndexMap, row_major
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.cuda_expression import function_of
from tunebench.kernels.common.expression import filled, variable
from tunebench.variant import ceil_div
from tunebench.workloads.common.strided_workload import StridedOperand, StridedWorkload

__all__ = [
    "LOOP_REGISTERS",
    "Load",
    "Touched",
    "arguments",
    "decoded",
    "decoded_indices",
    "held_registers",
    "loads_of",
    "parameters",
    "place_of",
    "prelude",
    "spaced",
    "touched",
    "widest",
]

LOOP_REGISTERS = 24
"""Registers of a thread in addition to loaded elements, as far as short expressions need them."""

LARGEST = 2**31
"""Sums below this are computed in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a thread loads an operand for `vector` adjacent indices of an axis.

    Attributes:
        name: Name of the operand.
        operand: The operand.
        axis: The axis.
        vector: Adjacent indices of a thread.
        elements: Loaded elements: `vector`, or 1 if the element is the same at all indices.
        is_vector: Whether one access loads all elements.
    """

    name: str
    operand: StridedOperand
    axis: int
    vector: int
    elements: int
    is_vector: bool

    @property
    def accesses(self) -> int:
        """Number of loads of a thread."""
        return 1 if self.is_vector else self.elements

    @property
    def held(self) -> str:
        """Type of the held elements."""
        return f"Vec<{ctype(self.operand.dtype)}, {self.elements}>"

    def element(self, register: str) -> str:
        """Return the text of the f32 value of element i.

        Args:
            register: Text of the held elements.
        """
        return f"to_float({register}.at[{'0' if self.elements == 1 else 'i'}])"

    def text(self, register: str, index: Mapping[int, str]) -> str:
        """Return the statement that loads the elements; those that do not exist are 0.

        Args:
            register: Text of the variable for the held elements.
            index: Text of the index along each axis.
        """
        index_map, pointer = self.operand.index, variable(self.name)
        offset = _offset(index_map, index)
        if self.is_vector or self.elements == 1:
            element = f"load_vec<{self.elements}>({pointer} + ({offset}))"
            exists = " && ".join(condition(guard, index, index_map.shape) for guard in index_map.guards)
            return f"{register} = {f'{exists} ? {element} : {self.held}{{}}' if exists else element};"
        inside = {**index, self.axis: f"({index[self.axis]} + i)"}
        offset = _offset(index_map, inside)
        exists = " && ".join(condition(guard, inside, index_map.shape) for guard in index_map.guards)
        element = f"{pointer}[{offset}]"
        guarded = f"{exists} ? {element} : {ctype(self.operand.dtype)}{{}}" if exists else element
        return f"\n#pragma unroll\n    for (int i = 0; i < {self.vector}; ++i) {register}.at[i] = {guarded};"


def _offset(index_map: IndexMap, index: Mapping[int, str]) -> str:
    """Return the text of the offset of an element, whose indices in memory are checked.

    Args:
        index_map: Map of the operand.
        index: Text of the index along each axis.
    """
    terms = [summed(index_map.strides, index, index_map.start, index_map.shape)]
    for gather in index_map.gathers:
        at = summed(gather.coefficients, index, gather.start, index_map.shape)
        wide = "i64" if abs(gather.step) * gather.extent >= LARGEST else "int"
        checked = (
            f"valid_index<{gather.extent}, {str(gather.wraps).lower()}>({variable(gather.source)}[{at}])"
        )
        terms.append(f"{wide}({checked}) * {gather.step}")
    return " + ".join(terms)


def loads_of(workload: StridedWorkload, axis: int, vector: int) -> tuple[Load, ...]:
    """Return how a thread loads each operand for `vector` aligned, adjacent indices of an axis."""
    return tuple(
        Load(
            name=name,
            operand=operand,
            axis=axis,
            vector=vector,
            elements=1 if _is_constant(operand.index, axis) else vector,
            is_vector=vector > 1 and _is_aligned(operand.index, axis, vector),
        )
        for name, operand in workload.maps.items()
    )


def _is_constant(index: IndexMap, axis: int) -> bool:
    return not any(row[axis] for row in index.rows())


def _is_aligned(index: IndexMap, axis: int, vector: int) -> bool:
    """Return whether `vector` aligned indices along an axis are one aligned access, or do not exist."""

    def others(row: Sequence[int]) -> list[int]:
        extents = enumerate(index.shape)
        return [row[other_axis] for other_axis, extent in extents if other_axis != axis and extent > 1]

    limits = [
        (*others(guard.coefficients), guard.start, guard.extent) if guard.coefficients[axis] == 1 else (0,)
        for guard in index.guards
        if guard.coefficients[axis]
    ]
    steps = [index.start, *others(index.strides), *(step for limit in limits for step in limit)]
    steps += [gather.step for gather in index.gathers]
    only_unit = all(guard.coefficients[axis] in (0, 1) for guard in index.guards)
    one_index = not any(gather.coefficients[axis] for gather in index.gathers)
    is_adjacent = index.strides[axis] == 1 and only_unit and one_index
    return is_adjacent and all(step % vector == 0 for step in steps)


def held_registers(workload: StridedWorkload, vector: Any, unroll: Any) -> Any:
    """Return the registers for loaded elements of all operands; arguments are numbers or columns.

    Args:
        workload: The workload.
        vector: Elements of a vector.
        unroll: Vectors of each operand.
    """
    registers = (ceil_div(vector * itemsize(operand.dtype), 4) for operand in workload.maps.values())
    return sum(registers) * unroll


def widest(workload: StridedWorkload, axis: int, *, stored: bool) -> int:
    """Return the largest element, in bytes, among the tensors that one access reads or writes as a vector.

    Args:
        workload: The workload.
        axis: Axis along which vectors are.
        stored: Whether results are also stored as vectors.
    """
    sizes = [
        itemsize(operand.dtype) for operand in workload.maps.values() if operand.index.strides[axis] == 1
    ]
    return max([*sizes, itemsize(workload.dtype) if stored else 1])


def decoded(
    flat: str, axes: Sequence[int], extents: Mapping[int, int], scale: Mapping[int, int]
) -> list[str]:
    """Return the statements that decode a flat index of type u32 to indices named ``at_0``, ``at_1``, ….

    Args:
        flat: Text of the flat index.
        axes: Axes to decode, outermost first.
        extents: Extents by axis.
        scale: Step between indices along some axes, such as the length of vectors; others have steps of 1.
    """
    statements, step = [], 1
    for axis in reversed(axes):
        count = extents[axis] // scale.get(axis, 1)
        digit = flat if step == 1 else f"{flat} / {step}u"
        digit = digit if axis == axes[0] else f"({digit}) % {count}u"
        factor = f" * {scale[axis]}" if scale.get(axis, 1) > 1 else ""
        statements.append(f"const int at_{axis} = int({digit}){factor};")
        step *= count
    return statements


def place_of(extents: Sequence[int]) -> str:
    """Return the text of the row-major offset of the element at the indices ``at_0``, ``at_1`` and so on."""
    steps = list(enumerate(row_major(extents)))
    return " + ".join(f"size_t(at_{axis}) * {step}" for axis, step in reversed(steps)) or "0"


def summed(row: Sequence[int], index: Mapping[int, str], start: int, shape: Sequence[int]) -> str:
    """Return the text of a constant plus the sum of indices times coefficients, of 32 bits if possible."""
    largest = abs(start) + sum(abs(step) * extent for step, extent in zip(row, shape, strict=True))
    wide = largest >= LARGEST
    terms = [
        (f"i64({text})" if wide else text) if step == 1 else f"{f'i64({text})' if wide else text} * {step}"
        for axis, text in index.items()
        for step in (row[axis],)
        if step
    ]
    first = [f"{start}" if not wide else f"i64({start})"] if start or not terms else []
    return " + ".join([*terms, *first]).replace("+ -", "- ")


def condition(guard: Guard, index: Mapping[int, str], shape: Sequence[int]) -> str:
    """Return the condition of a guard; one unsigned comparison tests both limits."""
    total = summed(guard.coefficients, index, guard.start, shape)
    return f"{'u64' if 'i64' in total else 'u32'}({total}) < {max(0, guard.extent)}u"


# -- expected execution -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Touched:
    """What the loads of some vectors touch, for each vector.

    Attributes:
        accesses: Loads of a thread.
        passes: Passes of a warp through L1.
        sector_bytes: Bytes of distinct sectors, for a thread.
    """

    accesses: float
    passes: float
    sector_bytes: float


def decoded_indices(
    flat: Any, axes: Sequence[int], extents: Mapping[int, int], scale: Mapping[int, int]
) -> dict[int, Any]:
    """Return the indices that the statements of `decoded` compute; flat indices beyond the end wrap.

    Args:
        flat: Flat indices.
        axes: Axes to decode, outermost first.
        extents: Extents by axis.
        scale: Step between indices along some axes.
    """
    found = {}
    for axis in reversed(axes):
        count = extents[axis] // scale.get(axis, 1)
        found[axis] = flat % count * scale.get(axis, 1)
        flat = flat // count
    return found


def touched(loads: Sequence[Load], index: Mapping[int, Any]) -> Touched:
    """Return what the threads of some warps touch when each loads one vector of every operand.

    Elements that a guard hides count as loaded, and gathered indices as random.

    Args:
        loads: The loads of a thread.
        index: Indices along each axis, an array over threads: whole warps, one after the other.
    """
    threads = len(next(iter(index.values()), np.zeros(1)))
    warps, accesses, passes, sector_bytes = max(1, threads // 32), 0, 0.0, 0.0
    for load in loads:
        size, index_map = itemsize(load.operand.dtype), load.operand.index
        offset = np.full(threads, index_map.start, dtype=np.int64)
        for axis, at in index.items():
            offset = offset + index_map.strides[axis] * at
        for gather in index_map.gathers:
            place = sum(gather.coefficients[axis] * at for axis, at in index.items())
            offset = offset + gather.step * (np.asarray(place) * 40503 % max(1, gather.extent))
        step = index_map.strides[load.axis] if load.axis >= 0 else 0
        elements = (offset[:, None] + step * np.arange(load.elements)) * size
        groups = _groups(load.elements * size if load.is_vector else size)
        seen = elements[:, :1] if load.is_vector else elements
        lines = (seen // 128).reshape(warps * groups, -1, seen.shape[1])
        for access in range(seen.shape[1]):
            ordered = np.sort(lines[:, :, access], axis=1)
            passes += (warps * groups + np.count_nonzero(np.diff(ordered, axis=1))) / warps
        accesses += load.accesses + len(index_map.gathers)
        sector_bytes += 32.0 * len(np.unique(elements // 32)) / threads
    return Touched(float(accesses), passes, sector_bytes)


def _groups(lane_bytes: int) -> int:
    """Return the groups of lanes that L1 serves one after the other."""
    return max(1, lane_bytes // 4)


def prelude(workload: StridedWorkload) -> str:
    """Return the headers of the kernels, and the device function `chain` of the expression."""
    chain = function_of(workload.tree, tuple(workload.maps))
    gather = ["gather"] if workload.gathered else []
    return helpers("types", "reduce", "row_block", "epilogue", "strided", *gather) + chain


def parameters(workload: StridedWorkload) -> str:
    """Return the kernel parameters for the operands."""
    return ", ".join(
        f"const {ctype(tensor.dtype)}* __restrict__ {variable(tensor.name)}" for tensor in workload.inputs()
    )


def arguments(loads: Sequence[Load], suffix: str = "[n]") -> str:
    """Return the arguments of `chain` for element i of held operands.

    Args:
        loads: The operands.
        suffix: Suffix of the names of held elements.
    """
    return ", ".join(load.element(f"held_{load.name}{suffix}") for load in loads)


def spaced(template: str, **pieces: Sequence[str]) -> str:
    """Return a template with each ``@WORD@`` replaced by statements, one a line."""
    return filled(template, **{word: "\n    ".join(statements) for word, statements in pieces.items()})
