"""torch's convolution, as calls of libraries have it on processors and on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench import libraries
from tunebench.kernels.common.library import Compute, copied
from tunebench.libraries import Tensors
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["bound_torch", "channels_first", "in_order", "of_torch"]


def channels_first(workload: Conv2d, tensor: Any) -> Any:
    """Return a view of a tensor as torch addresses it; the memory stays as it is."""
    return tensor.permute(0, 3, 1, 2) if workload.layout == "nhwc" and tensor.dim() == 4 else tensor


def in_order(workload: Conv2d, convolve: Compute) -> Compute:
    """Return a program of torch whose result has the order of axes of the workload."""
    if workload.layout == "nchw":
        return convolve
    return lambda t: convolve(t).permute(0, 2, 3, 1)


def of_torch(workload: Conv2d) -> Compute:
    """Return torch's convolution, or its gradient, with its order of axes."""
    return lambda t: libraries.torch_calls(workload, t)["torch"]()


def bound_torch(workload: Conv2d, inputs: Tensors, output: Any) -> Callable[[], object]:
    """Return torch's convolution, or its gradient, of f32 inputs, copied into an output."""
    return copied(libraries.torch_calls(workload, inputs)["torch"], channels_first(workload, output))
