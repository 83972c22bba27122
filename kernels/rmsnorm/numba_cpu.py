"""rmsnorm on the CPU: rows in parallel, squares summed over chunks that stay in the first cache.

A residual is added on the way. Rows are as in `tunebench.kernels.common.numba_norm`, which layernorm shares.
"""

from __future__ import annotations

from tunebench.kernels.common.numba_norm import NumbaCpuForwardNorm, Statistics, squares
from tunebench.space import Config
from tunebench.workloads.operators.rmsnorm import RmsNorm


class NumbaCpuRmsNorm(NumbaCpuForwardNorm[RmsNorm]):
    """Serves every size, type and prologue, forward."""

    operator = RmsNorm

    def statistics(self, config: Config) -> Statistics:
        """Return the sum of squares: there is no mean."""
        return squares


VARIANT = NumbaCpuRmsNorm()
