"""ATen operators that move elements, as sums of operands that are 0 outside of a part of the result.

Each operand has an index map over the axes of the result in torch's order; an axis may be split. Each element
of the result is in exactly one operand, or is padding. The source of a gather is the name of the FX node of
its indices.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from tunebench.index_map import Gather, Guard, IndexMap
from tunebench.torch.compiler._aten_argument import traced

__all__ = ["broadcast_map", "in_memory_order", "moved_elements", "moves_elements"]

Arguments = Mapping[str, Any]
Part = tuple[fx.Node, IndexMap]
"""A tensor that a call reads, and the place in its memory of each element of the result."""

MOST_PARTS = 32
"""Most operands of a sum: each element tests the guards of all."""


def moves_elements(name: str) -> bool:
    """Return whether calls of an ATen operator may be sums of operands with index maps."""
    return name in _READERS


def moved_elements(name: str, args: Arguments, result: Tensor) -> list[Part] | None:
    """Return the operands whose sum is the result of a call, or None if it has no such form.

    Args:
        name: Name of the operator, such as ``aten::cat``.
        args: Its arguments; tensors as FX nodes.
        result: The traced result.
    """
    parts = _READERS[name](args, result)
    if parts is None or len(parts) > MOST_PARTS:
        return None
    return parts if all(traced(node).numel() for node, _ in parts) else None


def broadcast_map(tensor: Tensor, shape: Sequence[int]) -> IndexMap:
    """Return the map from a shape to the memory of a tensor that is broadcast to it."""
    lead = len(shape) - tensor.dim()
    steps = (0 if extent == 1 else int(s) for extent, s in zip(tensor.shape, tensor.stride(), strict=True))
    return IndexMap(tuple(map(int, shape)), (*(0,) * lead, *steps))


def in_memory_order(index: IndexMap, result: Tensor) -> IndexMap:
    """Return a map over the axes of a result as a map over its memory, outermost axis first."""
    rest, groups = list(range(len(index.shape))), list[list[int]]()
    for extent in result.shape:
        group: list[int] = []
        while math.prod(index.shape[axis] for axis in group) < extent:
            group.append(rest.pop(0))
        groups.append(group)
    order = sorted(range(result.dim()), key=lambda axis: -result.stride(axis))
    axes = [axis for group_index in order for axis in groups[group_index]]

    return index.with_rows([index.shape[axis] for axis in axes], lambda row: [row[axis] for axis in axes])


# -- parts of results ----------------------------------------------------------------------------------------


def _only_within(index: IndexMap, axis: int, first: int, count: int) -> IndexMap:
    """Return a map whose operand is 0 outside of a range of the indices along an axis."""
    coefficients = tuple(int(i == axis) for i in range(len(index.shape)))
    guards = (*index.guards, Guard(coefficients, -first, count))
    return dataclasses.replace(index, guards=guards)


def _from(node: fx.Node, result: Tensor, axis: int, first: int) -> Part:
    """Return a tensor as the part of the result that begins at an index along an axis."""
    strides = tuple(map(int, traced(node).stride()))
    index = IndexMap(tuple(map(int, result.shape)), strides, -first * strides[axis])
    return node, _only_within(index, axis, first, int(traced(node).shape[axis]))


def _at(node: fx.Node, result: Tensor, axis: int, position: int) -> Part:
    """Return a tensor that lacks an axis of the result as the part at one index along this axis."""
    strides = list(map(int, traced(node).stride()))
    strides.insert(axis, 0)
    index = IndexMap(tuple(map(int, result.shape)), tuple(strides))
    return node, _only_within(index, axis, position, 1)


def _every(node: fx.Node, result: Tensor, axis: int, first: int, step: int) -> Part:
    """Return a tensor as the part of the result at every `step`-th index of an axis; the axis is split."""
    strides, shape = list(map(int, traced(node).stride())), list(map(int, result.shape))
    before, residue = divmod(first, step)
    shape[axis : axis + 1] = [shape[axis] // step, step]
    start = -before * strides[axis]
    strides.insert(axis + 1, 0)
    index = IndexMap(tuple(shape), tuple(strides), start)
    within = _only_within(index, axis, before, int(traced(node).shape[axis]))
    return node, _only_within(within, axis + 1, residue, 1)


def _outside(node: fx.Node, result: Tensor, axis: int, first: int, end: int) -> list[Part]:
    """Return a tensor of the result's shape as the parts before and after a range of indices."""
    whole, extent = broadcast_map(traced(node), result.shape), int(result.shape[axis])
    ranges = ((0, first), (end, extent))
    return [(node, _only_within(whole, axis, low, high - low)) for low, high in ranges if low < high]


def _axis(args: Arguments, result: Tensor) -> int:
    axis: int = args["dim"] % result.dim()
    return axis


def _cat(args: Arguments, result: Tensor) -> list[Part] | None:
    axis = _axis(args, result)
    parts = [part for part in args["tensors"] if traced(part).numel()]
    firsts = itertools.accumulate((int(traced(part).shape[axis]) for part in parts), initial=0)
    return [_from(part, result, axis, first) for part, first in zip(parts, firsts, strict=False)]


def _stack(args: Arguments, result: Tensor) -> list[Part] | None:
    axis = _axis(args, result)
    return [_at(part, result, axis, position) for position, part in enumerate(args["tensors"])]


def _pad(args: Arguments, result: Tensor) -> list[Part] | None:
    if args["value"] != 0:
        return None
    node, pads = args["self"], list(map(int, args["pad"]))
    tensor = traced(node)
    befores = [0] * (tensor.dim() - len(pads) // 2) + pads[::2][::-1]
    strides = tuple(map(int, tensor.stride()))
    start = -sum(before * stride for before, stride in zip(befores, strides, strict=True))
    index = IndexMap(tuple(map(int, result.shape)), strides, start)
    for axis, before in enumerate(befores):
        index = _only_within(index, axis, before, int(tensor.shape[axis]))
    return [(node, index)]


def _slice_backward(args: Arguments, result: Tensor) -> list[Part] | None:
    axis = _axis(args, result)
    first, step = slice(args["start"], args["end"]).indices(int(result.shape[axis]))[0], args["step"]
    if step == 1:
        return [_from(args["grad_output"], result, axis, first)]
    if result.shape[axis] % step:
        return None
    return [_every(args["grad_output"], result, axis, first, step)]


def _select_backward(args: Arguments, result: Tensor) -> list[Part] | None:
    axis = _axis(args, result)
    return [_at(args["grad_output"], result, axis, args["index"] % int(result.shape[axis]))]


def _slice_scatter(args: Arguments, result: Tensor) -> list[Part] | None:
    axis = _axis(args, result)
    first, end, step = slice(args["start"], args["end"], args["step"]).indices(int(result.shape[axis]))
    if step != 1:
        return None
    return [
        _from(args["src"], result, axis, first),
        *_outside(args["self"], result, axis, first, max(first, end)),
    ]


def _select_scatter(args: Arguments, result: Tensor) -> list[Part] | None:
    axis = _axis(args, result)
    position = args["index"] % int(result.shape[axis])
    return [
        _at(args["src"], result, axis, position),
        *_outside(args["self"], result, axis, position, position + 1),
    ]


def _flip(args: Arguments, result: Tensor) -> list[Part] | None:
    whole = broadcast_map(traced(args["self"]), result.shape)
    axes = {axis % result.dim() for axis in args["dims"]}
    start = sum((whole.shape[axis] - 1) * whole.strides[axis] for axis in axes)
    strides = tuple(-stride if axis in axes else stride for axis, stride in enumerate(whole.strides))
    return [(args["self"], IndexMap(whole.shape, strides, start))]


def _roll(args: Arguments, result: Tensor) -> list[Part] | None:
    """Return a tensor in two parts along each shifted axis."""
    if not args["dims"]:
        return None
    maps = [broadcast_map(traced(args["self"]), result.shape)]
    for dim, shift in zip(args["dims"], args["shifts"], strict=True):
        axis, extent = dim % result.dim(), int(result.shape[dim])
        begin = shift % extent
        ranges = ((0, begin, extent - begin), (begin, extent, -begin))
        maps = [
            _only_within(_shifted(part_map, axis, moved), axis, low, high - low)
            for part_map in maps
            for low, high, moved in ranges
            if low < high
        ]
    return [(args["self"], index) for index in maps]


def _shifted(index: IndexMap, axis: int, count: int) -> IndexMap:
    return dataclasses.replace(index, start=index.start + count * index.strides[axis])


def _repeat(args: Arguments, result: Tensor) -> list[Part] | None:
    """Return a tensor whose axes are split into repeats, which broadcast, and its own indices."""
    tensor, repeats = traced(args["self"]), list(map(int, args["repeats"]))
    lead = len(repeats) - tensor.dim()
    extents = (*(1,) * lead, *map(int, tensor.shape))
    strides = (*(0,) * lead, *map(int, tensor.stride()))
    shape = tuple(part for pair in zip(repeats, extents, strict=True) for part in pair)
    return [(args["self"], IndexMap(shape, tuple(part for stride in strides for part in (0, stride))))]


def _upsample_nearest(args: Arguments, result: Tensor) -> list[Part] | None:
    """Return images whose last axes are split into their own indices and copies, which broadcast."""
    tensor = traced(args["self"])
    shape, strides = list(map(int, tensor.shape[:2])), list(map(int, tensor.stride()[:2]))
    for axis in range(2, tensor.dim()):
        times, rest = divmod(int(result.shape[axis]), int(tensor.shape[axis]))
        if rest:
            return None
        shape += [int(tensor.shape[axis]), times]
        strides += [int(tensor.stride(axis)), 0]
    return [(args["self"], IndexMap(tuple(shape), tuple(strides)))]


# -- indices in memory ---------------------------------------------------------------------------------------


def gather_of(
    indices: fx.Node, result: Tensor, first: int, *, step: int, extent: int, wraps: bool = False
) -> Gather:
    """Return the gather by a tensor of indices that is broadcast to some axes of a result.

    Args:
        indices: The indices.
        result: The result.
        first: Last of these axes, counted from the end of the result's axes: 0 for the innermost one.
        step: Step in the gathered tensor between adjacent indices.
        extent: Number of valid indices.
        wraps: Whether negative indices count from the end.
    """
    tensor = traced(indices)
    strides = [0 if e == 1 else int(s) for e, s in zip(tensor.shape, tensor.stride(), strict=True)]
    row = (*(0,) * (result.dim() - len(strides) - first), *strides, *(0,) * first)
    return Gather(indices.name, row, 0, step, extent, wraps)


def _gathered(node: fx.Node, result: Tensor, strides: Sequence[int], *gathers: Gather) -> list[Part]:
    return [(node, IndexMap(tuple(map(int, result.shape)), tuple(strides), 0, (), gathers))]


def _embedding(args: Arguments, result: Tensor) -> list[Part] | None:
    weight, indices = args["weight"], args["indices"]
    (rows, _), (step, stride) = traced(weight).shape, traced(weight).stride()
    gather = gather_of(indices, result, 1, step=int(step), extent=int(rows))
    return _gathered(weight, result, (*(0,) * traced(indices).dim(), int(stride)), gather)


def _index_select(args: Arguments, result: Tensor) -> list[Part] | None:
    node, axis = args["self"], _axis(args, result)
    strides = list(map(int, traced(node).stride()))
    step, extent = strides[axis], int(traced(node).shape[axis])
    strides[axis] = 0
    gather = gather_of(args["index"], result, result.dim() - 1 - axis, step=step, extent=extent)
    return _gathered(node, result, strides, gather)


def _gather(args: Arguments, result: Tensor) -> list[Part] | None:
    if not result.dim() or traced(args["self"]).dim() != result.dim():
        return None
    node, axis = args["self"], _axis(args, result)
    strides = list(map(int, traced(node).stride()))
    step, extent = strides[axis], int(traced(node).shape[axis])
    strides[axis] = 0
    return _gathered(node, result, strides, gather_of(args["index"], result, 0, step=step, extent=extent))


def _index(args: Arguments, result: Tensor) -> list[Part] | None:
    """Return a tensor whose axes with tensors of indices are replaced by the axes of these, broadcast."""
    node, indices = args["self"], args["indices"]
    taken = [axis for axis, axis_indices in enumerate(indices) if axis_indices is not None]
    tensor, dims = traced(node), max(traced(indices[axis]).dim() for axis in taken)
    strides, is_adjacent = list(map(int, tensor.stride())), taken[-1] - taken[0] == len(taken) - 1
    first = taken[0] if is_adjacent else 0
    strides_kept = [stride for axis, stride in enumerate(strides) if axis not in taken]
    gathers = (
        gather_of(
            indices[axis],
            result,
            len(strides_kept) - first,
            step=strides[axis],
            extent=int(tensor.shape[axis]),
            wraps=True,
        )
        for axis in taken
    )
    return _gathered(node, result, (*strides_kept[:first], *(0,) * dims, *strides_kept[first:]), *gathers)


_READERS: Mapping[str, Callable[[Arguments, Tensor], list[Part] | None]] = {
    "aten::_unsafe_index": _index,
    "aten::cat": _cat,
    "aten::constant_pad_nd": _pad,
    "aten::embedding": _embedding,
    "aten::flip": _flip,
    "aten::gather": _gather,
    "aten::index": _index,
    "aten::index_select": _index_select,
    "aten::repeat": _repeat,
    "aten::roll": _roll,
    "aten::select_backward": _select_backward,
    "aten::select_scatter": _select_scatter,
    "aten::slice_backward": _slice_backward,
    "aten::slice_scatter": _slice_scatter,
    "aten::stack": _stack,
    "aten::upsample_nearest1d": _upsample_nearest,
    "aten::upsample_nearest2d": _upsample_nearest,
    "aten::upsample_nearest3d": _upsample_nearest,
}
"""Reader of each operator's arguments, by its name without overload."""
