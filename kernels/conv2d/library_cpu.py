"""conv2d by libraries of the processor: torch's convolution, and oneDNN's with its epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench import libraries
from tunebench.kernels.common.library_cpu import LibraryCpu, LibraryProgram, is_single
from tunebench.kernels.common.onednn import PostOperation, computes, post_operation
from tunebench.libraries import Tensors
from tunebench.workloads.operators.conv2d import Conv2d


def _channels_first(workload: Conv2d, t: Tensors) -> dict[str, Any]:
    """Return views of tensors as torch addresses them; the memory stays as it is."""
    if workload.layout == "nchw":
        return dict(t)
    return {name: value.permute(0, 3, 1, 2) if value.dim() == 4 else value for name, value in t.items()}


def _torch(workload: Conv2d, t: Tensors) -> Callable[[], object]:
    """Return torch's convolution, or its gradient."""
    compute = libraries.torch_calls(workload, {tensor.name: t[tensor.name] for tensor in workload.inputs()})
    output = _channels_first(workload, t)[workload.outputs()[0].name]
    return lambda: output.copy_(compute["torch"]())


def _onednn(workload: Conv2d, t: Tensors) -> Callable[[], object]:
    """Return a convolution with its epilogue; filters take up the scale."""
    import torch

    view = _channels_first(workload, t)
    x, w, y, bias = view["x"], view["w"], view["y"], view.get("bias")
    attribute, numbers, algorithm = _post_operation(workload) or ("none", [], "")
    pads = [workload.pad, workload.pad_w]
    geometry = (pads, [workload.stride] * 2, [workload.dilation] * 2, workload.groups)
    convolution = torch.ops.mkldnn._convolution_pointwise

    def filters() -> Any:
        return w * view["scale"].view(-1, 1, 1, 1) if workload.has_scale else w

    if workload.has_residual:
        sum_of = convolution.binary
        unary = None if attribute == "none" else attribute
        others = (*geometry, "add", 1.0, unary, numbers, algorithm)
        return lambda: y.copy_(sum_of(x, view["residual"], filters(), bias, *others))
    compute = convolution.default
    return lambda: y.copy_(compute(x, filters(), bias, *geometry, attribute, numbers, algorithm))


def _post_operation(workload: Conv2d) -> PostOperation | None:
    return post_operation("relu" if workload.has_relu else workload.activation)


def _is_fused(workload: Conv2d) -> bool:
    # A half type would round the scaled filters once more.
    exact = workload.dtype == "f32" or not workload.has_scale
    fprop = workload.direction == "fprop"
    return fprop and exact and computes(workload) and _post_operation(workload) is not None


class LibraryConv2d(LibraryCpu[Conv2d]):
    """Convolutions by torch and oneDNN."""

    operator = Conv2d
    programs = {
        "torch": LibraryProgram("torch", _torch, "functions of torch, one after the other", is_single),
        "onednn": LibraryProgram("torch", _onednn, "torch.ops.mkldnn._convolution_pointwise", _is_fused),
    }


VARIANT = LibraryConv2d()
