"""Batch statistics and their gradients in Numba-CUDA: threads share a column, reduced in shared memory.

A block has `others` adjacent columns, with `threads` threads each. Nothing is split among blocks, so that few
columns leave a large device idle. Forward, a thread sums differences from its first value, and later from the
mean so far; see batchnorm_stats.cuh.

Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
Recommendations", 1983.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cuda_results import NumbaCudaResults, result_space
from tunebench.kernels.common.numba_cuda_rows import block_reduction, device_function
from tunebench.space import Config, Table
from tunebench.variant import Costs, Launch, Scalar, ceil_div
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

AT_FIRST, AT_ONCE = 8, 32
"""Rows whose differences a thread takes from its first value, and then from one mean."""


class NumbaCudaBatchNormStats(NumbaCudaResults[BatchNormStats]):
    """Variant for every size of f32 and f16, both directions."""

    operator = BatchNormStats
    space = result_space(NumbaCudaResults.reduces_rows, "column")

    def limits(self, workload: BatchNormStats, device: Device) -> str | None:
        """Refuse bf16, whose conversions only a driver can link."""
        return f"{self.key} does not support bf16" if workload.dtype == "bf16" else None

    def costs(self, workload: BatchNormStats, table: Table, device: Device) -> Costs:
        """Count a difference, a sum and a multiply-add per element, and bytes that no other block reads."""
        matrices = 2 + workload.has_relu if workload.is_backward else 1
        shared = self.result_costs(
            workload, table, device, matrices=matrices, instructions=6.0, stored=int(workload.has_relu)
        )
        elements = 1.0 * table["others"] * workload.rows
        return dataclasses.replace(
            shared,
            smem_bytes=(8.0 if workload.is_backward else 12.0) * table["threads"] * table["others"],
            fma=3.0 * elements,
            accesses=shared.accesses + workload.has_relu * elements,
        )

    def kernel(self, workload: BatchNormStats, config: Config) -> Callable[..., None]:
        """Return the kernel of the workload's direction."""
        threads, others = config["threads"], config["others"]
        if workload.is_backward:
            return _gradients(threads, others, workload.has_relu)
        return _statistics(threads, others)

    def launches(self, workload: BatchNormStats, config: Config) -> tuple[Launch, ...]:
        """Launch one block for every `others` columns; without relu, x replaces the missing tensors."""
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
        """Return a full and a partial block of columns, and more rows per thread than it takes at once."""
        rows = min(workload.rows, (AT_ONCE + 2) * config["threads"] + 1)
        return dataclasses.replace(workload, rows=rows, cols=min(workload.cols, config["others"] + 1))


def _statistics(threads: int, others: int) -> Callable[..., None]:
    """Return the forward kernel, which computes the statistics."""
    import math

    import numpy as np
    from numba import cuda, float32

    f32, zero, one = np.float32, np.float32(0), np.float32(1)

    @device_function
    def join(met: Any, c: int, t: int, other: int) -> None:
        if met[0, other, c] > zero:
            mine, theirs = met[0, t, c], met[0, other, c]
            apart = met[1, other, c] - met[1, t, c]
            share = theirs / (mine + theirs)
            met[0, t, c] = mine + theirs
            met[1, t, c] += apart * share
            met[2, t, c] += met[2, other, c] + apart * apart * (mine * share)

    reduce = block_reduction(threads, join)

    def statistics(
        x: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any, new_mean: Any, new_var: Any,
        eps: Any, momentum: Any,
    ) -> None:  # fmt: skip
        # Counts of rows, their means, and squared deviations from the means.
        met = cuda.shared.array((3, threads, others), float32)
        c, t = cuda.threadIdx.x, cuda.threadIdx.y
        column = cuda.blockIdx.x * others + c
        # A column beyond the end has no rows; its threads still reach every barrier.
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
        reduce(met, c, t)
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
    """Return the backward kernel, which sums over rows."""
    import numpy as np
    from numba import cuda, float32

    f32, zero = np.float32, np.float32(0)

    @device_function
    def join(met: Any, c: int, t: int, other: int) -> None:
        met[0, t, c] += met[0, other, c]
        met[1, t, c] += met[1, other, c]

    reduce = block_reduction(threads, join)

    def gradients(dy: Any, x: Any, mean: Any, rstd: Any, y: Any, dgamma: Any, dbeta: Any, dz: Any) -> None:
        met = cuda.shared.array((2, threads, others), float32)
        c, t = cuda.threadIdx.x, cuda.threadIdx.y
        column = cuda.blockIdx.x * others + c
        # A column beyond the end has no rows; its threads still reach every barrier.
        rows = x.shape[0] if column < x.shape[1] else 0
        centre, products, total = zero, zero, zero
        if rows > 0:
            centre = mean[column]
        for i in range(t, rows, threads):
            d = f32(dy[i, column])
            if has_relu:
                if f32(y[i, column]) <= zero:
                    d = zero
                dz[i, column] = d
            products += d * (f32(x[i, column]) - centre)
            total += d
        met[0, t, c] = products
        met[1, t, c] = total
        reduce(met, c, t)
        if t == 0 and rows > 0:
            dgamma[column] = met[0, 0, c] * rstd[column]
            dbeta[column] = met[1, 0, c]

    return gradients


VARIANT = NumbaCudaBatchNormStats()
