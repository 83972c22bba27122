"""Products of quantised matrices in a traced graph, as the workload `scaled_gemm`.

Models call `_scaled_mm` and `_weight_int8pack_mm`, which are one product each, or write the product as a few
operations, as torchao's quantised linear layers do:

- weights are converted and scaled, and then multiplied: ``x @ (w.to(bf16) - zero) * scale``, by row or group
- sums are scaled: ``(x @ w.to(bf16)) * scale``, and ``_int_mm(x, w) * scale_x * scale_w``
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from tunebench.errors import InputError
from tunebench.torch._tensor import DTYPES, stored_type
from tunebench.torch.compiler._aten_argument import is_view, traced
from tunebench.workloads import workload as make_workload
from tunebench.workloads.operators.scaled_gemm import GROUPS

__all__ = ["ScaledProduct", "call_of", "scaled_products"]

aten = torch.ops.aten

_QUANTIZED = {torch.int8: "i8", torch.float8_e4m3fn: "e4m3"}
_OFFSET = 128
"""Number that is added to signed bytes where a processor multiplies unsigned ones by signed ones."""

Number = tuple[tuple[fx.Node, ...], Callable[..., Tensor]]
"""Nodes of scales or shifts, and a function of their tensors that returns them as the workload has them."""


@dataclass(slots=True)
class ScaledProduct:
    """A product of quantised matrices.

    Attributes:
        calls: Nodes that compute it, without views.
        result: The node with its results.
        dimensions: Dimensions of the workload.
        tensors: Node of a, b and bias.
        numbers: Scales and shift.
    """

    calls: list[fx.Node]
    result: fx.Node
    dimensions: dict[str, Any]
    tensors: dict[str, fx.Node]
    numbers: dict[str, Number] = field(default_factory=dict)

    def text(self) -> str | None:
        """Return the canonical text of the workload, or None if there is no such workload."""
        try:
            return str(make_workload("scaled_gemm", **self.dimensions))
        except InputError:
            return None


def scaled_products(graph: fx.Graph) -> Iterator[ScaledProduct]:
    """Yield the products that a graph writes as several operations.

    Args:
        graph: FX graph of ATen operators without mutation; each node's `meta` has its `val`.
    """
    for node in graph.nodes:
        product = None
        if node.target in (aten.mm.default, aten.addmm.default):
            product = _with_weights(node)
        elif node.target is aten._int_mm.default:
            product = _of_integers(node)
        if product is not None and product.text() is not None:
            yield product


# -- calls that are one product ----------------------------------------------------------------------------


def call_of(node: fx.Node, arguments: Mapping[str, Any]) -> ScaledProduct | str:
    """Return the product that a call of `_scaled_mm` or `_weight_int8pack_mm` computes, or why it is none.

    Args:
        node: The call.
        arguments: Its arguments by name.
    """
    read = {"aten::_scaled_mm": _scaled_mm, "aten::_weight_int8pack_mm": _int8_weights}
    product = read[node.target._schema.name](node, arguments)
    if isinstance(product, str):
        return product
    return product if product.text() is not None else "sizes or types that scaled_gemm does not have"


def _int8_weights(node: fx.Node, arguments: Mapping[str, Any]) -> ScaledProduct | str:
    a, b, scales = arguments["self"], arguments["mat2"], arguments["scales"]
    if traced(a).dtype not in DTYPES or not traced(a).is_contiguous():
        return f"activations of type {traced(a).dtype}, or not contiguous"
    (m, k), n = traced(a).shape, traced(b).shape[0]
    sizes = {"m": m, "n": n, "k": k, "dtype": DTYPES[traced(a).dtype], "weight": "i8"}
    number = _number(scales, (n,), sizes["dtype"])
    return ScaledProduct([node], node, sizes, {"a": a, "b": b}, {"scale_b": number})


def _scaled_mm(node: fx.Node, arguments: Mapping[str, Any]) -> ScaledProduct | str:
    a, b = arguments["self"], arguments["mat2"]
    (m, k), n = traced(a).shape, traced(b).shape[1]
    if traced(a).dtype != torch.float8_e4m3fn or traced(b).dtype != torch.float8_e4m3fn:
        return f"products of {traced(a).dtype} and {traced(b).dtype}"
    if not traced(a).is_contiguous() or not traced(b).t().is_contiguous():
        return "factors in another memory layout"
    if arguments.get("scale_result") is not None or traced(node).dtype not in DTYPES:
        return "a scaled result, or one of another type"
    sizes = {"m": m, "n": n, "k": k, "dtype": "e4m3", "out": DTYPES[traced(node).dtype]}
    numbers = _scales_of_call(arguments["scale_a"], arguments["scale_b"], sizes)
    if numbers is None:
        return "scales of another shape or type"
    product = ScaledProduct([node], node, sizes, {"a": a, "b": b}, numbers)
    if arguments.get("bias") is not None:
        product.dimensions["bias"] = True
        product.tensors["bias"] = arguments["bias"]
    return product


def _scales_of_call(scale_a: Any, scale_b: Any, sizes: dict[str, Any]) -> dict[str, Number] | None:
    """Return the scales of `_scaled_mm`, and add their kind to the dimensions; None for other kinds."""
    of_a, of_b = traced(scale_a), traced(scale_b)
    if of_a.dtype != torch.float32 or of_b.dtype != torch.float32:
        return None
    m, n, k = (sizes[name] for name in "mnk")
    to_a: tuple[int, ...]
    to_b: tuple[int, ...]
    parts = math.ceil(k / 128)
    shapes = (tuple(of_a.shape), tuple(of_b.shape))
    if of_a.numel() == of_b.numel() == 1:
        kind, to_a, to_b = "tensor", (1,), (1,)
    elif shapes == ((m, 1), (1, n)):
        kind, to_a, to_b = "row", (m,), (n,)
    elif shapes == ((m, parts), (parts, n)):
        kind, to_a, to_b = "group", (m, parts), (n, parts)
    elif shapes == ((m, parts), (parts, math.ceil(n / 128))):
        kind, to_a, to_b = "block", (m, parts), (math.ceil(n / 128), parts)
    else:
        return None
    sizes["scales"] = kind
    number_b = _number(scale_b, to_b, "f32", swaps=len(to_b) == 2)
    return {"scale_a": _number(scale_a, to_a, "f32"), "scale_b": number_b}


def _number(node: fx.Node, shape: tuple[int, ...], dtype: Any, *, swaps: bool = False) -> Number:
    """Return scales in another shape and type, after their two axes are swapped if so stated."""
    arranged = functools.partial(_arranged, shape=shape, swaps=swaps, dtype=stored_type(dtype))
    return (node,), arranged


def _arranged(scale: Tensor, *, shape: tuple[int, ...], swaps: bool, dtype: torch.dtype) -> Tensor:
    return (scale.t() if swaps else scale).reshape(shape).to(dtype).contiguous()


# -- weights that are converted ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Weights:
    """Weights (n, k) behind conversions and scales."""

    b: fx.Node
    calls: list[fx.Node]
    dimensions: dict[str, Any]
    numbers: dict[str, Number]


def _with_weights(node: fx.Node) -> ScaledProduct | None:
    """Return the product of activations and quantised weights that a call of mm or addmm computes."""
    is_addmm = node.target is aten.addmm.default
    if is_addmm and (node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("beta", 1) != 1):
        return None
    bias, a, right = node.args if is_addmm else (None, *node.args)
    if traced(a).dtype not in DTYPES or not traced(a).is_contiguous():
        return None
    (m, k), n = traced(a).shape, traced(right).shape[1]
    weights = _weights(right, n, k, DTYPES[traced(a).dtype])
    if weights is None or not _all_internal([*weights.calls, node], node):
        return None
    sizes = {"m": m, "n": n, "k": k, "dtype": DTYPES[traced(a).dtype], **weights.dimensions}
    product = ScaledProduct([*weights.calls, node], node, sizes, {"a": a, "b": weights.b}, weights.numbers)
    if is_addmm:
        if traced(bias).shape != (n,) or not weights.numbers:
            return None
        product.dimensions["bias"] = True
        product.tensors["bias"] = bias
    if not product.numbers and not _scale_sums(product, {"scale_b": (n,)}):
        return None
    return product


def _weights(node: fx.Node, n: int, k: int, dtype: str) -> _Weights | None:
    """Return the quantised weights that a right factor (k, n) is computed from; None if there are none."""
    source, calls = _converted_from(node)
    if _is_quantized(source, n, k):
        return _Weights(source, calls, {"weight": _QUANTIZED[traced(source).dtype]}, {})
    if source.target is not aten.mul.Tensor:
        return None
    for scaled, scale in (source.args[:2], source.args[1::-1]):
        if not isinstance(scaled, fx.Node) or not isinstance(scale, fx.Node):
            continue
        zero, inner = None, _converted_from(scaled)
        if inner[0].target is aten.sub.Tensor and not inner[0].kwargs:
            scaled, zero = inner[0].args
            deeper = _converted_from(scaled)
            inner = (deeper[0], [*deeper[1], inner[0], *inner[1]])
        if not _is_quantized(inner[0], n, k):
            continue
        kind = _kind_of(traced(scaled).shape, traced(scale).shape, n, k)
        if kind is None or (zero is not None and traced(zero).shape != traced(scale).shape):
            return None
        shape, dimensions = kind
        (scale, of_scale), (zero, of_zero) = _own_conversions(scale), _own_conversions(zero)
        numbers = {"scale_b": _number(scale, shape, dtype)}
        if zero is not None:
            dimensions["shift"] = True
            numbers["shift"] = _shift(scale, zero, shape, dtype)
        dimensions["weight"] = _QUANTIZED[traced(inner[0]).dtype]
        return _Weights(inner[0], [*of_scale, *of_zero, *inner[1], source, *calls], dimensions, numbers)
    return None


def _own_conversions(node: Any) -> tuple[Any, list[fx.Node]]:
    """Return the numbers that a node shows or converts, and conversions that nothing else reads."""
    if node is None:
        return None, []
    source, calls = _converted_from(node)
    same = traced(source).numel() == traced(node).numel() and traced(source).is_contiguous()
    return (source, calls) if same and all(len(call.users) == 1 for call in calls) else (node, [])


def _shift(scale: fx.Node, zero: fx.Node, shape: tuple[int, ...], dtype: Any) -> Number:
    arranged = functools.partial(_shifted, shape=shape, dtype=stored_type(dtype))
    return (scale, zero), arranged


def _shifted(scale: Tensor, zero: Tensor, *, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (-zero.float().reshape(shape) * scale.float().reshape(shape)).to(dtype)


def _is_quantized(node: Any, n: int, k: int) -> bool:
    tensor = traced(node)
    is_matrix = isinstance(tensor, Tensor) and tensor.dtype in _QUANTIZED and tensor.shape == (n, k)
    return bool(is_matrix and tensor.is_contiguous())


def _converted_from(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the node that another one shows or converts, and the conversions between both, in order."""
    calls: list[fx.Node] = []
    while node.op == "call_function":
        if node.target is aten._to_copy.default:
            calls.insert(0, node)
        elif not is_view(node):
            break
        node = node.args[0]
    return node, calls


def _kind_of(
    elements: tuple[int, ...], scale: tuple[int, ...], n: int, k: int
) -> tuple[tuple[int, ...], dict[str, Any]] | None:
    """Return the shape of the scales of weights (n, k), and the dimensions that state it; None for others.

    Args:
        elements: Shape in which the weights are scaled: (n, k), (k, n) or (n, groups, group).
        scale: Shape of the scales, which is broadcast to it.
        n: Rows of the weights.
        k: Columns of the weights.
    """
    if math.prod(scale) == 1:
        return (1,), {"scales": "tensor"}
    by_layout: dict[tuple[int, ...], tuple[tuple[int, ...], ...]]
    by_layout = {(n, k): ((n, 1),), (k, n): ((1, n), (n,))}
    if tuple(scale) in by_layout.get(tuple(elements), ()):
        return (n,), {"scales": "row"}
    if len(elements) == 3 and elements[0] == n and math.prod(elements) == n * k:
        groups, group = elements[1:]
        if tuple(scale) == (n, groups, 1) and groups == 1:
            return (n,), {"scales": "row"}
        if tuple(scale) == (n, groups, 1) and group in GROUPS:
            return (n, groups), {"scales": "group", "group": group}
    return None


# -- sums that are scaled ----------------------------------------------------------------------------------


def _of_integers(node: fx.Node) -> ScaledProduct | None:
    """Return the product that `_int_mm` computes together with the scales after it."""
    a, calls = _signed(node.args[0])
    right = node.args[1]
    (m, k), n = traced(a).shape, traced(right).shape[1]
    b, conversions = _converted_from(right)
    if conversions or not _is_quantized(b, n, k) or traced(a).dtype != torch.int8:
        return None
    if not _all_internal([*calls, node], node):  # other products read the converted activations, too
        calls = []
    sizes = {"m": m, "n": n, "k": k, "dtype": "i8"}
    product = ScaledProduct([*calls, node], node, sizes, {"a": a, "b": b})
    if traced(node.args[0]).dtype == torch.uint8 and not _without_offset(product, right):
        return None
    if not _scale_sums(product, {"scale_a": (m, 1), "scale_b": (n,)}):
        return None
    product.dimensions["out"] = DTYPES[traced(product.result).dtype]
    return product


def _signed(node: Any) -> tuple[Any, list[fx.Node]]:
    """Return the signed bytes to which `_OFFSET` was added before they became unsigned; else the node."""
    unsigned, source = node, node
    if traced(node).dtype == torch.uint8 and node.target is aten._to_copy.default:
        added = node.args[0]
        if added.target is aten.add.Tensor and added.args[1] == _OFFSET:
            wide = added.args[0]
            if wide.target is aten._to_copy.default and traced(wide.args[0]).dtype == torch.int8:
                source = wide.args[0]
                return _unviewed(source), [wide, added, unsigned]
    return _unviewed(source), []


def _unviewed(node: fx.Node) -> fx.Node:
    """Return the node that a matrix is a view of in the same shape."""
    while node.op == "call_function" and is_view(node) and traced(node.args[0]).shape == traced(node).shape:
        node = node.args[0]
    return node


def _without_offset(product: ScaledProduct, right: fx.Node) -> bool:
    """Include the subtraction of what the offset of a added to the sums, and return whether there is one."""
    (subtraction,) = list(product.result.users)[:1] or [None]
    if subtraction is None or subtraction.target is not aten.sub.Tensor or len(product.result.users) > 1:
        return False
    sums, added = subtraction.args
    if sums is not product.result or added.target is not aten.mul.Tensor or added.args[1] != _OFFSET:
        return False
    total = added.args[0]
    if total.target is not aten.sum.dim_IntList or list(total.args[1]) != [0]:
        return False
    if _shown(total.args[0]) is not _shown(right) or traced(total.args[0]).stride() != traced(right).stride():
        return False
    product.calls += [total, added, subtraction]
    product.result = subtraction
    return True


def _scale_sums(product: ScaledProduct, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Include the scales of a product's sums, in any order, and a bias; return whether all exist."""
    missing = dict(shapes)
    while True:
        user = _only_user(product.result)
        if user is None:
            break
        if user.target is aten._to_copy.default and (missing or traced(user).dtype in DTYPES):
            product.calls.append(user)
        elif user.target is aten.mul.Tensor and missing:
            if not _take_scale(product, user, missing):
                return False
        elif user.target is aten.add.Tensor and not missing and "bias" not in product.tensors:
            vector = _operand(user, product.result)
            if vector is None or traced(vector).shape != (product.dimensions["n"],) or user.kwargs:
                break
            if traced(vector).dtype != traced(user).dtype:
                break
            product.calls.append(user)
            product.tensors["bias"] = vector
            product.dimensions["bias"] = True
        else:
            break
        product.result = user
    return not missing and traced(product.result).dtype in DTYPES


def _take_scale(product: ScaledProduct, user: fx.Node, missing: dict[str, tuple[int, ...]]) -> bool:
    """Include a multiplication by one of the missing scales, and return whether it is one."""
    scale = _operand(user, product.result)
    if scale is None or not isinstance(traced(scale), Tensor):
        return False
    shape = tuple(traced(scale).shape)
    for name, expected in missing.items():
        if shape in (expected, (1, *expected)):
            dtype = "f32" if product.dimensions["dtype"] == "i8" else product.dimensions["dtype"]
            product.numbers[name] = _number(scale, (math.prod(shape),), dtype)
            product.calls.append(user)
            del missing[name]
            return True
    return False


def _operand(node: fx.Node, sums: fx.Node) -> fx.Node | None:
    """Return the operand of a call that is not a view of the sums, or None if none of both is."""
    for first, second in (node.args[:2], node.args[1::-1]):
        if isinstance(first, fx.Node) and isinstance(second, fx.Node) and _shown(first) is _shown(sums):
            return second
    return None


def _shown(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node):
        node = node.args[0]
    return node


def _only_user(node: fx.Node) -> fx.Node | None:
    """Return the only call that reads a node, through views that nothing else reads; None if there are more.

    Views into other matrices than the node's own, rows by columns, end the search.
    """
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function":
            return None
        if not is_view(user):
            return user
        if traced(user).shape[-1] != traced(node).shape[-1]:
            return None
        node = user
    return None


def _all_internal(calls: list[fx.Node], result: fx.Node) -> bool:
    """Return whether only the calls, through views, read the results of all calls but one."""
    inside = set(calls)

    def is_inside(node: fx.Node) -> bool:
        return node in inside or (
            node.op == "call_function" and is_view(node) and all(map(is_inside, node.users))
        )

    return all(is_inside(user) for call in calls if call is not result for user in call.users)
