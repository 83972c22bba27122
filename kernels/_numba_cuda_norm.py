"""layernorm and rmsnorm in Numba-CUDA, forward: what both share.

A row has one x-line of a block, whose threads reduce through shared memory. What is normalised may be a sum,
which is made again in each pass: the one that is written is rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.space import Config, Constraint, Parameter, Table
from tunebench.variant import Argument, Costs, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workloads.operators._norm import Norm

__all__ = [
    "CONSTRAINTS",
    "PARAMETERS",
    "costs",
    "default_shape",
    "kernel",
    "launches",
    "limits",
    "miniature",
    "tiles",
]

N = TypeVar("N", bound=Norm)

PARAMETERS = (
    Parameter("threads", (8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
    Parameter("rows", (1, 2, 4, 8, 16), "rows of a block"),
)
CONSTRAINTS: tuple[Constraint, ...] = (
    lambda threads, rows: (threads * rows >= 32) & (threads * rows <= 1024),
    # Threads without an element are of no use.
    lambda threads, workload: (threads == 8) | (threads < 2 * workload.cols),
)


def limits(variant: NumbaCudaVariant[Any], workload: Norm) -> str | None:
    """Refuse bf16, which Numba-CUDA converts by functions that only a driver can link, and gradients."""
    if workload.is_backward:
        return f"{variant.key} does not compute gradients"
    return f"{variant.key} does not do bf16" if workload.dtype == "bf16" else None


def default_shape(workload: Norm) -> dict[str, int]:
    """Return up to 256 threads a row, and blocks of at least 128."""
    threads = next((t for t in (8, 16, 32, 64, 128) if workload.cols <= 4 * t), 256)
    while threads > 8 and threads >= 2 * workload.cols:
        threads //= 2
    return {"threads": threads, "rows": max(1, 128 // threads)}


def tiles(workload: Norm, config: Config) -> tuple[Tiling, ...]:
    """Return how blocks cut rows, and threads their elements."""
    return (
        Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
        Tiling(dimension="cols", extent=workload.cols, tile=config["threads"]),
    )


def costs(workload: Norm, table: Table, device: Device, fma: float, reductions: int) -> Costs:
    """Return what any such kernel must do, with `fma` multiply-adds an element and so many reductions."""
    rows, threads = table["rows"], table["threads"]
    elements = rows * float(workload.cols)
    # A short row may have come to L1 with its neighbour's.
    far = workload.cols * itemsize(workload.dtype) > 64
    tensors = 1 + workload.has_residual
    return Costs(
        blocks=workload.rows / rows,
        full_blocks=workload.rows // rows,
        threads=threads * rows,
        smem_bytes=4.0 * rows * threads,
        fma=fma * elements,
        fill_bytes=tensors * np.maximum(0.0, elements * itemsize(workload.dtype) - 64.0),
        # From L2, where nobody else reads the row; then from what threads leave each other.
        chain_clocks=(device.l2_latency if far else device.l1_latency) + reductions * device.smem_latency,
    )


def launches(workload: Norm, config: Config) -> tuple[Launch, ...]:
    """Launch one block for every `rows` rows; another tensor of its rank stands for what there is not."""
    there = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
    others = {"beta": "gamma", "bias": "gamma", "residual": "x", "z": "x", "mean": "gamma", "rstd": "gamma"}
    names = ("x", "gamma", "beta", "bias", "residual", "y", "z", "mean", "rstd")
    arguments: tuple[Argument, ...] = tuple(name if name in there else others[name] for name in names)
    grid = (ceil_div(workload.rows, config["rows"]), 1, 1)
    return (Launch(grid=grid, block=(config["threads"], config["rows"], 1), arguments=arguments),)


def miniature(workload: N, config: Config) -> N:
    """Return one full block and a cut one, with rows of at most three elements a thread and one more."""
    rows, cols = config["rows"] + 1, 3 * config["threads"] + 1
    return dataclasses.replace(workload, rows=min(workload.rows, rows), cols=min(workload.cols, cols))


def kernel(workload: Norm, threads: int, rows: int, online: bool) -> Callable[..., None]:  # noqa: C901 - may call nothing
    """Return the kernel that takes what `launches` passes; `online`: mean and variance are found together."""
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
