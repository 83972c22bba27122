"""Gradient of cross entropy in Numba-CUDA: a block computes a piece of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.expected import (
    LANES,
    NUMBA_ACCESS,
    NUMBA_REGISTERS,
    PROLOGUE,
    converted,
    sector_bytes,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Launch, NumbaCudaVariant, Tiling, ceil_div
from tunebench.workloads.operators.cross_entropy import CrossEntropy

MAX_GRID_Y = 65535
"""Most blocks along y of a grid. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

SPACE = Space(
    (
        Parameter("threads", (32, 64, 128, 256, 512, 1024), "threads of a block"),
        Parameter("each", (1, 2, 4, 8), "elements of a thread"),
    ),
    (
        # Threads without an element are useless.
        lambda threads, each, workload: (threads * each == 32) | (threads * each < 2 * workload.cols),
        lambda threads, each, workload: ceil_div(workload.cols, threads * each) <= MAX_GRID_Y,
    ),
)


class NumbaCudaCrossEntropyBackward(NumbaCudaVariant[CrossEntropy]):
    """Backward variant in f32 and f16."""

    name = "numba_cuda_backward"
    operator = CrossEntropy
    direction = "backward"
    space = SPACE

    def limits(self, workload: CrossEntropy, device: Device) -> str | None:
        """Refuse huge rows, and bf16, whose conversions only a driver can link."""
        if workload.cols > 8 * 1024 * MAX_GRID_Y:
            return f"{self.key} supports rows of up to {8 * 1024 * MAX_GRID_Y} elements"
        return f"{self.key} does not support bf16" if workload.dtype == "bf16" else None

    def default(self, workload: CrossEntropy, device: Device) -> Config:
        """Return up to 256 threads of 4 elements."""
        fits = [
            (t, e)
            for t in (32, 64, 128, 256, 512, 1024)
            for e in (1, 2, 4, 8)
            if (t * e == 32 or t * e < 2 * workload.cols) and ceil_div(workload.cols, t * e) <= MAX_GRID_Y
        ]
        threads, each = max(((t, e) for t, e in fits if t <= 256 and e <= 4), default=fits[-1])
        return Config({"threads": threads, "each": each})

    def tiles(self, workload: CrossEntropy, config: Config) -> tuple[Tiling, ...]:
        """Return the row of a block, and its piece of the row."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=1),
            Tiling(dimension="cols", extent=workload.cols, tile=config["threads"] * config["each"]),
        )

    def costs(self, workload: CrossEntropy, table: Table, device: Device) -> Costs:
        """Count the difference and the product of each element, which may be one instruction.

        Exponentials are not counted, since the compiler chooses their instructions.
        """
        piece = 1.0 * table["threads"] * table["each"]
        # One sector at either end may be shared with another piece.
        own_bytes = (piece * itemsize(workload.dtype) - 64.0).clip(0.0)
        return Costs(
            blocks=workload.rows * workload.cols / piece,
            full_blocks=workload.rows * (workload.cols // piece),
            threads=table["threads"],
            fma=piece,
            fill_bytes=own_bytes,
            accesses=2.0 * piece,
            chain_clocks=device.l1_latency,
            execution=_execution(workload, table),
        )

    def kernel(self, workload: CrossEntropy, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, target, lse, dloss, dx)`."""
        import math

        import numpy as np
        from numba import cuda

        threads, each, one, zero = config["threads"], config["each"], np.float32(1), np.float32(0)

        def cross_entropy_backward(x: Any, target: Any, lse: Any, dloss: Any, dx: Any) -> None:
            i, first = cuda.blockIdx.x, cuda.blockIdx.y * (threads * each) + cuda.threadIdx.x
            for j in range(first, min(x.shape[1], first + threads * each), threads):
                onehot = one if j == target[i] else zero
                dx[i, j] = (np.float32(math.exp(np.float32(x[i, j]) - lse[i])) - onehot) * dloss[i]

        return cross_entropy_backward

    def launches(self, workload: CrossEntropy, config: Config) -> tuple[Launch, ...]:
        """Launch one block for each piece of each row."""
        pieces = ceil_div(workload.cols, config["threads"] * config["each"])
        return (
            Launch(
                grid=(workload.rows, pieces, 1),
                block=(config["threads"], 1, 1),
                arguments=("x", "target", "lse", "dloss", "dx"),
            ),
        )

    def emulation_workload(self, workload: CrossEntropy, config: Config) -> CrossEntropy:
        """Return two rows of one full and one partial piece."""
        piece = config["threads"] * config["each"]
        return dataclasses.replace(workload, rows=min(workload.rows, 2), cols=min(workload.cols, piece + 1))


def _execution(workload: CrossEntropy, table: Table) -> Execution:
    """Describe a piece: a thread waits for each of its elements, since results may overlap with inputs."""
    threads, each, size = table["threads"], table["each"], itemsize(workload.dtype)
    piece = 1.0 * threads * each
    # The element, and three figures of its row after each store; a power takes a dozen instructions.
    of_element = 20 + 5 * NUMBA_ACCESS + 2 * converted(size)
    runs = piece / LANES * sector_bytes(LANES * size, workload.cols * size)
    return Execution(
        registers=NUMBA_REGISTERS,
        instructions=piece / LANES * of_element + threads / LANES * PROLOGUE,
        accesses=5 * piece,
        passes=5 * piece / LANES,
        l2_bytes=sector_bytes(piece * size, workload.cols * size) + runs,
        memory_waits=each,
        l2_waits=each,
    )


VARIANT = NumbaCudaCrossEntropyBackward()
