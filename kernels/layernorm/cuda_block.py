"""Layernorm in CUDA C++: threads share a row, which is kept in registers, in shared memory, or read twice.

If the row is kept, its mean is computed first, then its variance about the mean. If it is read twice, both
are computed together: each thread merges the mean and the squared deviations of its vectors, and the threads
of a row merge theirs, so that no large sum of squares cancels. Bias and residual are added in the same
kernel, and the sum is a second output. See `tunebench.kernels.common.row_block` for the parameters. The
kernels are in norm.cuh, which rmsnorm shares.

Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances",
1979.
"""

from __future__ import annotations

from tunebench.kernels.common.norm import CudaBlockNorm
from tunebench.workloads.operators.layernorm import LayerNorm


class CudaBlockLayerNorm(CudaBlockNorm[LayerNorm]):
    """Forward variant for every size, type and prologue."""

    operator = LayerNorm


VARIANT = CudaBlockLayerNorm()
