"""Cross entropy in Numba-CUDA: the threads along x of a block share a row and reduce through shared memory.

Each thread updates the maximum of its elements and the sum of their exponentials relative to it, so that a
row is read once.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cuda_rows import NumbaCudaRows, row_costs, row_reduction
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch
from tunebench.workloads.operators.cross_entropy import CrossEntropy


class NumbaCudaCrossEntropy(NumbaCudaRows[CrossEntropy]):
    """Forward variant for every size in f32 and f16."""

    name = "numba_cuda"
    operator = CrossEntropy

    def costs(self, workload: CrossEntropy, table: Table, device: Device) -> Costs:
        """Count the difference and the sum of each element, which may be one instruction."""
        return row_costs(
            workload,
            table,
            device,
            row_tensors=1,
            fma=1.0,
            accesses=1.0,
            reductions=2,
            reads=1,
            instructions=30.0,  # two powers
            outputs=0,
        )

    def kernel(self, workload: CrossEntropy, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, target, loss, lse)`."""
        import math

        import numpy as np
        from numba import cuda, float32

        maximum, total_of = (row_reduction(config["threads"], operation) for operation in ("max", "sum"))
        threads, rows = config["threads"], config["rows"]
        lowest, zero = np.float32(np.finfo(np.float32).min), np.float32(0)

        def cross_entropy(x: Any, target: Any, loss: Any, lse: Any) -> None:
            shared = cuda.shared.array((rows, threads), float32)
            t, r = cuda.threadIdx.x, cuda.threadIdx.y
            i = cuda.blockIdx.x * rows + r
            # A row beyond the end has no columns; its threads still reach every barrier.
            cols = x.shape[1] if i < x.shape[0] else 0
            top, total = lowest, zero
            for j in range(t, cols, threads):
                z = np.float32(x[i, j])
                higher = max(top, z)
                total = total * math.exp(top - higher) + math.exp(z - higher)
                top = higher

            highest = maximum(shared, r, t, top)
            cuda.syncthreads()

            total = total_of(shared, r, t, total * math.exp(top - highest))
            if t == 0 and cols > 0:
                log = highest + math.log(total)
                lse[i] = log
                loss[i] = log - np.float32(x[i, target[i]])

        return cross_entropy

    def launches(self, workload: CrossEntropy, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return self.launch(workload, config, "x", "target", "loss", "lse")


VARIANT = NumbaCudaCrossEntropy()
