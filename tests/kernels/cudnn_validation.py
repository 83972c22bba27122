"""Validate graphs of this package by the installed nvidia-cudnn-frontend, without a GPU.

LD_PRELOAD=libcudnn.so.9 python -m tests.kernels.cudnn_validation
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from tunebench.dtype import storage
from tunebench.kernels.attention import library_cudnn as attention
from tunebench.kernels.common.cudnn_graph import described_graph
from tunebench.kernels.conv2d import library_cudnn as conv2d
from tunebench.libraries import torch_type
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.operators.attention import Attention
from tunebench.workloads.operators.conv2d import Conv2d

_CONVOLUTION = "conv2d:n=2,c=8,h=11,w=9,k=16,r=3,s=3,pad=1"
_ATTENTION = "attention:batch=2,heads=4,seq_q=37,head_dim=32"
GRAPHS = [
    f"{_CONVOLUTION},stride=1,dtype=f32,layout=nchw",
    f"{_CONVOLUTION},stride=2,dtype=f32,layout=nhwc,epilogue=scale+bias+residual+relu",
    f"{_CONVOLUTION},stride=1,dtype=bf16,layout=nhwc,epilogue=bias+relu",
    f"{_CONVOLUTION},stride=1,dtype=tf32,layout=nhwc,groups=2,dilation=2,epilogue=bias,act=gelu(x)",
    f"{_CONVOLUTION},stride=1,dtype=f16,layout=nchw,pad_w=2,epilogue=bias,act=silu(x)",
    f"{_ATTENTION},dtype=bf16,causal=true",
    f"{_ATTENTION},dtype=f16,seq_k=45,heads_k=2,causal=true",
    f"{_ATTENTION},dtype=bf16,seq_k=45,heads_k=2,causal=true,align=first",
    f"{_ATTENTION},dtype=f16,seq_k=45",
]


def graph_of(workload: Workload, **shapes: tuple[int, ...]) -> Any:
    """Return the graph of a workload on tensors without memory, some of other shapes."""
    import torch

    tensors = {
        tensor.name: torch.empty(
            shapes.get(tensor.name, tensor.shape), dtype=torch_type(storage(tensor.dtype)), device="meta"
        )
        for tensor in (*workload.inputs(), *workload.outputs())
    }
    if isinstance(workload, Conv2d):
        views, operations = conv2d._views(workload, tensors), functools.partial(conv2d._operations, workload)
        return described_graph(workload, views, operations, None)[0]
    assert isinstance(workload, Attention)
    operate = functools.partial(attention._operations, workload)
    return described_graph(workload, attention._views(tensors), operate, None)[0]


def main() -> None:
    """Validate all graphs, and one whose keys have a number of heads that does not divide its queries'."""
    import cudnn

    cudnn.pygraph._backend_handle_for_lowering = lambda graph, arguments: 1  # never used by a validation
    for text in GRAPHS:
        graph_of(parse(text)).validate()
    refused = False
    try:
        graph_of(parse(GRAPHS[-1]), k=(2, 3, 45, 32), v=(2, 3, 45, 32)).validate()
    except cudnn.cudnnGraphNotSupportedError:
        refused = True
    sys.stdout.write(f"{len(GRAPHS)} graphs are valid, {int(refused)} is refused\n")


if __name__ == "__main__":
    main()
