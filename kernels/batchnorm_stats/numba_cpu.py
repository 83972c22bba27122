"""Batch statistics and their gradients on the CPU: parts of the rows in parallel, then a join of results.

A task has `block` adjacent columns and processes `unroll` rows of its part at a time. Its results are in
memory that stays in the cache. Forward, it sums differences from the first row, and their squares; after some
rows it continues with differences from the mean so far. One pass therefore suffices, however far means are
from zero, and the first row from the means. Means and squared deviations of parts are joined in a fixed
order.

Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
Recommendations", 1983.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.expression import compiled
from tunebench.kernels.common.numba_cpu import address, jitted, load, store
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workload import Tensor
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

LEAST_PART = 64
"""Least rows of a part."""
LEAST_COLUMNS = 64
"""Least columns of a task; fewer columns would waste fetched bytes."""
AT_FIRST, AT_ONCE = 8, 64
"""Rows whose differences are relative to the first row, and then to one mean; enough to hide its update."""


def _most_rows(workload: BatchNormStats) -> int:
    """Return the most rows that are processed at a time."""
    return (1 if workload.has_relu else 4) if workload.is_backward else 8


SPACE = Space(
    (
        Parameter("block", tuple(2**n for n in range(6, 15)), "columns of a task"),
        Parameter("parts", tuple(2**n for n in range(11)), "parts that the rows are split into"),
        Parameter("unroll", (1, 2, 4, 8), "rows that are processed at a time"),
    ),
    (
        lambda parts, workload: (parts == 1) | (parts * LEAST_PART <= workload.rows),
        lambda block, workload: (block == LEAST_COLUMNS) | (block < 2 * workload.cols),
        # More rows of several matrices would need more overlap checks than LLVM generates.
        lambda unroll, workload: (unroll == 1) | (unroll <= min(workload.rows, _most_rows(workload))),
    ),
)

# The lines of `figures`, of `block` columns each, are consecutive. Known distances need no overlap checks,
# and LLVM vectorises only loops with few checks.
SEE = """
def take(x_at, begin, cols, count, figures, to):
    for j in range(count):
        shift = figures[to + j]
        total = figures[to + block + j]
        squares = figures[to + 2 * block + j]
@TAKEN@
        figures[to + block + j] = total
        figures[to + 2 * block + j] = squares
"""
SEE_EACH = """
        apart_{n} = read(x_at[begin + {n} * cols + j]) - shift
        total += apart_{n}
        squares += apart_{n} * apart_{n}
"""

ADD = """
def take(dy_at, x_at, y_at, dz_at, begin, cols, count, figures, to):
    for j in range(count):
        mean = figures[to + j]
        total = figures[to + block + j]
        products = figures[to + 2 * block + j]
@TAKEN@
        figures[to + block + j] = total
        figures[to + 2 * block + j] = products
"""
ADD_EACH = """
        dy_{n} = read(dy_at[begin + {n} * cols + j])
        total += dy_{n}
        products += dy_{n} * (read(x_at[begin + {n} * cols + j]) - mean)
"""
ADD_THROUGH_RELU = """
        is_off_{n} = read(y_at[begin + {n} * cols + j]) <= zero
        dy_{n} = zero if is_off_{n} else read(dy_at[begin + {n} * cols + j])
        dz_at[begin + {n} * cols + j] = write(dy_{n})
        total += dy_{n}
        products += dy_{n} * (read(x_at[begin + {n} * cols + j]) - mean)
"""


class NumbaCpuBatchNormStats(NumbaCpuVariant[BatchNormStats]):
    """Variant for every size and type, both directions."""

    name = "numba_cpu"
    operator = BatchNormStats
    space = SPACE
    fastmath = frozenset({"contract", "nsz"})  # reordering would add values before the difference is taken

    def default(self, workload: BatchNormStats, device: Device) -> Config:
        """Return up to 1024 columns per task, parts if tasks are fewer than 16, and several short rows."""
        block = max(b for b in (64, 256, 1024) if b == LEAST_COLUMNS or b < 2 * workload.cols)
        blocks, parts = -(-workload.cols // block), 1
        while parts < 1024 and parts * blocks < 16 and 8 * parts * LEAST_PART <= workload.rows:
            parts *= 2
        most = 1 if workload.is_backward else min(workload.rows, 256 // workload.cols)
        unroll = max(u for u in (1, 2, 4) if u == 1 or u <= most)
        return Config({"block": block, "parts": parts, "unroll": unroll})

    def costs(self, workload: BatchNormStats, table: Table, device: Device) -> Costs:
        """Count a difference and a sum of each element; the product may use another pipe."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=2.0 * workload.rows * workload.cols)

    def scratch(self, workload: BatchNormStats, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the numbers of columns: (parts, blocks, lines, columns of a block)."""
        blocks = -(-workload.cols // config["block"])
        shape = (config["parts"], blocks, _lines(workload), config["block"])
        return (Tensor(name="figures", shape=shape, dtype="f32"),)

    def arguments(self, workload: BatchNormStats, config: Config) -> tuple[Argument, ...]:
        """Return all tensors in order, then the shape, then eps and momentum in the forward direction.

        Without relu, x replaces the missing tensors and is not accessed.
        """
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        factors = (Scalar("float", workload.eps), Scalar("float", workload.momentum))
        if workload.is_backward:
            y, dz = ("y", "dz") if workload.has_relu else ("x", "x")
            return ("dy", "x", "mean", "rstd", y, "dgamma", "dbeta", dz, "figures", *sizes)
        return (*super().arguments(workload, config), *sizes, *factors)

    def generated(self, workload: BatchNormStats, config: Config) -> str:
        """Return the loop over columns, with its rows unrolled."""
        return _unrolled(workload, config["unroll"])

    def kernel(self, workload: BatchNormStats, config: Config) -> Callable[..., None]:
        """Return the kernel of the workload's direction, which takes `arguments`."""
        import numpy as np

        read, block = load(workload.dtype), config["block"]
        scope = {"__name__": __name__, "read": read, "write": store(workload.dtype), "block": block}
        scope["zero"] = np.float32(0)
        several, one = (
            jitted(self.fastmath)(compiled(_unrolled(workload, rows), "take", dict(scope)))
            for rows in (config["unroll"], 1)
        )
        if workload.is_backward:
            return _gradients(config, several, one)
        return _statistics(config, _passing(config, several, one, read))


def _lines(workload: BatchNormStats) -> int:
    """Return the lines of numbers: mean, sum, products; or shift, sum, squares, accumulated squares."""
    return 3 if workload.is_backward else 4


def _unrolled(workload: BatchNormStats, rows: int) -> str:
    around, each = (ADD, ADD_EACH) if workload.is_backward else (SEE, SEE_EACH)
    each = ADD_THROUGH_RELU if workload.has_relu else each
    taken = "".join(each.strip("\n").format(n=n) + "\n" for n in range(rows))
    return around.replace("@TAKEN@\n", taken)


# -- backward -----------------------------------------------------------------------------------------------


def _gradients(config: Config, several: Callable[..., Any], one: Callable[..., Any]) -> Callable[..., None]:
    """Return the backward kernel, which sums over rows."""
    import numba
    import numpy as np

    block, parts, unroll = config["block"], config["parts"], config["unroll"]
    size, address_of, zero, end = 3 * block, address(), np.float32(0), _end_of_gradients(config)

    @jitted()
    def begin(mean: Any, figures: Any, to: int, count: int) -> None:
        for j in range(count):
            figures[to + j] = mean[j]
            figures[to + block + j] = zero
            figures[to + 2 * block + j] = zero

    def gradients(
        dy: Any, x: Any, mean: Any, rstd: Any, y: Any, dgamma: Any, dbeta: Any, dz: Any, figures: Any,
        rows: int, cols: int,
    ) -> None:  # fmt: skip
        blocks = (cols + block - 1) // block
        for task in numba.prange(blocks * parts):
            column, part = task % blocks * block, task // blocks
            first, last = rows * part // parts, rows * (part + 1) // parts
            count, to, figures_at = min(block, cols - column), task * size, address_of(figures)
            begin(mean[column:], figures_at, to, count)
            given = address_of(dy), address_of(x), address_of(y), address_of(dz)
            whole = last - (last - first) % unroll
            for i in range(first, whole, unroll):
                several(*given, i * cols + column, cols, count, figures_at, to)
            for i in range(whole, last):
                one(*given, i * cols + column, cols, count, figures_at, to)
        for task in numba.prange(blocks):
            column = task * block
            count = min(block, cols - column)
            end(address_of(figures), task * size, blocks * size, rstd, dgamma, dbeta, column, count)

    return gradients


def _end_of_gradients(config: Config) -> Callable[..., Any]:
    """Return the function that adds the parts of some columns, `part` apart, and writes their results."""
    block, parts = config["block"], config["parts"]

    @jitted()
    def end(
        figures: Any, to: int, part: int, rstd: Any, dgamma: Any, dbeta: Any, column: int, count: int
    ) -> None:
        for other in range(to + part, to + parts * part, part):
            for j in range(block, 2 * block + count):
                figures[to + j] += figures[other + j]
        for j in range(count):
            dbeta[column + j] = figures[to + block + j]
            dgamma[column + j] = figures[to + 2 * block + j] * rstd[column + j]

    return end


# -- forward ------------------------------------------------------------------------------------------------


def _passing(
    config: Config, several: Callable[..., Any], one: Callable[..., Any], read: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the function that processes rows: means in the first line, squared deviations in the last."""
    import numpy as np

    block, unroll, zero = config["block"], config["unroll"], np.float32(0)

    @jitted()
    def begin(x: Any, at: int, figures: Any, to: int, count: int) -> None:
        for j in range(count):
            figures[to + j] = read(x[at + j])
            figures[to + block + j] = zero
            figures[to + 2 * block + j] = zero
            figures[to + 3 * block + j] = zero

    @jitted()
    def centre(rows: int, figures: Any, to: int, count: int) -> None:
        each, number = np.float32(1.0 / rows), np.float32(rows)
        for j in range(count):
            before, total = figures[to + j], figures[to + block + j]
            after = before + total * each
            moved = after - before
            left = total - moved * number
            figures[to + 3 * block + j] += figures[to + 2 * block + j] - moved * (total + left)
            figures[to + j] = after
            figures[to + block + j] = left
            figures[to + 2 * block + j] = zero

    @jitted()
    def go_down(
        x: Any, figures: Any, first: int, last: int, cols: int, column: int, count: int, to: int
    ) -> None:
        begin(x, first * cols + column, figures, to, count)
        bottom = first
        while bottom < last:
            top, bottom = bottom, min(last, bottom + (AT_FIRST if bottom == first else AT_ONCE))
            whole = bottom - (bottom - top) % unroll
            for i in range(top, whole, unroll):
                several(x, i * cols + column, cols, count, figures, to)
            for i in range(whole, bottom):
                one(x, i * cols + column, cols, count, figures, to)
            centre(bottom - first, figures, to, count)
        for j in range(to + 3 * block, to + 3 * block + count):
            figures[j] = zero if figures[j] < 0 else figures[j]  # NaN is kept

    return go_down


def _statistics(config: Config, go_down: Callable[..., Any]) -> Callable[..., None]:
    """Return the forward kernel, which computes the statistics."""
    import numba

    block, parts = config["block"], config["parts"]
    size, address_of, (join, end) = 4 * block, address(), _ends_of_statistics(config)

    def statistics(
        x: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any, new_mean: Any, new_var: Any,
        figures: Any, rows: int, cols: int, eps: Any, momentum: Any,
    ) -> None:  # fmt: skip
        blocks = (cols + block - 1) // block
        for task in numba.prange(blocks * parts):
            column, part = task % blocks * block, task // blocks
            first, last = rows * part // parts, rows * (part + 1) // parts
            count = min(block, cols - column)
            go_down(address_of(x), address_of(figures), first, last, cols, column, count, task * size)
        for task in numba.prange(blocks):
            column, to = task * block, task * size
            count, figures_at = min(block, cols - column), address_of(figures)
            for part in range(1, parts):
                before = rows * part // parts
                more = rows * (part + 1) // parts - before
                join(figures_at, to, to + part * blocks * size, count, before, more)
            running = running_mean[column:], running_var[column:]
            batch, new = (mean[column:], rstd[column:]), (new_mean[column:], new_var[column:])
            end(figures_at, to, running, batch, new, count, rows, eps, momentum)

    return statistics


def _ends_of_statistics(config: Config) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions that join a part to those before it, and write the results."""
    import numpy as np

    block, f32, unit = config["block"], np.float32, np.float32(1)

    @jitted()
    def join(figures: Any, to: int, other: int, count: int, before: int, more: int) -> None:
        share = f32(more / (before + more))
        weight = f32(before * (more / (before + more)))
        for j in range(count):
            apart = figures[other + j] - figures[to + j]
            figures[to + j] += apart * share
            figures[to + 3 * block + j] += figures[other + 3 * block + j] + apart * apart * weight

    @jitted()
    def end(
        figures: Any,
        to: int,
        running: Any,
        batch: Any,
        new: Any,
        count: int,
        rows: int,
        eps: Any,
        momentum: Any,
    ) -> None:
        (running_mean, running_var), (mean, rstd), (new_mean, new_var) = running, batch, new
        each, spread, rest = f32(1.0 / rows), f32(momentum / (rows - 1.0)), unit - momentum
        for j in range(count):
            squares = figures[to + 3 * block + j]
            mean[j] = figures[to + j]
            rstd[j] = unit / np.sqrt(squares * each + eps)
            new_mean[j] = rest * running_mean[j] + momentum * figures[to + j]
            new_var[j] = rest * running_var[j] + spread * squares

    return join, end


VARIANT = NumbaCpuBatchNormStats()
