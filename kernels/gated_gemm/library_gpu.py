"""gated_gemm by libraries of the GPU."""

from __future__ import annotations

import dataclasses

from tunebench.dtype import storage
from tunebench.kernels.common.library_gpu import TORCH, LibraryGpu
from tunebench.workloads.operators.gated_gemm import GatedGemm


def _is_of_one_type(workload: GatedGemm) -> bool:
    return workload.out == storage(workload.dtype)


class LibraryGatedGemm(LibraryGpu[GatedGemm]):
    """Gated layers by torch: two products, an activation and a product of elements."""

    operator = GatedGemm
    multiplies = True
    programs = {"torch": dataclasses.replace(TORCH, supports=_is_of_one_type)}


VARIANT = LibraryGatedGemm()
