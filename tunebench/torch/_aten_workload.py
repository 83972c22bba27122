"""ATen operators as workloads.

Calls are seen below autograd, where every composite function has become a few operators: `linear` is addmm,
and its gradients are mm. One call may be two workloads: a convolution's backward computes two gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tunebench.errors import InputError
from tunebench.expression import LARGEST, SMALLEST
from tunebench.torch._tensor import DTYPES
from tunebench.workloads import parse, workload

__all__ = ["AtenWorkloads", "convolution", "cross_entropy", "is_known", "signature", "workloads_of"]

Arguments = Mapping[str, Any]
"""Arguments of a call by their names in the operator's schema, defaults included."""


class _Unsupported(Exception):
    """A call that no operator of tunebench computes; the message is the reason."""


@dataclass(frozen=True, slots=True)
class AtenWorkloads:
    """The workloads of a call.

    Attributes:
        workloads: Canonical texts, each computed once; empty if no operator of tunebench computes the call.
        reason: Why there are none.
    """

    workloads: tuple[str, ...] = ()
    reason: str = ""


def is_known(func: Any) -> bool:
    """Return whether calls of an ATen operator may be workloads, whatever the overload."""
    return func._schema.name in _READERS


def signature(value: Any) -> Any:
    """Return a hashable key of an argument: of a tensor its shape, layout, type and device."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, (list, tuple)):
        return tuple(map(signature, value))
    return value


def workloads_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AtenWorkloads:
    """Return the workloads of a call of an operator that `is_known`; its results are not needed."""
    schema = func._schema
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    try:
        return AtenWorkloads(workloads=_READERS[schema.name](given))
    except (_Unsupported, InputError) as reason:
        return AtenWorkloads(reason=str(reason))


# -- products --------------------------------------------------------------------------------------


def _dtype(*tensors: Any, tf32: bool = False) -> str:
    """Return the common type of all tensors, as workloads name it.

    Raises:
        _Unsupported: if the types differ, or kernels do not compute with them.
    """
    found = {tensor.dtype for tensor in tensors}
    name = DTYPES.get(tensors[0].dtype)
    if len(found) > 1 or name is None:
        raise _Unsupported(" and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in found)))
    return "tf32" if tf32 and name == "f32" and tensors[0].is_cuda else name


def _order(matrix: Any) -> str:
    """Return the order of the last two axes in memory: ``"t"`` if columns are contiguous."""
    return "t" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "n"


def _product(a: Any, b: Any, *others: Any, epilogue: str = "none") -> tuple[str, ...]:
    dtype = _dtype(a, b, *others, tf32=torch.backends.cuda.matmul.allow_tf32)
    found = workload(
        "gemm",
        m=a.shape[-2],
        n=b.shape[-1],
        k=a.shape[-1],
        dtype=dtype,
        batch=a.shape[0] if a.dim() == 3 else 1,
        trans=_order(a) + _order(b),
        epilogue=epilogue,
    )
    return (str(found),)


def _mm(given: Arguments) -> tuple[str, ...]:
    return _product(given["self"], given["mat2"])


def _sum_with(addend: Any, a: Any, b: Any, given: Arguments, activation: str = "") -> tuple[str, ...]:
    """Return the workload of beta * addend + alpha * a @ b, where the addend is a bias or a residual."""
    if given["alpha"] != 1 or given["beta"] not in (0, 1):
        raise _Unsupported(f"alpha={given['alpha']}, beta={given['beta']}")
    if given["beta"] == 0:
        return _product(a, b)
    shape = (*a.shape[:-1], b.shape[-1])
    if addend.numel() == shape[-1] and addend.shape[-1] == shape[-1]:
        return _product(a, b, addend, epilogue="bias" + activation)
    if tuple(addend.shape) == shape and not activation:
        return _product(a, b, addend, epilogue="residual")
    raise _Unsupported(f"an addend of shape {tuple(addend.shape)}")


def _addmm(given: Arguments) -> tuple[str, ...]:
    return _sum_with(given["self"], given["mat1"], given["mat2"], given)


def _addmm_activation(given: Arguments) -> tuple[str, ...]:
    if given["use_gelu"]:
        raise _Unsupported("gelu, by tanh on some devices")
    return _sum_with(given["self"], given["mat1"], given["mat2"], given, "+relu")


def _baddbmm(given: Arguments) -> tuple[str, ...]:
    return _sum_with(given["self"], given["batch1"], given["batch2"], given)


# -- convolutions ----------------------------------------------------------------------------------


def _alike(name: str, values: Any) -> int:
    if len(set(values)) > 1:
        raise _Unsupported(f"{name} of {' and '.join(map(str, values))}")
    return int(values[0])


def _layout(*tensors: Any) -> str:
    """Return the layout of a convolution: channels last if any of its tensors has it."""
    last = any(
        tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        for tensor in tensors
    )
    return "nhwc" if last else "nchw"


def _convolution_of(x: Any, w: Any, given: Arguments, **more: Any) -> str:
    if w.dim() != 4:
        raise _Unsupported(f"{w.dim() - 2}-dimensional")
    n, c, height, width = _enlarged(x, w, given) if given["transposed"] else x.shape
    k, _, r, s = w.shape
    found = workload(
        "conv2d",
        n=n,
        c=c,
        h=height,
        w=width,
        k=k,
        r=r,
        s=s,
        stride=_alike("stride", given["stride"]),
        pad=_alike("padding", given["padding"]),
        dilation=_alike("dilation", given["dilation"]),
        groups=given["groups"],
        dtype=_dtype(x, w, tf32=torch.backends.cudnn.allow_tf32),
        layout=_layout(x, w),
        **more,
    )
    return str(found)


def _enlarged(x: Any, w: Any, given: Arguments) -> tuple[int, ...]:
    """Return the shape of the images whose convolution has the shape of `x`."""
    sizes = (
        (extent - 1) * stride - 2 * pad + dilation * (taps - 1) + more + 1
        for extent, stride, pad, dilation, taps, more in zip(
            x.shape[2:],
            *(given[name] for name in ("stride", "padding", "dilation")),
            w.shape[2:],
            given["output_padding"],
            strict=True,
        )
    )
    return (x.shape[0], w.shape[1] * given["groups"], *sizes)


def convolution(x: Any, w: Any, given: Arguments, epilogue: str) -> str | None:
    """Return the workload of a convolution with an epilogue, or None if no operator of tunebench computes it.

    Args:
        x: Images.
        w: Filters.
        given: Stride, padding and dilation, each for both axes, and groups.
        epilogue: Epilogue, as the workload names it.
    """
    try:
        return _convolution_of(x, w, {"transposed": False, **given}, epilogue=epilogue)
    except (_Unsupported, InputError):
        return None


def _convolution(given: Arguments) -> tuple[str, ...]:
    """Return the workload of a convolution; a transposed one is an input gradient, without its bias."""
    if given["transposed"]:
        return (_convolution_of(given["input"], given["weight"], given, direction="dgrad"),)
    epilogue = "bias" if given["bias"] is not None else "none"
    return (_convolution_of(given["input"], given["weight"], given, epilogue=epilogue),)


def _convolution_backward(given: Arguments) -> tuple[str, ...]:
    ways = ("fprop", "wgrad") if given["transposed"] else ("dgrad", "wgrad")
    return tuple(
        _convolution_of(given["input"], given["weight"], given, direction=direction)
        for direction, wanted in zip(ways, given["output_mask"], strict=False)
        if wanted
    )


# -- rows ------------------------------------------------------------------------------------------


def _rows(x: Any, dim: int) -> dict[str, Any]:
    if dim not in (-1, x.dim() - 1) or x.dim() == 0:
        raise _Unsupported("not over the last axis")
    return {"rows": x.numel() // max(1, x.shape[-1]), "cols": x.shape[-1], "dtype": _dtype(x)}


def _softmax(log: bool) -> Callable[[Arguments], tuple[str, ...]]:
    def read(given: Arguments) -> tuple[str, ...]:
        if given["half_to_float"]:
            raise _Unsupported("a result of another type")
        return (str(workload("softmax", **_rows(given["self"], given["dim"]), log=log)),)

    return read


def _softmax_backward(log: bool) -> Callable[[Arguments], tuple[str, ...]]:
    def read(given: Arguments) -> tuple[str, ...]:
        y, dy = given["output"], given["grad_output"]
        _dtype(y, dy)
        if given["input_dtype"] != y.dtype:
            raise _Unsupported("a result of another type")
        found = workload("softmax", **_rows(y, given["dim"]), log=log, direction="backward")
        return (str(found),)

    return read


def _norm(x: Any, normalized: Any, weights: tuple[Any, ...]) -> dict[str, Any]:
    if any(weight is None for weight in weights):
        raise _Unsupported("without weights")
    cols = math.prod(normalized)
    return {"rows": x.numel() // max(1, cols), "cols": cols, "dtype": _dtype(x, *weights)}


def _eps(given: Arguments) -> float:
    eps = given["eps"]
    if eps is None:
        raise _Unsupported("no eps given")
    if not SMALLEST <= eps <= LARGEST:
        raise _Unsupported(f"eps={eps:g}")
    return float(eps)


def _is_trained(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _layer_norm(given: Arguments) -> tuple[str, ...]:
    x, weights = given["input"], (given["weight"], given["bias"])
    dimensions = _norm(x, given["normalized_shape"], weights)
    dimensions["eps"] = _eps(given)
    return (str(workload("layernorm", **dimensions, stats=_is_trained(x, *weights))),)


def _layer_norm_backward(given: Arguments) -> tuple[str, ...]:
    weights = (given["weight"], given["bias"])
    dimensions = _norm(given["input"], given["normalized_shape"], weights)
    return (str(workload("layernorm", **dimensions, direction="backward")),)


def _rms_norm(given: Arguments) -> tuple[str, ...]:
    x, weight = given["input"], given["weight"]
    dimensions = _norm(x, given["normalized_shape"], (weight,))
    dimensions["eps"] = _eps(given)
    return (str(workload("rmsnorm", **dimensions, stats=_is_trained(x, weight))),)


def _rms_norm_backward(given: Arguments) -> tuple[str, ...]:
    dimensions = _norm(given["input"], given["normalized_shape"], (given["weight"],))
    return (str(workload("rmsnorm", **dimensions, direction="backward")),)


def cross_entropy(softmax: str) -> str:
    """Return the cross entropy that a log-softmax and the loss next to it compute together.

    It also merges their gradients.

    Args:
        softmax: Canonical text of the log-softmax.
    """
    rows: Any = parse(softmax)
    sizes = {name: getattr(rows, name) for name in ("rows", "cols", "dtype", "direction")}
    return str(workload("cross_entropy", **sizes))


# -- attention -------------------------------------------------------------------------------------


def _attention(direction: str) -> Callable[[Arguments], tuple[str, ...]]:
    def read(given: Arguments) -> tuple[str, ...]:
        q, k, v = given["query"], given["key"], given["value"]
        _plain_attention(given, q, k, v)
        batch, heads, seq_q, head_dim = q.shape
        found = workload(
            "attention",
            batch=batch,
            heads=heads,
            seq_q=seq_q,
            head_dim=head_dim,
            dtype=_dtype(q, k, v),
            seq_k=k.shape[2],
            heads_k=k.shape[1],
            causal=given["is_causal"],
            direction=direction,
        )
        return (str(found),)

    return read


def _plain_attention(given: Arguments, q: Any, k: Any, v: Any) -> None:
    if given.get("attn_mask") is not None or _is_there(given.get("attn_bias")):
        raise _Unsupported("a mask")
    if given["dropout_p"]:
        raise _Unsupported("dropout")
    scale = given.get("scale")
    if scale is not None and not math.isclose(scale, 1 / math.sqrt(q.shape[-1]), rel_tol=1e-6):
        raise _Unsupported(f"scale={scale:g}")
    if v.shape != k.shape:
        raise _Unsupported("values and keys of different shapes")
    if given["is_causal"] and q.shape[2] != k.shape[2]:
        raise _Unsupported("a causal mask aligned with the first key")


def _is_there(tensor: Any) -> bool:
    return tensor is not None and tensor.numel() > 0


_READERS: Mapping[str, Callable[[Arguments], tuple[str, ...]]] = {
    "aten::mm": _mm,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": _baddbmm,
    "aten::_addmm_activation": _addmm_activation,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_softmax": _softmax(log=False),
    "aten::_log_softmax": _softmax(log=True),
    "aten::_softmax_backward_data": _softmax_backward(log=False),
    "aten::_log_softmax_backward_data": _softmax_backward(log=True),
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_fused_rms_norm": _rms_norm,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    **{
        f"aten::_scaled_dot_product_{kind}_attention{of}{end}": _attention(direction)
        for kind, of in (("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))
        for end, direction in (("", "forward"), ("_backward", "backward"))
    },
}
"""Reader of each operator's arguments, by its name without overload."""
