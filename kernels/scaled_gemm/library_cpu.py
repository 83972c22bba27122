"""scaled_gemm by libraries of the processor."""

from __future__ import annotations

import dataclasses
import functools

from tunebench.kernels.common.library_cpu import TORCH, LibraryCpu, LibraryProgram, torch_baseline
from tunebench.workloads.operators.scaled_gemm import ScaledGemm


def _is_dequantised(workload: ScaledGemm) -> bool:
    return workload.dtype == workload.out == "f32"


def _is_quantised(workload: ScaledGemm) -> bool:
    """Return whether torch multiplies i8 itself."""
    plain = workload.scales in ("tensor", "row") and not (workload.shift or workload.bias)
    return workload.dtype == "i8" and plain and workload.m > 16 and not (workload.n % 16 or workload.k % 16)


_int_mm = functools.partial(torch_baseline, name="torch, quantised")


class LibraryScaledGemm(LibraryCpu[ScaledGemm]):
    """Products by torch, of weights that are dequantised first, or of i8."""

    operator = ScaledGemm
    programs = {
        "torch": dataclasses.replace(TORCH, supports=_is_dequantised),
        "torch_int_mm": LibraryProgram("torch", _int_mm, "torch._int_mm", _is_quantised),
    }


VARIANT = LibraryScaledGemm()
