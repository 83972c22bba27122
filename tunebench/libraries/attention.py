"""attention by NumPy and by torch."""

from __future__ import annotations

from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.libraries import _attention_backward as backward
from tunebench.libraries import _attention_forward as forward
from tunebench.libraries._attention_mask import torch_mask
from tunebench.workloads.operators.attention import Attention

__all__ = ["numpy_call", "torch_calls", "torch_mask"]


def numpy_call(workload: Attention, inputs: Tensors) -> LibraryCall:
    """Return the program with NumPy's BLAS, with all scores in memory."""
    tensors = single(inputs)
    program = backward.by_numpy if workload.direction == "backward" else forward.by_numpy
    return lambda: program(workload, tensors)


def torch_calls(workload: Attention, tensors: Tensors) -> dict[str, LibraryCall]:
    """Return torch's programs for attention, or for its gradients."""
    if workload.direction == "backward":
        return backward.by_torch(workload, tensors)
    return forward.by_torch(workload, tensors)
