"""RMS normalisation that a model writes as operations, as the one operator that torch runs on a GPU.

The operations are ``x * rsqrt(mean(x ** 2) + eps) * weight``, for types of 16 bits in float32 between casts.
Without a GPU torch traces `torch.nn.functional.rms_norm` like that. transformers writes it with the cast
before the weight (Llama, Mistral, Qwen): the operator rounds once where those operations round twice.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from tunebench.torch._layout import is_static

__all__ = ["fuse_rms_norms"]

aten = torch.ops.aten


def fuse_rms_norms(graph: fx.Graph) -> int:
    """Replace RMS normalisations in a graph for inference, and return the number of replacements.

    Args:
        graph: FX graph of ATen operators without mutation, with a fake tensor in `meta["val"]` of each node.
    """
    roots = [node for node in graph.nodes if node.target is aten.rsqrt.default and is_static(_val(node))]
    patterns = [_match(node) for node in roots]
    norms = [pattern for pattern in patterns if pattern is not None]
    for norm in norms:
        _replace(norm)
    if norms:
        graph.eliminate_dead_code()
    return len(norms)


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The nodes of one normalisation.

    Attributes:
        x: Input, (..., *normalised axes).
        weight: Weight, of the shape of the normalised axes.
        eps: Number that is added to the mean square.
        result: Node with the results.
    """

    x: fx.Node
    weight: fx.Node
    eps: float
    result: fx.Node


def _match(rsqrt: fx.Node) -> _Pattern | None:
    """Return the normalisation that a reciprocal square root belongs to, or None."""
    total = rsqrt.args[0]
    if not (_calls(total, aten.add.Scalar) or _calls(total, aten.add.Tensor)):
        return None
    if not _calls(total.args[0], aten.mean.dim) or not isinstance(total.args[1], int | float):
        return None
    square, axes, keeps = (*total.args[0].args, False)[:3]
    if not (keeps and _calls(square, aten.pow.Tensor_Scalar) and square.args[1] == 2):
        return None
    wide, scaled = square.args[0], _only_user(rsqrt)
    if scaled is None or scaled.target is not aten.mul.Tensor or set(scaled.args) != {wide, rsqrt}:
        return None
    unweighted, weighted = scaled, _only_user(scaled)
    is_cast_first = _calls(weighted, aten._to_copy.default)
    if weighted is not None and is_cast_first:
        unweighted, weighted = weighted, _only_user(weighted)
    if weighted is None or weighted.target is not aten.mul.Tensor or weighted.args[0] is weighted.args[1]:
        return None
    (weight,) = (operand for operand in weighted.args if operand is not unweighted)
    x, result = wide, weighted
    if _calls(wide, aten._to_copy.default):
        x, result = wide.args[0], weighted if is_cast_first else _only_user(weighted)
        if result is None or not (is_cast_first or _calls(result, aten._to_copy.default)):
            return None
    shape = _val(x).shape[_val(x).dim() - len(axes) :]
    same_type = _val(result).dtype == _val(x).dtype == _val(weight).dtype
    last = {axis % _val(x).dim() for axis in axes} == set(range(_val(x).dim() - len(axes), _val(x).dim()))
    if not (last and same_type and isinstance(weight, fx.Node) and _val(weight).shape == shape):
        return None
    return _Pattern(x, weight, _written(total.args[1]), result)


def _written(eps: float) -> float:
    """Return the number whose rounding to float32 was traced."""
    rounded = np.float32(eps)
    return float(str(rounded)) if float(rounded) == eps else eps


def _replace(pattern: _Pattern) -> None:
    graph, x, weight = pattern.result.graph, pattern.x, pattern.weight
    arguments = (list(_val(weight).shape), weight, pattern.eps)
    with graph.inserting_before(pattern.result):
        both = graph.call_function(aten._fused_rms_norm.default, (x, *arguments))
        first = graph.call_function(operator.getitem, (both, 0))
    with _val(x).fake_mode:
        both.meta["val"] = aten._fused_rms_norm(_val(x), arguments[0], _val(weight), pattern.eps)
    first.meta["val"] = both.meta["val"][0]
    pattern.result.replace_all_uses_with(first)


def _val(node: Any) -> Any:
    return node.meta["val"]


def _calls(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
