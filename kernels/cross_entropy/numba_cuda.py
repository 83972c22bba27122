"""cross_entropy in Numba-CUDA: a row has one x-line of a block, whose threads reduce through shared memory.

Each thread keeps the maximum of its elements and the sum of their exponentials relative to it, so that a row
is read once.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workloads.operators.cross_entropy import CrossEntropy

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


class NumbaCudaCrossEntropy(NumbaCudaVariant[CrossEntropy]):
    """Serves every size of the forward direction in f32 and f16."""

    name = "numba_cuda"
    operator = CrossEntropy
    space = SPACE

    def limits(self, workload: CrossEntropy, device: Device) -> str | None:
        """Refuse gradients, and bf16: Numba-CUDA converts it by functions that only a driver can link."""
        if workload.is_backward:
            return f"{self.key} does direction=forward only"
        return f"{self.key} does not do bf16" if workload.dtype == "bf16" else None

    def default(self, workload: CrossEntropy, device: Device) -> Config:
        """Return up to 256 threads a row, and blocks of at least 128."""
        threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
        while threads > 8 and threads >= 2 * workload.cols:
            threads //= 2
        return Config({"threads": threads, "rows": max(1, 128 // threads)})

    def tiles(self, workload: CrossEntropy, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["threads"]),
        )

    def costs(self, workload: CrossEntropy, table: Table, device: Device) -> Costs:
        """Count the difference and the sum of each element, in case they are done at once.

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
            fma=elements,
            fill_bytes=np.maximum(0.0, elements * itemsize(workload.dtype) - 64.0),
            accesses=elements,
            # From L2, where nobody else reads the row; a thread's sum, an element after the other;
            # twice from what threads leave each other.
            chain_clocks=(device.l2_latency if far else device.l1_latency)
            + (ceil_div(workload.cols, threads) - 1) * device.fma_latency
            + 2 * device.smem_latency,
        )

    def kernel(self, workload: CrossEntropy, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, target, loss, lse)`."""
        import math

        import numpy as np
        from numba import cuda, float32

        threads, rows = config["threads"], config["rows"]
        lowest, zero = np.float32(np.finfo(np.float32).min), np.float32(0)

        def cross_entropy(x: Any, target: Any, loss: Any, lse: Any) -> None:
            shared = cuda.shared.array((rows, threads), float32)
            t, r = cuda.threadIdx.x, cuda.threadIdx.y
            i = cuda.blockIdx.x * rows + r
            # A missing row has no columns; its threads still come to every barrier.
            cols = x.shape[1] if i < x.shape[0] else 0
            top, total = lowest, zero
            for j in range(t, cols, threads):
                z = np.float32(x[i, j])
                higher = max(top, z)
                total = total * math.exp(top - higher) + math.exp(z - higher)
                top = higher

            shared[r, t] = top
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if t < half:
                    shared[r, t] = max(shared[r, t], shared[r, t + half])
                cuda.syncthreads()
                half //= 2
            highest = shared[r, 0]
            cuda.syncthreads()

            shared[r, t] = total * math.exp(top - highest)
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if t < half:
                    shared[r, t] += shared[r, t + half]
                cuda.syncthreads()
                half //= 2
            if t == 0 and cols > 0:
                log = highest + math.log(shared[r, 0])
                lse[i] = log
                loss[i] = log - np.float32(x[i, target[i]])

        return cross_entropy

    def launches(self, workload: CrossEntropy, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows."""
        return (
            Launch(
                grid=(ceil_div(workload.rows, config["rows"]), 1, 1),
                block=(config["threads"], config["rows"], 1),
                arguments=("x", "target", "loss", "lse"),
            ),
        )

    def miniature(self, workload: CrossEntropy, config: Config) -> CrossEntropy:
        """Return one full block and a cut one, with rows of at most three elements a thread and one more."""
        return dataclasses.replace(
            workload,
            rows=min(workload.rows, config["rows"] + 1),
            cols=min(workload.cols, 3 * config["threads"] + 1),
        )


VARIANT = NumbaCudaCrossEntropy()
