"""gemm by libraries of the GPU: cuBLAS and cuBLASLt by the functions of torch that call them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tunebench.activation import name_of
from tunebench.dtype import storage
from tunebench.kernels.common.library import Compute, LibraryProgram, Write
from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.kernels.gemm._torch_product import TORCH_MM, factors, matrix
from tunebench.libraries import Tensors, torch_type
from tunebench.workloads.operators.gemm import Gemm


def _with_addend(workload: Gemm) -> Compute:
    """Return the product with a bias or a residual, one call of cuBLAS."""
    import torch

    multiply = torch.addmm if workload.batch == 1 else torch.baddbmm
    return lambda t: multiply(_addend(workload, t), *factors(workload, t))


def _write_with_addend(workload: Gemm) -> Write:
    import torch

    if workload.batch == 1:
        return lambda t, c: torch.addmm(_addend(workload, t), *factors(workload, t), out=c[0])
    return lambda t, c: torch.baddbmm(_addend(workload, t), *factors(workload, t), out=c)


def _addend(workload: Gemm, t: Tensors) -> Any:
    if workload.has_bias:
        return t["bias"]
    return matrix(t["residual"]) if workload.batch == 1 else t["residual"]


def _is_sum(workload: Gemm) -> bool:
    return (
        _is_of_one_type(workload)
        and workload.has_bias is not workload.has_residual
        and workload.activation == "none"
    )


def _is_of_one_type(workload: Gemm) -> bool:
    stored = storage(workload.dtype)
    return stored in ("f32", "f16", "bf16") and workload.out == stored and not workload.has_pre


_USES_GELU = {"relu": False, "gelu_tanh": True}
"""torch's flag by activation. cuBLASLt approximates gelu by tanh."""


def _activated(workload: Gemm) -> Compute:
    """Return the product with bias and activation, one call of cuBLASLt."""
    import torch

    uses_gelu = _USES_GELU[name_of(workload.activation)]
    return lambda t: torch._addmm_activation(t["bias"], *factors(workload, t), use_gelu=uses_gelu)


def _write_activated(workload: Gemm) -> Write:
    import torch

    uses_gelu = _USES_GELU[name_of(workload.activation)]
    call = torch.ops.aten._addmm_activation.out
    return lambda t, c: call(t["bias"], *factors(workload, t), use_gelu=uses_gelu, out=c[0])


def _is_activated(workload: Gemm) -> bool:
    plain_sum = _is_of_one_type(workload) and workload.has_bias and not workload.has_residual
    return plain_sum and workload.batch == 1 and name_of(workload.activation) in _USES_GELU


def _scaled(workload: Gemm) -> Compute:
    """Return the product of e4m3, with a bias in the type of the result."""
    import torch

    @functools.cache
    def unit(device: Any) -> Any:
        return torch.ones((), device=device)

    kind = {"out_dtype": torch_type(workload.out), "use_fast_accum": workload.accumulate == "fast"}

    def run(t: Tensors) -> Any:
        a, b = factors(workload, t)
        scales = {"scale_a": unit(a.device), "scale_b": unit(a.device)}
        return torch._scaled_mm(a, b, bias=t.get("bias"), **scales, **kind)

    return run


def _is_scaled(workload: Gemm) -> bool:
    """Return whether cuBLASLt multiplies e4m3 so; it requires contiguous k, and multiples of 16."""
    bare = not (workload.has_residual or workload.has_pre) and workload.activation == "none"
    bias = not workload.has_bias or workload.out in ("f16", "bf16")
    return (
        workload.dtype == "e4m3"
        and bare
        and bias
        and workload.trans == "nt"
        and _has_multiples_of_16(workload)
    )


def _has_multiples_of_16(workload: Gemm) -> bool:
    return workload.batch == 1 and not (workload.n % 16 or workload.k % 16)


def _of_integers(workload: Gemm) -> Compute:
    import torch

    return lambda t: torch._int_mm(*factors(workload, t))


def _write_integers(workload: Gemm) -> Write:
    import torch

    return lambda t, c: torch.ops.aten._int_mm.out(*factors(workload, t), out=c[0])


def _is_of_integers(workload: Gemm) -> bool:
    return workload.dtype == "i8" and workload.m > 16 and _has_multiples_of_16(workload)


def _is_of_floats(workload: Gemm) -> bool:
    return workload.dtype not in ("e4m3", "i8")


class LibraryGemm(LibraryGpu[Gemm]):
    """Products by torch: one call with its epilogue where the library has it, else one after the other."""

    operator = Gemm
    multiplies = True
    programs = {
        "torch_mm": TORCH_MM,
        "torch_addmm": LibraryProgram(
            "torch",
            _with_addend,
            "torch.addmm or torch.baddbmm",
            _is_sum,
            _write_with_addend,
            accepts_matrices=True,
        ),
        "torch_activation": LibraryProgram(
            "torch",
            _activated,
            "torch._addmm_activation",
            _is_activated,
            _write_activated,
            accepts_matrices=True,
        ),
        "torch_scaled_mm": LibraryProgram(
            "torch", _scaled, "torch._scaled_mm", _is_scaled, accepts_matrices=True
        ),
        "torch_int_mm": LibraryProgram(
            "torch", _of_integers, "torch._int_mm", _is_of_integers, _write_integers, accepts_matrices=True
        ),
        "torch": dataclasses.replace(TORCH, supports=_is_of_floats),
    }


VARIANT = LibraryGemm()
