"""Layernorm of few long rows in CUDA C++: several blocks share a row, in two launches.

See `tunebench.kernels.common.norm_split` for the parameters. The kernels are in norm_split.cuh, which rmsnorm
shares.
"""

from __future__ import annotations

from tunebench.kernels.common.norm_split import CudaSplitNorm
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaSplitLayerNorm(CudaSplitNorm[LayerNorm]):
    """Forward variant for few long rows of every type and prologue."""

    operator = LayerNorm


VARIANT = CudaSplitLayerNorm()
