"""rmsnorm in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

A residual is added on the way, and the sum is written beside the result. See `tunebench.kernels.common.row_block`
for the parameters; the kernels, which layernorm shares, are in norm.cuh.
"""

from __future__ import annotations

from tunebench.kernels.common.norm import CudaBlockNorm
from tunebench.workloads.operators.rmsnorm import RmsNorm


class CudaBlockRmsNorm(CudaBlockNorm[RmsNorm]):
    """Serves every size, type and prologue, forward."""

    operator = RmsNorm


VARIANT = CudaBlockRmsNorm()
