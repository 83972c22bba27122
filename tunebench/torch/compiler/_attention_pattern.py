"""Attention that a model writes as products around a softmax, as one call of scaled_dot_product_attention.

The pattern is ``softmax(q @ k^T * scale + bias) @ v``, with any factors of q, k and the scores, any biases
that are added to the scores, any masks that fill hidden scores, and views between them. Attention whose
probabilities are also read elsewhere is not replaced. A query without keys has the result 0 instead of NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from tunebench.torch._layout import is_static
from tunebench.torch._tensor import DTYPES

__all__ = ["fuse_attention"]

aten = torch.ops.aten

_SOFTMAX = frozenset({aten._softmax.default, aten._safe_softmax.default})
_PERMUTATIONS = frozenset({aten.permute.default, aten.transpose.int})
_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.clone.default})

HIDES = -1e8
"""Largest number that counts as hiding a key when it replaces a score."""

HIDDEN = -1e30
"""Number added to a score in place of a finite one that replaces it: the sum does not depend on the score."""


def fuse_attention(graph: fx.Graph) -> int:
    """Replace attention in a graph for inference, and return the number of replacements.

    Args:
        graph: FX graph of ATen operators without mutation, with a fake tensor in `meta["val"]` of each node.
    """
    count = 0
    for softmax in [node for node in graph.nodes if node.target in _SOFTMAX and is_static(_val(node))]:
        pattern = _match(softmax)
        if pattern is not None:
            count += _replace(pattern)
    return count


@dataclass
class _Pattern:
    """The nodes of one attention.

    Attributes:
        result: The second product.
        q: Left operand of the first product, (items, queries, head_dim).
        k: Its right operand, (items, head_dim, keys).
        v: Right operand of the second product, (items, keys, head_dim).
        scale: Factor of the first product.
        biases: Nodes that are added to the scores, each with the leading extents of these scores.
        fills: Masks that fill scores: the mask, the number, whether it fills where the mask is true, and the
            leading extents of the scores.
    """

    result: fx.Node
    q: Any = None
    k: Any = None
    v: Any = None
    scale: float = 1.0
    biases: list[tuple[fx.Node, Sequence[int]]] = field(default_factory=list)
    fills: list[tuple[fx.Node, float, bool, Sequence[int]]] = field(default_factory=list)


# -- recognition ---------------------------------------------------------------------------------------------


def _match(softmax: fx.Node) -> _Pattern | None:
    scores, axis = softmax.args[:2]
    if axis not in (-1, _val(softmax).dim() - 1) or not isinstance(scores, fx.Node):
        return None
    product = _only_product(softmax)
    if product is None:
        return None
    pattern = _Pattern(product, v=product.args[1])
    return pattern if _read_scores(scores, pattern) else None


def _only_product(softmax: fx.Node) -> fx.Node | None:
    """Return the product that is the only reader of the probabilities, through views and casts; else None."""
    node = softmax
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.bmm.default:
            return user if user.args[0] is node and user.args[1] is not node else None
        if not _keeps_matrices(user):
            return None
        node = user
    return None


def _read_scores(node: Any, pattern: _Pattern) -> bool:
    """Read scores back to the product of q and k, and return whether they are those of attention."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        node = _unviewed(node)
        factor = _factor(node)
        if node.target is aten.bmm.default:
            pattern.q, pattern.k = node.args
            return True
        if node.target is aten.baddbmm.default:
            return _read_baddbmm(node, pattern)
        if _keeps_matrices(node):
            node = node.args[0]
        elif factor is not None:
            pattern.scale *= factor
            node = node.args[0]
        elif pattern.scale != 1:  # a factor of the sum
            return False
        elif (filled := _filled(node)) is not None:
            node, *fill = filled
            if fill[1] != -math.inf and (
                pattern.biases or any(fill[1] != number for _, number, *_ in pattern.fills)
            ):
                return False  # where a row hides all its keys, their weights depend on these numbers
            pattern.fills.append((*fill, tuple(_val(node).shape[:-2])))
        elif (summands := _summands(node)) is not None:
            node, bias = summands
            pattern.biases.append((bias, tuple(_val(node).shape[:-2])))
        else:
            return False
    return False


def _read_baddbmm(node: fx.Node, pattern: _Pattern) -> bool:
    bias, pattern.q, pattern.k = node.args
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    if beta != 0:
        if beta != 1 or pattern.scale != 1:
            return False
        pattern.biases.append((bias, tuple(_val(node).shape[:-2])))
    pattern.scale *= float(alpha)
    return True


def _val(node: Any) -> Any:
    return node.meta["val"]


def _keeps_matrices(node: fx.Node) -> bool:
    """Return whether a node only casts its input to a float type, or views it with the same last two axes."""
    if node.target is aten._to_copy.default:
        return bool(_val(node).dtype.is_floating_point and node.kwargs.keys() <= {"dtype"})
    if node.target not in _VIEWS:
        return False
    before, after = _val(node.args[0]), _val(node)
    return bool(before.shape[-2:] == after.shape[-2:] and before.numel() == after.numel())


def _unviewed(node: fx.Node) -> fx.Node:
    """Return the node that scores are a view of, if both have their elements in the same order."""
    source, expected = node, _val(node)
    while source.target in _VIEWS | _PERMUTATIONS and len(source.users) == 1:
        source = source.args[0]
        tensor = _val(source)
        same = tensor.shape[-2:] == expected.shape[-2:] and tensor.numel() == expected.numel()
        if same and tensor.is_contiguous() and expected.is_contiguous() and len(source.users) == 1:
            return source
    return node


def _factor(node: fx.Node) -> float | None:
    """Return the number by which a node multiplies its first input, or None."""
    if node.target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
        number = node.args[1]
        if isinstance(number, (int, float)) and math.isfinite(number) and number != 0:
            divides = node.target in (aten.div.Tensor, aten.div.Scalar)
            return 1 / number if divides else float(number)
    return None


def _summands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the scores and the bias of a sum; None if neither summand is scores in the sum's shape."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return None
    for scores, bias in (node.args[:2], node.args[1::-1]):
        both = isinstance(scores, fx.Node) and isinstance(bias, fx.Node)
        if both and _val(scores).shape == _val(node).shape and _leads_to_product(scores):
            return scores, bias
    return None


def _leads_to_product(node: Any) -> bool:
    """Return whether scores are computed from a product by views, factors, sums and fills only."""
    while isinstance(node, fx.Node) and len(node.users) == 1:
        node = _unviewed(node)
        if node.target in (aten.bmm.default, aten.baddbmm.default):
            return True
        filled = _filled(node)
        if filled is not None:
            node = filled[0]
        elif node.target is aten.add.Tensor:
            return any(map(_leads_to_product, node.args[:2]))
        elif _keeps_matrices(node) or _factor(node) is not None:
            node = node.args[0]
        else:
            return False
    return False


def _filled(node: fx.Node) -> tuple[fx.Node, fx.Node, float, bool] | None:
    """Return scores, a mask, the number that fills them, and whether it does where the mask is true."""
    if node.target is aten.masked_fill.Scalar:
        scores, mask, number = node.args
        filled = (scores, mask, number, True)
    elif node.target is aten.where.self:
        mask, unmasked, alternative = node.args
        kept_number, other_number = _number(unmasked), _number(alternative)
        if (kept_number is None) == (other_number is None):
            return None
        filled = (
            (unmasked, mask, other_number, False)
            if kept_number is None
            else (alternative, mask, kept_number, True)
        )
    else:
        return None
    if _val(filled[0]).shape != _val(node).shape or filled[2] > HIDES:
        return None
    return filled


def _number(node: Any) -> float | None:
    """Return the value of a scalar node if it is a constant of the graph, else None."""
    if isinstance(node, fx.Node) and node.target is aten.scalar_tensor.default:
        return float(node.args[0])
    if isinstance(node, fx.Node) and node.target is aten.full.default and node.args[0] == []:
        return float(node.args[1])
    if isinstance(node, fx.Node) and node.target is aten.lift_fresh_copy.default and not _val(node).dim():
        attribute = node.args[0]
        constant: Any = getattr(node.graph.owning_module, str(attribute.target), None)
        with unset_fake_temporarily():
            return float(constant) if attribute.op == "get_attr" and type(constant) is Tensor else None
    return None


# -- replacement ---------------------------------------------------------------------------------------------


def _replace(pattern: _Pattern) -> bool:
    """Replace the nodes of a pattern, and return whether scaled_dot_product_attention takes its operands."""
    result, dtype = pattern.result, _val(pattern.q).dtype
    operands = (pattern.q, pattern.k, pattern.v, *(bias for bias, _ in pattern.biases))
    if dtype not in DTYPES or any(_val(operand).dtype != dtype for operand in operands) or pattern.scale <= 0:
        return False
    if dtype == torch.float16 and any(number != -math.inf for _, number, *_ in pattern.fills):
        return False  # no finite half hides a key whatever its score is
    usual = _leading(pattern.q)
    summands = [*pattern.biases, *((mask, leading) for mask, _, _, leading in pattern.fills)]
    lead: Sequence[int] = max(
        [(_val(pattern.q).shape[0],), usual, *(leading for _, leading in summands)], key=len
    )
    shapes = [_split(_val(summand), leading, lead) for summand, leading in summands]
    batch_axes = _place(lead, shapes, usual)
    if batch_axes is None:
        return False
    grouped = (math.prod(lead[:batch_axes]), math.prod(lead[batch_axes:]))
    with result.graph.inserting_before(result):
        bias = _bias(pattern, shapes, batch_axes)
        q, q_factor = _operand(pattern.q, grouped)
        k, k_factor = _transposed(pattern.k, grouped)
        v, _ = _operand(pattern.v, grouped, factors=False)
        scale = pattern.scale * q_factor * k_factor
        fused = aten.scaled_dot_product_attention.default
        attended = _call(result, fused, q, k, v, bias, scale=scale)
    _use(attended, result)
    return True


def _use(attended: fx.Node, product: fx.Node) -> None:
    """Replace a product by attention; copy the results for readers that need the strides of the product."""
    with product.graph.inserting_after(attended):
        swapped = _call(attended, aten.transpose.int, attended, 1, 2)
    copies = [copy for reader in product.users if (copy := _swapped_copy(reader, _val(swapped)))]
    for copy in copies:
        copy.replace_all_uses_with(swapped)
    if len(copies) < len(product.users):  # others read it, too
        with product.graph.inserting_before(product):
            copied = _call(product, aten.clone.default, attended, memory_format=torch.contiguous_format)
            product.replace_all_uses_with(_viewed(copied, list(_val(product).shape)))
    _erase([swapped, *copies, product])


def _swapped_copy(view: fx.Node, swapped: Tensor) -> fx.Node | None:
    """Return the copy that alone reads a view of results and is laid out as `swapped`; None without one.

    Args:
        view: View of the results as (batch, heads, rows, head_dim).
        swapped: Results of attention, (batch, rows, heads, head_dim).
    """
    chain = [view]
    while len(chain) < 3 and len(chain[-1].users) == 1:
        chain += chain[-1].users
    if len(chain) < 3 or view.target not in _VIEWS or chain[1].target not in _PERMUTATIONS:
        return None
    shape = list(_val(view).shape)
    if len(shape) != 4 or list(_val(view).transpose(1, 2).stride()) != list(_val(chain[1]).stride()):
        return None
    copy = _val(chain[2])
    is_copy = chain[2].target is aten.clone.default and copy.shape == swapped.shape
    return chain[2] if is_copy and copy.is_contiguous() and swapped.is_contiguous() else None


def _leading(node: fx.Node) -> tuple[int, ...]:
    """Return the leading extents of an operand before a view merged them into one batch of matrices."""
    while _val(node).dim() == 3 and (_keeps_matrices(node) or _factor(node) is not None):
        node = node.args[0]
    return tuple(_val(node).shape[:-2])


def _split(bias: Tensor, lead: Sequence[int], refined: Sequence[int]) -> tuple[int, ...] | None:
    """Return the shape of a bias after its leading axes are split.

    Args:
        bias: The bias.
        lead: Leading extents of the scores that it is added to.
        refined: Leading extents to split these into.

    Returns:
        The shape, 1 where the bias is broadcast; None if the axes cannot be split so.
    """
    shape = (1,) * (len(lead) + 2 - bias.dim()) + tuple(bias.shape)
    remaining, extents = list(refined), []
    for extent, whole in zip(shape[:-2], lead, strict=True):
        parts, product = [], 1
        while remaining and (product < whole or remaining[0] == 1):
            parts.append(remaining.pop(0))
            product *= parts[-1]
        if product != whole or extent not in (1, whole):
            return None
        extents += parts if extent == whole else [1] * len(parts)
    return None if remaining else (*extents, *shape[-2:])


def _place(lead: Sequence[int], shapes: Sequence[tuple[int, ...] | None], usual: Sequence[int]) -> int | None:
    """Return the number of leading axes to count as the batch; the other ones are the heads.

    The sum of the biases must be broadcast along all axes of the batch or along none, and likewise of the
    heads. None if no number allows that.

    Args:
        lead: Leading extents of the scores.
        shapes: Shape of each bias after `_split`.
        usual: Batch and heads of the operands, preferred if possible.
    """
    if any(shape is None for shape in shapes):
        return None
    whole = [max((shape[axis] for shape in shapes if shape), default=1) for axis in range(len(lead))]
    splits = range(len(lead) + 1)
    for batch_axes in sorted(
        splits, key=lambda batch_axes: len(usual) != 2 or math.prod(lead[:batch_axes]) != usual[0]
    ):
        groups = (whole[:batch_axes], lead[:batch_axes]), (whole[batch_axes:], lead[batch_axes:])
        if all(
            tuple(extents) == tuple(lead_extents) or math.prod(extents) == 1
            for extents, lead_extents in groups
        ):
            return batch_axes
    return None


def _bias(pattern: _Pattern, shapes: Sequence[tuple[int, ...] | None], batch_axes: int) -> fx.Node | None:
    """Return the sum of all biases, (batch or 1, heads or 1, queries or 1, keys); None if there are none.

    The first `batch_axes` leading axes are the batch.
    """
    like = pattern.result
    of_type = {"dtype": _val(like).dtype, "device": _val(like).device}
    added: list[fx.Node] = []
    fills: list[fx.Node] = []
    for (bias, _), shape in zip(pattern.biases, shapes, strict=False):
        added.append(_viewed(bias, list(shape or ())))
    for (mask, number, hides, _), shape in zip(pattern.fills, shapes[len(pattern.biases) :], strict=True):
        numbers = (number if number == -math.inf else HIDDEN, 0.0)
        low, zero = (_call(like, aten.scalar_tensor.default, number, **of_type) for number in numbers)
        filled = _call(like, aten.where.self, mask, *((low, zero) if hides else (zero, low)))
        fills.append(_viewed(filled, list(shape or ())))
    if fills:
        added.append(functools.reduce(functools.partial(_call, like, aten.minimum.default), fills))
    if not added:
        return None
    total = functools.reduce(functools.partial(_call, like, aten.add.Tensor), added)
    *lead, queries, keys = _val(total).shape
    return _viewed(total, [math.prod(lead[:batch_axes]), math.prod(lead[batch_axes:]), queries, keys])


def _viewed(node: fx.Node, shape: list[int]) -> fx.Node:
    """Return a node in another shape, copied if its strides allow no view."""
    if list(_val(node).shape) == shape:
        return node
    try:
        return _call(node, aten.view.default, node, shape)
    except (RuntimeError, ValueError):
        copied = _call(node, aten.clone.default, node, memory_format=torch.contiguous_format)
        return _call(node, aten.view.default, copied, shape)


def _operand(node: fx.Node, grouped: tuple[int, int], *, factors: bool = True) -> tuple[fx.Node, float]:
    """Return an operand as (batch, heads, rows, head_dim), and the product of the factors removed from it.

    Args:
        node: The operand, with any leading extents.
        grouped: Batch and heads.
        factors: Whether factors may be removed.
    """
    grouped_source, factor, source = None, 1.0, node
    while True:
        if tuple(_val(source).shape[:-2]) == grouped:
            grouped_source = (source, factor)
        number = _factor(source) if factors else None
        if number is None and (not _keeps_matrices(source) or source.target is aten._to_copy.default):
            break
        factor *= 1.0 if number is None else number
        source = source.args[0]
    return grouped_source or (_viewed(node, [*grouped, *_val(node).shape[-2:]]), 1.0)


def _transposed(node: fx.Node, grouped: tuple[int, int]) -> tuple[fx.Node, float]:
    """Return keys, given as (items, head_dim, keys), as (batch, heads, keys, head_dim), and their factors."""
    source, factor = _operand(node, grouped)
    axes = _val(source).dim()
    if source.target is aten.transpose.int and {axis % axes for axis in source.args[1:]} == {
        axes - 2,
        axes - 1,
    }:
        inner, more = _operand(source.args[0], grouped)
        return inner, factor * more
    return _call(node, aten.transpose.int, source, -2, -1), factor


def _call(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call, traced with fake tensors in the mode of the node `like`."""
    values = fx.map_arg((args, kwargs), _val)
    with _val(like).fake_mode:
        traced = target(*values[0], **values[1])
    made = like.graph.call_function(target, args, kwargs)
    made.meta["val"] = traced
    return made


def _erase(nodes: list[fx.Node]) -> None:
    """Erase those nodes that have no users, and then their inputs that have none left."""
    queue, erased = nodes, set[fx.Node]()
    while queue:
        unused = queue.pop()
        if unused in erased or unused.users or unused.op != "call_function":
            continue
        queue += unused.all_input_nodes
        unused.graph.erase_node(unused)
        erased.add(unused)
