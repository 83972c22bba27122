"""gemm of e4m3 by Hopper's wgmma (sm_90a) with promoted sums, for ``accumulate=f32``.

The kernel is that of `cuda_wgmma`. Tensor cores keep 13 fraction bits of sums of e4m3 products, so that long
sums lose bits. Here they sum `promote` steps of k only, 256 products at most. The consumer then adds these
sums to totals in f32, in its registers, and its next products start from zero.

Limits: those of `cuda_wgmma`; a tile has two sets of sums in registers, so it is smaller.

Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.3.2; DeepSeek, DeepGEMM; CUTLASS,
"fp8 accumulation" (promotion interval).
"""

from __future__ import annotations

from tunebench.kernels.common import gemm
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.promoted_wgmma import PROMOTE, PromotedWgmmaGemm
from tunebench.kernels.common.promoted_wgmma import constraints as promotion
from tunebench.kernels.common.wgmma_gemm import RING, constraints
from tunebench.kernels.gemm.cuda_wgmma import DIVISION, SPLIT_K, STAGED, CudaWgmmaGemm, boxes_are_stored
from tunebench.space import Parameter, Space
from tunebench.workloads.operators.gemm import Gemm

SPACE = Space(
    (
        Parameter("bm", (64, 128, 192, 256), "rows of c per tile"),
        Parameter("bn", (64, 128, 192), "columns of c per tile"),
        Parameter("bk", (128, 256), "elements of k per step, in one buffer"),
        PROMOTE,
        *(STAGED if parameter.name == "staged" else parameter for parameter in RING),
        SPLIT_K,
    ),
    (*constraints(gemm), *promotion(gemm), boxes_are_stored, *DIVISION),
)


class CudaWgmmaPromotedGemm(PromotedWgmmaGemm[Gemm], CudaWgmmaGemm):
    """e4m3 with sums in f32 on Hopper."""

    name = "cuda_wgmma_promoted"
    space = SPACE

    def preamble(self, workload: Gemm) -> str:
        """Return the source of the activation, if it is an expression, and of promotion."""
        return super().preamble(workload) + helpers("promoted_wgmma")


VARIANT = CudaWgmmaPromotedGemm()
