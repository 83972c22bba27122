"""scaled_gemm by NumPy and by torch: the products of dequantised matrices, and torch's own quantised ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.libraries import LibraryCall, Tensors, torch_type
from tunebench.workloads.operators.scaled_gemm import ScaledGemm, unpacked

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: ScaledGemm, inputs: Tensors) -> LibraryCall | None:
    """Return the program with NumPy's BLAS, in f32, which dequantises both matrices first."""
    t = {name: np.asarray(value, dtype=np.float32) for name, value in inputs.items()}

    def run() -> Array:
        a = t["a"] * workload.spread(t["scale_a"], of_b=False) if workload.is_quantized else t["a"]
        b = unpacked(t["b"]) if workload.weight == "i4" else t["b"]
        b = b * workload.spread(t["scale_b"], of_b=True)
        if workload.shift:
            b += workload.spread(t["shift"], of_b=True)
        c: Array = a @ b.T
        if workload.bias:
            c += t["bias"]
        return c

    return run


def torch_calls(workload: ScaledGemm, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's product for these scales, and a linear layer whose weights are dequantised each time."""
    calls: dict[str, LibraryCall] = {}
    if not workload.is_quantized and workload.out == workload.dtype:
        calls["torch"] = lambda: _dequantised(workload, t)
    own = _own_call(workload, t)
    if own is not None:
        calls["torch, quantised"] = own
    return calls


def _dequantised(workload: ScaledGemm, t: Tensors) -> Any:
    import torch
    from torch.nn import functional

    a, b = t["a"], t["b"]
    if workload.weight == "i4":
        b = torch.stack((((b & 15) ^ 8) - 8, b >> 4), dim=-1).reshape(workload.n, workload.k)
    weights = b.to(a.dtype) * _spread(workload, t["scale_b"])
    if workload.shift:
        weights = weights + _spread(workload, t["shift"])
    return functional.linear(a, weights, t.get("bias"))


def _spread(workload: ScaledGemm, scale: Any) -> Any:
    """Return scales of b in a shape that broadcasts to (n, k)."""
    if workload.scales == "tensor":
        return scale
    if workload.scales == "row":
        return scale[:, None]
    if workload.scales == "block":
        scale = scale.repeat_interleave(workload.group, dim=0)[: workload.n]
    return scale.repeat_interleave(workload.group, dim=1)[:, : workload.k]


def _own_call(workload: ScaledGemm, t: Tensors) -> LibraryCall | None:
    """Return the call of torch's operator for these scales, which has no public name; None if it has none.

    cuBLAS requires n and k in multiples of 16, and torch more than 16 rows of i8.
    """
    import torch

    is_plain = workload.scales in ("tensor", "row") and not workload.shift
    if not is_plain or workload.n % 16 or workload.k % 16:
        return None
    a, b, out = t["a"], t["b"], torch_type(workload.out)
    scale_b, bias = t["scale_b"], t.get("bias")
    if workload.dtype == "e4m3" and hasattr(torch, "_scaled_mm"):
        scale_a = t["scale_a"]
        if workload.scales == "row":
            scale_a, scale_b = scale_a[:, None], scale_b[None]
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out, use_fast_accum=True
        )
    if workload.dtype == "i8" and workload.m > 16 and bias is None:
        scale_a = t["scale_a"][:, None] if workload.scales == "row" else t["scale_a"]
        return lambda: (torch._int_mm(a, b.t()) * scale_a * scale_b).to(out)
    return None
