"""grouped_gemm by libraries of the GPU."""

from __future__ import annotations

from typing import Any

from tunebench.errors import InputError
from tunebench.kernels.common.library import Compute, LibraryProgram
from tunebench.kernels.common.library_gpu import LibraryGpu
from tunebench.libraries import Tensors
from tunebench.libraries.grouped_gemm import grouped_mm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm


def _grouped(workload: GroupedGemm) -> Compute:
    def run(t: Tensors) -> Any:
        multiply = grouped_mm(workload, t)
        if multiply is None:
            raise InputError(f"torch does not compute {workload} on this GPU")
        return multiply()

    return run


def _is_aligned(workload: GroupedGemm) -> bool:
    return (workload.dtype, workload.out) == ("bf16", "bf16") and not (workload.n % 8 or workload.k % 8)


class LibraryGroupedGemm(LibraryGpu[GroupedGemm]):
    """grouped_gemm by one call of torch for all groups; one per group would read sizes on the host."""

    operator = GroupedGemm
    multiplies = True
    programs = {
        "torch_grouped_mm": LibraryProgram("torch", _grouped, "torch.nn.functional.grouped_mm", _is_aligned),
    }


VARIANT = LibraryGroupedGemm()
