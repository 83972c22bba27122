"""conv2d by libraries of the GPU: cuDNN by the functions of torch that call it."""

from __future__ import annotations

from typing import Any

from tunebench.kernels.common.library import Compute, LibraryProgram
from tunebench.kernels.common.library_gpu import LibraryGpu, benchmarked
from tunebench.kernels.conv2d._torch_convolution import bound_torch, channels_first, in_order, of_torch
from tunebench.libraries import Tensors
from tunebench.workloads.operators.conv2d import Conv2d


def _chosen(workload: Conv2d) -> Compute:
    """Return torch's convolution or gradient by the fastest of cuDNN's algorithms."""
    return benchmarked(of_torch(workload))


def _in_channels_last(workload: Conv2d) -> Compute:
    """Return the same with operands that are copied into the order of axes of tensor cores first."""
    import torch

    convolve = _chosen(workload)

    def run(t: Tensors) -> Any:
        last = torch.channels_last
        return convolve({k: v.contiguous(memory_format=last) if v.dim() == 4 else v for k, v in t.items()})

    return run


def _is_first(workload: Conv2d) -> bool:
    return workload.layout == "nchw"


def _fused(workload: Conv2d) -> Compute:
    """Return one call of cuDNN for convolution, bias, residual and relu."""
    import torch

    pads = [workload.pad, workload.pad_w]
    geometry = ([workload.stride] * 2, pads, [workload.dilation] * 2, workload.groups)

    def run(t: Tensors) -> Any:
        x, w = channels_first(workload, t["x"]), channels_first(workload, t["w"])
        if workload.has_residual:
            residual = channels_first(workload, t["residual"])
            return torch.cudnn_convolution_add_relu(x, w, residual, 1.0, t.get("bias"), *geometry)
        return torch.cudnn_convolution_relu(x, w, t.get("bias"), *geometry)

    return benchmarked(run)


def _is_fused(workload: Conv2d) -> bool:
    fprop = workload.direction == "fprop"
    return fprop and workload.has_relu and not (workload.has_scale or workload.has_pre)


def _program(
    convolve: Any, calls: str, supports: Any = lambda workload: True, bind: Any = None
) -> LibraryProgram:
    return LibraryProgram(
        "torch", lambda workload: in_order(workload, convolve(workload)), calls, supports, bind=bind
    )


class LibraryConv2d(LibraryGpu[Conv2d]):
    """Convolutions by torch and cuDNN."""

    operator = Conv2d
    multiplies = True
    programs = {
        "cudnn_relu": _program(
            _fused, "torch.cudnn_convolution_relu or torch.cudnn_convolution_add_relu", _is_fused
        ),
        "torch": _program(of_torch, "functions of torch, one after the other", bind=bound_torch),
        "torch_benchmark": _program(_chosen, "the same with torch.backends.cudnn.benchmark"),
        "torch_channels_last": _program(
            _in_channels_last, "the same with operands copied to torch.channels_last", _is_first
        ),
    }


VARIANT = LibraryConv2d()
