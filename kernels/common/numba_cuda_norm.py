"""Forward kernel of layernorm and rmsnorm in Numba-CUDA.

The normalised value may be a sum of inputs. Each pass computes it again, since the stored sum is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.kernels.common.numba_cuda_rows import device_function, row_reduction
from tunebench.variant import Argument
from tunebench.workloads.common.norm import Norm

__all__ = ["arguments", "kernel"]


def arguments(workload: Norm) -> tuple[Argument, ...]:
    """Return the arguments of the kernel; another tensor of its rank replaces a missing one."""
    there = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
    others = {"beta": "gamma", "bias": "gamma", "residual": "x", "z": "x", "mean": "gamma", "rstd": "gamma"}
    names = ("x", "gamma", "beta", "bias", "residual", "y", "z", "mean", "rstd")
    return tuple(name if name in there else others[name] for name in names)


def kernel(  # noqa: C901 - one kernel for all prologues
    workload: Norm, threads: int, rows: int, online: bool
) -> Callable[..., None]:
    """Return the kernel that takes `arguments`.

    Args:
        workload: The workload.
        threads: Threads that share a row.
        rows: Rows of a block.
        online: Whether one pass computes both mean and variance.
    """
    import math

    import numpy as np
    from numba import cuda, float32

    total_of = row_reduction(threads)
    centred, stats = "mean" in workload.statistics, workload.stats
    has_bias, has_residual = workload.has_bias, workload.has_residual
    zero, one, eps = np.float32(0), np.float32(1), np.float32(workload.eps)

    @device_function
    def value_of(x: Any, bias: Any, residual: Any, i: int, j: int) -> Any:
        value = np.float32(x[i, j])
        if has_bias:
            value += np.float32(bias[j])
        if has_residual:
            value += np.float32(residual[i, j])
        return value

    def norm(
        x: Any, gamma: Any, beta: Any, bias: Any, residual: Any, y: Any, z: Any, mean_of: Any, rstd_of: Any
    ) -> None:
        shared = cuda.shared.array((rows, threads), float32)
        t, r = cuda.threadIdx.x, cuda.threadIdx.y
        i = cuda.blockIdx.x * rows + r
        # A row beyond the end has no columns; its threads still reach every barrier.
        cols = x.shape[1] if i < x.shape[0] else 0
        seen, total, squares, mine, mean = zero, zero, zero, zero, zero
        for j in range(t, cols, threads):
            value = value_of(x, bias, residual, i, j)
            if has_residual:
                z[i, j] = value
            seen += one
            if not centred:
                squares += value * value
            elif online:
                difference = value - mine
                mine += difference / seen
                squares += difference * (value - mine)
            else:
                total += value

        if centred:
            mean = total_of(shared, r, t, seen * mine if online else total) / np.float32(x.shape[1])
            cuda.syncthreads()
            if online:
                squares += seen * (mine - mean) * (mine - mean)
            else:
                for j in range(t, cols, threads):
                    value = value_of(x, bias, residual, i, j)
                    squares += (value - mean) * (value - mean)

        squares = total_of(shared, r, t, squares)
        rstd = one / np.float32(math.sqrt(squares / np.float32(x.shape[1]) + eps))
        if stats and t == 0 and cols > 0:
            rstd_of[i] = rstd
            if centred:
                mean_of[i] = mean

        for j in range(t, cols, threads):
            value = value_of(x, bias, residual, i, j)
            scaled = (value - mean) * rstd * np.float32(gamma[j])
            if centred:
                scaled += np.float32(beta[j])
            y[i, j] = scaled

    return norm
