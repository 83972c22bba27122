"""Gradients of softmax on the CPU: rows in parallel, a sum by chunks, then the result in a second pass.

A row that stays in a cache comes from memory once. `keep=1` leaves y dy (for the logarithm dy) in f32,
`keep=0` reads and converts again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, exponential, jitted, load, store
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workloads.operators.softmax import Softmax

SPACE = Space(
    (
        Parameter("chunk", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "elements a loop adds up"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows a thread takes at a time"),
        Parameter("keep", (0, 1), "1: terms of the sum are kept in f32; 0: inputs are read again"),
        Parameter("exp", ("libm", "poly"), "of the logarithm's gradient; poly vectorises"),
    ),
    (
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
        lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.cols),
        lambda exp, workload: (exp == "poly") | workload.log,
    ),
)


class NumbaCpuSoftmaxBackward(NumbaCpuVariant[Softmax]):
    """Serves every size and type of the backward direction."""

    name = "numba_cpu_backward"
    operator = Softmax
    space = SPACE
    fastmath = frozenset({"reassoc", "contract", "arcp", "nsz", "afn"})

    def limits(self, workload: Softmax, device: Device) -> str | None:
        """Refuse what is no gradient."""
        return None if workload.is_backward else f"{self.key} does direction=backward only"

    def default(self, workload: Softmax, device: Device) -> Config:
        """Return sums over 1 KiB in f32, and inputs that are read again from the cache."""
        chunk = max(c for c in (16, 32, 64, 128, 256) if c == 16 or c < 2 * workload.cols)
        row_block = max(b for b in (1, 2, 4) if b == 1 or b * 2 <= workload.rows)
        return Config({"chunk": chunk, "row_block": row_block, "keep": 0, "exp": "poly"})

    def costs(self, workload: Softmax, table: Table, device: Device) -> Costs:
        """Count a multiply-add of the sum, and a difference or another of the result, each element."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=2.0 * workload.rows * workload.cols)

    def arguments(self, workload: Softmax, config: Config) -> tuple[Argument, ...]:
        """Pass 1 for a missing scale."""
        return ("y", "dy", "scale" if workload.has_scale else Scalar("float", 1.0), "dx")

    def kernel(self, workload: Softmax, config: Config) -> Callable[..., None]:
        """Return the kernel `(y, dy, scale, dx)` for this type."""
        import numba
        import numpy as np

        row, row_block, address_of = _row(workload, config, self.fastmath), config["row_block"], address()

        def softmax_backward(y: Any, dy: Any, scale: Any, dx: Any) -> None:
            rows, cols = y.shape
            for block in numba.prange((rows + row_block - 1) // row_block):
                z = np.empty(cols, np.float32)
                for i in range(block * row_block, min(rows, (block + 1) * row_block)):
                    arrays = address_of(y), address_of(dy), address_of(dx)
                    row(arrays, scale, i * cols, cols, address_of(z))

        return softmax_backward


def _row(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return what computes the row of `cols` elements at `begin`; z has room for as many f32."""
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
    def row(arrays: Any, scale: Any, begin: int, cols: int, z: Any) -> None:
        y, dy, dx = arrays
        total = zero
        for start in range(0, cols, chunk):
            total += sum_of(y, dy, begin + start, min(cols - start, chunk), z, start)
        write_row(y, dy, dx, begin, cols, z, scale, total)

    return row


def _of_softmax(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return what writes ``scale y (dy - total)``; z has y dy if it is kept."""
    read, write, keep = load(workload.dtype), store(workload.dtype), config["keep"] == 1

    @jitted(fastmath)
    def write_row(y: Any, dy: Any, dx: Any, begin: int, cols: int, z: Any, scale: Any, total: Any) -> None:
        for j in range(cols):
            p = read(y[begin + j])
            inner = z[j] - p * total if keep else p * (read(dy[begin + j]) - total)
            dx[begin + j] = write(scale * inner)

    return write_row


def _of_logarithm(workload: Softmax, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return what writes ``scale (dy - exp(y) total)``; z has dy if it is kept."""
    read, write, keep = load(workload.dtype), store(workload.dtype), config["keep"] == 1
    power, unit = exponential(config["exp"])

    @jitted(fastmath)
    def write_row(y: Any, dy: Any, dx: Any, begin: int, cols: int, z: Any, scale: Any, total: Any) -> None:
        for j in range(cols):
            g = z[j] if keep else read(dy[begin + j])
            dx[begin + j] = write(scale * (g - power(read(y[begin + j]) * unit) * total))

    return write_row


VARIANT = NumbaCpuSoftmaxBackward()
