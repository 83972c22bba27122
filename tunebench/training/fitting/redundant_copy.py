"""Copies of a traced graph that need no memory: `remove_redundant_copies`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

__all__ = ["remove_redundant_copies", "value_computed_again"]


def remove_redundant_copies(graph: fx.Graph) -> None:
    """Replace copies by the tensors that they copy, where nothing can observe the difference.

    torch traces a dropout of probability 0 as a copy; eager torch returns its input. A copy is kept if its
    layout differs from that of its source, or if the copy or its source is memory that the caller has: an
    input, a parameter or a result.

    Args:
        graph: A graph without mutation; each node's `meta` has its `val`, which is updated for views of a
            removed copy.
    """
    (output,) = graph.find_nodes(op="output")
    callers = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"), *output.all_input_nodes]
    visible = {storage for node in callers for storage in _storages(node)}
    removed: set[StorageWeakRef] = set()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if removed & set(_storages(node)):  # a view of a removed copy
            node.meta["val"] = value_computed_again(node)
        source = node.args[0] if node.args else None
        if (
            node.target is torch.ops.aten.clone.default
            and isinstance(source, fx.Node)
            and _same_layout(node.meta.get("val"), source.meta.get("val"))
            and not visible & {*_storages(node), *_storages(source)}
        ):
            removed.update(_storages(node))
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _storages(node: fx.Node) -> Iterator[StorageWeakRef]:
    """Yield the memory of a node's results."""
    for leaf in tree_leaves(node.meta.get("val")):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield StorageWeakRef(leaf.untyped_storage())


def _same_layout(first: Any, second: Any) -> bool:
    """Return whether two values are tensors with equal places of elements, without lazy negation."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if first.layout != torch.strided or second.layout != torch.strided:
        return False
    return (
        (first.shape, first.stride(), first.dtype, first.device)
        == (second.shape, second.stride(), second.dtype, second.device)
        and first.untyped_storage().nbytes() == second.untyped_storage().nbytes()
        and not (second.is_conj() or second.is_neg())
    )


def value_computed_again(node: fx.Node) -> Any:
    """Return the value of a call on the present values of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return node.target(*args, **kwargs)
