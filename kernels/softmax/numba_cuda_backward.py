"""Gradients of softmax in Numba-CUDA: the threads along x of a block share a row.

A thread adds its terms of the row's sum, then reads its elements again and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cuda_rows import NumbaCudaRows, row_costs, row_reduction
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax


class NumbaCudaSoftmaxBackward(NumbaCudaRows[Softmax]):
    """Backward variant for every size in f32 and f16, with fused scale."""

    name = "numba_cuda_backward"
    operator = Softmax
    direction = "backward"

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count two multiply-adds per element: one of the sum, and one of the result."""
        accesses = 4.0 if workload.log else 5.0
        return row_costs(workload, table, device, row_tensors=2, fma=2.0, accesses=accesses, reads=2)

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        """Return the kernel `(y, dy, scale, dx)`."""
        import math

        import numpy as np
        from numba import cuda, float32

        threads, rows, log, zero = config["threads"], config["rows"], workload.log, np.float32(0)
        total_of = row_reduction(threads)

        def softmax_backward(y: Any, dy: Any, scale: Any, dx: Any) -> None:
            shared = cuda.shared.array((rows, threads), float32)
            t, r = cuda.threadIdx.x, cuda.threadIdx.y
            i = cuda.blockIdx.x * rows + r
            # A row beyond the end has no columns; its threads still reach every barrier.
            cols = y.shape[1] if i < y.shape[0] else 0
            total = zero
            for j in range(t, cols, threads):
                g = np.float32(dy[i, j])
                total += g if log else g * np.float32(y[i, j])
            total = total_of(shared, r, t, total)

            for j in range(t, cols, threads):
                p, g = np.float32(y[i, j]), np.float32(dy[i, j])
                if log:
                    dx[i, j] = scale * np.float32(g - math.exp(p) * total)
                else:
                    dx[i, j] = scale * p * (g - total)

        return softmax_backward

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return self.launch(
            workload, config, "y", "dy", "scale" if workload.has_scale else Scalar("float", 1.0), "dx"
        )


VARIANT = NumbaCudaSoftmaxBackward()
