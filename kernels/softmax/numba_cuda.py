"""softmax in Numba-CUDA: a row has one x-line of a block, whose threads reduce through shared memory.

With `passes=3` a thread finds its maximum, then its sum, then writes, and reads its elements each time; with
`passes=2` it finds maximum and sum together, at two exponentials an element. The logarithm needs none for its
result.
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
        Parameter("passes", (2, 3), "2: maximum and sum together; 3: one after the other"),
    ),
    (
        lambda threads, rows: (threads * rows >= 32) & (threads * rows <= 1024),
        # Threads without an element are of no use.
        lambda threads, workload: (threads == 8) | (threads < 2 * workload.cols),
    ),
)


class NumbaCudaSoftmax(NumbaCudaVariant[Softmax]):
    """Serves every size of the forward direction in f32 and f16, prologue fused."""

    name = "numba_cuda"
    operator = Softmax
    space = SPACE

    def limits(self, workload: Softmax, device: Device) -> str | None:
        """Refuse gradients, and bf16: Numba-CUDA converts it by functions that only a driver can link."""
        if workload.is_backward:
            return f"{self.key} does direction=forward only"
        return f"{self.key} does not do bf16" if workload.dtype == "bf16" else None

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return up to 256 threads a row, and blocks of at least 128."""
        threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
        while threads > 8 and threads >= 2 * workload.cols:
            threads //= 2
        return Config({"threads": threads, "rows": max(1, 128 // threads), "passes": 3})

    def tiles(self, workload: Softmax, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut rows, and threads their elements."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["threads"]),
        )

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count the difference, the sum and the product of each element, in case two are done at once.

        Exponentials are the compiler's choice of instructions and count as none.
        """
        rows, threads = table["rows"], table["threads"]
        elements = rows * float(workload.cols)
        # A short row may have come to L1 with its neighbour's.
        far = workload.cols * itemsize(workload.dtype) > 64
        tensors = 1 + workload.has_mask
        return Costs(
            blocks=workload.rows / rows,
            full_blocks=workload.rows // rows,
            threads=threads * rows,
            smem_bytes=4.0 * rows * threads,
            fma=1.5 * elements,
            fill_bytes=np.maximum(0.0, (elements * itemsize(workload.dtype) - 64.0) * tensors),
            accesses=elements * (table["passes"] * tensors + 1.0),
            # From L2, where nobody else reads the row; a thread's sum, an element after the other;
            # twice from what threads leave each other.
            chain_clocks=(device.l2_latency if far else device.l1_latency)
            + (ceil_div(workload.cols, threads) - 1) * device.fma_latency
            + 2 * device.smem_latency,
        )

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:  # noqa: C901 - may call nothing
        """Return the kernel `(x, scale, mask, y)` for this prologue."""
        import math

        import numpy as np
        from numba import cuda, float32

        threads, rows, masked = config["threads"], config["rows"], workload.has_mask
        online, log = config["passes"] == 2, workload.log
        lowest, zero, one = np.float32(np.finfo(np.float32).min), np.float32(0), np.float32(1)

        def softmax(x: Any, scale: Any, mask: Any, y: Any) -> None:  # noqa: C901 - likewise
            shared = cuda.shared.array((rows, threads), float32)
            t, r = cuda.threadIdx.x, cuda.threadIdx.y
            i = cuda.blockIdx.x * rows + r
            # A missing row has no columns; its threads still come to every barrier.
            cols = x.shape[1] if i < x.shape[0] else 0
            top, total = lowest, zero
            for j in range(t, cols, threads):
                z = np.float32(x[i, j]) * scale
                if masked:
                    z += np.float32(mask[i, j])
                higher = max(top, z)
                if online:
                    total = total * math.exp(top - higher) + math.exp(z - higher)
                top = higher
            mine = top

            shared[r, t] = top
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if t < half:
                    shared[r, t] = max(shared[r, t], shared[r, t + half])
                cuda.syncthreads()
                half //= 2
            top = shared[r, 0]
            cuda.syncthreads()

            if online:
                total *= math.exp(mine - top)
            else:
                for j in range(t, cols, threads):
                    z = np.float32(x[i, j]) * scale
                    if masked:
                        z += np.float32(mask[i, j])
                    total += math.exp(z - top)

            shared[r, t] = total
            cuda.syncthreads()
            half = threads // 2
            while half > 0:
                if t < half:
                    shared[r, t] += shared[r, t + half]
                cuda.syncthreads()
                half //= 2
            total = shared[r, 0]
            factor = one / total
            lse = top
            if log and cols > 0:
                lse += math.log(total)

            for j in range(t, cols, threads):
                z = np.float32(x[i, j]) * scale
                if masked:
                    z += np.float32(mask[i, j])
                if log:
                    y[i, j] = np.float32(z - lse)
                else:
                    y[i, j] = np.float32(math.exp(z - top)) * factor

        return softmax

    def launches(self, workload: Softmax, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `rows` rows; a missing mask is passed as x and not read."""
        scale: Argument = "scale" if workload.has_scale else Scalar("float", 1.0)
        return (
            Launch(
                grid=(ceil_div(workload.rows, config["rows"]), 1, 1),
                block=(config["threads"], config["rows"], 1),
                arguments=("x", scale, "mask" if workload.has_mask else "x", "y"),
            ),
        )

    def miniature(self, workload: Softmax, config: Config) -> Softmax:
        """Return one full block and a cut one, with rows of at most three elements a thread and one more."""
        return dataclasses.replace(
            workload,
            rows=min(workload.rows, config["rows"] + 1),
            cols=min(workload.cols, 3 * config["threads"] + 1),
        )


VARIANT = NumbaCudaSoftmax()
