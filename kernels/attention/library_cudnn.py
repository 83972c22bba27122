"""attention by cuDNN: its graph of scaled dot-product attention with lse, and the plans for it.

Forward in f16 and bf16, with a causal mask aligned with the first or the last key. Biases, windows and
gradients are left to others. Not run on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from tunebench.kernels.common.cudnn_graph import CUDNN_BINDING, CUDNN_LIBRARIES, CudnnPlan
from tunebench.kernels.common.library_gpu import LibraryPlan, LibraryPlans
from tunebench.libraries import Tensors
from tunebench.space import Config
from tunebench.workloads.operators.attention import Attention

_HEAD_MULTIPLE = 8
"""Elements of a head that cuDNN loads at a time."""


def _views(tensors: Tensors) -> dict[str, Any]:
    """Return the tensors, with lse of four axes."""
    return {name: tensor.unsqueeze(-1) if name == "lse" else tensor for name, tensor in tensors.items()}


def _operations(workload: Attention, graph: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    import cudnn

    mask = {}
    if workload.causal:
        last = workload.align == "last"
        alignment = cudnn.diagonal_alignment
        mask = {
            "diagonal_alignment": alignment.BOTTOM_RIGHT if last else alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
    operands = {name: inputs[name] for name in "qkv"}
    o, lse = graph.sdpa(**operands, attn_scale=workload.scale, generate_stats=True, **mask)
    return {"o": o, "lse": lse}


class LibraryCudnn(LibraryPlans[Attention]):
    """Plans of cuDNN for attention."""

    name, operator = "library_cudnn", Attention
    binding, libraries = CUDNN_BINDING, CUDNN_LIBRARIES
    ranks = 8

    def supports(self, workload: Attention) -> bool:
        """Return whether cuDNN has such an attention."""
        plain = workload.direction == "forward" and not (workload.has_bias or workload.window)
        return plain and workload.dtype in ("f16", "bf16") and workload.head_dim % _HEAD_MULTIPLE == 0

    def plan(self, workload: Attention, rank: int, tensors: Tensors) -> LibraryPlan:
        """Return a plan of the list, built."""
        return CudnnPlan(workload, rank, tensors, _views, functools.partial(_operations, workload))

    def calls(self, config: Config) -> str:
        """Return the function that is called."""
        return f"cudnn.pygraph.sdpa, plan {config['rank']} of its list"


VARIANT = LibraryCudnn()
