"""Gradients of rmsnorm in CUDA C++: rows give dx, and blocks that stay add up the gradients of the weights.

What each block has added up of all its rows is a part, and a second kernel adds the parts, so that no atomic
operation decides the order. See `tunebench.kernels.common.norm_backward` for the parameters; the kernels, which
layernorm and rmsnorm share, are in norm_backward.cuh.
"""

from __future__ import annotations

from tunebench.kernels.common.norm_backward import CudaBackwardNorm
from tunebench.workloads.operators.rmsnorm import RmsNorm


class CudaBackwardRmsNorm(CudaBackwardNorm[RmsNorm]):
    """Serves every size and type, backward."""

    operator = RmsNorm


VARIANT = CudaBackwardRmsNorm()
