"""conv2d by libraries of the processor: torch's convolution, and oneDNN's with its epilogue."""

from __future__ import annotations

from typing import Any

from tunebench.kernels.common.library_cpu import Compute, LibraryCpu, LibraryProgram, is_single
from tunebench.kernels.common.onednn import PostOperation, computes, post_operation, primitive
from tunebench.kernels.conv2d._torch_convolution import bound_torch, channels_first, in_order, of_torch
from tunebench.libraries import Tensors
from tunebench.workloads.operators.conv2d import Conv2d


def _onednn(workload: Conv2d) -> Compute:
    """Return a convolution with its epilogue, with torch's order of axes; filters take up the scale."""
    attribute, numbers, algorithm = _post_operation(workload) or ("none", [], "")
    pads = [workload.pad, workload.pad_w]
    geometry = (pads, [workload.stride] * 2, [workload.dilation] * 2, workload.groups)
    convolution = primitive("_convolution_pointwise")
    unary, binary = convolution.default, convolution.binary
    after_sum = None if attribute == "none" else attribute

    def run(t: Tensors) -> Any:
        x, w = channels_first(workload, t["x"]), channels_first(workload, t["w"])
        if workload.has_scale:
            w = w * t["scale"].view(-1, 1, 1, 1)
        if workload.has_residual:
            residual = channels_first(workload, t["residual"])
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
            lambda workload: in_order(workload, of_torch(workload)),
            "functions of torch, one after the other",
            is_single,
            bind=bound_torch,
        ),
        "onednn": LibraryProgram(
            "torch",
            lambda workload: in_order(workload, _onednn(workload)),
            "torch.ops.mkldnn._convolution_pointwise",
            _is_fused,
            is_traceable=True,
        ),
    }


VARIANT = LibraryConv2d()
