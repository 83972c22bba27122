"""gemm by NumPy and by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import storage
from tunebench.libraries import LibraryCall, Tensors, torch_type
from tunebench.libraries._activation import numpy_activation, torch_activation
from tunebench.libraries._prologue import numpy_prologue, torch_prologue
from tunebench.workloads.operators.gemm import Gemm

if TYPE_CHECKING:
    from tunebench.workload import Array

__all__ = ["numpy_call", "torch_calls"]


def numpy_call(workload: Gemm, inputs: Tensors, out: Array | None = None) -> LibraryCall | None:
    """Return the program with NumPy's BLAS; integers in float64, where sums are exact and BLAS applies."""
    activate = numpy_activation(workload.activation)
    if activate is None:
        return None
    exactly = np.float64 if workload.dtype == "i8" else np.float32
    tensors = {name: np.asarray(value, dtype=exactly) for name, value in inputs.items()}
    prologue = numpy_prologue(workload, tensors, _along_k(workload))
    if prologue is None:
        return None
    return lambda: _numpy_gemm(workload, {**tensors, "a": prologue()}, activate, out)


def _along_k(workload: Gemm) -> tuple[int, ...]:
    """Return the shape in which a vector along k broadcasts over a as it is stored."""
    return (workload.k,) if workload.trans[0] == "n" else (workload.k, 1)


def _numpy_gemm(workload: Gemm, t: Tensors, activate: Callable[[Array], None], out: Array | None) -> Array:
    a = t["a"] if workload.trans[0] == "n" else t["a"].swapaxes(1, 2)
    b = t["b"] if workload.trans[1] == "n" else t["b"].swapaxes(1, 2)
    c: Array = np.matmul(a, b, out=out)
    if workload.has_bias:
        c += t["bias"]
    activate(c)
    if workload.has_residual:
        c += t["residual"]
    return c


def torch_calls(workload: Gemm, t: Tensors) -> dict[str, LibraryCall]:
    """Return torch's matrix product, with its prologue and epilogue as its users write them."""
    call = _torch_8bit(workload, t) if workload.dtype in ("e4m3", "i8") else _torch_with_prologue(workload, t)
    return {} if call is None else {"torch": call}


def _torch_with_prologue(workload: Gemm, t: Tensors) -> Callable[[], Any]:
    """Return the product with a prologue that is written to memory; its views are created in the run."""
    if not workload.has_pre:
        return _torch(workload, t)
    prologue = torch_prologue(workload, t, _along_k(workload))
    return lambda: _torch(workload, {**t, "a": prologue()})()


def _torch(workload: Gemm, t: Tensors) -> Callable[[], Any]:
    a = t["a"] if workload.trans[0] == "n" else t["a"].transpose(1, 2)
    b = t["b"] if workload.trans[1] == "n" else t["b"].transpose(1, 2)
    if workload.epilogue == "none" and workload.activation == "none":
        return lambda: a[0].matmul(b[0]) if workload.batch == 1 else a.matmul(b)
    import torch

    # torch fuses bias and residual only in the type of a and b.
    fusible = workload.out == storage(workload.dtype)
    if workload.epilogue == "residual" and workload.activation == "none" and fusible:
        if workload.batch == 1:
            return lambda: torch.addmm(t["residual"][0], a[0], b[0])
        return lambda: torch.baddbmm(t["residual"], a, b)
    return _torch_in_steps(workload, a, b, t, fusible)


def _torch_in_steps(workload: Gemm, a: Any, b: Any, t: Tensors, fusible: bool) -> Callable[[], Any]:
    """Return the product, with bias if torch fuses it, then activation and residual."""
    from torch.nn import functional

    activate = torch_activation(workload.activation, a.device)

    def product() -> Any:
        if workload.batch == 1 and fusible:
            return functional.linear(a[0], b[0].transpose(0, 1), t.get("bias"))
        c = a.matmul(b)
        return c.add(t["bias"]) if workload.has_bias else c

    def run() -> Any:
        c = activate(product())
        # c has two dimensions if the batch is 1, otherwise three.
        return c.add(t["residual"][0] if c.dim() == 2 else t["residual"]) if workload.has_residual else c

    return run


def _torch_8bit(workload: Gemm, t: Tensors) -> Callable[[], Any] | None:
    """Return torch's product of 8-bit types, which has no public name; None if torch does not support it.

    It supports one product without epilogue. cuBLAS requires n and k in multiples of 16 and, for e4m3,
    contiguous k; for i8 torch requires more than 16 rows. On Hopper, cuBLAS promotes sums of e4m3 unless the
    accumulation is fast.
    """
    import torch

    if workload.epilogue != "none" or workload.activation != "none":
        return None
    if workload.batch > 1 or workload.n % 16 or workload.k % 16:
        return None
    a = t["a"][0] if workload.trans[0] == "n" else t["a"][0].transpose(0, 1)
    b = t["b"][0] if workload.trans[1] == "n" else t["b"][0].transpose(0, 1)
    if workload.dtype == "i8" and workload.m > 16:
        return lambda: torch._int_mm(a, b)
    if workload.dtype == "i8" or workload.trans != "nt" or not hasattr(torch, "_scaled_mm"):
        return None
    unit_scale = torch.ones((), device=a.device)
    out = torch_type(workload.out)
    fast = workload.accumulate == "fast"
    return lambda: torch._scaled_mm(
        a, b, scale_a=unit_scale, scale_b=unit_scale, out_dtype=out, use_fast_accum=fast
    )
