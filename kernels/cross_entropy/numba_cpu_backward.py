"""Gradient of cross entropy on the CPU: pieces of rows in parallel, element by element.

A piece is first written without regard to the target class. The task whose piece contains the class
then corrects that element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import exponential, jitted, load, store
from tunebench.kernels.common.numba_cpu_rows import EXP, NumbaCpuRows, piece_kernel
from tunebench.space import Config, Parameter, Space
from tunebench.workloads.operators.cross_entropy import CrossEntropy

SPACE = Space(
    (
        Parameter("piece", (256, 1024, 4096, 16384, 65536), "elements of a row that a task processes"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows of a task"),
        EXP,
    ),
    (
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
        lambda piece, workload: (piece == 256) | (piece < 2 * workload.cols),
    ),
)


class NumbaCpuCrossEntropyBackward(NumbaCpuRows[CrossEntropy]):
    """Backward variant for every size and type."""

    name = "numba_cpu_backward"
    operator = CrossEntropy
    direction = "backward"
    space = SPACE
    fma = 2.0  # the argument of the exponential, and a product

    def default(self, workload: CrossEntropy, device: Device) -> Config:
        """Return pieces of up to 16 K elements, and as many rows as have about 16 K elements."""
        piece = max(p for p in (256, 1024, 4096, 16384) if p == 256 or p < 2 * workload.cols)
        row_block = max(
            b
            for b in (1, 2, 4, 8, 16, 32, 64)
            if b == 1 or (b * 2 <= workload.rows and b * min(piece, workload.cols) <= 16384)
        )
        return Config({"piece": piece, "row_block": row_block, "exp": "poly"})

    def kernel(self, workload: CrossEntropy, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, target, lse, dloss, dx)` for the workload's type."""
        parameters = ("x", "target", "lse", "dloss", "dx")
        return piece_kernel(
            parameters, _run(workload, config, self.fastmath), config["row_block"], config["piece"]
        )


def _run(workload: CrossEntropy, config: Config, fastmath: frozenset[str]) -> Callable[..., Any]:
    """Return the function that computes a piece of a row (see `piece_kernel`)."""
    import numpy as np

    read, write, unit_loss = load(workload.dtype), store(workload.dtype), np.float32(1)
    power, unit = exponential(config["exp"])

    @jitted(fastmath)
    def fill(x: Any, dx: Any, begin: int, count: int, lse: Any, dloss: Any) -> None:
        for j in range(begin, begin + count):
            dx[j] = write(power((read(x[j]) - lse) * unit) * dloss)

    @jitted(fastmath)
    def run(tensors: Any, i: int, begin: int, column: int, count: int) -> None:
        x, target, lse, dloss, dx = tensors
        fill(x, dx, begin, count, lse[i], dloss[i])
        if column <= target[i] < column + count:
            at = begin - column + target[i]
            dx[at] = write((power((read(x[at]) - lse[i]) * unit) - unit_loss) * dloss[i])

    return run


VARIANT = NumbaCpuCrossEntropyBackward()
