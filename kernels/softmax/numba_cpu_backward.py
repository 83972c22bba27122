"""Gradients of softmax on the CPU: rows in parallel, a sum over chunks, then the result in a second pass.

A row that stays in a cache is loaded from memory once. `keep=1` stores y dy (dy for log-softmax) in f32;
`keep=0` reads and converts it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import exponential, jitted, load, store
from tunebench.kernels.common.numba_cpu_rows import (
    CHUNK,
    CONSTRAINTS,
    EXP,
    ROW_BLOCK,
    NumbaCpuRows,
    default_chunk,
    default_row_block,
    row_kernel,
)
from tunebench.space import Config, Parameter, Space
from tunebench.variant import Argument, Scalar
from tunebench.workloads.operators.softmax import Softmax

SPACE = Space(
    (
        *(CHUNK, ROW_BLOCK),
        Parameter("keep", (0, 1), "1: keep the terms of the sum in f32; 0: read the inputs again"),
        EXP,
    ),
    (
        *CONSTRAINTS,
        lambda exp, workload: (exp == "poly") | workload.log,
    ),
)


class NumbaCpuSoftmaxBackward(NumbaCpuRows[Softmax]):
    """Backward variant for every size and type."""

    name = "numba_cpu_backward"
    operator = Softmax
    direction = "backward"
    space = SPACE
    fma = 2.0  # one of the sum, and one of the result

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return sums over 1 KiB of f32, and inputs that are read again from the cache."""
        chunk, row_block = default_chunk(workload), default_row_block(workload, most=4)
        return Config({"chunk": chunk, "row_block": row_block, "keep": 0, "exp": "poly"})

    def arguments(self, workload: Softmax, config: Config) -> tuple[Argument, ...]:
        """Pass 1 for a missing scale."""
        return ("y", "dy", "scale" if workload.has_scale else Scalar("float", 1.0), "dx")

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        """Return the kernel `(y, dy, scale, dx)` for the workload's type."""
        row = _row(workload, config, self.fastmath)
        return row_kernel(("y", "dy", "scale", "dx"), row, config["row_block"], numbers=("scale",))


def _row(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that computes a row (see `row_kernel`)."""
    import numpy as np

    read, zero, chunk, log = load(workload.dtype), np.float32(0), config["chunk"], workload.log
    keep = config["keep"] == 1
    write_row = (_of_logarithm if log else _of_softmax)(workload, config, fastmath)

    @jitted(fastmath)
    def sum_of(y: Any, dy: Any, begin: int, count: int, z: Any, to: int) -> Any:
        total = zero
        for j in range(count):
            term = read(dy[begin + j]) if log else read(y[begin + j]) * read(dy[begin + j])
            if keep:
                z[to + j] = term
            total += term
        return total

    @jitted(fastmath)
    def row(tensors: Any, i: int, cols: int, z: Any) -> None:
        y, dy, scale, dx = tensors
        begin, total = i * cols, zero
        for start in range(0, cols, chunk):
            total += sum_of(y, dy, begin + start, min(cols - start, chunk), z, start)
        write_row(y, dy, dx, begin, cols, z, scale, total)

    return row


def _of_softmax(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that writes ``scale y (dy - total)``; z holds y dy if it is kept."""
    read, write, keep = load(workload.dtype), store(workload.dtype), config["keep"] == 1

    @jitted(fastmath)
    def write_row(y: Any, dy: Any, dx: Any, begin: int, cols: int, z: Any, scale: Any, total: Any) -> None:
        for j in range(cols):
            p = read(y[begin + j])
            inner = z[j] - p * total if keep else p * (read(dy[begin + j]) - total)
            dx[begin + j] = write(scale * inner)

    return write_row


def _of_logarithm(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that writes ``scale (dy - exp(y) total)``; z holds dy if it is kept."""
    read, write, keep = load(workload.dtype), store(workload.dtype), config["keep"] == 1
    power, unit = exponential(config["exp"])

    @jitted(fastmath)
    def write_row(y: Any, dy: Any, dx: Any, begin: int, cols: int, z: Any, scale: Any, total: Any) -> None:
        for j in range(cols):
            g = z[j] if keep else read(dy[begin + j])
            dx[begin + j] = write(scale * (g - power(read(y[begin + j]) * unit) * total))

    return write_row


VARIANT = NumbaCpuSoftmaxBackward()
