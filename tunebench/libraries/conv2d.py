"""conv2d by NumPy and by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.libraries._activation import numpy_activation, torch_activation
from tunebench.libraries._prologue import numpy_prologue, torch_prologue
from tunebench.workloads.operators.conv2d import Conv2d

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: Conv2d, inputs: Tensors) -> LibraryCall | None:
    """Return forward convolution by NumPy, or None."""
    tensors = single(inputs)
    activate = numpy_activation(workload.activation)
    if workload.direction != "fprop" or activate is None:
        return None
    prologue = numpy_prologue(workload, tensors, (-1,) if workload.layout == "nhwc" else (-1, 1, 1))
    if prologue is None:
        return None
    return lambda: _numpy(workload, {**tensors, "x": prologue()}, activate)


def _numpy(workload: Conv2d, t: Tensors, activate: Callable[[Array], None]) -> Array:
    """Gather every window and multiply once: the usual convolution in NumPy."""
    nhwc = workload.layout == "nhwc"
    x = t["x"] if nhwc else t["x"].transpose(0, 2, 3, 1)
    w = t["w"] if nhwc else t["w"].transpose(0, 2, 3, 1)
    step, gap = workload.stride, workload.dilation
    x = np.pad(x, ((0, 0), (workload.pad,) * 2, (workload.pad_w,) * 2, (0, 0)))
    reach = ((workload.r - 1) * gap + 1, (workload.s - 1) * gap + 1)
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=(1, 2))
    windows = windows[:, ::step, ::step, :, ::gap, ::gap]
    groups, k = workload.groups, workload.k
    parts = [
        np.tensordot(wx, wk, axes=((3, 4, 5), (3, 1, 2)))
        for wx, wk in zip(np.split(windows, groups, axis=3), np.split(w, groups, axis=0), strict=True)
    ]
    y: Array = np.concatenate(parts, axis=3) if groups > 1 else parts[0]
    assert y.shape[3] == k
    if "scale" in t:
        y *= t["scale"]
    if "bias" in t:
        y += t["bias"]
    if "residual" in t:
        y += t["residual"] if nhwc else t["residual"].transpose(0, 2, 3, 1)
    activate(y)
    return y if nhwc else np.ascontiguousarray(y.transpose(0, 3, 1, 2))


def torch_calls(workload: Conv2d, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's convolution or its gradient."""
    return {"torch": _torch(workload, t)}


def _torch(workload: Conv2d, t: Tensors) -> Callable[[], Any]:
    """Return the program with torch's preferred strides.

    NHWC tensors become channels-last views, without a copy.
    """
    import torch
    from torch.nn import functional

    nhwc = workload.layout == "nhwc"
    view = {name: v.permute(0, 3, 1, 2) if nhwc and v.dim() == 4 else v for name, v in t.items()}
    geometry = {
        "stride": workload.stride,
        "padding": (workload.pad, workload.pad_w),
        "dilation": workload.dilation,
    }
    if workload.direction == "fprop":
        of_channels = {name: view[name].view(-1, 1, 1) for name in ("scale", "bias") if name in view}
        added = None if workload.has_scale else view.get("bias")

        activate = torch_activation(workload.activation, view["x"].device)
        prologue = torch_prologue(workload, view, (-1, 1, 1))

        def fprop() -> Any:
            y = functional.conv2d(prologue(), view["w"], added, groups=workload.groups, **geometry)
            if workload.has_scale:
                y = torch.addcmul(of_channels["bias"], y, of_channels["scale"])
            if "residual" in view:
                y = y + view["residual"]
            return y.relu_() if workload.has_relu else activate(y)

        return fprop
    gradients = torch.nn.grad
    geometry["groups"] = workload.groups
    if workload.direction == "dgrad":
        shape = (workload.n, workload.c, workload.h, workload.w)
        return lambda: gradients.conv2d_input(shape, view["w"], view["dy"], **geometry)
    shape = (workload.k, workload.c // workload.groups, workload.r, workload.s)
    return lambda: gradients.conv2d_weight(view["x"], shape, view["dy"], **geometry)
