"""gated_gemm by NumPy and by torch: two products, an activation and a product of elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import storage
from tunebench.measure.libraries import Call, single
from tunebench.workloads.operators.gated_gemm import GatedGemm

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: GatedGemm, inputs: Mapping[str, Array]) -> Call:
    """Multiply by NumPy's BLAS, in f32."""
    t = single(inputs)
    gate, up = (t[b] if workload.trans == "nn" else t[b].T for b in ("b_gate", "b_up"))
    activate = _ACTIVATIONS[workload.activation]

    def run() -> Array:
        c: Array = t["a"] @ gate
        activate(c)
        c *= t["a"] @ up
        return c

    return run


def _silu(x: Array) -> None:
    x *= 0.5 * (1 + np.tanh(0.5 * x))  # no power overflows


def _gelu(x: Array) -> None:  # NumPy has no erf: the tanh form costs it less than erf would
    x *= 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _relu(x: Array) -> None:
    np.maximum(x, 0, out=x)


def _sigmoid(x: Array) -> None:
    x[...] = 0.5 * (1 + np.tanh(0.5 * x))


_ACTIVATIONS: dict[str, Callable[[Array], None]] = {
    "silu": _silu,
    "gelu": _gelu,
    "relu": _relu,
    "sigmoid": _sigmoid,
}


def torch_calls(workload: GatedGemm, t: Mapping[str, Any]) -> dict[str, Call]:
    """Return the layer as torch's users write it, and as those do who keep both matrices b in one.

    Concatenating them is done beforehand: it is how such models store their weights.
    """
    if workload.out != storage(workload.dtype):
        return {}
    import torch
    from torch.nn import functional

    activate = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "relu": functional.relu,
        "sigmoid": torch.sigmoid,
    }[workload.activation]
    gate, up = (t[b].transpose(0, 1) if workload.trans == "nn" else t[b] for b in ("b_gate", "b_up"))
    both = torch.cat((gate, up))

    def together() -> Any:
        of_gate, of_up = functional.linear(t["a"], both).chunk(2, dim=1)
        return activate(of_gate).mul_(of_up)

    return {
        "torch": lambda: activate(functional.linear(t["a"], gate)).mul_(functional.linear(t["a"], up)),
        "torch, weights in one": together,
    }
