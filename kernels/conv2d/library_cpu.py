"""conv2d by libraries of the processor: torch's convolution, and oneDNN's with its epilogue."""

from __future__ import annotations

from typing import Any

from tunebench import libraries
from tunebench.kernels.common.library_cpu import Compute, LibraryCpu, LibraryProgram, Write, is_single
from tunebench.kernels.common.onednn import PostOperation, computes, post_operation, primitive
from tunebench.libraries import Tensors
from tunebench.workloads.operators.conv2d import Conv2d


def _channels_first(workload: Conv2d, tensor: Any) -> Any:
    """Return a view of a tensor as torch addresses it; the memory stays as it is."""
    return tensor.permute(0, 3, 1, 2) if workload.layout == "nhwc" and tensor.dim() == 4 else tensor


def _results(workload: Conv2d, convolve: Compute) -> Compute:
    """Return a program of torch whose result has the order of axes of the workload."""
    if workload.layout == "nchw":
        return convolve
    return lambda t: convolve(t).permute(0, 2, 3, 1)


def _write(workload: Conv2d, convolve: Compute) -> Write:
    # torch's convolutions of other memory formats have no form that writes into the output.
    return lambda t, output: _channels_first(workload, output).copy_(convolve(t))


def _torch(workload: Conv2d) -> Compute:
    """Return torch's convolution, or its gradient, with its order of axes."""
    return lambda t: libraries.torch_calls(workload, t)["torch"]()


def _onednn(workload: Conv2d) -> Compute:
    """Return a convolution with its epilogue, with torch's order of axes; filters take up the scale."""
    attribute, numbers, algorithm = _post_operation(workload) or ("none", [], "")
    pads = [workload.pad, workload.pad_w]
    geometry = (pads, [workload.stride] * 2, [workload.dilation] * 2, workload.groups)
    convolution = primitive("_convolution_pointwise")
    unary, binary = convolution.default, convolution.binary
    after_sum = None if attribute == "none" else attribute

    def run(t: Tensors) -> Any:
        x, w = _channels_first(workload, t["x"]), _channels_first(workload, t["w"])
        if workload.has_scale:
            w = w * t["scale"].view(-1, 1, 1, 1)
        if workload.has_residual:
            residual = _channels_first(workload, t["residual"])
            return binary(x, residual, w, t.get("bias"), *geometry, "add", 1.0, after_sum, numbers, algorithm)
        return unary(x, w, t.get("bias"), *geometry, attribute, numbers, algorithm)

    return run


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
        "torch": LibraryProgram(
            "torch",
            lambda workload: _results(workload, _torch(workload)),
            "functions of torch, one after the other",
            is_single,
            lambda workload: _write(workload, _torch(workload)),
        ),
        "onednn": LibraryProgram(
            "torch",
            lambda workload: _results(workload, _onednn(workload)),
            "torch.ops.mkldnn._convolution_pointwise",
            _is_fused,
            lambda workload: _write(workload, _onednn(workload)),
            is_traceable=True,
        ),
    }


VARIANT = LibraryConv2d()
