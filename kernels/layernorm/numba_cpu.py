"""layernorm on the CPU: rows in parallel, statistics in passes over chunks that stay in the first cache.

`statistics=two_pass` sums a whole row for its mean, then squares of deviations for its variance.
`statistics=merged` takes both of a chunk while it is at hand and merges them into those of the row, so that a
long row comes from memory once for them; each chunk has its own mean, so nothing cancels.
Source: Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels._numba_cpu import address, jitted, load, store
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workloads.operators.layernorm import LayerNorm

SPACE = Space(
    (
        Parameter("statistics", ("two_pass", "merged"), "how mean and variance of a row are found"),
        Parameter("keep", (0, 1), "1: a row is converted to f32 once and kept; 0: it is read again"),
        Parameter("chunk", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "elements a loop handles together"),
        Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows a thread takes at a time"),
    ),
    (
        lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
        lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.cols),
    ),
)


class NumbaCpuLayerNorm(NumbaCpuVariant[LayerNorm]):
    """Serves every size and type."""

    name = "numba_cpu"
    operator = LayerNorm
    space = SPACE

    def default(self, workload: LayerNorm, device: Device) -> Config:
        """Return statistics merged from chunks of 1 KiB in f32, which are still in the first cache."""
        chunk = max(c for c in (16, 32, 64, 128, 256) if c == 16 or c < 2 * workload.cols)
        row_block = max(b for b in (1, 2, 4, 8, 16) if b == 1 or b * 2 <= workload.rows)
        return Config({"statistics": "merged", "keep": 0, "chunk": chunk, "row_block": row_block})

    def costs(self, workload: LayerNorm, table: Table, device: Device) -> Costs:
        """Count a sum, a deviation with its square, and a multiply-add for gamma and beta, each element."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=3 * elements)

    def arguments(self, workload: LayerNorm, config: Config) -> tuple[Argument, ...]:
        """Pass every tensor."""
        return ("x", "gamma", "beta", "y")

    def kernel(self, workload: LayerNorm, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, gamma, beta, y)` for this type."""
        import numba
        import numpy as np

        row, row_block, address_of = _row(workload, config, self.fastmath), config["row_block"], address()

        def layernorm(x: Any, gamma: Any, beta: Any, y: Any) -> None:
            rows, cols = x.shape
            for block in numba.prange((rows + row_block - 1) // row_block):
                z = np.empty(cols, np.float32)
                for i in range(block * row_block, min(rows, (block + 1) * row_block)):
                    arrays = address_of(x), address_of(gamma), address_of(beta), address_of(y)
                    row(arrays, i * cols, cols, address_of(z))

        return layernorm


def _row(workload: LayerNorm, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return what computes the row of `cols` elements at `begin`; z has room for as many f32."""
    import numpy as np

    read, write, keep = load(workload.dtype), store(workload.dtype), config["keep"] == 1
    one, eps = np.float32(1), np.float32(workload.eps)
    statistics = (_merged if config["statistics"] == "merged" else _two_pass)(workload, config, fastmath)

    @jitted(fastmath)
    def row(arrays: Any, begin: int, cols: int, z: Any) -> None:
        x, gamma, beta, y = arrays
        mean, squares = statistics(x, begin, cols, z)
        inverse = one / np.sqrt(squares / np.float32(cols) + eps)
        for j in range(cols):
            deviation = (z[j] if keep else read(x[begin + j])) - mean
            y[begin + j] = write(deviation * inverse * read(gamma[j]) + read(beta[j]))

    return row


def _sums(workload: LayerNorm, config: Config, fastmath: frozenset[str]) -> tuple[Callable[..., Any], ...]:
    """Return sums over `count` elements of a row: of them (kept in z if asked), of squared deviations."""
    import numpy as np

    read, keep, zero = load(workload.dtype), config["keep"] == 1, np.float32(0)

    @jitted(fastmath)
    def sum_of(x: Any, begin: int, z: Any, start: int, count: int) -> Any:
        total = zero
        for j in range(start, start + count):
            value = read(x[begin + j])
            if keep:
                z[j] = value
            total += value
        return total

    @jitted(fastmath)
    def squares_of(x: Any, begin: int, z: Any, start: int, count: int, mean: Any) -> Any:
        total = zero
        for j in range(start, start + count):
            deviation = (z[j] if keep else read(x[begin + j])) - mean
            total += deviation * deviation
        return total

    return sum_of, squares_of


def _two_pass(workload: LayerNorm, config: Config, fastmath: frozenset[str]) -> Callable[..., Any]:
    """Return what finds the mean of a row, then its sum of squared deviations."""
    import numpy as np

    sum_of, squares_of = _sums(workload, config, fastmath)
    chunk, zero = config["chunk"], np.float32(0)

    @jitted(fastmath)
    def two_pass(x: Any, begin: int, cols: int, z: Any) -> Any:
        total, squares = zero, zero
        for start in range(0, cols, chunk):
            total += sum_of(x, begin, z, start, min(cols - start, chunk))
        mean = total / np.float32(cols)
        for start in range(0, cols, chunk):
            squares += squares_of(x, begin, z, start, min(cols - start, chunk), mean)
        return mean, squares

    return two_pass


def _merged(workload: LayerNorm, config: Config, fastmath: frozenset[str]) -> Callable[..., Any]:
    """Return what merges means and sums of squared deviations of a row's chunks."""
    import numpy as np

    sum_of, squares_of = _sums(workload, config, fastmath)
    chunk, zero = config["chunk"], np.float32(0)

    @jitted(fastmath)
    def merged(x: Any, begin: int, cols: int, z: Any) -> Any:
        mean, squares, seen = zero, zero, zero
        for start in range(0, cols, chunk):
            terms = min(cols - start, chunk)
            count = np.float32(terms)
            own = sum_of(x, begin, z, start, terms) / count
            share, shift = count / (seen + count), own - mean
            squares += squares_of(x, begin, z, start, terms, own) + shift * shift * seen * share
            mean, seen = mean + shift * share, seen + count
        return mean, squares

    return merged


VARIANT = NumbaCpuLayerNorm()
