"""Calls that add rows by an index in memory: gradients of embeddings, index_add, index_put, scatter_add."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tunebench.errors import InputError
from tunebench.torch._tensor import DTYPES
from tunebench.torch.compiler._aten_argument import is_view, number_of, traced
from tunebench.torch.compiler._graph_values import INDEX_TYPES, TYPES
from tunebench.workloads import workload

__all__ = ["SCATTERS", "ScatterCall", "scatter_of"]

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ScatterCall:
    """A call of an operator of `SCATTERS`.

    Attributes:
        text: Canonical text of the workload.
        arguments: FX node of each input tensor of the workload.
    """

    text: str
    arguments: Mapping[str, fx.Node]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows, their indices, what they are added to (None for zeros), and other fields of the workload."""

    x: fx.Node
    index: fx.Node
    base: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)


def scatter_of(node: fx.Node, name: str, arguments: Arguments) -> ScatterCall | str:
    """Return the workload of a call, or why there is none.

    Args:
        node: The call.
        name: Name of the operator, a key of `SCATTERS`.
        arguments: Its arguments by name.
    """
    rows, result = SCATTERS[name](arguments), traced(node)
    if isinstance(rows, str):
        return rows
    x, index = traced(rows.x), traced(rows.index)
    if index.dtype not in INDEX_TYPES or x.dtype not in DTYPES or x.dtype != result.dtype:
        return f"indices of type {index.dtype}, or rows of type {x.dtype}"
    if not x.numel() or not result.numel() or not result.is_contiguous() or not index.is_contiguous():
        return "tensors without elements, or whose elements are not contiguous"
    cols = math.prod(result.shape[1:])
    if x.numel() != index.numel() * cols:
        return "rows that are broadcast"
    is_zero = rows.base is None or number_of(rows.base) == 0
    try:
        made = workload(
            "scatter_add",
            rows=index.numel(),
            cols=cols,
            bins=result.shape[0],
            dtype=DTYPES[x.dtype],
            index=TYPES[index.dtype],
            base=not is_zero,
            **rows.fields,
        )
    except InputError as error:
        return str(error)
    base = {} if is_zero else {"base": rows.base}
    return ScatterCall(str(made), {"x": rows.x, "index": rows.index, **base})


def _embedding(args: Arguments) -> _Rows | str:
    if args["scale_grad_by_freq"]:
        return "gradients divided by the frequency of their index"
    skipped = args["padding_idx"] if args["padding_idx"] >= 0 else -1
    return _Rows(args["grad_output"], args["indices"], fields={"skipped": skipped})


def _index_add(args: Arguments) -> _Rows | str:
    if args["dim"] % max(1, traced(args["self"]).dim()) or args["alpha"] != 1:
        return "another axis than the first, or a factor"
    return _Rows(args["source"], args["index"], args["self"])


def _index_put(args: Arguments) -> _Rows | str:
    if not args["accumulate"] or len(args["indices"]) != 1 or args["indices"][0] is None:
        return "rows that are not added, or several indices"
    return _Rows(args["values"], args["indices"][0], args["self"], {"wraps": True})


def _scatter_add(args: Arguments) -> _Rows | str:
    """Return the rows of a call whose index is the same for all elements of a row."""
    index, source = args["index"], args["src"]
    shape = traced(index).shape
    if args["dim"] % max(1, len(shape)) or shape != traced(source).shape or len(shape) < 2:
        return "another axis than the first, or another shape than that of the indices"
    if traced(args["self"]).shape[1:] != shape[1:] or any(traced(index).stride()[1:]):
        return "an index for each element"
    while is_view(index) and traced(index).numel() != shape[0]:
        index = index.args[0]
    if traced(index).numel() != shape[0]:
        return "an index for each element"
    return _Rows(source, index, args["self"])


SCATTERS: Mapping[str, Callable[[Arguments], _Rows | str]] = {
    "aten::embedding_dense_backward": _embedding,
    "aten::index_add": _index_add,
    "aten::index_put": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::scatter_add": _scatter_add,
}
"""Reader of each operator that adds rows, by its name without overload."""
