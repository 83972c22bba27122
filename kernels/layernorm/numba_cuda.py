"""layernorm in Numba-CUDA: a row has one x-line of a block, whose threads reduce through shared memory.

With `passes=3` a thread sums its elements, then their squared deviations from the row's mean, then writes,
and reads its elements each time; with `passes=2` it keeps mean and squared deviations of what it has seen.

Source: Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", 1962.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workloads.operators.layernorm import LayerNorm

SPACE = Space(
    (
        Parameter("threads", (8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
        Parameter("rows", (1, 2, 4, 8, 16), "rows of a block"),
        Parameter("passes", (2, 3), "2: mean and variance together; 3: one after the other"),
    ),
    (
        lambda threads, rows: (threads * rows >= 32) & (threads * rows <= 1024),
        # Threads without an element are of no use.
        lambda threads, workload: (threads == 8) | (threads < 2 * workload.cols),
    ),
)


class NumbaCudaLayerNorm(NumbaCudaVariant[LayerNorm]):
    """Serves every size in f32 and f16."""

    name = "numba_cuda"
    operator = LayerNorm
    space = SPACE

    def limits(self, workload: LayerNorm, device: Device) -> str | None:
        """Refuse bf16: Numba-CUDA converts it by functions that only a driver can link."""
        return f"{self.key} does not do bf16" if workload.dtype == "bf16" else None

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return up to 256 threads a row, and blocks of at least 128."""
        threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
        while threads > 8 and threads >= 2 * workload.cols:
            threads //= 2
        return Config({"threads": threads, "rows": max(1, 128 // threads), "passes": 3})

    def tiles(self, workload: LayerNorm, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["threads"]),
        )

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count the sum, deviation, square and affine map of each element, in case two are done at once."""
        rows, threads = table["rows"], table["threads"]
        elements = rows * float(workload.cols)
        # A short row may have come to L1 with its neighbour's.
        far = workload.cols * itemsize(workload.dtype) > 64
        return Costs(
            blocks=workload.rows / rows,
            full_blocks=workload.rows // rows,
            threads=threads * rows,
            smem_bytes=4.0 * rows * threads,
            fma=2.5 * elements,
            fill_bytes=np.maximum(0.0, elements * itemsize(workload.dtype) - 64.0),
            # From L2, where nobody else reads the row; twice from what threads leave each other.
            chain_clocks=(device.l2_latency if far else device.l1_latency) + 2 * device.smem_latency,
        )

    def kernel(self, workload: LayerNorm, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, gamma, beta, y)`."""
        import math

        import numpy as np
        from numba import cuda, float32

        threads, rows, online = config["threads"], config["rows"], config["passes"] == 2
        zero, one, eps = np.float32(0), np.float32(1), np.float32(workload.eps)

        def layernorm(x: Any, gamma: Any, beta: Any, y: Any) -> None:
            shared = cuda.shared.array((rows, threads), float32)
            t, r = cuda.threadIdx.x, cuda.threadIdx.y
            i = cuda.blockIdx.x * rows + r
            # A missing row has no columns; its threads still come to every barrier.
            cols = x.shape[1] if i < x.shape[0] else 0
            seen, total, squares = zero, zero, zero
            mine = zero
            for j in range(t, cols, threads):
                value = np.float32(x[i, j])
                seen += one
                if online:
                    difference = value - mine
                    mine += difference / seen
                    squares += difference * (value - mine)
                else:
                    total += value
            if online:
                total = seen * mine

            shared[r, t] = total
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
                    difference = np.float32(x[i, j]) - mean
                    squares += difference * difference

            shared[r, t] = squares
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if t < half:
                    shared[r, t] += shared[r, t + half]
                cuda.syncthreads()
                half //= 2
            inverse = one / np.float32(math.sqrt(shared[r, 0] / np.float32(x.shape[1]) + eps))

            for j in range(t, cols, threads):
                normal = (np.float32(x[i, j]) - mean) * inverse
                y[i, j] = normal * np.float32(gamma[j]) + np.float32(beta[j])

        return layernorm

    def launches(self, workload: LayerNorm, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return (
            Launch(
                grid=(ceil_div(workload.rows, config["rows"]), 1, 1),
                block=(config["threads"], config["rows"], 1),
                arguments=("x", "gamma", "beta", "y"),
            ),
        )

    def miniature(self, workload: LayerNorm, config: Config) -> LayerNorm:
        """Return one full block and a cut one, with rows of at most three elements a thread and one more."""
        return LayerNorm(
            rows=min(workload.rows, config["rows"] + 1),
            cols=min(workload.cols, 3 * config["threads"] + 1),
            dtype=workload.dtype,
        )


VARIANT = NumbaCudaLayerNorm()
