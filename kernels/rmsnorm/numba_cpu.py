"""Rmsnorm on the CPU: rows in parallel, squares summed over chunks that stay in the first cache.

A residual is added in the same kernel. `tunebench.kernels.common.numba_norm` has the code that layernorm
shares.
"""

from __future__ import annotations

from tunebench.kernels.common.numba_norm import NumbaCpuForwardNorm, Statistics, squares
from tunebench.space import Config
from tunebench.workloads.operators.rmsnorm import RmsNorm


class NumbaCpuRmsNorm(NumbaCpuForwardNorm[RmsNorm]):
    """Forward variant for every size, type and prologue."""

    operator = RmsNorm

    def statistics(self, config: Config) -> Statistics:
        """Return the sum of squares; rmsnorm has no mean."""
        return squares


VARIANT = NumbaCpuRmsNorm()
