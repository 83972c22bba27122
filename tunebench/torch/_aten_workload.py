"""ATen operators as workloads.

Calls are seen below autograd, where every composite function has become a few operators: `linear` is addmm,
and its gradients are mm. One call may be two workloads: a convolution's backward computes two gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tunebench._figure import significant
from tunebench.errors import InputError
from tunebench.expression import LARGEST, SMALLEST
from tunebench.torch._layout import bias_axes, channel_broadcast
from tunebench.torch._tensor import DTYPES
from tunebench.workloads import parse, workload

__all__ = ["bound_arguments", "convolution", "cross_entropy", "is_known", "signature", "workloads_of"]

Arguments = Mapping[str, Any]
"""Arguments of a call by their names in the operator's schema, defaults included."""


class _Unsupported(Exception):
    """A call that no operator of tunebench computes; the message is the reason."""


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


def workloads_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...] | str:
    """Return the workloads of a call of an operator that `is_known`, or why there are none.

    Canonical texts, each computed once; the results of the call are not needed.
    """
    try:
        return _READERS[func._schema.name](bound_arguments(func, args, kwargs))
    except (_Unsupported, InputError) as reason:
        return str(reason)


def bound_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names in the operator's schema, defaults included."""
    arguments = {argument.name: argument.default_value for argument in func._schema.arguments}
    return arguments | dict(zip(arguments, args, strict=False)) | dict(kwargs)


def _one(operator: str, **dimensions: Any) -> tuple[str, ...]:
    return (str(workload(operator, **dimensions)),)


# -- products --------------------------------------------------------------------------------------


def _dtype(*tensors: Any, tf32: bool = False) -> str:
    """Return the common type of all tensors, as workloads name it.

    Raises:
        _Unsupported: if the types differ, or kernels do not compute with them.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    name = DTYPES.get(tensors[0].dtype)
    if len(dtypes) > 1 or name is None:
        raise _Unsupported(" and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)))
    return "tf32" if tf32 and name == "f32" and tensors[0].is_cuda else name


def _order(matrix: Any) -> str:
    """Return the order of the last two axes in memory: ``"t"`` if columns are contiguous."""
    return "t" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "n"


def _product(a: Any, b: Any, *further: Any, epilogue: str = "none") -> tuple[str, ...]:
    sizes = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1], "batch": a.shape[0] if a.dim() == 3 else 1}
    dtype = _dtype(a, b, *further, tf32=torch.backends.cuda.matmul.allow_tf32)
    return _one("gemm", **sizes, dtype=dtype, trans=_order(a) + _order(b), epilogue=epilogue)


def _mm(args: Arguments) -> tuple[str, ...]:
    return _product(args["self"], args["mat2"])


def _addmm(
    args: Arguments, first: str = "mat1", second: str = "mat2", activation: str = ""
) -> tuple[str, ...]:
    """Return the workload of beta * addend + alpha * a @ b, where the addend is a bias or a residual."""
    addend, a, b = args["self"], args[first], args[second]
    if args["alpha"] != 1 or args["beta"] not in (0, 1):
        raise _Unsupported(f"alpha={args['alpha']}, beta={args['beta']}")
    if args["beta"] == 0:
        return _product(a, b)
    shape = (*a.shape[:-1], b.shape[-1])
    if addend.numel() == shape[-1] and addend.shape[-1] == shape[-1]:
        return _product(a, b, addend, epilogue="bias" + activation)
    if tuple(addend.shape) == shape and not activation:
        return _product(a, b, addend, epilogue="residual")
    raise _Unsupported(f"an addend of shape {tuple(addend.shape)}")


def _int_mm(args: Arguments) -> tuple[str, ...]:
    a, b = args["self"], args["mat2"]
    if {a.dtype, b.dtype} != {torch.int8}:
        raise _Unsupported("products of unsigned bytes")
    sizes = {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    return _one("gemm", **sizes, dtype="i8", trans=_order(a) + _order(b))


def _int4_weights(args: Arguments) -> tuple[str, ...]:
    """Return the product with weights of 4 bits, whose order in memory depends on the device."""
    a, numbers, group = args["self"], args["qScaleAndZeros"], args["qGroupSize"]
    (m, k), (_, n, _) = a.shape, numbers.shape
    sizes = {"m": m, "n": n, "k": k, "dtype": _dtype(a, numbers), "weight": "i4"}
    return _one("scaled_gemm", **sizes, scales="group", group=group, shift=True)


def _addmm_activation(args: Arguments) -> tuple[str, ...]:
    if args["use_gelu"]:
        raise _Unsupported("gelu, by tanh on some devices")
    return _addmm(args, activation="+relu")


def _grouped_product(args: Arguments, first: str = "self", second: str = "mat2") -> tuple[str, ...]:
    """Return the workload of a product of rows that are grouped by expert, each group with its own matrix."""
    a, b = args[first], args[second]
    if a.dim() != 2 or b.dim() != 3 or args["offs"] is None or args.get("bias") is not None:
        raise _Unsupported("grouped along k, or with a bias")
    if args.get("out_dtype") not in (None, a.dtype):
        raise _Unsupported("a result of another type")
    sizes = {"groups": b.shape[0], "m": a.shape[0], "n": b.shape[2], "k": a.shape[1]}
    return _one("grouped_gemm", **sizes, dtype=_dtype(a, b), trans=f"n{_order(b)}")


# -- convolutions ----------------------------------------------------------------------------------


def _alike(name: str, values: Any) -> int:
    if len(set(values)) > 1:
        raise _Unsupported(f"{name} of {' and '.join(map(str, values))}")
    return int(values[0])


def _layout(*tensors: Any) -> str:
    """Return the layout of a convolution: channels last if any of its tensors has it."""
    last = any(channel_broadcast(tensor) == "vector" and not tensor.is_contiguous() for tensor in tensors)
    return "nhwc" if last else "nchw"


def _convolution_of(x: Any, w: Any, args: Arguments, **more: Any) -> str:
    """Return the workload of a convolution; one over a sequence has images and filters of height 1."""
    if w.dim() == 5:
        x, w, args = _of_images(x, w, args)
    if w.dim() not in (3, 4):
        raise _Unsupported(f"{w.dim() - 2}-dimensional")
    n, c, *image = _enlarged(x, w, args) if args["transposed"] else x.shape
    k, _, *taps = w.shape
    height, width = image if w.dim() == 4 else (1, *image)
    r, s = taps if w.dim() == 4 else (1, *taps)
    sizes = {"n": n, "c": c, "h": height, "w": width, "k": k, "r": r, "s": s, "groups": args["groups"]}
    pad, pad_w = args["padding"] * 2 if len(args["padding"]) == 1 else args["padding"]
    placed = {name: _alike(name, args[name]) for name in ("stride", "dilation")}
    placed |= {"pad": pad if w.dim() == 4 else 0, "pad_w": pad_w}
    dtype = _dtype(x, w, tf32=torch.backends.cudnn.allow_tf32)
    return str(workload("conv2d", **sizes, **placed, dtype=dtype, layout=_layout(x, w), **more))


def _of_images(x: Any, w: Any, args: Arguments) -> tuple[Any, Any, Arguments]:
    """Return a convolution of volumes as the convolution of images that reads the same memory.

    Filters that are as deep as the volumes see each depth as further channels, as in the patch embedding of a
    video; filters of one element see the depth as further rows.

    Raises:
        _Unsupported: for other filters, groups, strides along the depth, or memory layouts.
    """
    depth, taps = x.shape[2], w.shape[2:]
    along = {name: args[name] * 3 if len(args[name]) == 1 else args[name] for name in _PLACED}
    if args["transposed"] or args["groups"] > 1 or not (x.is_contiguous() and w.is_contiguous()):
        raise _Unsupported(_VOLUMES)
    if taps[0] == depth and along["padding"][0] == 0 and (along["dilation"][0] == 1 or depth == 1):
        kept = {name: list(values[1:]) for name, values in along.items()}
        return x.flatten(1, 2), w.flatten(1, 2), {**args, **kept}
    if set(taps) == set(along["stride"]) == {1} and set(along["padding"]) == {0}:
        kept = {name: list(values[1:]) for name, values in along.items()}
        return x.flatten(2, 3), w.flatten(2, 3), {**args, **kept}
    raise _Unsupported(_VOLUMES)


_VOLUMES = "a 3-dimensional convolution that is not recognised as a 2-dimensional one"
_PLACED = ("stride", "padding", "dilation")
"""Arguments of a convolution with a number for each axis of images or volumes."""


def _enlarged(x: Any, w: Any, args: Arguments) -> tuple[int, ...]:
    """Return the shape of the images whose convolution has the shape of `x`."""
    sizes = (
        (extent - 1) * stride - 2 * pad + dilation * (taps - 1) + more + 1
        for extent, stride, pad, dilation, taps, more in zip(
            x.shape[2:],
            *(args[name] for name in ("stride", "padding", "dilation")),
            w.shape[2:],
            args["output_padding"],
            strict=True,
        )
    )
    return (x.shape[0], w.shape[1] * args["groups"], *sizes)


def convolution(x: Any, w: Any, args: Arguments, epilogue: str) -> str | None:
    """Return the workload of a convolution with an epilogue, or None if no operator of tunebench computes it.

    Args:
        x: Images.
        w: Filters.
        args: Stride, padding and dilation, each for both axes, and groups.
        epilogue: Epilogue, as the workload names it.
    """
    try:
        return _convolution_of(x, w, {"transposed": False, **args}, epilogue=epilogue)
    except (_Unsupported, InputError):
        return None


def _convolution(args: Arguments) -> tuple[str, ...]:
    """Return the workload of a convolution; a transposed one is an input gradient, without its bias."""
    if args["transposed"]:
        return (_convolution_of(args["input"], args["weight"], args, direction="dgrad"),)
    epilogue = "bias" if args["bias"] is not None else "none"
    return (_convolution_of(args["input"], args["weight"], args, epilogue=epilogue),)


def _convolution_backward(args: Arguments) -> tuple[str, ...]:
    ways = ("fprop", "wgrad") if args["transposed"] else ("dgrad", "wgrad")
    return tuple(
        _convolution_of(args["input"], args["weight"], args, direction=direction)
        for direction, is_needed in zip(ways, args["output_mask"], strict=False)
        if is_needed
    )


# -- rows ------------------------------------------------------------------------------------------


def _rows(x: Any, dim: int) -> dict[str, Any]:
    if dim not in (-1, x.dim() - 1) or x.dim() == 0:
        raise _Unsupported("not over the last axis")
    return {"rows": x.numel() // max(1, x.shape[-1]), "cols": x.shape[-1], "dtype": _dtype(x)}


def _softmax(args: Arguments, *, log: bool) -> tuple[str, ...]:
    if args["half_to_float"]:
        raise _Unsupported("a result of another type")
    return _one("softmax", **_rows(args["self"], args["dim"]), log=log)


def _softmax_backward(args: Arguments, *, log: bool) -> tuple[str, ...]:
    y, dy = args["output"], args["grad_output"]
    _dtype(y, dy)
    if args["input_dtype"] != y.dtype:
        raise _Unsupported("a result of another type")
    return _one("softmax", **_rows(y, args["dim"]), log=log, direction="backward")


def _norm(args: Arguments, *, operator: str, weights: tuple[str, ...], backward: bool) -> tuple[str, ...]:
    x, tensors = args["input"], [args[name] for name in weights]
    if any(tensor is None for tensor in tensors):
        raise _Unsupported("without weights")
    cols = math.prod(args["normalized_shape"])
    sizes = {"rows": x.numel() // max(1, cols), "cols": cols, "dtype": _dtype(x, *tensors)}
    if backward:
        return _one(operator, **sizes, direction="backward")
    eps = args["eps"]
    if eps is None:
        raise _Unsupported("no eps given")
    if not SMALLEST <= eps <= LARGEST:
        raise _Unsupported(f"eps={significant(eps, 6)}")
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors))
    return _one(operator, **sizes, eps=float(eps), stats=is_trained)


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


def _attention(args: Arguments, *, direction: str, kind: str) -> tuple[str, ...]:
    q, k, v = args["query"], args["key"], args["value"]
    if args["dropout_p"]:
        raise _Unsupported("dropout")
    if v.shape != k.shape:
        raise _Unsupported("values and keys of different shapes")
    if kind == "efficient" and q.shape[2] % 32 and args.get("compute_log_sumexp", True):
        raise _Unsupported("a log-sum-exp that torch pads to 32 queries")
    sizes = dict(zip(("batch", "heads", "seq_q", "head_dim"), q.shape, strict=True))
    sizes |= {"heads_k": k.shape[1], "seq_k": k.shape[2], "causal": args["is_causal"]}
    if args["is_causal"] and q.shape[2] != k.shape[2]:
        if kind not in _ALIGNED_FIRST:
            raise _Unsupported("a causal mask with different numbers of keys and queries")
        sizes["align"] = "first"
    scale, mask = args.get("scale"), _mask(args)
    if scale is not None and not math.isclose(scale, 1 / math.sqrt(q.shape[-1]), rel_tol=1e-6):
        sizes["scale"] = float(scale)
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    if mask is not None:
        sizes["bias"] = bias_axes(mask, (*q.shape[:3], k.shape[2]))
        if sizes["bias"] is None:
            raise _Unsupported(f"a mask of shape {tuple(mask.shape)}")
    return _one("attention", **sizes, dtype=_dtype(*operands), direction=direction)


_ALIGNED_FIRST = frozenset({"flash_for_cpu", "efficient", ""})
"""Kinds of attention whose causal mask is aligned with the first key, whatever the number of keys.

The empty name is that of `scaled_dot_product_attention`, which calls one of the kinds.
"""


def _mask(args: Arguments) -> Any:
    """Return the mask that is added to the scores, or None."""
    mask = args.get("attn_mask") if args.get("attn_mask") is not None else args.get("attn_bias")
    if mask is None or not mask.numel():
        return None
    if (args.get("grad_input_mask") or [False])[-1]:
        raise _Unsupported("a gradient of the mask")
    return mask


_READERS: Mapping[str, Callable[[Arguments], tuple[str, ...]]] = {
    "aten::mm": _mm,
    "aten::_int_mm": _int_mm,
    "aten::_weight_int4pack_mm": _int4_weights,
    "aten::_weight_int4pack_mm_for_cpu": _int4_weights,
    "aten::bmm": _mm,
    "aten::addmm": _addmm,
    "aten::baddbmm": functools.partial(_addmm, first="batch1", second="batch2"),
    "aten::_addmm_activation": _addmm_activation,
    "aten::_grouped_mm": _grouped_product,
    "transformers::grouped_mm_fallback": functools.partial(_grouped_product, first="input", second="weight"),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{
        f"aten::{name}": functools.partial(read, log=log)
        for read, name, log in (
            (_softmax, "_softmax", False),
            (_softmax, "_log_softmax", True),
            (_softmax_backward, "_softmax_backward_data", False),
            (_softmax_backward, "_log_softmax_backward_data", True),
        )
    },
    **{
        f"aten::{name}{end}": functools.partial(_norm, operator=operator, weights=weights, backward=bool(end))
        for name, operator, weights in (
            ("native_layer_norm", "layernorm", ("weight", "bias")),
            ("_fused_rms_norm", "rmsnorm", ("weight",)),
        )
        for end in ("", "_backward")
    },
    **{
        f"aten::_scaled_dot_product_{kind}_attention{cpu}{end}": functools.partial(
            _attention, direction=direction, kind=kind + cpu
        )
        for kind, cpu in (("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))
        for end, direction in (("", "forward"), ("_backward", "backward"))
    },
    "aten::scaled_dot_product_attention": functools.partial(_attention, direction="forward", kind=""),
}
"""Reader of each operator's arguments, by its name without overload."""
