"""layernorm in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

Where the row is kept, its mean is found first and its variance about the mean after. Where it is read twice,
both are found together: each thread merges the mean and the squared deviations of its vectors into its own,
and the threads of a row merge theirs, so that no large sum of squares cancels. Bias and residual are added on
the way, and the sum is written beside the result. See `tunebench.kernels.common.row_block` for the parameters; the
kernels, which rmsnorm shares, are in norm.cuh.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
1979.
"""

from __future__ import annotations

from tunebench.kernels.common.norm import CudaBlockNorm
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaBlockLayerNorm(CudaBlockNorm[LayerNorm]):
    """Serves every size, type and prologue, forward."""

    operator = LayerNorm


VARIANT = CudaBlockLayerNorm()
