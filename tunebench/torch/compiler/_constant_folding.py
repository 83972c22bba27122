"""Folding of constants: what a graph computes from no input, such as masks and positions, at compile time."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tunebench.torch._aten_workload import bound_arguments
from tunebench.torch._layout import is_static
from tunebench.torch.compiler._aten_argument import is_view, traced

__all__ = ["fold_constants"]

LARGEST_FOLDED = 2**20
"""Most elements of a tensor that is computed at compile time: the compiled graph keeps its memory."""

aten = torch.ops.aten


def fold_constants(module: fx.GraphModule) -> None:
    """Replace operations that read no input of a graph by their results; the graph is changed in place.

    A tensor of equal numbers becomes `aten.full`, which readers take as a number. Results that the graph
    returns, and views of them, are still computed in each call, because the caller may change them.

    Args:
        module: Module with a graph of ATen operators without mutation; it receives the results.
    """
    graph = module.graph
    for node in list(graph.nodes):
        _fill_by_number(graph, node)
    constants: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in graph.nodes:
            value = _computed(module, node, constants)
            if value is not None:
                constants[node] = value
        returned = _returned(graph, constants)
        for node, value in list(constants.items()):
            if node not in returned and _is_needed(node, value, constants):
                _replace(module, node, value)
    for node in reversed(constants):
        if not node.users and not node._erased:
            graph.erase_node(node)
    mode = detect_fake_mode([traced(node) for node in graph.find_nodes(op="placeholder")])
    if mode is not None:  # later passes trace operations on inputs and constants
        mode.allow_non_fake_inputs = True


_FILLED: Mapping[str, tuple[str, float]] = {
    "aten::full_like": ("fill_value", 0),
    "aten::new_full": ("fill_value", 0),
    "aten::fill": ("value", 0),
    "aten::zeros": ("", 0),
    "aten::zeros_like": ("", 0),
    "aten::new_zeros": ("", 0),
    "aten::ones": ("", 1),
    "aten::ones_like": ("", 1),
    "aten::new_ones": ("", 1),
}
"""Operators that write one number and may read the sizes of a tensor: the argument or the number itself."""


def _fill_by_number(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an operator that writes one number by `aten.full`, which reads nothing."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return
    result = traced(node)
    name, number = _FILLED.get(node.target._schema.name, ("", None))
    if number is None or not isinstance(result, Tensor):
        return
    if not is_static(result) or not result.is_contiguous():
        return
    if name:
        number = bound_arguments(node.target, node.args, node.kwargs)[name]
    if isinstance(number, (int, float)):
        _replace_by_full(graph, node, number)


def _replace_by_full(graph: fx.Graph, node: fx.Node, number: float) -> None:
    result = traced(node)
    kind = {"dtype": result.dtype, "device": result.device, "pin_memory": False}
    with graph.inserting_before(node):
        full = graph.call_function(aten.full.default, (list(result.shape), number), kind)
    _take_place(full, node)


def _take_place(new: fx.Node, node: fx.Node) -> None:
    """Replace a node, whose name and metadata the new one receives."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    if not node.users:
        name, graph = node.name, node.graph
        graph.erase_node(node)
        new.name = name


# -- values ------------------------------------------------------------------------------------------------


def _computed(module: fx.GraphModule, node: fx.Node, constants: Mapping[fx.Node, Any]) -> Any:
    """Return the result of a node that depends on constants only and is small; None otherwise."""
    if node.op == "get_attr":  # of tensors only literals are constant; AOTAutograd names them
        is_literal = str(node.target).startswith("_tensor_constant")
        return getattr(module, str(node.target)) if is_literal else None
    if node.op != "call_function" or not all(read in constants for read in node.all_input_nodes):
        return None
    if node.target is not operator.getitem and not _is_repeatable(node.target):
        return None
    shown = tree_leaves(traced(node))
    if not shown or not all(
        isinstance(result, Tensor) and result.numel() <= LARGEST_FOLDED for result in shown
    ):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda read: constants[read])
    return node.target(*args, **kwargs)


def _is_repeatable(target: Any) -> bool:
    """Return whether an ATen operator has the same results each time, and no other effect."""
    if getattr(target, "namespace", "") not in ("aten", "prims"):
        return False
    is_random = torch.Tag.nondeterministic_seeded in target.tags
    return not is_random and not target._schema.is_mutable and "empty" not in target._schema.name


def _shares_memory(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view(node)


def _returned(graph: fx.Graph, constants: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """Return the constants that the graph returns, or returns a view of."""
    (output,) = graph.find_nodes(op="output")
    queue, returned = [read for read in output.all_input_nodes if read in constants], set[fx.Node]()
    while queue:
        node = queue.pop()
        returned.add(node)
        queue += [read for read in node.all_input_nodes if _shares_memory(node)]
    return returned


def _is_needed(node: fx.Node, value: Any, constants: Mapping[fx.Node, Any]) -> bool:
    """Return whether an operation, or a view, reads a constant that is not a literal or filled already."""
    if node.op == "get_attr" or _shares_memory(node) or node.target in _NUMBERS:
        return False
    if not isinstance(value, Tensor) or value.stride() != traced(node).stride():
        return False
    return any(user not in constants or _shares_memory(user) for user in node.users)


_NUMBERS = frozenset({aten.full.default, aten.scalar_tensor.default})


def _replace(module: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    """Replace a node by a constant of the module, or by a tensor that is filled with one number."""
    first = value.flatten()[:1]
    if first.numel() and value.is_contiguous() and not value.is_complex() and bool((value == first).all()):
        _replace_by_full(module.graph, node, first.item())
        return
    name = f"_folded_{node.name}"
    module.register_buffer(name, value, persistent=False)
    with module.graph.inserting_before(node):
        constant = module.graph.get_attr(name)
    _take_place(constant, node)
