"""The gradient of cross_entropy on the CPU: pieces of rows in parallel, element by element.

A piece is written as if no class were in it; the one element of the row's class is corrected by whoever has
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, exponential, jitted, load, store
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, NumbaCpuVariant
from tunebench.workloads.operators.cross_entropy import CrossEntropy

SPACE = Space(
    (
        Parameter(
            "piece", (256, 1024, 4096, 16384, 65536), "elements of a row that a thread takes at a time"
        ),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows of which it takes them"),
        Parameter("exp", ("libm", "poly"), "poly: a polynomial, which vectorises; libm: one call an element"),
    ),
    (
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
        lambda piece, workload: (piece == 256) | (piece < 2 * workload.cols),
    ),
)


class NumbaCpuCrossEntropyBackward(NumbaCpuVariant[CrossEntropy]):
    """Serves every size and type of the backward direction."""

    name = "numba_cpu_backward"
    operator = CrossEntropy
    space = SPACE
    fastmath = frozenset({"reassoc", "contract", "arcp", "nsz", "afn"})

    def limits(self, workload: CrossEntropy, device: Device) -> str | None:
        """Refuse what is no gradient."""
        return None if workload.is_backward else f"{self.key} does direction=backward only"

    def default(self, workload: CrossEntropy, device: Device) -> Config:
        """Return pieces of up to 16 K elements, of as many rows as have about so many."""
        piece = max(p for p in (256, 1024, 4096, 16384) if p == 256 or p < 2 * workload.cols)
        row_block = max(
            b
            for b in (1, 2, 4, 8, 16, 32, 64)
            if b == 1 or (b * 2 <= workload.rows and b * min(piece, workload.cols) <= 16384)
        )
        return Config({"piece": piece, "row_block": row_block, "exp": "poly"})

    def costs(self, workload: CrossEntropy, table: Table, device: Device) -> Costs:
        """Count a multiply-add of the exponential's argument, and a product, each element."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=2.0 * workload.rows * workload.cols)

    def kernel(self, workload: CrossEntropy, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, target, lse, dloss, dx)` for this type."""
        import numba

        fill, one, address_of = _fill(workload, config, self.fastmath)
        piece, row_block = config["piece"], config["row_block"]

        def cross_entropy_backward(x: Any, target: Any, lse: Any, dloss: Any, dx: Any) -> None:
            rows, cols = x.shape
            pieces = (cols + piece - 1) // piece
            for index in numba.prange((rows + row_block - 1) // row_block * pieces):
                block, begin = index // pieces, index % pieces * piece
                end = min(cols, begin + piece)
                for i in range(block * row_block, min(rows, (block + 1) * row_block)):
                    fill(address_of(x), address_of(dx), i * cols + begin, end - begin, lse[i], dloss[i])
                    if begin <= target[i] < end:
                        dx[i, target[i]] = one(x[i, target[i]], lse[i], dloss[i])

        return cross_entropy_backward


def _fill(workload: CrossEntropy, config: Config, fastmath: frozenset[str]) -> tuple[Callable[..., Any], ...]:
    """Return what writes `count` elements of no class, what computes that of the class, and `address`."""
    import numpy as np

    read, write, unit_loss = load(workload.dtype), store(workload.dtype), np.float32(1)
    power, unit = exponential(config["exp"])

    @jitted(fastmath)
    def fill(x: Any, dx: Any, begin: int, count: int, lse: Any, dloss: Any) -> None:
        for j in range(begin, begin + count):
            dx[j] = write(power((read(x[j]) - lse) * unit) * dloss)

    @jitted(fastmath)
    def one(x: Any, lse: Any, dloss: Any) -> Any:
        return write((power((read(x) - lse) * unit) - unit_loss) * dloss)

    return fill, one, address()


VARIANT = NumbaCpuCrossEntropyBackward()
