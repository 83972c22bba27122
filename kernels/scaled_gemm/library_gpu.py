"""scaled_gemm by libraries of the GPU."""

from __future__ import annotations

import dataclasses
import functools

from tunebench.kernels.common.library import LibraryProgram, torch_baseline
from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.scaled_gemm import ScaledGemm

_multiplied = functools.partial(torch_baseline, name="torch, quantised")


def _is_quantised(workload: ScaledGemm) -> bool:
    """Return whether torch multiplies the 8-bit types themselves."""
    if workload.scales not in ("tensor", "row") or workload.shift or workload.n % 16 or workload.k % 16:
        return False
    return workload.dtype == "e4m3" or (workload.dtype == "i8" and workload.m > 16 and not workload.bias)


def _is_dequantised(workload: ScaledGemm) -> bool:
    return not workload.is_quantized and workload.out == workload.dtype


class LibraryScaledGemm(LibraryGpu[ScaledGemm]):
    """Products by torch, of 8-bit types, or of weights that are dequantised first."""

    operator = ScaledGemm
    multiplies = True
    programs = {
        "torch_quantised": LibraryProgram(
            "torch", _multiplied, "torch._scaled_mm or torch._int_mm", _is_quantised
        ),
        "torch": dataclasses.replace(TORCH, supports=_is_dequantised),
    }


VARIANT = LibraryScaledGemm()
