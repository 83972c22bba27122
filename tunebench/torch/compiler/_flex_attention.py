"""Calls of flex_attention as attention workloads, where its functions are masks or biases that kernels have.

The functions of a call are graphs of operations on indices. A mask is evaluated for all pairs of queries and
keys, and is then none, causal, a window, or a bias of zeros and minus infinity. A function of scores may
multiply them by a number and add what depends on indices only; torch runs others, such as a soft cap.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from tunebench.errors import InputError
from tunebench.torch._layout import bias_axes
from tunebench.torch._tensor import DTYPES
from tunebench.torch.compiler._aten_argument import is_used, traced
from tunebench.torch.compiler._constant_folding import fold_constants
from tunebench.workloads import parse
from tunebench.workloads import workload as make_workload

__all__ = ["FlexCall", "flex_call_of", "read_flex_attention", "replace_flex_attention"]

LARGEST_MASK = 2**24
"""Most pairs of queries and keys, times batch and heads, for which functions of indices are evaluated."""

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class FlexCall:
    """A call of flex_attention as a workload.

    Attributes:
        text: Canonical text of the workload.
        tensors: Node of each tensor that its kernel reads; empty if the blocks of the call may hide more keys
            than its mask, so that only torch may compute it.
    """

    text: str
    tensors: dict[str, fx.Node]

    @property
    def arguments(self) -> dict[str, fx.Node]:
        """The tensors by the names of attention's arguments."""
        names = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask"}
        return {names[name]: node for name, node in self.tensors.items()}


class _Unsupported(Exception):
    """A call that no kernel computes; the message is the reason."""


def read_flex_attention(module: fx.GraphModule) -> None:
    """Find the workloads of the calls in a graph; constant biases become buffers of its module.

    Args:
        module: Module with a graph of ATen operators without mutation, after constants were folded.
    """
    for node in _calls(module):
        with _disable_current_modes(), torch.no_grad():
            try:
                node.meta[_KEY] = _read(module, node)
            except (_Unsupported, InputError) as reason:
                node.meta[_KEY] = str(reason)


def replace_flex_attention(module: fx.GraphModule) -> None:
    """Replace calls in a graph for inference by scaled_dot_product_attention, where it computes the same.

    It has causal masks and biases, but no windows. Functions of the other calls stay in the graph.

    Args:
        module: Module with a graph of ATen operators without mutation.
    """
    if not _calls(module):
        return
    fold_constants(module)
    read_flex_attention(module)
    replaced = [node for node in _calls(module) if _replaced(node, flex_call_of(node))]
    if replaced:
        module.graph.eliminate_dead_code()


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    calls: list[fx.Node] = module.graph.find_nodes(op="call_function", target=_FLEX)
    return calls


def _replaced(node: fx.Node, call: FlexCall | str) -> bool:
    """Replace the results of a call, and return whether that is possible."""
    if isinstance(call, str) or not call.tensors:
        return False
    workload: Any = parse(call.text)
    if workload.window or (workload.causal and workload.before):
        return False
    tensors = call.tensors
    arguments = (tensors["q"], tensors["k"], tensors["v"], tensors.get("bias"), 0.0, workload.causal)
    options = {"scale": workload.scale, "enable_gqa": workload.group > 1}
    for result in [user for user in node.users if user.args[1] == 0]:
        with node.graph.inserting_before(node):
            attended = _traced_call(node.graph, _ATTENTION, arguments, options)
            if traced(attended).stride() != traced(result).stride():
                contiguous = {"memory_format": torch.contiguous_format}
                attended = _traced_call(node.graph, aten.clone.default, (attended,), contiguous)
        result.replace_all_uses_with(attended)
    return True


def _traced_call(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    values = fx.map_arg(args, traced)
    with values[0].fake_mode:
        node.meta["val"] = target(*values, **kwargs)
    return node


_FLEX = torch.ops.higher_order.flex_attention
_KEY = "tunebench_flex_attention"
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def flex_call_of(node: fx.Node) -> FlexCall | str:
    """Return what `read_flex_attention` found for a call, or why there is no workload."""
    return node.meta.get(_KEY, "flex_attention in training")  # type: ignore[no-any-return]


def _read(module: fx.GraphModule, node: fx.Node) -> FlexCall:
    q, k, v, score_mod, blocks, scale, _, score_buffers, mask_buffers = node.args
    queries, keys, values = traced(q), traced(k), traced(v)
    if is_used(node, 1) or is_used(node, 2):
        raise _Unsupported("statistics of scores are used")
    if len({queries.dtype, keys.dtype, values.dtype}) > 1 or queries.dtype not in DTYPES:
        raise _Unsupported(f"queries of {queries.dtype}, keys of {keys.dtype}, values of {values.dtype}")
    if keys.shape != values.shape or keys.shape[0] != queries.shape[0]:
        raise _Unsupported("values and keys of different shapes, or a shared batch")
    if mask_buffers or score_buffers:
        raise _Unsupported("functions that read tensors of the model")
    shape = (*queries.shape[:3], keys.shape[2])
    if math.prod(shape[2:]) > LARGEST_MASK:
        raise _Unsupported(f"more than {LARGEST_MASK} pairs of queries and keys")
    sizes = dict(zip(("batch", "heads", "seq_q", "head_dim"), queries.shape, strict=True))
    sizes |= {"heads_k": keys.shape[1], "seq_k": keys.shape[2], "dtype": DTYPES[queries.dtype]}
    score_graph, mask_graph = (getattr(module, str(part.target)) for part in (score_mod, blocks[-1]))
    factor = _factor(score_graph)
    if not math.isclose(scale * factor, 1 / math.sqrt(queries.shape[-1]), rel_tol=1e-6):
        sizes["scale"] = float(scale * factor)
    mask = _evaluated(mask_graph, shape, scores=False)
    added = _evaluated(score_graph, shape, scores=True)
    bias = _masked(mask, added, queries.dtype, sizes)
    tensors = {"q": q, "k": k, "v": v}
    if bias is not None:
        sizes["bias"] = bias_axes(bias, shape)
        tensors["bias"] = _buffer(module, node, bias, traced(q))
    text = str(make_workload("attention", **sizes))
    return FlexCall(text, tensors if _blocks_agree(module, blocks, mask, shape) else {})


# -- functions of scores and indices -----------------------------------------------------------------------


def _evaluated(graph: fx.GraphModule, shape: tuple[int, ...], *, scores: bool) -> Tensor:
    """Return the value of a function for all indices, with axes of extent 1 where it does not depend on one.

    Args:
        graph: The function.
        shape: Batch, heads, queries and keys.
        scores: Whether its first argument is the score, which is 0.
    """
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    indices = []
    for axis, (extent, place) in enumerate(zip(shape, inputs[scores:], strict=True)):
        view = [1] * 4
        view[axis] = extent if place.users else 1
        indices.append(torch.arange(view[axis]).view(view))
    if math.prod(index.numel() for index in indices) > LARGEST_MASK:
        raise _Unsupported(f"a mask or a bias of more than {LARGEST_MASK} elements")
    first = (torch.zeros((1, 1, 1, 1)),) if scores else ()
    value: Tensor = graph(*first, *indices)
    return value.view((1,) * (4 - value.dim()) + tuple(value.shape))


def _factor(graph: fx.GraphModule) -> float:
    """Return the number by which a function multiplies the score, besides what it adds.

    Raises:
        _Unsupported: if it is another function of the score.
    """
    score = next(node for node in graph.graph.nodes if node.op == "placeholder")
    (output,) = graph.graph.find_nodes(op="output")
    factors: dict[fx.Node, float] = {score: 1.0}
    for node in graph.graph.nodes:
        if node.op == "call_function" and any(read in factors for read in node.all_input_nodes):
            factors[node] = _factor_after(node, factors)
    (result,) = output.all_input_nodes
    if result not in factors or factors[result] <= 0:
        raise _Unsupported("a function that does not read the score, or changes its sign")
    return factors[result]


def _factor_after(node: fx.Node, factors: dict[fx.Node, float]) -> float:
    """Return the factor of the score in the result of an operation that reads the score."""
    first, *rest = node.args
    dependent = [argument for argument in node.args if isinstance(argument, fx.Node) and argument in factors]
    if len(dependent) == 1:
        factor, (read,) = factors[dependent[0]], dependent
        other = rest[0] if rest and read is first else first
        if node.target in (aten.add.Tensor, aten.add.Scalar) and not node.kwargs:
            return factor
        if node.target in (aten.sub.Tensor, aten.sub.Scalar) and read is first and not node.kwargs:
            return factor
        if node.target is aten._to_copy.default and traced(node).dtype.is_floating_point:
            return factor
        if node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(other, int | float):
            return factor * other
        if node.target in (aten.div.Tensor, aten.div.Scalar) and isinstance(other, int | float):
            return factor / other
        if node.target is aten.where.self and read is rest[0] and _is_minus_infinity(rest[1]):
            return factor
    raise _Unsupported(f"scores in {str(node.target).removeprefix('aten.').partition('.')[0]}")


def _is_minus_infinity(node: Any) -> bool:
    return isinstance(node, fx.Node) and -math.inf in node.args


def _masked(mask: Tensor, added: Tensor, dtype: torch.dtype, sizes: dict[str, Any]) -> Tensor | None:
    """Return the bias of a mask and of what is added to scores, or None, with the mask in the dimensions.

    Raises:
        _Unsupported: if rounding to 16 bits changes the bias.
    """
    mask, added = mask & (added > -math.inf), added.clamp(min=torch.finfo(added.dtype).min)
    added = torch.where(mask, added, 0.0)
    adds = bool((added != 0).any())
    if not adds and bool(mask.all()):
        return None
    if not adds and (causal := _causal(mask, sizes["seq_q"], sizes["seq_k"])) is not None:
        sizes.update(causal)
        return None
    bias = torch.where(mask, added, -math.inf)
    rounded = bias.to(dtype)
    if not torch.equal(rounded.to(bias.dtype), bias):
        raise _Unsupported(f"biases that {DTYPES[dtype]} does not hold exactly")
    return rounded.expand(*bias.shape[:3], sizes["seq_k"]).contiguous()


def _causal(mask: Tensor, seq_q: int, seq_k: int) -> dict[str, Any] | None:
    """Return the dimensions of a causal mask, perhaps with a window; None for other masks."""
    if mask.shape[:2] != (1, 1):
        return None
    pairs = mask[0, 0].expand(seq_q, seq_k)
    distance = torch.arange(seq_q)[:, None] - torch.arange(seq_k)
    for align, before in (("last", seq_k - seq_q), ("first", 0)):
        behind = distance + before
        window = int(pairs.sum(1).max())
        for dimensions, expected in (
            ({}, behind >= 0),
            ({"window": window}, (behind >= 0) & (behind < window)),
        ):
            if before >= 0 and torch.equal(pairs, expected):
                return {"causal": True, "align": align, **dimensions}
    return None


# -- blocks ------------------------------------------------------------------------------------------------


def _blocks_agree(module: fx.GraphModule, blocks: Any, mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether the blocks of a call are known, and hide no key that the mask shows."""
    count, indices, full_count, full_indices = (_constant(module, part) for part in blocks[2:6])
    rows, columns = blocks[-3], blocks[-2]
    if count is None or indices is None or (blocks[4] is not None and full_count is None):
        return False
    pairs = mask.expand(*mask.shape[:2], *shape[2:])
    shown, whole = torch.zeros_like(pairs), torch.zeros_like(pairs)
    for covered, counts, places in ((shown, count, indices), (whole, full_count, full_indices)):
        if counts is None or places is None:
            continue
        if counts.shape[0] > covered.shape[0] or counts.shape[1] > covered.shape[1]:
            return False
        for b, h, i in itertools.product(*map(range, counts.shape)):
            of_b = slice(None) if counts.shape[0] == 1 else b
            of_h = slice(None) if counts.shape[1] == 1 else h
            for j in places[b, h, i, : int(counts[b, h, i])].tolist():
                covered[of_b, of_h, i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = True
    return bool((pairs <= (shown | whole)).all()) and bool((whole <= pairs).all())


def _constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """Return the value of a node that is a constant of the graph, else None."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "get_attr":
        value = getattr(module, str(node.target))
        return value if isinstance(value, Tensor) else None
    if node.target is aten.full.default:
        return torch.full(node.args[0], node.args[1], dtype=traced(node).dtype)
    return None


def _buffer(module: fx.GraphModule, node: fx.Node, value: Tensor, like: Tensor) -> fx.Node:
    """Insert a constant tensor into the graph."""
    name = f"_bias_{node.name}"
    value = value.to(like.device)
    module.register_buffer(name, value, persistent=False)
    with node.graph.inserting_before(node):
        constant = node.graph.get_attr(name)
    with like.fake_mode:
        constant.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=like.device)
    return constant
