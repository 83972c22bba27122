"""Convolutions of images with an epilogue, in either layout, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tunebench.dispatch import BoundKernel
from tunebench.errors import InputError
from tunebench.torch._tensor import compute_type, unsupported_reason
from tunebench.torch.functional._activation import (
    activation_gradient,
    apply_activation,
    canonical_activation,
    expression,
)
from tunebench.torch.functional._autocast import cast_to_autocast
from tunebench.torch.functional.custom_op import (
    CustomOp,
    OpCall,
    OperandView,
    Shape,
    dispatch,
    is_differentiated,
)
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["conv2d"]

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
Pair = int | tuple[int, ...]


def conv2d(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    scale: Tensor | None = None,
    residual: Tensor | None = None,
    relu: bool = False,
    activation: str = "none",
) -> Tensor:
    """Convolve images, as `torch.nn.functional.conv2d` does, with an optional epilogue.

    Args:
        input: (n, c, h, w), contiguous or channels last.
        weight: (k, c / groups, r, s).
        bias: (k,).
        stride: Stride of the filter.
        padding: Zeros around the images, ``"valid"`` or ``"same"``.
        dilation: Distance between the filter's taps.
        groups: Groups of channels.
        scale: (k,), factor of each filter's sums before the bias is added.
        residual: Shaped like the result; added after the bias.
        relu: Short for ``activation="relu"``.
        activation: Applied last, as for `linear`. torch applies all but relu where gradients are needed.

    Raises:
        InputError: if the activation is invalid.
    """
    x, w, added, factor, rest = cast_to_autocast(input, weight, bias, scale, residual)
    last = _last(relu, activation)

    def fallback() -> Tensor:
        y = functional.conv2d(x, w, None if factor is not None else added, stride, padding, dilation, groups)
        return _epilogue(y, factor, added if factor is not None else None, rest, last)

    if last not in ("none", "relu") and is_differentiated((x, w, factor, added, rest)):
        geometry = (stride, padding, dilation, groups)
        return apply_activation(last, conv2d(x, w, added, *geometry, scale=factor, residual=rest))
    attributes = (_hashable(stride), _hashable(padding), _hashable(dilation), groups, last)
    return dispatch(CONV2D, "conv2d", (x, w, factor, added, rest), attributes, _call_of, fallback)


def _last(relu: bool, activation: str) -> str:
    """Return the activation that `relu` and `activation` ask for."""
    if relu and activation not in ("none", "relu"):
        raise InputError(
            f"relu=True and activation={activation!r} are two activations: pass only one of them"
        )
    return "relu" if relu else canonical_activation(activation)


def _hashable(extent: Any) -> Any:
    return tuple(extent) if isinstance(extent, list | tuple) else extent


def _epilogue(y: Tensor, scale: Any, bias: Any, residual: Any, activation: str) -> Tensor:
    if scale is not None:
        y = y * scale.view(-1, 1, 1)
    if bias is not None:
        y = y + bias.view(-1, 1, 1)
    if residual is not None:
        y = y + residual
    return apply_activation(activation, y)


# -- operator calls ------------------------------------------------------------------------------------------


def _call_of(x: Tensor, w: Tensor, scale: Any, bias: Any, residual: Any, *attributes: Any) -> OpCall | str:
    stride, padding, dilation, groups, activation = attributes
    reason = unsupported_reason((x, w, scale, bias, residual))
    if reason is not None:
        return reason
    if x.ndim not in (3, 4) or w.ndim != 4:
        return "shapes that are not images"
    if x.ndim == 3:
        return _of_one(x, w, scale, bias, residual, *attributes)
    step, gap = _alike(stride), _alike(dilation)
    pads = None if step is None or gap is None else _padding(padding, w, step, gap)
    if step is None or gap is None or pads is None:
        return "a stride or dilation that differs between the axes, or padding between opposite sides"
    if (scale is not None or residual is not None) and bias is None:
        return "an epilogue without a bias"
    for vector in (scale, bias):
        if vector is not None and (vector.shape != w.shape[:1] or not vector.is_contiguous()):
            return "a scale or bias that is not a contiguous vector with one number per filter"
    layout = _layout(x, w)
    if layout is None:
        return "images that are neither contiguous nor channels last"
    copied = not w.is_contiguous(memory_format=FORMATS[layout])
    if residual is not None and not residual.is_contiguous(memory_format=FORMATS[layout]):
        return "a residual with another layout than the images"
    p, q = _extents(x.shape[2:], w.shape[2:], step, pads, gap)
    if p < 1 or q < 1 or x.shape[1] != w.shape[1] * groups:
        return "filters that do not match the images"
    if residual is not None and residual.shape != (x.shape[0], w.shape[0], p, q):
        return "a residual with another shape than the result"
    view_w = OperandView(tuple(w.shape), is_copied=True) if copied else None
    return OpCall((None, view_w, None, None, None), (step, pads, gap, groups, activation, layout))


def _of_one(x: Tensor, w: Tensor, scale: Any, bias: Any, residual: Any, *attributes: Any) -> OpCall | str:
    """Return the operator call of a convolution of one image without a batch axis."""
    if residual is not None:
        return "a residual of an image without a batch axis"
    call = _call_of(x.unsqueeze(0), w, scale, bias, None, *attributes)
    if isinstance(call, str):
        return call
    size = _extents(x.shape[1:], w.shape[2:], *call.attributes)
    views = (OperandView((1, *x.shape), is_copied=True), *call.views[1:])
    return OpCall(views, call.attributes, (w.shape[0], *size))


def _alike(extent: Any) -> int | None:
    """Return the number that holds for both axes, or None if they differ."""
    if not isinstance(extent, tuple):
        return int(extent)
    return int(extent[0]) if len(set(extent)) == 1 and len(extent) <= 2 else None


def _padding(padding: Any, w: Tensor, step: int, gap: int) -> tuple[int, int] | None:
    """Return the zeros above and to the left, or None if there are not as many below and to the right."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        down, across = (gap * (taps - 1) for taps in w.shape[2:])
        return (down // 2, across // 2) if step == 1 and not (down % 2 or across % 2) else None
    if isinstance(padding, str):
        return None
    pads = padding if isinstance(padding, tuple) else (padding,)
    return (int(pads[0]), int(pads[-1])) if len(pads) <= 2 else None


def _layout(x: Tensor, w: Tensor) -> str | None:
    """Return the layout that torch would choose for the result, or None if the images do not have it."""
    plain, last = x.is_contiguous(), x.is_contiguous(memory_format=torch.channels_last)
    w_last = w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous()
    if last and (not plain or w_last):
        return "nhwc"
    return "nchw" if plain and not w_last else None


def _extents(image: Shape, taps: Shape, *attributes: Any) -> tuple[int, int]:
    """Return height and width of the result."""
    stride, pads, dilation, *_ = attributes
    p, q = (
        (extent + 2 * pad - dilation * (count - 1) - 1) // stride + 1
        for extent, count, pad in zip(image, taps, pads, strict=True)
    )
    return p, q


# -- the operators -------------------------------------------------------------------------------------------


def _sized(images: Shape, filters: Shape, x: Tensor) -> dict[str, Any]:
    (n, c, h, w), (k, r, s) = images, filters
    dtype = compute_type(x, convolution=True)
    return {"n": n, "c": c, "h": h, "w": w, "k": k, "r": r, "s": s, "dtype": dtype}


def _placed(attributes: Sequence[Any]) -> dict[str, Any]:
    stride, pads, dilation, groups, layout = attributes
    placed = {"stride": stride, "pad": pads[0], "pad_w": pads[1], "dilation": dilation}
    return {**placed, "groups": groups, "layout": layout}


def _workload(x: Tensor, w: Tensor, scale: Any, bias: Any, residual: Any, *attributes: Any) -> Conv2d:
    *placed, activation, layout = attributes
    epilogue_operands = {"scale": scale, "bias": bias, "residual": residual}
    parts = [name for name, tensor in epilogue_operands.items() if tensor is not None]
    return Conv2d(
        **_sized(tuple(x.shape), (w.shape[0], *w.shape[2:]), x),
        **_placed((*placed, layout)),
        epilogue="+".join(parts) or "none",  # type: ignore[arg-type]
        act=expression(activation),
    )


def _gradients(workload: Conv2d) -> tuple[Any, ...]:
    return tuple(workload.changed(direction=way, epilogue="none", act=IDENTITY) for way in ("dgrad", "wgrad"))


def _workload_input(dy: Tensor, w: Tensor, h: int, width: int, *attributes: Any) -> Conv2d:
    sizes = _sized((dy.shape[0], w.shape[1] * attributes[3], h, width), (w.shape[0], *w.shape[2:]), dy)
    return Conv2d(**sizes, **_placed(attributes), direction="dgrad")


def _workload_weight(x: Tensor, dy: Tensor, r: int, s: int, *attributes: Any) -> Conv2d:
    return Conv2d(**_sized(tuple(x.shape), (dy.shape[1], r, s), x), **_placed(attributes), direction="wgrad")


def _fallback(x: Tensor, w: Tensor, scale: Any, bias: Any, residual: Any, *attributes: Any) -> Tensor:
    stride, pads, dilation, groups, activation, layout = attributes
    added = None if scale is not None else bias
    y = functional.conv2d(x, w, added, stride, pads, dilation, groups)
    y = _epilogue(y, scale, bias if scale is not None else None, residual, activation)
    return y.contiguous(memory_format=FORMATS[layout])


def _fallback_input(dy: Tensor, w: Tensor, h: int, width: int, *attributes: Any) -> Tensor:
    shape = (dy.shape[0], w.shape[1] * attributes[3], h, width)
    return _gradient(0, dy, dy.new_empty(shape), w, *attributes)


def _fallback_weight(x: Tensor, dy: Tensor, r: int, s: int, *attributes: Any) -> Tensor:
    shape = (dy.shape[1], x.shape[1] // attributes[3], r, s)
    return _gradient(1, dy, x, x.new_empty(shape), *attributes)


def _gradient(which: int, dy: Tensor, x: Tensor, w: Tensor, *attributes: Any) -> Tensor:
    stride, pads, dilation, groups, layout = attributes
    geometry = ([stride] * 2, list(pads), [dilation] * 2, False, [0, 0], groups)
    output_mask = [which == 0, which == 1, False]
    gradient: Tensor = torch.ops.aten.convolution_backward(dy, x, w, None, *geometry, output_mask)[which]
    return gradient.contiguous(memory_format=FORMATS[layout])


def _fresh(like: Tensor, shape: Shape, layout: str) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=FORMATS[layout])


def _fake(x: Tensor, w: Tensor, scale: Any, bias: Any, residual: Any, *attributes: Any) -> Tensor:
    p, q = _extents(x.shape[2:], w.shape[2:], *attributes)
    return _fresh(x, (x.shape[0], w.shape[0], p, q), attributes[-1])


def _fake_input(dy: Tensor, w: Tensor, h: int, width: int, *attributes: Any) -> Tensor:
    return _fresh(dy, (dy.shape[0], w.shape[1] * attributes[3], h, width), attributes[-1])


def _fake_weight(x: Tensor, dy: Tensor, r: int, s: int, *attributes: Any) -> Tensor:
    return _fresh(x, (dy.shape[1], x.shape[1] // attributes[3], r, s), attributes[-1])


def _empty(kernel: BoundKernel, shape: Shape | None, *arguments: Any) -> tuple[Tensor]:
    """Return memory for the result, with axes in torch's order (n, c, h, w) and the workload's layout."""
    w: Conv2d = kernel.workload  # type: ignore[assignment]
    shapes = {"fprop": (w.n, w.k, w.p, w.q), "dgrad": (w.n, w.c, w.h, w.w)}
    filters = (w.k, w.c // w.groups, w.r, w.s)
    return (_fresh(arguments[0], shapes.get(w.direction, filters), w.layout),)


def _arranged(kernel: BoundKernel, shape: Shape | None, result: Tensor) -> tuple[Tensor]:
    """Return the result of a library with axes in torch's order."""
    w: Conv2d = kernel.workload  # type: ignore[assignment]
    stored = result.view(kernel.outputs[0].shape)
    return (stored.permute(0, 3, 1, 2) if w.layout == "nhwc" else stored,)


def _prepare(tensor: Tensor, *attributes: Any) -> Tensor:
    return (
        tensor.contiguous(memory_format=FORMATS[attributes[-1]]) if tensor.ndim == 4 else tensor.contiguous()
    )


# -- gradients: each of the three operators is differentiated by the other two -----------------------------


def _both(pads: Any) -> tuple[int, ...]:
    """Return the padding of both axes; torch's dispatcher also accepts one number for both."""
    return (pads, pads) if isinstance(pads, int) else tuple(pads)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, w, scale, bias, residual, stride, pads, *further = inputs
    ctx.attributes = (stride, _both(pads), *further)
    ctx.activation = ctx.attributes[-2]
    # relu's gradient needs only the result; the sums before another activation are recomputed
    saved = {"none": (), "relu": (output,)}.get(ctx.activation, (bias, residual))
    ctx.save_for_backward(x, w, scale, *saved)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w, scale, *saved = ctx.saved_tensors
    *geometry, activation, layout = ctx.attributes
    placed = (*geometry, layout)
    needs_x, needs_w, needs_scale, needs_bias, needs_residual = ctx.needs_input_grad[:5]
    if activation == "relu":
        dy = dy * (saved[0] > 0)
    elif activation != "none":
        before = CONV2D(x, w, scale, *saved, *geometry, "none", layout)
        dy = activation_gradient(activation, before, dy)
    dsums, dscale = dy, None
    if scale is not None:
        dsums = dy * scale.view(-1, 1, 1)
        if needs_scale:
            sums = _forward(x, w, placed)
            dscale = (dy * sums).sum((0, 2, 3))
    dx = CONV2D_INPUT(dsums, w, *x.shape[2:], *placed) if needs_x else None
    dw = CONV2D_WEIGHT(x, dsums, *w.shape[2:], *placed) if needs_w else None
    dbias = dy.sum((0, 2, 3)) if needs_bias else None
    return (dx, dw, dscale, dbias, dy if needs_residual else None, *[None] * 6)


def _save_pair(ctx: Any, inputs: Any, output: Tensor) -> None:
    first, second, _, _, stride, pads, *further = inputs
    ctx.placed = (stride, _both(pads), *further)
    ctx.save_for_backward(first, second)


def _backward_input(ctx: Any, ddx: Tensor) -> tuple[Any, ...]:
    dy, w = ctx.saved_tensors
    ddy = _forward(ddx, w, ctx.placed) if ctx.needs_input_grad[0] else None
    dw = CONV2D_WEIGHT(ddx, dy, *w.shape[2:], *ctx.placed) if ctx.needs_input_grad[1] else None
    return (ddy, dw, *[None] * 7)


def _backward_weight(ctx: Any, ddw: Tensor) -> tuple[Any, ...]:
    x, dy = ctx.saved_tensors
    dx = CONV2D_INPUT(dy, ddw, *x.shape[2:], *ctx.placed) if ctx.needs_input_grad[0] else None
    ddy = _forward(x, ddw, ctx.placed) if ctx.needs_input_grad[1] else None
    return (dx, ddy, *[None] * 7)


def _forward(x: Tensor, w: Tensor, placed: Any) -> Any:
    *geometry, layout = placed
    return CONV2D(x, w, None, None, None, *geometry, "none", layout)


def _key(*attributes: Any) -> tuple[Any, ...]:
    """Return the attributes as a key of a dictionary: torch passes the padding as a list."""
    return tuple(map(_hashable, attributes))


_PLACED = "int stride, int[2] pad, int dilation, int groups"
CONV2D = CustomOp(
    f"conv2d(Tensor x, Tensor w, Tensor? scale, Tensor? bias, Tensor? residual, {_PLACED}, str activation, "
    "str layout) -> Tensor",
    5,
    _workload,
    _fallback,
    _fake,
    gradients=_gradients,
    empty=_empty,
    arrange=_arranged,
    prepare=_prepare,
    backward=_backward,
    save=_save,
    key=_key,
)
CONV2D_INPUT = CustomOp(
    f"conv2d_input(Tensor dy, Tensor w, SymInt h, SymInt width, {_PLACED}, str layout) -> Tensor",
    2,
    _workload_input,
    _fallback_input,
    _fake_input,
    empty=_empty,
    arrange=_arranged,
    prepare=_prepare,
    backward=_backward_input,
    save=_save_pair,
    key=_key,
)
CONV2D_WEIGHT = CustomOp(
    f"conv2d_weight(Tensor x, Tensor dy, SymInt r, SymInt s, {_PLACED}, str layout) -> Tensor",
    2,
    _workload_weight,
    _fallback_weight,
    _fake_weight,
    empty=_empty,
    arrange=_arranged,
    prepare=_prepare,
    backward=_backward_weight,
    save=_save_pair,
    key=_key,
)
