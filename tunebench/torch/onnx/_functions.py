"""Functions of torch for the operators of ONNX.

A function has the inputs of its operator as positional arguments and the attributes as keywords, with the
names and defaults of ONNX's operator schemas, opset 13 or newer. Where attributes became inputs between
opsets, the function accepts both.

Source: https://onnx.ai/onnx/operators
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["BROADCASTING", "FUNCTIONS", "TYPES", "OnnxFunction", "UnsupportedError"]

TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    19: torch.float8_e5m2,
}
"""Type of torch of each `onnx.TensorProto.DataType` that torch has."""


class UnsupportedError(Exception):
    """Attributes or inputs of an operator for which torch has no function; the text states them."""


@dataclass(frozen=True, slots=True)
class OnnxFunction:
    """A function of torch for an operator of ONNX.

    Attributes:
        call: The function.
        numeric: Positions of inputs that it takes as numbers or lists of numbers, not as tensors.
    """

    call: Callable[..., Any]
    numeric: frozenset[int] = frozenset()


FUNCTIONS: dict[str, OnnxFunction] = {}
"""Function of each operator of ONNX's default domain, by the operator's name."""


def _function(name: str, *numeric: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function of an operator, whose inputs at some positions are numbers."""

    def register(call: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS[name] = OnnxFunction(call, frozenset(numeric))
        return call

    return register


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnsupportedError(reason)


BROADCASTING = frozenset(
    {
        *("Add", "Div", "Max", "Mean", "Min", "Mod", "Mul", "Pow", "Sub", "Sum", "Where"),
        *("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Or", "Xor"),
    }
)
"""Operators of tensors that are broadcast to one shape: a vector of one number may be the number."""

# -- elementwise -------------------------------------------------------------------------------------------

for _name, _call in {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Add": operator.add,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseAnd": operator.and_,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Equal": operator.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "HardSwish": functional.hardswish,
    "IsNaN": torch.isnan,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Log": torch.log,
    "Mish": functional.mish,
    "Mul": operator.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Pow": operator.pow,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "Sqrt": torch.sqrt,
    "Sub": operator.sub,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Where": torch.where,
}.items():
    _function(_name)(_call)


def _as_tensor(value: Any, like: Any) -> Tensor:
    """Return a tensor; a number receives the type of another tensor."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=like.dtype)


def _pairwise(call: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return a function of one or more tensors or numbers that applies a function of two tensors in turn."""

    def combined(*values: Any) -> Any:
        like = next(value for value in values if isinstance(value, Tensor))
        result = _as_tensor(values[0], like)
        for value in values[1:]:
            result = call(result, _as_tensor(value, like))
        return result

    return combined


for _name, _call in {
    "And": torch.logical_and,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Or": torch.logical_or,
    "Sum": torch.add,
    "Xor": torch.logical_xor,
}.items():
    _function(_name)(_pairwise(_call))


@_function("Mean")
def _mean(*values: Tensor) -> Any:
    return _pairwise(torch.add)(*values) / len(values)


@_function("Div")
def _div(a: Any, b: Any) -> Any:
    like = a if isinstance(a, Tensor) else b
    if like.is_floating_point():
        return a / b
    return torch.div(_as_tensor(a, like), b, rounding_mode="trunc")


@_function("Mod")
def _mod(a: Any, b: Any, *, fmod: int = 0) -> Any:
    like = a if isinstance(a, Tensor) else b
    return torch.fmod(_as_tensor(a, like), b) if fmod else torch.remainder(_as_tensor(a, like), b)


@_function("IsInf")
def _is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    return torch.isposinf(x) if detect_positive else torch.isneginf(x)


@_function("Clip", 1, 2)
def _clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    if low is None and high is None:
        return x
    if low == 0 and high == 6:
        return functional.relu6(x)
    return torch.clamp(x, low, high)


@_function("Elu")
def _elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.elu(x, alpha)


@_function("Celu")
def _celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.celu(x, alpha)


@_function("Selu")
def _selu(x: Tensor, *, alpha: float = 1.6732632, gamma: float = 1.0507010) -> Tensor:
    return gamma * torch.where(x > 0, x, alpha * (torch.exp(x) - 1))


@_function("LeakyRelu")
def _leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    return functional.leaky_relu(x, alpha)


@_function("ThresholdedRelu")
def _thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return torch.where(x > alpha, x, 0.0)


@_function("PRelu")
def _prelu(x: Tensor, slope: Any) -> Tensor:
    return torch.where(x > 0, x, x * slope)


@_function("HardSigmoid")
def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    if math.isclose(alpha, 1 / 6, rel_tol=1e-5) and beta == 0.5:
        return functional.hardsigmoid(x)
    return torch.clamp(alpha * x + beta, 0, 1)


@_function("Gelu")
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return functional.gelu(x, approximate=approximate)


@_function("Swish")
def _swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.silu(x) if alpha == 1 else x * torch.sigmoid(alpha * x)


@_function("Cast")
def _cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    _require(to in TYPES, f"type {to}")
    return x.to(TYPES[to])


@_function("CastLike")
def _cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return x.to(like.dtype)


@_function("Identity")
def _identity(x: Any) -> Any:
    return x


@_function("Dropout", 1, 2)
def _dropout(x: Tensor, ratio: Any = None, training: Any = False, *, seed: int = 0) -> Tensor:
    _require(not training, "dropout in training")
    return x


def _per_axis(values: Any, x: Tensor, axis: int) -> Any:
    """Return scales or zero points in a shape that is broadcast along the other axes."""
    if not isinstance(values, Tensor) or values.dim() == 0:
        return values
    _require(values.dim() == 1, "scales of blocks")
    return values.reshape([-1 if position == axis % x.dim() else 1 for position in range(x.dim())])


@_function("DequantizeLinear")
def _dequantize(
    x: Tensor, scale: Any, zero: Any = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Tensor:
    _require(not block_size, "scales of blocks")
    factor = _per_axis(scale, x, axis)
    dtype = TYPES.get(output_dtype, scale.dtype if isinstance(scale, Tensor) else torch.float32)
    wide = x.to(dtype)
    return (wide if zero is None else wide - _per_axis(zero, x, axis)) * factor


@_function("QuantizeLinear")
def _quantize(
    x: Tensor,
    scale: Any,
    zero: Any = None,
    *,
    axis: int = 1,
    saturate: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
    precision: int = 0,
) -> Tensor:
    _require(not block_size, "scales of blocks")
    dtype = zero.dtype if isinstance(zero, Tensor) else TYPES.get(output_dtype, torch.uint8)
    _require(not dtype.is_floating_point, "a floating-point type")
    steps = torch.round(x / _per_axis(scale, x, axis))
    shifted = steps if zero is None else steps + _per_axis(zero, x, axis)
    limits = torch.iinfo(dtype)
    return torch.clamp(shifted, limits.min, limits.max).to(dtype)


# -- reductions --------------------------------------------------------------------------------------------


def _reduction(call: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Any]:
    def reduce(x: Tensor, axes: Any = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        if not axes and noop_with_empty_axes:
            return x
        return call(x, list(axes or range(x.dim())), bool(keepdims))

    return reduce


def _product(x: Tensor, axes: list[int], keepdims: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keepdims)
    return x


for _name, _reduce in {
    "ReduceL1": lambda x, axes, keepdims: torch.sum(torch.abs(x), axes, keepdims),
    "ReduceL2": lambda x, axes, keepdims: torch.sqrt(torch.sum(x * x, axes, keepdims)),
    "ReduceLogSum": lambda x, axes, keepdims: torch.log(torch.sum(x, axes, keepdims)),
    "ReduceLogSumExp": torch.logsumexp,
    "ReduceMax": torch.amax,
    "ReduceMean": torch.mean,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceSum": lambda x, axes, keepdims: torch.sum(x, axes, keepdims, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keepdims: torch.sum(x * x, axes, keepdims),
}.items():
    _function(_name, 1)(_reduction(_reduce))


def _arg_reduction(call: Callable[..., Tensor]) -> Callable[..., Any]:
    def reduce(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        _require(not select_last_index, "the last of equal elements")
        return call(x, axis, bool(keepdims))

    return reduce


_function("ArgMax")(_arg_reduction(torch.argmax))
_function("ArgMin")(_arg_reduction(torch.argmin))


@_function("CumSum", 1)
def _cumsum(x: Tensor, axis: Any, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
    _require(not exclusive and not reverse, "an exclusive or reverse sum")
    return torch.cumsum(x, int(_single(axis)), dtype=x.dtype)


@_function("Softmax")
def _softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.softmax(x, axis)


@_function("LogSoftmax")
def _log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return torch.log_softmax(x, axis)


@_function("TopK", 1)
def _topk(x: Tensor, k: Any, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> Any:  # noqa: A002
    return tuple(torch.topk(x, int(_single(k)), axis, bool(largest), bool(sorted)))


def _single(value: Any) -> Any:
    """Return the only number of a list, or the number."""
    return value[0] if isinstance(value, list) else value


# -- products ----------------------------------------------------------------------------------------------

_function("MatMul")(torch.matmul)


@_function("Gemm")
def _gemm(
    a: Tensor,
    b: Tensor,
    c: Any = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    left, right = (a.t() if transA else a), (b.t() if transB else b)
    if c is None or beta == 0:
        return torch.mm(left, right) if alpha == 1 else alpha * torch.mm(left, right)
    return torch.addmm(_as_tensor(c, a), left, right, beta=beta, alpha=alpha)


@_function("MatMulInteger")
def _matmul_integer(a: Tensor, b: Tensor, a_zero: Any = None, b_zero: Any = None) -> Tensor:
    left, right = a.to(torch.int32), b.to(torch.int32)
    left = left if a_zero is None else left - a_zero
    return torch.matmul(left, right if b_zero is None else right - b_zero)


@_function("Einsum")
def _einsum(*tensors: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, *tensors)


@_function("Attention")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *past: Any,
    is_causal: int = 0,
    kv_num_heads: int = 0,
    q_num_heads: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int = 0,
    qk_matmul_output_mode: int = 0,
) -> Tensor:
    _require(not softcap and not any(value is not None for value in past), "a soft cap or a cache")
    _require(not (is_causal and mask is not None), "a causal mask beside another one")
    three = q.dim() == 3
    if three:
        q, k, v = (
            x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)
            for x, heads in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
        )
    result = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=bool(is_causal), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return result.transpose(1, 2).flatten(2) if three else result


# -- convolution and pooling -------------------------------------------------------------------------------

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}
_MAX_POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
_AVERAGE_POOLS = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}


@dataclass(frozen=True, slots=True)
class _Windows:
    """Windows that slide over the inner axes of an image: strides, dilations, and padding of both ends."""

    strides: list[int]
    dilations: list[int]
    before: list[int]
    after: list[int]

    @classmethod
    def of(
        cls, x: Tensor, kernel: Sequence[int], auto_pad: str, pads: Any, strides: Any, dilations: Any
    ) -> _Windows:
        axes = len(kernel)
        _require(axes in _CONVOLUTIONS, f"{axes} axes")
        strides, dilations = list(strides or [1] * axes), list(dilations or [1] * axes)
        pads = list(pads or [0] * (2 * axes))
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            sums = [
                max(0, (-(-extent // stride) - 1) * stride + (size - 1) * dilation + 1 - extent)
                for extent, size, stride, dilation in zip(
                    x.shape[2:], kernel, strides, dilations, strict=True
                )
            ]
            small, large = [total // 2 for total in sums], [total - total // 2 for total in sums]
            pads = small + large if auto_pad == "SAME_UPPER" else large + small
        return cls(strides, dilations, pads[:axes], pads[axes:])

    def padded(self, x: Tensor, value: float = 0.0) -> tuple[Tensor, list[int]]:
        """Return the image and the padding of each end that is left to do."""
        if self.before == self.after:
            return x, self.before
        both = zip(reversed(self.before), reversed(self.after), strict=True)
        return functional.pad(x, [pad for ends in both for pad in ends], value=value), [0] * len(self.before)


@_function("Conv")
def _conv(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Tensor:
    windows = _Windows.of(x, w.shape[2:], auto_pad, pads, strides, dilations)
    x, padding = windows.padded(x)
    return _CONVOLUTIONS[len(padding)](x, w, b, windows.strides, padding, windows.dilations, group)


@_function("ConvTranspose")
def _conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Any = None,
    group: int = 1,
    kernel_shape: Any = None,
    output_padding: Any = None,
    output_shape: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Tensor:
    windows = _Windows.of(x, w.shape[2:], "NOTSET", pads, strides, dilations)
    _require(auto_pad in ("NOTSET", "VALID") and not output_shape, "padding by the size of the result")
    _require(windows.before == windows.after, "different padding of both ends")
    outer = list(output_padding or [0] * len(windows.before))
    return _TRANSPOSED[len(outer)](x, w, b, windows.strides, windows.before, outer, group, windows.dilations)


@_function("MaxPool")
def _max_pool(
    x: Tensor,
    *,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Any = None,
    pads: Any = None,
    storage_order: int = 0,
    strides: Any = None,
) -> Tensor:
    windows = _Windows.of(x, kernel_shape, auto_pad, pads, strides, dilations)
    x, padding = windows.padded(x, -math.inf)
    return _MAX_POOLS[len(padding)](
        x, list(kernel_shape), windows.strides, padding, windows.dilations, bool(ceil_mode)
    )


@_function("AveragePool")
def _average_pool(
    x: Tensor,
    *,
    kernel_shape: Any,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Tensor:
    windows = _Windows.of(x, kernel_shape, auto_pad, pads, strides, dilations)
    _require(set(windows.dilations) == {1}, "dilations")
    _require(bool(count_include_pad) or windows.before == windows.after, "different padding of both ends")
    x, padding = windows.padded(x)
    pool = _AVERAGE_POOLS[len(padding)]
    return pool(x, list(kernel_shape), windows.strides, padding, bool(ceil_mode), bool(count_include_pad))


@_function("GlobalAveragePool")
def _global_average_pool(x: Tensor) -> Tensor:
    return torch.mean(x, list(range(2, x.dim())), keepdim=True)


@_function("GlobalMaxPool")
def _global_max_pool(x: Tensor) -> Tensor:
    return torch.amax(x, list(range(2, x.dim())), keepdim=True)


_COORDINATES: dict[tuple[str, str, str], dict[str, Any]] = {
    ("nearest", "asymmetric", "floor"): {"mode": "nearest"},
    ("nearest", "half_pixel", "round_prefer_ceil"): {"mode": "nearest-exact"},
    ("linear", "half_pixel", ""): {"mode": "linear", "align_corners": False},
    ("linear", "pytorch_half_pixel", ""): {"mode": "linear", "align_corners": False},
    ("linear", "align_corners", ""): {"mode": "linear", "align_corners": True},
    ("cubic", "half_pixel", ""): {"mode": "bicubic", "align_corners": False},
    ("cubic", "pytorch_half_pixel", ""): {"mode": "bicubic", "align_corners": False},
    ("cubic", "align_corners", ""): {"mode": "bicubic", "align_corners": True},
}
"""Arguments of `interpolate`, by mode, coordinates and rounding of ONNX's Resize."""

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@_function("Resize", 1, 2, 3)
def _resize(
    x: Tensor,
    roi: Any = None,
    scales: Any = None,
    sizes: Any = None,
    *,
    antialias: int = 0,
    axes: Any = None,
    coordinate_transformation_mode: str = "half_pixel",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Tensor:
    rounding = nearest_mode if mode == "nearest" else ""
    arguments = _COORDINATES.get((mode, coordinate_transformation_mode, rounding))
    _require(arguments is not None, f"{mode} {coordinate_transformation_mode} {rounding}".strip())
    _require(not axes and cubic_coeff_a == -0.75 and not exclude_outside, "axes or coefficients")
    assert arguments is not None
    _require(not antialias, "filters against aliasing")
    if coordinate_transformation_mode == "pytorch_half_pixel":
        _require(bool(sizes) and min(sizes) > 1, "one pixel along an axis")
    if arguments.get("align_corners") and not sizes:
        extents = [extent * scale for extent, scale in zip(x.shape, scales, strict=True)]
        _require(all(extent == int(extent) for extent in extents), "a fraction of a pixel")
    if arguments["mode"] == "linear":
        arguments = {**arguments, "mode": _LINEAR.get(x.dim() - 2, "")}
    if sizes:
        _require(list(sizes[:2]) == list(x.shape[:2]), "other axes than those of images")
        return functional.interpolate(x, size=list(sizes[2:]), **arguments)
    _require(list(scales[:2]) == [1.0, 1.0], "other axes than those of images")
    return functional.interpolate(x, scale_factor=list(scales[2:]), **arguments)


# -- normalisation -----------------------------------------------------------------------------------------


@_function("BatchNormalization")
def _batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> Tensor:
    _require(not training_mode, "batch normalisation in training")
    return functional.batch_norm(x, mean, var, scale, bias, False, 0.0, epsilon)


@_function("LayerNormalization")
def _layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    return functional.layer_norm(x, x.shape[axis % x.dim() :], scale, bias, epsilon)


@_function("RMSNormalization")
def _rms_norm(
    x: Tensor, scale: Tensor, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    return functional.rms_norm(x, x.shape[axis % x.dim() :], scale, epsilon)


@_function("GroupNormalization")
def _group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    _require(scale.shape[0] == x.shape[1], "one scale for each group")
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


@_function("InstanceNormalization")
def _instance_norm(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float = 1e-5) -> Tensor:
    return functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)


@_function("LRN")
def _lrn(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Tensor:
    return functional.local_response_norm(x, size, alpha, beta, bias)


@_function("LpNormalization")
def _lp_norm(x: Tensor, *, axis: int = -1, p: int = 2) -> Tensor:
    return functional.normalize(x, p, axis)


# -- layout ------------------------------------------------------------------------------------------------


@_function("Reshape", 1)
def _reshape(x: Tensor, shape: Any, *, allowzero: int = 0) -> Tensor:
    if not allowzero:
        shape = [x.shape[axis] if extent == 0 else extent for axis, extent in enumerate(shape)]
    return x.reshape(shape)


@_function("Flatten")
def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    first = axis % x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:first]), -1)


@_function("Transpose")
def _transpose(x: Tensor, *, perm: Any = None) -> Tensor:
    return x.permute(list(perm or reversed(range(x.dim()))))


@_function("Squeeze", 1)
def _squeeze(x: Tensor, axes: Any = None) -> Tensor:
    chosen = range(x.dim()) if axes is None else [axis % x.dim() for axis in axes]
    drop = [axis for axis in chosen if x.shape[axis] == 1]
    return x.reshape([extent for axis, extent in enumerate(x.shape) if axis not in drop])


@_function("Unsqueeze", 1)
def _unsqueeze(x: Tensor, axes: Any) -> Tensor:
    count = x.dim() + len(axes)
    for axis in sorted(axis % count for axis in axes):
        x = x.unsqueeze(axis)
    return x


@_function("Concat")
def _concat(*tensors: Tensor, axis: int) -> Tensor:
    return torch.cat(tensors, axis)


@_function("Split", 1)
def _split(x: Tensor, split: Any = None, *, axis: int = 0, num_outputs: int = 1) -> Any:
    return torch.split(x, split or -(-x.shape[axis] // num_outputs), axis)


@_function("Slice", 1, 2, 3, 4)
def _slice(x: Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> Tensor:
    axes = axes or range(len(starts))
    for axis, first, end, step in zip(axes, starts, ends, steps or [1] * len(starts), strict=True):
        taken = slice(first, end, step)
        if step < 0:
            _require(len(range(x.shape[axis])[taken]) == x.shape[axis], "a step back over a part")
            x = x.flip(axis)
        else:
            x = x[(slice(None),) * (axis % x.dim()) + (taken,)]
    return x


@_function("Gather")
def _gather(x: Tensor, index: Any, *, axis: int = 0) -> Tensor:
    """Gather rows or slices; indices into more than one axis must not be negative."""
    if not isinstance(index, Tensor):
        return x.select(axis, index)
    if x.dim() == 1:
        return x[index]
    if index.dim() == 0:
        return torch.index_select(x, axis, index.reshape(1)).squeeze(axis)
    if axis == 0 and x.dim() == 2:
        return functional.embedding(index, x)
    axis %= x.dim()
    shape = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    return torch.index_select(x, axis, index.reshape(-1)).reshape(shape)


@_function("GatherElements")
def _gather_elements(x: Tensor, index: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, index)


@_function("GatherND")
def _gather_nd(x: Tensor, index: Tensor, *, batch_dims: int = 0) -> Tensor:
    _require(batch_dims == 0, "axes of batches")
    return x[tuple(index.unbind(-1))]


_SCATTERED = {"none": "", "add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""Reduction of torch's `scatter_reduce` by ONNX's name."""


@_function("ScatterElements")
def _scatter_elements(
    x: Tensor, index: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    reduce = _SCATTERED[reduction]
    return (
        torch.scatter_reduce(x, axis, index, updates, reduce)
        if reduce
        else torch.scatter(x, axis, index, updates)
    )


@_function("ScatterND")
def _scatter_nd(x: Tensor, index: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    _require(reduction in ("none", "add"), f"reduction {reduction}")
    return x.index_put(tuple(index.unbind(-1)), updates, accumulate=reduction == "add")


@_function("Expand", 1)
def _expand(x: Tensor, shape: Any) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


@_function("Tile", 1)
def _tile(x: Tensor, repeats: Any) -> Tensor:
    return x.repeat(repeats)


@_function("Pad", 1, 2, 3)
def _pad(x: Tensor, pads: Any, value: Any = None, axes: Any = None, *, mode: str = "constant") -> Tensor:
    places = [axis % x.dim() for axis in (axes or range(x.dim()))]
    ends = dict(zip(places, zip(pads[: len(places)], pads[len(places) :], strict=True), strict=True))
    flat = [pad for axis in reversed(range(x.dim())) for pad in ends.get(axis, (0, 0))]
    if mode == "constant":
        return functional.pad(x, flat, value=_single(value) or 0)
    while flat and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    _require(mode in ("reflect", "edge"), f"mode {mode}")
    return functional.pad(x, flat, mode="reflect" if mode == "reflect" else "replicate")


@_function("DepthToSpace")
def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return functional.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    blocks = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return blocks.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


@_function("SpaceToDepth")
def _space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize).permute(0, 3, 5, 1, 2, 4)
    return blocks.reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@_function("Trilu", 1)
def _trilu(x: Tensor, k: Any = 0, *, upper: int = 1) -> Tensor:
    diagonal = int(_single(k))
    return torch.triu(x, diagonal) if upper else torch.tril(x, diagonal)


@_function("Range", 0, 1, 2)
def _range(start: Any, limit: Any, delta: Any) -> Tensor:
    return torch.arange(start, limit, delta)


@_function("ConstantOfShape", 0)
def _constant_of_shape(shape: Any, *, value: Tensor | None = None) -> Tensor:
    return torch.zeros(shape) if value is None else value.expand(shape)


@_function("OneHot", 1, 2)
def _one_hot(index: Tensor, depth: Any, values: Any, *, axis: int = -1) -> Tensor:
    low, high = values
    count = int(_single(depth))
    is_hot = torch.where(index < 0, index + count, index).unsqueeze(-1) == torch.arange(count)
    return torch.where(is_hot, high, low).movedim(-1, axis)
