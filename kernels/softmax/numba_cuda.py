"""Softmax in Numba-CUDA: the threads along x of a block share a row and reduce through shared memory.

With `passes=3` a thread computes its maximum, then its sum, then writes, and reads its elements each time.
With `passes=2` it computes maximum and sum together, by two exponentials per element. Log-softmax needs no
exponentials for its result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tunebench.device import Device
from tunebench.kernels.common.numba_cuda_rows import (
    NumbaCudaRows,
    device_function,
    passes_space,
    row_costs,
    row_reduction,
)
from tunebench.space import Config, Table
from tunebench.variant import Argument, Costs, Launch, Scalar
from tunebench.workloads.operators.softmax import Softmax


class NumbaCudaSoftmax(NumbaCudaRows[Softmax]):
    """Forward variant for every size in f32 and f16, with fused prologue."""

    name = "numba_cuda"
    operator = Softmax
    space = passes_space("maximum and sum")
    more: ClassVar[dict[str, Any]] = {"passes": 3}

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count the difference, the sum and the product of each element, at two per instruction."""
        tensors = 1 + workload.has_mask
        return row_costs(
            workload,
            table,
            device,
            row_tensors=tensors,
            fma=1.5,
            accesses=table["passes"] * tensors + 1.0,
            reductions=2,
            reads=table["passes"],
            # Differences, comparisons and sums; a power takes a dozen instructions, twice if online.
            instructions=40.0,
        )

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, scale, mask, y)` for the workload's prologue."""
        import math

        import numpy as np
        from numba import cuda, float32

        threads, rows, masked = config["threads"], config["rows"], workload.has_mask
        maximum, total_of = row_reduction(threads, "max"), row_reduction(threads)
        online, log = config["passes"] == 2, workload.log
        lowest, zero, one = np.float32(np.finfo(np.float32).min), np.float32(0), np.float32(1)

        @device_function
        def argument(x: Any, scale: Any, mask: Any, i: int, j: int) -> Any:
            z = np.float32(x[i, j]) * scale
            if masked:
                z += np.float32(mask[i, j])
            return z

        def softmax(x: Any, scale: Any, mask: Any, y: Any) -> None:
            shared = cuda.shared.array((rows, threads), float32)
            t, r = cuda.threadIdx.x, cuda.threadIdx.y
            i = cuda.blockIdx.x * rows + r
            # A row beyond the end has no columns; its threads still reach every barrier.
            cols = x.shape[1] if i < x.shape[0] else 0
            top, total = lowest, zero
            for j in range(t, cols, threads):
                z = argument(x, scale, mask, i, j)
                higher = max(top, z)
                if online:
                    total = total * math.exp(top - higher) + math.exp(z - higher)
                top = higher
            mine = top

            top = maximum(shared, r, t, top)
            cuda.syncthreads()

            if online:
                total *= math.exp(mine - top)
            else:
                for j in range(t, cols, threads):
                    z = argument(x, scale, mask, i, j)
                    total += math.exp(z - top)

            total = total_of(shared, r, t, total)
            factor = one / total
            lse = top
            if log and cols > 0:
                lse += math.log(total)

            for j in range(t, cols, threads):
                z = argument(x, scale, mask, i, j)
                if log:
                    y[i, j] = np.float32(z - lse)
                else:
                    y[i, j] = np.float32(math.exp(z - top)) * factor

        return softmax

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows; a missing mask is passed as x and not read."""
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        return self.launch(workload, config, "x", scale, "mask" if workload.has_mask else "x", "y")


VARIANT = NumbaCudaSoftmax()
