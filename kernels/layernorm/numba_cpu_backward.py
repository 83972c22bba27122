"""Gradients of layernorm on the CPU: parts of the rows in parallel, with separate sums for the weights.

A row is read for its sums, and again, from a cache, for dx. See `tunebench.kernels.common.numba_norm`.
"""

from __future__ import annotations

from tunebench.kernels.common.numba_norm import NumbaCpuBackwardNorm
from tunebench.workloads.operators.layernorm import LayerNorm


class NumbaCpuBackwardLayerNorm(NumbaCpuBackwardNorm[LayerNorm]):
    """Backward variant for every size and type."""

    operator = LayerNorm


VARIANT = NumbaCpuBackwardLayerNorm()
