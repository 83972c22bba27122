"""Gradients of softmax in Numba-CUDA: a row has one x-line of a block, which reduces in shared memory.

A thread adds up its terms of the row's sum, then reads its elements again and writes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, Launch, NumbaCudaVariant, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.softmax import Softmax

SPACE = Space(
    (
        Parameter("threads", (8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
        Parameter("rows", (1, 2, 4, 8, 16), "rows of a block"),
    ),
    (
        lambda threads, rows: (threads * rows >= 32) & (threads * rows <= 1024),
        # Threads without an element are of no use.
        lambda threads, workload: (threads == 8) | (threads < 2 * workload.cols),
    ),
)


class NumbaCudaSoftmaxBackward(NumbaCudaVariant[Softmax]):
    """Serves every size of the backward direction in f32 and f16, scale fused."""

    name = "numba_cuda_backward"
    operator = Softmax
    space = SPACE

    def limits(self, workload: Softmax, device: Device) -> str | None:
        """Refuse what is no gradient, and bf16, which Numba-CUDA converts by functions of a driver's."""
        if not workload.is_backward:
            return f"{self.key} does direction=backward only"
        return f"{self.key} does not do bf16" if workload.dtype == "bf16" else None

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return up to 256 threads a row, and blocks of at least 128."""
        threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
        while threads > 8 and threads >= 2 * workload.cols:
            threads //= 2
        return Config({"threads": threads, "rows": max(1, 128 // threads)})

    def tiles(self, workload: Softmax, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["threads"]),
        )

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count two multiply-adds an element: the sum's, and one of the result.

        Exponentials are the compiler's choice of instructions and count as none.
        """
        rows, threads = table["rows"], table["threads"]
        elements = rows * float(workload.cols)
        # A short row may have come to L1 with its neighbour's.
        far = workload.cols * itemsize(workload.dtype) > 64
        return Costs(
            blocks=workload.rows / rows,
            full_blocks=workload.rows // rows,
            threads=threads * rows,
            smem_bytes=4.0 * rows * threads,
            fma=2.0 * elements,
            fill_bytes=np.maximum(0.0, (elements * itemsize(workload.dtype) - 64.0) * 2),
            accesses=elements * (4.0 if workload.log else 5.0),
            # From L2, where nobody else reads the row; a thread's sum, an element after the other;
            # then from what threads leave each other.
            chain_clocks=(device.l2_latency if far else device.l1_latency)
            + (ceil_div(workload.cols, threads) - 1) * device.fma_latency
            + device.smem_latency,
        )

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        """Return the kernel `(y, dy, scale, dx)`."""
        import math

        import numpy as np
        from numba import cuda, float32

        threads, rows, log, zero = config["threads"], config["rows"], workload.log, np.float32(0)

        def softmax_backward(y: Any, dy: Any, scale: Any, dx: Any) -> None:
            shared = cuda.shared.array((rows, threads), float32)
            t, r = cuda.threadIdx.x, cuda.threadIdx.y
            i = cuda.blockIdx.x * rows + r
            # A missing row has no columns; its threads still come to every barrier.
            cols = y.shape[1] if i < y.shape[0] else 0
            total = zero
            for j in range(t, cols, threads):
                g = np.float32(dy[i, j])
                total += g if log else g * np.float32(y[i, j])

            shared[r, t] = total
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if t < half:
                    shared[r, t] += shared[r, t + half]
                cuda.syncthreads()
                half //= 2
            total = shared[r, 0]

            for j in range(t, cols, threads):
                p, g = np.float32(y[i, j]), np.float32(dy[i, j])
                if log:
                    dx[i, j] = scale * np.float32(g - math.exp(p) * total)
                else:
                    dx[i, j] = scale * p * (g - total)

        return softmax_backward

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        return (
            Launch(
                grid=(ceil_div(workload.rows, config["rows"]), 1, 1),
                block=(config["threads"], config["rows"], 1),
                arguments=("y", "dy", scale, "dx"),
            ),
        )

    def miniature(self, workload: Softmax, config: Config) -> Softmax:
        """Return one full block and a cut one, with rows of at most three elements a thread and one more."""
        return dataclasses.replace(
            workload,
            rows=min(workload.rows, config["rows"] + 1),
            cols=min(workload.cols, 3 * config["threads"] + 1),
        )


VARIANT = NumbaCudaSoftmaxBackward()
