"""Rows of layernorm and rmsnorm on the CPU: what their Numba variants share, forward and backward.

Forward, a row is read for its statistics, by chunks that stay in the first cache, and again for its result.
What is normalised may be a sum, which is written by the way. Later passes read the sum that is written, if it
is f32; where it is rounded, and the row is not kept in f32, they make it again. Each innermost loop writes
few arrays, so that LLVM's checks of what overlaps stay within limits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, store
from tunebench.space import Config, Constraint, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workload import Tensor
from tunebench.workloads.operators._norm import Norm

__all__ = [
    "CONSTRAINTS",
    "PARAMETERS",
    "NumbaCpuBackwardNorm",
    "NumbaCpuForwardNorm",
    "Statistics",
    "merged",
    "squares",
    "two_pass",
]

Fastmath = frozenset[str]
Statistics = Callable[[Norm, Config, Fastmath], Callable[..., Any]]


N = TypeVar("N", bound=Norm)

PARAMETERS = (
    Parameter("keep", (0, 1), "1: a row is converted to f32 once and kept; 0: it is read again"),
    Parameter("chunk", (16, 32, 64, 128, 256, 512, 1024, 2048, 4096), "elements a loop handles together"),
    Parameter("row_block", (1, 2, 4, 8, 16, 32, 64), "rows a thread takes at a time"),
)
CONSTRAINTS: tuple[Constraint, ...] = (
    lambda row_block, workload: (row_block == 1) | (row_block * 2 <= workload.rows),
    lambda chunk, workload: (chunk == 16) | (chunk < 2 * workload.cols),
)


class NumbaCpuForwardNorm(NumbaCpuVariant[N]):
    """Serves every size, type and prologue, forward; `statistics` says how those of a row are found.

    Attributes:
        more: Values of the default for parameters besides `PARAMETERS`.
    """

    name = "numba_cpu"
    space = Space(PARAMETERS, CONSTRAINTS)
    more: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def statistics(self, config: Config) -> Statistics:
        """Return one of the functions of this module that find mean and squared deviations of a row."""

    def limits(self, workload: N, device: Device) -> str | None:
        """Refuse gradients."""
        return f"{self.key} does not compute gradients" if workload.is_backward else None

    def default(self, workload: N, device: Device) -> Config:
        """Return chunks of 1 KiB in f32, which are still in the first cache."""
        chunk = max(c for c in (16, 32, 64, 128, 256) if c == 16 or c < 2 * workload.cols)
        row_block = max(b for b in (1, 2, 4, 8, 16) if b == 1 or b * 2 <= workload.rows)
        return Config({**self.more, "keep": 0, "chunk": chunk, "row_block": row_block})

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count what is least of each element.

        Of layernorm a sum, a deviation with its square, and a multiply-add for gamma and beta; of rmsnorm a
        square and two products.
        """
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=3 * elements)

    def arguments(self, workload: N, config: Config) -> tuple[Argument, ...]:
        """Pass x or y in place of a tensor that there is not; it is not touched."""
        there = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
        inputs = [name if name in there else "x" for name in ("x", "gamma", "beta", "bias", "residual")]
        return (*inputs, *(name if name in there else "y" for name in ("y", "z", "mean", "rstd")))

    def kernel(self, workload: N, config: Config) -> Callable[..., None]:
        """Return the kernel for this type and prologue."""
        return _forward_kernel(workload, config, self.fastmath, self.statistics(config))


def _forward_kernel(
    workload: Norm, config: Config, fastmath: Fastmath, statistics: Statistics
) -> Callable[..., None]:
    """Return the kernel that takes the arguments of `NumbaCpuForwardNorm`."""
    import numba
    import numpy as np

    row, address_of = _forward_row(workload, config, fastmath, statistics), address()
    row_block = config["row_block"]

    def norm(
        x: Any, gamma: Any, beta: Any, bias: Any, residual: Any, y: Any, z: Any, mean: Any, rstd: Any
    ) -> None:
        rows, cols = x.shape
        for block in numba.prange((rows + row_block - 1) // row_block):
            kept = np.empty(cols, np.float32)
            for i in range(block * row_block, min(rows, (block + 1) * row_block)):
                parts = address_of(x), address_of(bias), address_of(residual)
                weights = address_of(gamma), address_of(beta)
                results = address_of(y), address_of(z), address_of(mean), address_of(rstd)
                row(parts, weights, results, i, cols, address_of(kept))

    return norm


def _forward_row(
    workload: Norm, config: Config, fastmath: Fastmath, statistics: Statistics
) -> Callable[..., None]:
    """Return what computes row i of `cols` elements; `kept` has room for as many f32."""
    import numpy as np

    read, write = load(workload.dtype), store(workload.dtype)
    again, moments = _again(workload, config), statistics(workload, config, fastmath)
    centred, stats = "mean" in workload.statistics, workload.stats
    one, eps = np.float32(1), np.float32(workload.eps)

    @jitted(fastmath)
    def normalise(
        parts: Any, weights: Any, y: Any, z: Any, begin: int, cols: int, kept: Any, mean: Any, rstd: Any
    ) -> None:
        gamma, beta = weights
        for j in range(cols):
            value = again(parts, z, begin, kept, j)
            if centred:
                y[begin + j] = write((value - mean) * rstd * read(gamma[j]) + read(beta[j]))
            else:
                y[begin + j] = write(value * rstd * read(gamma[j]))

    @jitted(fastmath)
    def row(parts: Any, weights: Any, results: Any, i: int, cols: int, kept: Any) -> None:
        y, z, mean_of, rstd_of = results
        begin = i * cols
        mean, squared = moments(parts, z, begin, cols, kept)
        rstd = one / np.sqrt(squared / np.float32(cols) + eps)
        if stats and centred:
            mean_of[i] = mean
        if stats:
            rstd_of[i] = rstd
        normalise(parts, weights, y, z, begin, cols, kept, mean, rstd)

    return row


# -- statistics: (mean, sum of squared deviations from it) of a row, whose sum is written by the way


def _summed(workload: Norm) -> Callable[..., Any]:
    """Return what makes element j of the row at `begin`, in f32."""
    read, has_bias, has_residual = load(workload.dtype), workload.has_bias, workload.has_residual

    @inlined
    def part(parts: Any, begin: int, j: int) -> Any:
        x, bias, residual = parts
        value = read(x[begin + j])
        if has_bias:
            value += read(bias[j])
        if has_residual:
            value += read(residual[begin + j])
        return value

    return part


def _taken(workload: Norm, config: Config) -> Callable[..., Any]:
    """Return what makes an element for the first time, and stores what is kept of it."""
    part, write, keep = _summed(workload), store(workload.dtype), config["keep"] == 1
    has_residual = workload.has_residual

    @inlined
    def taken(parts: Any, z: Any, begin: int, kept: Any, j: int) -> Any:
        value = part(parts, begin, j)
        if keep:
            kept[j] = value
        if has_residual:
            z[begin + j] = write(value)
        return value

    return taken


def _again(workload: Norm, config: Config) -> Callable[..., Any]:
    """Return what has an element once more: as it was kept, as it was written, or made again."""
    part, keep = _summed(workload), config["keep"] == 1
    written = workload.has_residual and workload.dtype == "f32"

    @inlined
    def again(parts: Any, z: Any, begin: int, kept: Any, j: int) -> Any:
        if keep:
            value = kept[j]
        elif written:
            value = z[begin + j]
        else:
            value = part(parts, begin, j)
        return value

    return again


def _first(workload: Norm, config: Config, fastmath: Fastmath, square: bool) -> Callable[..., Any]:
    """Return what sums `count` elements, or their squares, and stores what is kept of them."""
    import numpy as np

    taken, zero = _taken(workload, config), np.float32(0)

    @jitted(fastmath)
    def first(parts: Any, z: Any, begin: int, kept: Any, start: int, count: int) -> Any:
        total = zero
        for j in range(start, start + count):
            value = taken(parts, z, begin, kept, j)
            total += value * value if square else value
        return total

    return first


def squares(workload: Norm, config: Config, fastmath: Fastmath) -> Callable[..., Any]:
    """Return what sums the squares of a row, whose mean is taken to be 0."""
    import numpy as np

    first, chunk, zero = _first(workload, config, fastmath, square=True), config["chunk"], np.float32(0)

    @jitted(fastmath)
    def of_row(parts: Any, z: Any, begin: int, cols: int, kept: Any) -> Any:
        total = zero
        for start in range(0, cols, chunk):
            total += first(parts, z, begin, kept, start, min(cols - start, chunk))
        return zero, total

    return of_row


def two_pass(workload: Norm, config: Config, fastmath: Fastmath) -> Callable[..., Any]:
    """Return what finds the mean of a row, then its sum of squared deviations."""
    import numpy as np

    first, again = _first(workload, config, fastmath, square=False), _again(workload, config)
    chunk, zero = config["chunk"], np.float32(0)

    @jitted(fastmath)
    def squares_about(parts: Any, z: Any, begin: int, kept: Any, start: int, count: int, mean: Any) -> Any:
        total = zero
        for j in range(start, start + count):
            deviation = again(parts, z, begin, kept, j) - mean
            total += deviation * deviation
        return total

    @jitted(fastmath)
    def of_row(parts: Any, z: Any, begin: int, cols: int, kept: Any) -> Any:
        total, squared = zero, zero
        for start in range(0, cols, chunk):
            total += first(parts, z, begin, kept, start, min(cols - start, chunk))
        mean = total / np.float32(cols)
        for start in range(0, cols, chunk):
            squared += squares_about(parts, z, begin, kept, start, min(cols - start, chunk), mean)
        return mean, squared

    return of_row


LEADING = 8
"""The mean of one in so many elements of a chunk serves for the first, where there is no other yet."""


def merged(workload: Norm, config: Config, fastmath: Fastmath) -> Callable[..., Any]:
    """Return what merges means and sums of squared deviations of a row's chunks, each read once.

    Both of a chunk are found about the mean of what came before it. Where that is far from the chunk's own,
    digits of the chunk's squares cancel, but what the distance adds to those of the row is as large. Of the
    first chunk, the squares about that of its leading part are no more than `LEADING` + 1 times its own.
    """
    import numpy as np

    taken, first = _taken(workload, config), _first(workload, config, fastmath, square=False)
    chunk, zero, leading_part = config["chunk"], np.float32(0), max(16, config["chunk"] // LEADING)

    @jitted(fastmath)
    def moments_about(parts: Any, z: Any, begin: int, kept: Any, start: int, count: int, mean: Any) -> Any:
        total, squared = zero, zero
        for j in range(start, start + count):
            deviation = taken(parts, z, begin, kept, j) - mean
            total += deviation
            squared += deviation * deviation
        return total, squared

    @jitted(fastmath)
    def of_row(parts: Any, z: Any, begin: int, cols: int, kept: Any) -> Any:
        leading = min(cols, leading_part)
        mean = first(parts, z, begin, kept, 0, leading) / np.float32(leading)
        squared, seen = zero, zero
        for start in range(0, cols, chunk):
            terms = min(cols - start, chunk)
            count = np.float32(terms)
            total, about = moments_about(parts, z, begin, kept, start, terms, mean)
            share, shift = count / (seen + count), total / count
            own = about - total * shift
            # Of elements that are all alike rounding may leave less than nothing.
            squared += (zero if own < zero else own) + shift * shift * seen * share
            mean, seen = mean + shift * share, seen + count
        return mean, squared

    return of_row


# -- backward ------------------------------------------------------------------------------------------------


PARTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class NumbaCpuBackwardNorm(NumbaCpuVariant[N]):
    """Serves every size and type, backward."""

    name = "numba_cpu_backward"
    space = Space(
        (Parameter("parts", PARTS, "parts of the rows, each a thread's turn"),),
        (lambda parts, workload: (parts == 1) | (parts <= workload.rows),),
    )

    def limits(self, workload: N, device: Device) -> str | None:
        """Refuse what is no gradient."""
        return None if workload.is_backward else f"{self.key} computes gradients alone"

    def default(self, workload: N, device: Device) -> Config:
        """Return two parts for each core: more cost more sums, fewer leave cores waiting."""
        most = min(workload.rows, 2 * device.sm_count)
        return Config({"parts": max(parts for parts in PARTS if parts <= most)})

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count the normal form, g and its means, dx, and the gradients of weights, each element."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=(3 + 2 * len(workload.weights)) * elements)

    def scratch(self, workload: N, config: Config) -> tuple[Tensor, ...]:
        """Return a line of sums for each part and gradient of a weight."""
        shape = (config["parts"], len(workload.weights), workload.cols)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def arguments(self, workload: N, config: Config) -> tuple[Argument, ...]:
        """Pass every tensor; rstd stands for a mean that there is not, dgamma for dbeta."""
        statistics = (workload.statistics[0], "rstd")
        weights = (f"d{workload.weights[0]}", f"d{workload.weights[-1]}")
        return ("x", "gamma", *statistics, "dy", "dx", *weights, "partial")

    def kernel(self, workload: N, config: Config) -> Callable[..., None]:
        """Return the kernel for this type."""
        return _backward_kernel(workload, config, self.fastmath)


def _backward_kernel(workload: Norm, config: Config, fastmath: Fastmath) -> Callable[..., None]:
    """Return the kernel of gradients; `config` has `parts`, into which rows are cut.

    It takes x, gamma, mean (any array for rmsnorm, which has none), rstd, dy, dx, dgamma, dbeta (likewise)
    and f32 scratch (parts, gradients of weights, cols). A part adds up its rows in lines of its own of the
    scratch; then the lines are added in their order.
    """
    import numba

    row, finish, address_of = _gradient_row(workload, fastmath), _add_parts(workload, fastmath), address()
    parts, centred = config["parts"], "mean" in workload.statistics
    strip = 256  # columns of a thread's turn, whose sums stay in the first cache

    def gradients(
        x: Any, gamma: Any, mean: Any, rstd: Any, dy: Any, dx: Any, dgamma: Any, dbeta: Any, partial: Any
    ) -> None:
        rows, cols = x.shape
        for part in numba.prange(parts):
            partial[part] = 0
            for i in range(part * rows // parts, (part + 1) * rows // parts):
                shift = mean[i] if centred else rstd[i]
                arrays = address_of(x), address_of(gamma), address_of(dy), address_of(dx)
                row(
                    arrays,
                    i * cols,
                    cols,
                    shift,
                    rstd[i],
                    address_of(partial[part, 0]),
                    address_of(partial[part, -1]),
                )
        for first in numba.prange((cols + strip - 1) // strip):
            begin, end = first * strip, min(cols, (first + 1) * strip)
            finish(address_of(partial), address_of(dgamma), address_of(dbeta), parts, cols, begin, end)

    return gradients


def _gradient_row(workload: Norm, fastmath: Fastmath) -> Callable[..., None]:
    """Return what computes dx of the row at `begin`, and adds to the sums of all rows."""
    import numpy as np

    read, write, centred = load(workload.dtype), store(workload.dtype), "mean" in workload.statistics
    zero, one = np.float32(0), np.float32(1)

    @jitted(fastmath)
    def sums_of(arrays: Any, begin: int, cols: int, mean: Any, rstd: Any, scales: Any, shifts: Any) -> Any:
        x, gamma, dy, _ = arrays
        level, along = zero, zero
        for j in range(cols):
            d = read(dy[begin + j])
            normal = ((read(x[begin + j]) - mean) if centred else read(x[begin + j])) * rstd
            scales[j] += d * normal
            if centred:
                shifts[j] += d
            g = d * read(gamma[j])
            if centred:
                level += g
            along += g * normal
        return level, along

    @jitted(fastmath)
    def row(arrays: Any, begin: int, cols: int, mean: Any, rstd: Any, scales: Any, shifts: Any) -> None:
        x, gamma, dy, dx = arrays
        level, along = sums_of(arrays, begin, cols, mean, rstd, scales, shifts)
        share = one / np.float32(cols)
        level, along = level * share, along * share
        for j in range(cols):
            g = read(dy[begin + j]) * read(gamma[j])
            if centred:
                normal = (read(x[begin + j]) - mean) * rstd
                dx[begin + j] = write(rstd * (g - level - normal * along))
            else:
                dx[begin + j] = write(rstd * (g - read(x[begin + j]) * rstd * along))

    return row


def _add_parts(workload: Norm, fastmath: Fastmath) -> Callable[..., None]:
    """Return what adds the lines of the scratch in some columns, and rounds the sums."""
    import numpy as np

    write, centred = store(workload.dtype), "mean" in workload.statistics
    sums = 2 if centred else 1

    @jitted(fastmath)
    def add(totals: Any, partial: Any, at: int, count: int) -> None:
        for j in range(count):
            totals[j] += partial[at + j]

    @jitted(fastmath)
    def round_to(target: Any, totals: Any, begin: int, count: int) -> None:
        for j in range(count):
            target[begin + j] = write(totals[j])

    address_of = address()

    @jitted(fastmath)
    def finish(partial: Any, dgamma: Any, dbeta: Any, parts: int, cols: int, begin: int, end: int) -> None:
        for s in range(sums):
            totals = np.zeros(end - begin, np.float32)
            for part in range(parts):
                add(address_of(totals), partial, (part * sums + s) * cols + begin, end - begin)
            if s == 0:
                round_to(dgamma, address_of(totals), begin, end - begin)
            else:
                round_to(dbeta, address_of(totals), begin, end - begin)

    return finish
