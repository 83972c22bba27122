"""conv2d by cuDNN: one graph of convolution, scale, bias, residual and activation, and the plans for it.

The list depends on the GPU, the versions of cuDNN and its frontend, and the limit on temporary memory. Plans
that round f32 operands are excluded, except for tf32. Gradients are left to `library_gpu`. Not run on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tunebench.activation import name_of
from tunebench.dtype import storage
from tunebench.kernels.common.cudnn_graph import CUDNN_BINDING, CUDNN_LIBRARIES, CudnnPlan
from tunebench.kernels.common.library_gpu import LibraryPlan, LibraryPlans
from tunebench.kernels.conv2d._torch_convolution import channels_first
from tunebench.libraries import Tensors
from tunebench.space import Config
from tunebench.workloads.operators.conv2d import Conv2d

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_approx_tanh",
    "silu": "swish",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
}
"""Operation of cuDNN by activation."""


def _views(workload: Conv2d, tensors: Tensors) -> dict[str, Any]:
    """Return views of images and filters with channels second, and of numbers for each filter as images."""
    return {
        name: channels_first(workload, tensor) if tensor.dim() == 4 else tensor.view(1, -1, 1, 1)
        for name, tensor in tensors.items()
    }


def _operations(workload: Conv2d, graph: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    pads = [workload.pad, workload.pad_w]
    y = graph.conv_fprop(
        image=inputs["x"],
        weight=inputs["w"],
        pre_padding=pads,
        post_padding=pads,
        stride=[workload.stride] * 2,
        dilation=[workload.dilation] * 2,
    )
    if workload.has_scale:
        y = graph.mul(a=y, b=inputs["scale"])
    for name in ("bias", "residual"):
        if name in inputs:
            y = graph.add(a=y, b=inputs[name])
    activation = name_of(workload.activation)
    if activation != "none":
        y = getattr(graph, _ACTIVATIONS[activation])(input=y)
    return {"y": y}


class LibraryCudnn(LibraryPlans[Conv2d]):
    """Plans of cuDNN for a convolution with its epilogue."""

    name, operator = "library_cudnn", Conv2d
    binding, libraries = CUDNN_BINDING, CUDNN_LIBRARIES
    ranks = 16

    def supports(self, workload: Conv2d) -> bool:
        """Return whether the graph has operations for the workload."""
        forward = workload.direction == "fprop" and not workload.has_pre
        activation = name_of(workload.activation)
        return (
            forward
            and storage(workload.dtype) in ("f32", "f16", "bf16")
            and (activation == "none" or activation in _ACTIVATIONS)
        )

    def plan(self, workload: Conv2d, rank: int, tensors: Tensors) -> LibraryPlan:
        """Return a plan of the list, built."""
        views_of = functools.partial(_views, workload)
        return CudnnPlan(workload, rank, tensors, views_of, functools.partial(_operations, workload))

    def calls(self, config: Config) -> str:
        """Return the function that is called."""
        return f"cudnn.pygraph of the convolution and its epilogue, plan {config['rank']} of its list"


VARIANT = LibraryCudnn()
