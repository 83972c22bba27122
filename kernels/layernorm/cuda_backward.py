"""Gradients of layernorm in CUDA C++: persistent blocks compute dx, and sum the gradients of the weights.

Each block leaves the sums of its rows, which a second kernel adds, so that the order of additions is fixed.
See `tunebench.kernels.common.norm_backward` for the parameters. The kernels are in norm_backward.cuh, which
rmsnorm shares.
"""

from __future__ import annotations

from tunebench.kernels.common.norm_backward import CudaBackwardNorm
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaBackwardLayerNorm(CudaBackwardNorm[LayerNorm]):
    """Backward variant for every size and type."""

    operator = LayerNorm


VARIANT = CudaBackwardLayerNorm()
