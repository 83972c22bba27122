"""layernorm and rmsnorm in Numba-CUDA, forward: what both share besides what kernels of rows do.

What is normalised may be a sum, which is made again in each pass: the one that is written is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.variant import Argument
from tunebench.workloads.operators._norm import Norm

__all__ = ["arguments", "kernel"]


def arguments(workload: Norm) -> tuple[Argument, ...]:
    """Return what the kernel takes; another tensor of its rank stands for what there is not."""
    there = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
    others = {"beta": "gamma", "bias": "gamma", "residual": "x", "z": "x", "mean": "gamma", "rstd": "gamma"}
    names = ("x", "gamma", "beta", "bias", "residual", "y", "z", "mean", "rstd")
    return tuple(name if name in there else others[name] for name in names)


def kernel(workload: Norm, threads: int, rows: int, online: bool) -> Callable[..., None]:  # noqa: C901 - may call nothing
    """Return the kernel that takes `arguments`; `online`: mean and variance are found together."""
    import math

    import numpy as np
    from numba import cuda, float32

    centred, stats = "mean" in workload.statistics, workload.stats
    has_bias, has_residual = workload.has_bias, workload.has_residual
    zero, one, eps = np.float32(0), np.float32(1), np.float32(workload.eps)

    def norm(  # noqa: C901 - likewise
        x: Any, gamma: Any, beta: Any, bias: Any, residual: Any, y: Any, z: Any, mean_of: Any, rstd_of: Any
    ) -> None:
        shared = cuda.shared.array((rows, threads), float32)
        t, r = cuda.threadIdx.x, cuda.threadIdx.y
        i = cuda.blockIdx.x * rows + r
        # A missing row has no columns; its threads still come to every barrier.
        cols = x.shape[1] if i < x.shape[0] else 0
        seen, total, squares, mine, mean = zero, zero, zero, zero, zero
        for j in range(t, cols, threads):
            value = np.float32(x[i, j])
            if has_bias:
                value += np.float32(bias[j])
            if has_residual:
                value += np.float32(residual[i, j])
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
            shared[r, t] = seen * mine if online else total
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if t < half:
                    shared[r, t] += shared[r, t + half]
                cuda.syncthreads()
                half //= 2
            mean = shared[r, 0] / np.float32(x.shape[1])
            cuda.syncthreads()
            if online:
                squares += seen * (mine - mean) * (mine - mean)
            else:
                for j in range(t, cols, threads):
                    value = np.float32(x[i, j])
                    if has_bias:
                        value += np.float32(bias[j])
                    if has_residual:
                        value += np.float32(residual[i, j])
                    squares += (value - mean) * (value - mean)

        shared[r, t] = squares
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half:
                shared[r, t] += shared[r, t + half]
            cuda.syncthreads()
            half //= 2
        rstd = one / np.float32(math.sqrt(shared[r, 0] / np.float32(x.shape[1]) + eps))
        if stats and t == 0 and cols > 0:
            rstd_of[i] = rstd
            if centred:
                mean_of[i] = mean

        for j in range(t, cols, threads):
            value = np.float32(x[i, j])
            if has_bias:
                value += np.float32(bias[j])
            if has_residual:
                value += np.float32(residual[i, j])
            scaled = (value - mean) * rstd * np.float32(gamma[j])
            if centred:
                scaled += np.float32(beta[j])
            y[i, j] = scaled

    return norm
