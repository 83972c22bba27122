"""batchnorm_stats in Numba-CUDA, both directions: threads go down a column and meet in shared memory.

A block has `others` columns side by side, and `threads` go down each. Nothing is split among blocks: few
columns leave a large device idle. Forward, a thread takes differences from the first value that it meets, and
later from the mean of all so far; see batchnorm_stats.cuh.

Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
Recommendations", 1983.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Launch, NumbaCudaVariant, Scalar, Tiling, ceil_div
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

AT_FIRST, AT_ONCE = 8, 32
"""Rows that a thread takes differences of from its first value, and then from one mean."""

SPACE = Space(
    (
        Parameter("threads", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a column"),
        Parameter("others", (1, 2, 4, 8, 16, 32, 64, 128, 256), "columns of a block"),
    ),
    (
        lambda threads, others: (threads * others >= 64) & (threads * others <= 1024),
        # Threads without an element are of no use, nor are those of columns that there are not.
        lambda threads, others, workload: (
            ((threads * others == 64) & (others <= 2))
            | ((threads < 2 * workload.rows) & (others < 2 * workload.cols))
        ),
        # Less than two sectors side by side waste what is fetched, unless rows are so short.
        lambda threads, others, workload: (
            (others * itemsize(workload.dtype) >= 64)
            | (others >= workload.cols)
            | ((threads * others == 64) & (others <= 2))
        ),
    ),
)


class NumbaCudaBatchNormStats(NumbaCudaVariant[BatchNormStats]):
    """Serves every size of f32 and f16, both directions."""

    name = "numba_cuda"
    operator = BatchNormStats
    space = SPACE

    def limits(self, workload: BatchNormStats, device: Device) -> str | None:
        """Refuse bf16: Numba-CUDA converts it by functions that only a driver can link."""
        return f"{self.key} does not do bf16" if workload.dtype == "bf16" else None

    def default(self, workload: BatchNormStats, device: Device) -> Config:
        """Return 32 columns side by side, and 8 threads down each."""
        pairs = [(t, others) for others in (32, 64, 16, 8, 4, 2, 1) for t in (8, 16, 4, 32, 64, 2, 1)]
        choices = [Config({"threads": t, "others": others}) for t, others in [*pairs, (64, 1)]]
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: BatchNormStats, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut columns, and threads rows."""
        return (
            Tiling(dimension="cols", extent=workload.cols, tile=config["others"]),
            Tiling(dimension="rows", extent=workload.rows, tile=config["threads"]),
        )

    def costs(self, workload: BatchNormStats, table: Table, device: Device) -> Costs:
        """Count a difference, a sum and a multiply-add an element, and the bytes that nobody else reads."""
        threads, others, size = table["threads"], table["others"], float(itemsize(workload.dtype))
        elements, whole = 1.0 * others * workload.rows, 2 + workload.has_relu if workload.is_backward else 1
        own_bytes = workload.rows * np.maximum(0.0, others * size - 64.0)
        return Costs(
            blocks=workload.cols / others,
            full_blocks=workload.cols // others,
            threads=threads * others,
            smem_bytes=(8.0 if workload.is_backward else 12.0) * threads * others,
            fma=3.0 * elements,
            fill_bytes=whole * own_bytes,
            accesses=(whole + workload.has_relu) * elements,
            # The first load, one addition after the other, and what threads leave each other.
            chain_clocks=np.where(own_bytes > 0, device.l2_latency, device.l1_latency)
            + (ceil_div(workload.rows, threads) - 1) * device.fma_latency
            + device.smem_latency,
        )

    def kernel(self, workload: BatchNormStats, config: Config) -> Callable[..., None]:
        """Return the kernel of this direction."""
        threads, others = config["threads"], config["others"]
        if workload.is_backward:
            return _gradients(threads, others, workload.has_relu)
        return _statistics(threads, others)

    def launches(self, workload: BatchNormStats, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every few columns; without relu x stands for what there is not."""
        factors = (Scalar("float", workload.eps), Scalar("float", workload.momentum))
        tensors = tuple(tensor.name for tensor in (*workload.inputs(), *workload.outputs()))
        if workload.is_backward:
            y, dz = ("y", "dz") if workload.has_relu else ("x", "x")
            tensors = ("dy", "x", "mean", "rstd", y, "dgamma", "dbeta", dz)
        return (
            Launch(
                grid=(ceil_div(workload.cols, config["others"]), 1, 1),
                block=(config["others"], config["threads"], 1),
                arguments=(*tensors, *(() if workload.is_backward else factors)),
            ),
        )

    def emulation_workload(self, workload: BatchNormStats, config: Config) -> BatchNormStats:
        """Return a full block of columns and a cut one, and more rows a thread than it takes at once."""
        rows = min(workload.rows, (AT_ONCE + 2) * config["threads"] + 1)
        return dataclasses.replace(workload, rows=rows, cols=min(workload.cols, config["others"] + 1))


def _statistics(threads: int, others: int) -> Callable[..., None]:
    """Return the kernel of the statistics."""
    import math

    import numpy as np
    from numba import cuda, float32

    f32, zero, one = np.float32, np.float32(0), np.float32(1)

    def statistics(
        x: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any, new_mean: Any, new_var: Any,
        eps: Any, momentum: Any,
    ) -> None:  # fmt: skip
        # Numbers of rows, their means, and squared deviations from them.
        met = cuda.shared.array((3, threads, others), float32)
        c, t = cuda.threadIdx.x, cuda.threadIdx.y
        column = cuda.blockIdx.x * others + c
        # A column that is missing has no rows; its threads still come to every barrier.
        rows = x.shape[0] if column < x.shape[1] else 0
        shift, total, squares, kept, seen = zero, zero, zero, zero, 0
        if t < rows:
            shift = f32(x[t, column])
        while t + seen * threads < rows:
            following = min((rows - t + threads - 1) // threads, seen + (AT_ONCE if seen else AT_FIRST))
            for i in range(t + seen * threads, min(rows, t + following * threads), threads):
                apart = f32(x[i, column]) - shift
                total += apart
                squares += apart * apart
            seen = following
            after = shift + total / f32(seen)
            moved = after - shift
            left = total - moved * f32(seen)
            kept += squares - moved * (total + left)
            shift, total, squares = after, left, zero
        met[0, t, c] = f32(seen)
        met[1, t, c] = shift
        met[2, t, c] = kept
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half and met[0, t + half, c] > zero:
                mine, theirs = met[0, t, c], met[0, t + half, c]
                apart = met[1, t + half, c] - met[1, t, c]
                share = theirs / (mine + theirs)
                met[0, t, c] = mine + theirs
                met[1, t, c] += apart * share
                met[2, t, c] += met[2, t + half, c] + apart * apart * (mine * share)
            cuda.syncthreads()
            half //= 2
        if t == 0 and rows > 0:
            found = met[2, 0, c]
            if found < zero:
                found = zero
            kept = one - momentum
            mean[column] = met[1, 0, c]
            rstd[column] = one / f32(math.sqrt(found / f32(rows) + eps))
            new_mean[column] = kept * running_mean[column] + momentum * met[1, 0, c]
            new_var[column] = kept * running_var[column] + momentum * (found / f32(rows - 1))

    return statistics


def _gradients(threads: int, others: int, has_relu: bool) -> Callable[..., None]:
    """Return the kernel of the sums over rows."""
    import numpy as np
    from numba import cuda, float32

    f32, zero = np.float32, np.float32(0)

    def gradients(dy: Any, x: Any, mean: Any, rstd: Any, y: Any, dgamma: Any, dbeta: Any, dz: Any) -> None:
        met = cuda.shared.array((2, threads, others), float32)
        c, t = cuda.threadIdx.x, cuda.threadIdx.y
        column = cuda.blockIdx.x * others + c
        # A column that is missing has no rows; its threads still come to every barrier.
        rows = x.shape[0] if column < x.shape[1] else 0
        centre, products, total = zero, zero, zero
        if rows > 0:
            centre = mean[column]
        for i in range(t, rows, threads):
            d = f32(dy[i, column])
            if has_relu:
                if not f32(y[i, column]) > zero:
                    d = zero
                dz[i, column] = d
            products += d * (f32(x[i, column]) - centre)
            total += d
        met[0, t, c] = products
        met[1, t, c] = total
        cuda.syncthreads()
        half = threads // 2
        while half > 0:
            if t < half:
                met[0, t, c] += met[0, t + half, c]
                met[1, t, c] += met[1, t + half, c]
            cuda.syncthreads()
            half //= 2
        if t == 0 and rows > 0:
            dgamma[column] = met[0, 0, c] * rstd[column]
            dbeta[column] = met[1, 0, c]

    return gradients


VARIANT = NumbaCudaBatchNormStats()
