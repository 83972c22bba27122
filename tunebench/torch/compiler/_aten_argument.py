"""Tensors of workloads as arguments and results of ATen operators."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from tunebench.torch._aten_workload import bound_arguments
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["arguments_of", "is_used", "is_view", "number_of", "results_of", "traced"]

_ARGUMENTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gemm": {
        "a": ("mat1", "batch1", "self"),
        "b": ("mat2", "batch2"),
        "bias": ("self",),
        "residual": ("self",),
    },
    "scaled_gemm": {},
    "scatter_add": {"x": ("x",), "index": ("index",), "base": ("base",)},
    "grouped_gemm": {"a": ("self", "input"), "b": ("mat2", "weight"), "offsets": ("offs",)},
    "conv2d": {"x": ("input",), "w": ("weight",), "bias": ("bias",), "dy": ("grad_output",)},
    "transposed": {"dy": ("input",), "w": ("weight",), "x": ("grad_output",)},
    "reduction": {"x0": ("grad_output",)},
    "softmax": {"x": ("self",), "y": ("output",), "dy": ("grad_output",)},
    "layernorm": {
        "x": ("input",),
        "gamma": ("weight",),
        "beta": ("bias",),
        "mean": ("mean",),
        "rstd": ("rstd",),
        "dy": ("grad_out",),
    },
    "rmsnorm": {"x": ("input",), "gamma": ("weight",), "rstd": ("rstd",), "dy": ("grad_out",)},
    "attention": {
        "q": ("query",),
        "k": ("key",),
        "v": ("value",),
        "o": ("out",),
        "lse": ("logsumexp",),
        "do": ("grad_out", "grad_out_"),
        "bias": ("attn_mask", "attn_bias"),
    },
}
"""Arguments of ATen operators that are the tensors of workloads: the first one that is a tensor."""


def arguments_of(workload: Workload, *, transposed: bool) -> Mapping[str, tuple[str, ...]]:
    """Return the possible arguments of a call for each input tensor of a workload.

    Args:
        workload: The workload.
        transposed: Whether the call is a transposed convolution, which is an input gradient.
    """
    return _ARGUMENTS["transposed" if transposed and workload.operator == "conv2d" else workload.operator]


def is_used(node: fx.Node, index: int) -> bool:
    """Return whether one of a call's several results is used."""
    return any(user.target is operator.getitem and user.args[1] == index for user in node.users)


_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::detach"})
"""Operators that return a view although their schema does not say so."""


def is_view(node: fx.Node) -> bool:
    """Return whether a call returns a view of its first argument, which no kernel computes."""
    func = node.target
    return hasattr(func, "_schema") and (bool(func.is_view) or func._schema.name in _VIEWS)


def results_of(
    node: fx.Node, texts: Iterable[str], translated: Container[str]
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the used results of a call that are results of workloads: name of the value, and traced tensor.

    Args:
        node: The call.
        texts: Canonical texts of the workloads.
        translated: Names of results that have a value already.
    """
    results: dict[str, tuple[str, torch.Tensor]] = {}
    for workload in map(parse, texts):
        for index, spec in enumerate(workload.outputs()):
            if spec.name in translated or (index and isinstance(node.meta["val"], torch.Tensor)):
                continue
            if isinstance(node.meta["val"], torch.Tensor):
                results[spec.name] = (node.name, node.meta["val"])
            elif is_used(node, index := _PLACES[workload.operator][spec.name]):
                results[spec.name] = (f"{node.name}.{index}", node.meta["val"][index])
    return results


_PLACES: Mapping[str, Mapping[str, int]] = {
    "conv2d": {"y": 0, "dx": 0, "dw": 1},
    "reduction": {"out": 2},
    "layernorm": {"y": 0, "mean": 1, "rstd": 2, "dx": 0, "dgamma": 1, "dbeta": 2},
    "rmsnorm": {"y": 0, "rstd": 1, "dx": 0, "dgamma": 1},
    "attention": {"o": 0, "lse": 1, "dq": 0, "dk": 1, "dv": 2},
}
"""Places of workloads' results among the results of ATen operators that return several tensors."""

_CONSTANTS = {"aten::full": "fill_value", "aten::scalar_tensor": "s"}
"""Operators that fill a tensor with a number, and the argument that is the number."""


def number_of(value: Any) -> float | None:
    """Return the number that an argument is, or that fills a constant tensor or its view; None otherwise."""
    if isinstance(value, (int, float)):
        return value
    if not isinstance(value, fx.Node) or not hasattr(value.target, "_schema"):
        return None
    if is_view(value):
        base = value.args[0]
        same = isinstance(base, fx.Node) and traced(base).dtype == traced(value).dtype
        return number_of(base) if same else None
    key = _CONSTANTS.get(value.target._schema.name)
    number = None if key is None else bound_arguments(value.target, value.args, value.kwargs)[key]
    return _stored(number, traced(value).dtype) if isinstance(number, (int, float)) else None


def _stored(number: float, dtype: torch.dtype) -> float:
    """Return a number as a tensor of some type holds it."""
    with _disable_current_modes():
        value: float = torch.tensor(number, dtype=dtype).item()
    return +value  # 0 or 1 for bool


def traced(node: Any) -> Any:
    """Return the traced tensor or tensors of an FX node; other values as they are."""
    return node.meta.get("val") if isinstance(node, fx.Node) else node
