"""layernorm of few long rows in CUDA C++: several blocks share a row, in two launches.

See `tunebench.kernels.common.norm_split` for the parameters; the kernels, which layernorm and rmsnorm share, are in
norm_split.cuh.
"""

from __future__ import annotations

from tunebench.kernels.common.norm_split import CudaSplitNorm
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaSplitLayerNorm(CudaSplitNorm[LayerNorm]):
    """Serves long rows where they are few, of every type and prologue, forward."""

    operator = LayerNorm


VARIANT = CudaSplitLayerNorm()
