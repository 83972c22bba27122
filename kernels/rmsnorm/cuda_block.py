"""Rmsnorm in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

A residual is added in the same kernel, and the sum is a second output. See
`tunebench.kernels.common.row_block` for the parameters. The kernels are in norm.cuh, which layernorm shares.
"""

from __future__ import annotations

from tunebench.kernels.common.norm import CudaBlockNorm
from tunebench.workloads.operators.rmsnorm import RmsNorm


class CudaBlockRmsNorm(CudaBlockNorm[RmsNorm]):
    """Forward variant for every size, type and prologue."""

    operator = RmsNorm


VARIANT = CudaBlockRmsNorm()
