"""Nodes of FX graphs with whole numbers, and the calls with results of type int8 that f32 computes exactly.

Kernels compute in f32, and leave out the conversions between the operations of a chain. A conversion to int8
changes all numbers but whole ones from -128 to 127.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from tunebench.torch._aten_workload import bound_arguments
from tunebench.torch.compiler._aten_argument import is_view, number_of, traced

__all__ = ["is_exact_in_int8"]

Range = tuple[float, float]

_FREE = (-math.inf, math.inf)
_TYPES: Mapping[torch.dtype, Range] = {
    torch.bool: (0, 1),
    torch.int8: (-128, 127),
    torch.uint8: (0, 255),
}
_COPIED: Mapping[str, tuple[str, ...]] = {
    "aten::_to_copy": ("self",),
    "aten::clone": ("self",),
    "aten::where": ("self", "other"),
    "aten::masked_fill": ("self", "value"),
}
"""Arguments of which a call's results are copies."""
_FILLED = frozenset({"aten::full", "aten::scalar_tensor"})
"""Calls that write one number, which is stored as the type holds it."""
_DEPTH = 8
"""Most calls to follow."""


def is_exact_in_int8(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call with results of type int8 copies whole numbers that the type has.

    Args:
        name: Name of the operator, such as ``aten::_to_copy``.
        arguments: Its arguments by name.
    """
    low, high = _TYPES[torch.int8]
    ranges = [_range_of(arguments[key], _DEPTH) for key in _COPIED.get(name, ())]
    in_range = [limits is not None and low <= limits[0] and limits[1] <= high for limits in ranges]
    return name in _FILLED or (bool(in_range) and all(in_range))


def _range_of(node: Any, depth: int) -> Range | None:
    """Return the range of a node's values if all of them are whole numbers or NaN; None if not known."""
    number = number_of(node)
    if number is not None:
        return (number, number) if math.isfinite(number) and number == int(number) else None
    tensor = traced(node)
    if not isinstance(tensor, Tensor) or not depth:
        return None
    if tensor.dtype in _TYPES:
        return _TYPES[tensor.dtype]
    if not isinstance(node, fx.Node) or not hasattr(node.target, "_schema"):
        return None
    arguments = bound_arguments(node.target, node.args, node.kwargs)
    first = arguments.get("self")
    if is_view(node):
        return _range_of(first, depth - 1) if traced(first).dtype == tensor.dtype else None
    match node.target._schema.name:
        case "aten::round" if not arguments.get("decimals"):
            return _FREE
        case "aten::_to_copy" | "aten::clone":  # whole numbers stay whole in a shorter type
            return _range_of(first, depth - 1)
        case "aten::clamp" | "aten::clamp_min" | "aten::hardtanh":
            return _clamped(arguments, depth)
        case "aten::add" | "aten::sub" as name if arguments.get("alpha", 1) == 1:
            return _summed(first, arguments["other"], depth, 1 if name == "aten::add" else -1)
    return None


def _clamped(arguments: Mapping[str, Any], depth: int) -> Range | None:
    limits = [arguments.get(name, arguments.get(f"{name}_val")) for name in ("min", "max")]
    low, high = (
        free if limit is None else number_of(limit) for limit, free in zip(limits, _FREE, strict=True)
    )
    inner = _range_of(arguments["self"], depth - 1)
    if inner is None or low is None or high is None or any(math.isfinite(x) and x % 1 for x in (low, high)):
        return None
    return min(max(inner[0], low), high), min(max(inner[1], low), high)


def _summed(first: Any, second: Any, depth: int, sign: int) -> Range | None:
    ranges = _range_of(first, depth - 1), _range_of(second, depth - 1)
    if ranges[0] is None or ranges[1] is None:
        return None
    added = sorted(sign * limit for limit in ranges[1])
    return ranges[0][0] + added[0], ranges[0][1] + added[1]
