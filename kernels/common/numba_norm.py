"""Layernorm and rmsnorm in Numba on the CPU, forward and backward.

Forward, a row is read for its statistics, in chunks that stay in the first cache, and again for its result.
The normalised value may be a sum of inputs, which is an output too. Later passes read the stored sum if it is
f32. If it is rounded, and the row is not kept in f32, they compute it again. Each innermost loop writes few
arrays, since LLVM vectorises only loops with few overlap checks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, store
from tunebench.kernels.common.numba_cpu_rows import (
    CHUNK,
    CONSTRAINTS,
    ROW_BLOCK,
    default_chunk,
    default_row_block,
    row_kernel,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workload import Tensor
from tunebench.workloads.common.norm import Norm

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
    Parameter("keep", (0, 1), "1: keep the row in f32; 0: read it again"),
    *(CHUNK, ROW_BLOCK),
)


FORWARD_ARRAYS = ("x", "gamma", "beta", "bias", "residual", "y", "z", "mean", "rstd")
"""Parameters of the forward kernel: inputs, then outputs."""


class NumbaCpuForwardNorm(NumbaCpuVariant[N]):
    """Forward variant for every size, type and prologue; `statistics` selects the algorithm.

    Attributes:
        more: Default values of parameters that `PARAMETERS` does not contain.
    """

    name = "numba_cpu"
    direction = "forward"
    space = Space(PARAMETERS, CONSTRAINTS)
    more: ClassVar[dict[str, Any]] = {}

    @abstractmethod
    def statistics(self, config: Config) -> Statistics:
        """Return a function of this module that computes the mean and the squared deviations of a row."""

    def default(self, workload: N, device: Device) -> Config:
        """Return chunks of 1 KiB in f32, which stay in the first cache."""
        chunk, row_block = default_chunk(workload), default_row_block(workload, most=16)
        return Config({**self.more, "keep": 0, "chunk": chunk, "row_block": row_block})

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count the least work of an element.

        For layernorm that is a sum, a deviation with its square, and a multiply-add for gamma and beta. For
        rmsnorm it is a square and two products.
        """
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=3 * elements)

    def arguments(self, workload: N, config: Config) -> tuple[Argument, ...]:
        """Pass x or y in place of a missing tensor; the kernel does not access it."""
        there = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
        others = {name: "x" if i < 5 else "y" for i, name in enumerate(FORWARD_ARRAYS)}
        return tuple(name if name in there else others[name] for name in FORWARD_ARRAYS)

    def kernel(self, workload: N, config: Config) -> Callable[..., None]:
        """Return the kernel for the workload's type and prologue."""
        row = _forward_row(workload, config, self.fastmath, self.statistics(config))
        return row_kernel(FORWARD_ARRAYS, row, config["row_block"])


def _forward_row(
    workload: Norm, config: Config, fastmath: Fastmath, statistics: Statistics
) -> Callable[..., None]:
    """Return the function that computes a row (see `row_kernel`)."""
    import numpy as np

    read, write = load(workload.dtype), store(workload.dtype)
    again, moments = _again(workload, config), statistics(workload, config, fastmath)
    centred, stats = "mean" in workload.statistics, workload.stats
    one, eps = np.float32(1), np.float32(workload.eps)

    @jitted(fastmath)
    def normalise(
        parts: Any, weights: Any, outputs: Any, begin: int, cols: int, kept: Any, moments: Any
    ) -> None:
        (gamma, beta), (y, z), (mean, rstd) = weights, outputs, moments
        for j in range(cols):
            value = again(parts, z, begin, kept, j)
            if centred:
                y[begin + j] = write((value - mean) * rstd * read(gamma[j]) + read(beta[j]))
            else:
                y[begin + j] = write(value * rstd * read(gamma[j]))

    @jitted(fastmath)
    def row(tensors: Any, i: int, cols: int, kept: Any) -> None:
        x, gamma, beta, bias, residual, y, z, mean_of, rstd_of = tensors
        parts = x, bias, residual
        begin = i * cols
        mean, squared = moments(parts, z, begin, cols, kept)
        rstd = one / np.sqrt(squared / np.float32(cols) + eps)
        if stats and centred:
            mean_of[i] = mean
        if stats:
            rstd_of[i] = rstd
        normalise(parts, (gamma, beta), (y, z), begin, cols, kept, (mean, rstd))

    return row


# -- statistics of a row: mean and sum of squared deviations; the sum of inputs is stored on the way


def _summed(workload: Norm) -> Callable[..., Any]:
    """Return the function that computes element j of the row at `begin`, in f32."""
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
    """Return the function that computes an element, and stores it if a later pass needs it."""
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
    """Return the function that returns an element in a later pass: kept, stored, or recomputed."""
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
    """Return the function that sums `count` elements, or their squares, in the first pass."""
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
    """Return the function that sums the squares of a row; its mean counts as 0.

    Args:
        workload: The workload.
        config: The configuration, for `chunk` and `keep`.
        fastmath: LLVM fast-math flags.
    """
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
    """Return the function that computes the mean of a row, then its sum of squared deviations.

    Args:
        workload: The workload.
        config: The configuration, for `chunk` and `keep`.
        fastmath: LLVM fast-math flags.
    """
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
"""A chunk has this many times the elements whose mean serves as the first estimate."""


def merged(workload: Norm, config: Config, fastmath: Fastmath) -> Callable[..., Any]:
    """Return the function that merges the means and squared deviations of a row's chunks, reading each once.

    The statistics of a chunk are computed relative to the mean of the elements before it. If that mean is far
    from the chunk's, digits of the chunk's squares cancel, but the distance contributes as much to the
    squares of the row. For the first chunk, the squares relative to the mean of its leading part are at most
    `LEADING` + 1 times its own.

    Args:
        workload: The workload.
        config: The configuration, for `chunk` and `keep`.
        fastmath: LLVM fast-math flags.
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
            # With equal elements, rounding may leave a negative number.
            squared += (zero if own < zero else own) + shift * shift * seen * share
            mean, seen = mean + shift * share, seen + count
        return mean, squared

    return of_row


# -- backward ------------------------------------------------------------------------------------------------


PARTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class NumbaCpuBackwardNorm(NumbaCpuVariant[N]):
    """Backward variant for every size and type."""

    name = "numba_cpu_backward"
    direction = "backward"
    space = Space(
        (Parameter("parts", PARTS, "parts of the rows, one task each"),),
        (lambda parts, workload: (parts == 1) | (parts <= workload.rows),),
    )

    def default(self, workload: N, device: Device) -> Config:
        """Return two parts for each core: more parts need more sums, fewer leave cores idle."""
        most = min(workload.rows, 2 * device.sm_count)
        return Config({"parts": max(parts for parts in PARTS if parts <= most)})

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count the normalised value, g and its means, dx, and the gradients of the weights."""
        elements = float(workload.rows * workload.cols)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=(3 + 2 * len(workload.weights)) * elements)

    def scratch(self, workload: N, config: Config) -> tuple[Tensor, ...]:
        """Return a row of sums for each part and each gradient of a weight."""
        shape = (config["parts"], len(workload.weights), workload.cols)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def arguments(self, workload: N, config: Config) -> tuple[Argument, ...]:
        """Pass every tensor, with rstd in place of a missing mean, and dgamma in place of dbeta."""
        statistics = (workload.statistics[0], "rstd")
        weights = (f"d{workload.weights[0]}", f"d{workload.weights[-1]}")
        return ("x", "gamma", *statistics, "dy", "dx", *weights, "partial")

    def kernel(self, workload: N, config: Config) -> Callable[..., None]:
        """Return the kernel for the workload's type."""
        return _backward_kernel(workload, config, self.fastmath)


def _backward_kernel(workload: Norm, config: Config, fastmath: Fastmath) -> Callable[..., None]:
    """Return the backward kernel.

    It takes x, gamma, mean (any array for rmsnorm, which has none), rstd, dy, dx, dgamma, dbeta (likewise)
    and f32 scratch (parts, gradients of weights, cols). Each part sums its rows into separate rows of the
    scratch, which are then added in a fixed order.

    Args:
        workload: The workload.
        config: The configuration, with `parts` of the rows.
        fastmath: LLVM fast-math flags.
    """
    import numba

    row, finish, address_of = _gradient_row(workload, fastmath), _add_parts(workload, fastmath), address()
    parts, centred = config["parts"], "mean" in workload.statistics
    strip = 256  # columns of a task, whose sums stay in the first cache

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
    """Return the function that computes dx of the row at `begin`, and adds to the sums over rows."""
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
    """Return the function that adds the scratch rows of some columns, and rounds the sums."""
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
