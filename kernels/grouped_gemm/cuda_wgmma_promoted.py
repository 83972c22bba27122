"""grouped_gemm of e4m3 by Hopper's wgmma (sm_90a) with promoted sums, for ``accumulate=f32``.

The kernel is that of `cuda_wgmma`. Sums are promoted as in gemm's cuda_wgmma_promoted: tensor cores sum at
most 256 products, and these sums are added in f32.

Limits: those of `cuda_wgmma`; a tile has two sets of sums in registers, so it is smaller.

Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.3.2; DeepSeek, DeepGEMM.
"""

from __future__ import annotations

from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.promoted_wgmma import PROMOTE, PromotedWgmmaGemm
from tunebench.kernels.common.promoted_wgmma import constraints as promotion
from tunebench.kernels.common.wgmma_gemm import RING, constraints
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.kernels.grouped_gemm.cuda_wgmma import SOURCE, CudaWgmmaGroupedGemm
from tunebench.space import Parameter, Space
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of a group per tile"),
        Parameter("bn", (64, 128, 192), "columns of c per tile"),
        Parameter("bk", (128, 256), "elements of k per step, in one buffer"),
        PROMOTE,
        *RING,
    ),
    (*constraints(_grouped), *promotion(_grouped)),
)


class CudaWgmmaPromotedGroupedGemm(PromotedWgmmaGemm[GroupedGemm], CudaWgmmaGroupedGemm):
    """e4m3 with sums in f32 on Hopper."""

    name = "cuda_wgmma_promoted"
    space = SPACE
    text = SOURCE.replace("multiply<C>(memory.buffers", PromotedWgmmaGemm.multiplied)

    def preamble(self, workload: GroupedGemm) -> str:
        """Return the source of promotion."""
        return super().preamble(workload) + helpers("promoted_wgmma")


VARIANT = CudaWgmmaPromotedGroupedGemm()
