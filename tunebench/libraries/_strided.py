"""Operands of strided operators by NumPy and by torch: views where a library has them, copies otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tunebench._lazy import np
from tunebench.expression import Apply, Name, Node, names
from tunebench.index_map import Guard, IndexMap
from tunebench.libraries import Tensors
from tunebench.libraries._expression import Library
from tunebench.workloads.common.strided_workload import StridedWorkload, places_of

__all__ = ["Arrays", "of_numpy", "of_torch", "program", "torch_memory"]

Box = tuple[slice, ...]
"""A range of indices along each axis."""


class Arrays(NamedTuple):
    """Operations of a library on arrays.

    Attributes:
        view: Returns the elements of a map without guards, given flat memory; the result may be a view.
        zeros: Returns zeros of a shape, of the type of another array.
        indexed: Returns the elements of flat memory at indices, 0 where a condition is false.
        permuted: Returns a view with the axes in another order.
        host: Returns an array of NumPy.
    """

    view: Callable[[Any, IndexMap], Callable[[], Any]]
    zeros: Callable[[Sequence[int], Any], Any]
    indexed: Callable[[Any, Any, Any], Callable[[], Any]]
    permuted: Callable[[Any, Sequence[int]], Any]
    host: Callable[[Any], Any]


def of_numpy() -> Arrays:
    """Return NumPy's operations."""

    def view(memory: Any, index: IndexMap) -> Callable[[], Any]:
        strides = [step * memory.itemsize for step in index.strides]
        strided = np.lib.stride_tricks.as_strided(memory[index.start :], index.shape, strides)
        return lambda: strided

    return Arrays(
        view=view,
        zeros=lambda shape, like: np.zeros(shape, like.dtype),
        indexed=lambda memory, offsets, exists: (
            lambda: np.where(exists, memory[offsets], memory.dtype.type(0))
        ),
        permuted=np.transpose,
        host=np.asarray,
    )


def of_torch() -> Arrays:
    """Return torch's operations. Its tensors have no negative strides: `flip` copies."""
    import torch

    def view(memory: Any, index: IndexMap) -> Callable[[], Any]:
        backward = [axis for axis, step in enumerate(index.strides) if step < 0]
        start = index.start + sum(index.strides[axis] * (index.shape[axis] - 1) for axis in backward)
        strided = memory.as_strided(index.shape, [abs(step) for step in index.strides], start)
        return (lambda: strided.flip(backward)) if backward else lambda: strided

    def indexed(memory: Any, offsets: Any, exists: Any) -> Callable[[], Any]:
        at, mask = (torch.from_numpy(array).to(memory.device) for array in (offsets, exists))
        return lambda: torch.where(mask, memory[at], memory.new_zeros(()))

    return Arrays(
        view=view,
        zeros=lambda shape, like: like.new_zeros(tuple(shape)),
        indexed=indexed,
        permuted=lambda array, order: array.permute(*order),
        host=lambda array: array.cpu().numpy(),
    )


def torch_memory(t: Tensors) -> dict[str, Any]:
    """Return tensors of bool and i8 as f32: torch does not subtract the former, the latter wrap."""
    import torch

    small = (torch.bool, torch.int8)
    return {name: tensor.float() if tensor.dtype in small else tensor for name, tensor in t.items()}


def program(
    workload: StridedWorkload, memory: Tensors, library: Library, arrays: Arrays
) -> Callable[[], Any]:
    """Return a function that computes the values of the expression over the index space.

    A sum of operands that exist in separate boxes is a concatenation, which copies each once.

    Args:
        workload: The workload.
        memory: Flat memory of each operand, of a type that the library can add.
        library: Operations of expressions.
        arrays: Operations on arrays.
    """
    boxes = {name: _box(operand.index) for name, operand in workload.maps.items()}
    parts = _summands(workload.tree)
    if parts and len(parts) > 1 and not workload.gathered and _are_separate([boxes[n] for n in parts]):
        return _concatenation(workload, {name: boxes[name] for name in parts}, memory, arrays)
    read = {
        name: _gathering(operand.index, memory[name], memory, arrays)
        if operand.index.gathers
        else _reader(operand.index, boxes[name], memory[name], arrays)
        for name, operand in workload.maps.items()
    }
    if isinstance(workload.tree, Name):
        return read[workload.tree.name]
    compute = library.function(workload.tree, {})
    ordered = [read[name] for name in names(workload.tree)]
    return lambda: compute(*(reader() for reader in ordered))


def _reader(index: IndexMap, box: Box | None, memory: Any, arrays: Arrays) -> Callable[[], Any]:
    """Return a function that returns an operand's elements over the index space."""
    if not index.guards:
        return arrays.view(memory, index)
    if box is None:
        return arrays.indexed(memory, *places_of(index, range(index.shape[0])))
    inside = arrays.view(memory, _within(index, box))

    def padded() -> Any:
        out = arrays.zeros(index.shape, memory)
        out[box] = inside()
        return out

    return padded


def _gathering(index: IndexMap, memory: Any, indices: Tensors, arrays: Arrays) -> Callable[[], Any]:
    """Return a function that gathers an operand's elements, by whole rows where an index selects a row."""
    gather, *further_gathers = index.gathers
    rows = [axis for axis, factor in enumerate(gather.coefficients) if factor]
    rest = [axis for axis in range(len(index.shape)) if axis not in rows]
    if further_gathers or index.guards or any(index.strides[axis] for axis in rows):
        sources = {gathering.source: arrays.host(indices[gathering.source]) for gathering in index.gathers}
        return arrays.indexed(memory, *places_of(index, range(index.shape[0]), sources))

    def of_axes(axes: Sequence[int], row: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(index.shape[axis] for axis in axes), tuple(row[axis] for axis in axes)

    (extents, steps), (count, strides) = of_axes(rest, index.strides), of_axes(rows, gather.coefficients)
    table = arrays.view(memory, IndexMap((gather.extent, *extents), (gather.step, *steps), index.start))()
    at = arrays.view(indices[gather.source], IndexMap(count, strides, gather.start))()
    order = [(rows + rest).index(axis) for axis in range(len(index.shape))]
    return lambda: arrays.permuted(table[at], order)


def _concatenation(
    workload: StridedWorkload, boxes: Mapping[str, Box | None], memory: Tensors, arrays: Arrays
) -> Callable[[], Any]:
    parts = [
        (box, arrays.view(memory[name], _within(workload.maps[name].index, box)))
        for name, box in boxes.items()
        if box is not None
    ]
    like = memory[next(iter(boxes))]

    def concatenated() -> Any:
        out = arrays.zeros(workload.extents, like)
        for box, inside in parts:
            out[box] = inside()
        return out

    return concatenated


def _summands(tree: Node) -> list[str] | None:
    """Return the names that an expression adds, or None if it is no such sum."""
    if isinstance(tree, Name):
        return [tree.name]
    if not isinstance(tree, Apply) or tree.operation != "add":
        return None
    parts = [_summands(argument) for argument in tree.arguments]
    return None if None in parts else [name for part in parts if part for name in part]


def _are_separate(boxes: Sequence[Box | None]) -> bool:
    """Return whether no index is in two boxes; None is not a box."""
    present = [box for box in boxes if box is not None]
    pairs = [(a, b) for index, a in enumerate(present) for b in present[:index]]
    apart = (any(x.stop <= y.start or y.stop <= x.start for x, y in zip(a, b, strict=True)) for a, b in pairs)
    return len(present) == len(boxes) and all(apart)


def _box(index: IndexMap) -> Box | None:
    """Return the indices at which all guards hold, or None if they are not a box."""
    limits = [[0, extent] for extent in index.shape]
    for guard in index.guards:
        axes = [axis for axis, factor in enumerate(guard.coefficients) if factor]
        if len(axes) != 1:
            return None
        first, last = _range(guard, axes[0])
        limits[axes[0]] = [max(limits[axes[0]][0], first), min(limits[axes[0]][1], last)]
    return tuple(slice(first, max(first, last)) for first, last in limits)


def _range(guard: Guard, axis: int) -> tuple[int, int]:
    """Return the first index along an axis at which its guard holds, and the one after the last."""
    factor, start, end = guard.coefficients[axis], guard.start, guard.extent
    if factor < 0:
        factor, start = -factor, end - 1 - start
    return -(-max(0, -start) // factor), -(-(end - start) // factor)


def _within(index: IndexMap, box: Box) -> IndexMap:
    """Return the index map of a box whose elements all exist."""
    start = index.start + sum(part.start * step for part, step in zip(box, index.strides, strict=True))
    return IndexMap(tuple(part.stop - part.start for part in box), index.strides, start)
