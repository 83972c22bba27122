"""gated_gemm by NumPy and by torch: two products, an activation and an elementwise product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import storage
from tunebench.libraries import LibraryCall, Tensors, single
from tunebench.libraries._activation import numpy_activation, torch_activation
from tunebench.workloads.operators.gated_gemm import GatedGemm

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: GatedGemm, inputs: Tensors, out: Array | None = None) -> LibraryCall | None:
    """Return the program with NumPy's BLAS, in f32; None if NumPy lacks a function of the activation."""
    t = single(inputs)
    gate, up = (t[b] if workload.trans == "nn" else t[b].T for b in ("b_gate", "b_up"))
    activate = numpy_activation(workload.activation)
    if activate is None:
        return None

    def run() -> Array:
        c: Array = np.matmul(t["a"], gate, out=out)
        activate(c)
        c *= t["a"] @ up
        return c

    return run


def torch_calls(workload: GatedGemm, t: Tensors) -> dict[str, LibraryCall]:
    """Return the layer with two matrices b, and with both concatenated.

    The concatenation is not timed: models with this layout store their weights concatenated.
    """
    if workload.out != storage(workload.dtype):
        return {}
    import torch
    from torch.nn import functional

    activate = torch_activation(workload.activation)
    gate, up = (t[b].transpose(0, 1) if workload.trans == "nn" else t[b] for b in ("b_gate", "b_up"))
    both = torch.cat((gate, up))

    def together() -> Any:
        of_gate, of_up = functional.linear(t["a"], both).chunk(2, dim=1)
        return activate(of_gate).mul_(of_up)

    return {
        "torch": lambda: activate(functional.linear(t["a"], gate)).mul_(functional.linear(t["a"], up)),
        "torch, weights in one": together,
    }
