"""batchnorm_stats on the CPU, both directions: parts of the rows in parallel, then what parts have together.

A task takes `block` columns side by side and goes down the rows of its part, `unroll` at once; what columns
come to waits in memory, which stays in the cache. Forward, differences from the first row are added up, with
their squares, and after some rows those from the mean of all so far: one pass will do, however far means are
from zero and the first row from them. Means and squared deviations of parts are joined in an order that is
always the same.

Source: Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance: Analysis and
Recommendations", 1983.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels._chain import compiled
from tunebench.kernels._numba_cpu import address, jitted, load
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workload import Tensor
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

LEAST_PART = 64
"""Rows that are worth a part of their own."""
BESIDE = 64
"""Columns that are worth a task of their own: fewer waste what is fetched with them."""
AT_FIRST, AT_ONCE = 8, 64
"""Rows that differences are taken of from the first, and then from one mean: many beside what that costs."""

SPACE = Space(
    (
        Parameter("block", tuple(2**n for n in range(6, 15)), "columns that a task takes together"),
        Parameter("parts", tuple(2**n for n in range(11)), "pieces that rows fall into"),
        Parameter("unroll", (1, 2, 4, 8), "rows that are taken in at once"),
    ),
    (
        lambda parts, workload: (parts == 1) | (parts * LEAST_PART <= workload.rows),
        lambda block, workload: (block == BESIDE) | (block < 2 * workload.cols),
        lambda unroll, workload: (unroll == 1) | (unroll <= workload.rows),
    ),
)

SEE = """
def see(x_at, begin, cols, count, shift_at, sums_at, squares_at, to):
    for j in range(count):
        shift, total, squares = shift_at[to + j], sums_at[to + j], squares_at[to + j]
@TAKEN@
        sums_at[to + j] = total
        squares_at[to + j] = squares
"""
SEE_EACH = """
        apart_{n} = read(x_at[begin + {n} * cols + j]) - shift
        total += apart_{n}
        squares += apart_{n} * apart_{n}
"""

ADD = """
def add(dy_at, x_at, begin, cols, count, mean_at, column, sums_at, products_at, to):
    for j in range(count):
        mean, total, products = mean_at[column + j], sums_at[to + j], products_at[to + j]
@TAKEN@
        sums_at[to + j] = total
        products_at[to + j] = products
"""
ADD_EACH = """
        dy_{n} = read(dy_at[begin + {n} * cols + j])
        total += dy_{n}
        products += dy_{n} * (read(x_at[begin + {n} * cols + j]) - mean)
"""


class NumbaCpuBatchNormStats(NumbaCpuVariant[BatchNormStats]):
    """Serves every size and type, both directions."""

    name = "numba_cpu"
    operator = BatchNormStats
    space = SPACE
    fastmath = frozenset({"contract", "nsz"})  # another order would add up what differences are taken of

    def default(self, workload: BatchNormStats, device: Device) -> Config:
        """Return up to 1024 columns a task, and parts only where columns are too few for 16 tasks."""
        block = max(b for b in (64, 256, 1024) if b == BESIDE or b < 2 * workload.cols)
        blocks, parts = -(-workload.cols // block), 1
        while parts < 1024 and parts * blocks < 16 and 8 * parts * LEAST_PART <= workload.rows:
            parts *= 2
        unroll = max(u for u in (1, 2, 4) if u <= workload.rows)
        return Config({"block": block, "parts": parts, "unroll": unroll})

    def costs(self, workload: BatchNormStats, table: Table, device: Device) -> Costs:
        """Count a difference and a sum of each element: its product may be of another pipe."""
        return Costs(blocks=1, full_blocks=0, threads=1, fma=2.0 * workload.rows * workload.cols)

    def scratch(self, workload: BatchNormStats, config: Config) -> tuple[Tensor, ...]:
        """Return what columns come to in each part (parts, cols)."""
        names = ("sums", "products") if workload.is_backward else ("shift", "sums", "squares", "kept")
        shape = (config["parts"], workload.cols)
        return tuple(Tensor(name=f"{name}_of_part", shape=shape, dtype="f32") for name in names)

    def arguments(self, workload: BatchNormStats, config: Config) -> tuple[Argument, ...]:
        """Pass all tensors in order, then the shape, then eps and momentum if it is forward."""
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        factors = (Scalar("float", workload.eps), Scalar("float", workload.momentum))
        return (*super().arguments(workload, config), *sizes, *(() if workload.is_backward else factors))

    def generated(self, workload: BatchNormStats, config: Config) -> str:
        """Return the loop over columns that takes in so many rows."""
        return _unrolled(workload, config["unroll"])

    def kernel(self, workload: BatchNormStats, config: Config) -> Callable[..., None]:
        """Return the kernel of this direction, which takes `arguments`."""
        several, one = (
            jitted(self.fastmath)(
                compiled(
                    _unrolled(workload, rows),
                    "add" if workload.is_backward else "see",
                    {"__name__": __name__, "read": load(workload.dtype)},
                )
            )
            for rows in (config["unroll"], 1)
        )
        make = _gradients if workload.is_backward else _statistics
        return make(config, several, one, *(() if workload.is_backward else (load(workload.dtype),)))


def _unrolled(workload: BatchNormStats, rows: int) -> str:
    around, each = (ADD, ADD_EACH) if workload.is_backward else (SEE, SEE_EACH)
    taken = "".join(each.strip("\n").format(n=n) + "\n" for n in range(rows))
    return around.replace("@TAKEN@\n", taken)


def _gradients(config: Config, several: Callable[..., Any], one: Callable[..., Any]) -> Callable[..., None]:
    """Return the kernel of the sums over rows."""
    import numba
    import numpy as np

    block, parts, unroll = config["block"], config["parts"], config["unroll"]
    address_of, zero = address(), np.float32(0)

    @jitted()
    def end(sums: Any, products: Any, rstd: Any, dgamma: Any, dbeta: Any, begin: int, count: int) -> None:
        cols = rstd.shape[0]
        sums_at, products_at = address_of(sums), address_of(products)
        for part in range(1, parts):
            for j in range(begin, begin + count):
                sums_at[j] += sums_at[part * cols + j]
                products_at[j] += products_at[part * cols + j]
        for j in range(begin, begin + count):
            dgamma[j] = products_at[j] * rstd[j]
            dbeta[j] = sums_at[j]

    def gradients(
        dy: Any, x: Any, mean: Any, rstd: Any, dgamma: Any, dbeta: Any, sums: Any, products: Any,
        rows: int, cols: int,
    ) -> None:  # fmt: skip
        blocks = (cols + block - 1) // block
        for task in numba.prange(blocks * parts):
            column, part = task // parts * block, task % parts
            first, last = rows * part // parts, rows * (part + 1) // parts
            count, to = min(block, cols - column), part * cols + column
            sums_at, products_at, mean_at = address_of(sums), address_of(products), address_of(mean)
            dy_at, x_at = address_of(dy), address_of(x)
            for j in range(to, to + count):
                sums_at[j] = zero
                products_at[j] = zero
            whole = last - (last - first) % unroll
            for i in range(first, whole, unroll):
                at = i * cols + column
                several(dy_at, x_at, at, cols, count, mean_at, column, sums_at, products_at, to)
            for i in range(whole, last):
                at = i * cols + column
                one(dy_at, x_at, at, cols, count, mean_at, column, sums_at, products_at, to)
        for task in numba.prange(blocks):
            column = task * block
            end(sums, products, rstd, dgamma, dbeta, column, min(block, cols - column))

    return gradients


def _passing(
    config: Config, several: Callable[..., Any], one: Callable[..., Any], read: Callable[..., Any]
) -> Callable[..., Any]:
    """Return what goes down some rows, and leaves means as `shift`, and as `kept` squared deviations."""
    import numpy as np

    unroll, zero = config["unroll"], np.float32(0)

    @jitted()
    def begin(x: Any, at: int, figures: Any, to: int, count: int) -> None:
        shift, sums, squares, kept = figures
        for j in range(count):
            shift[to + j] = read(x[at + j])
        for j in range(to, to + count):
            sums[j] = zero
            squares[j] = zero
            kept[j] = zero

    @jitted()
    def centre(rows: int, figures: Any, to: int, count: int) -> None:
        shift, sums, squares, kept = figures
        each, number = np.float32(1.0 / rows), np.float32(rows)
        for j in range(to, to + count):
            after = shift[j] + sums[j] * each
            moved = after - shift[j]
            left = sums[j] - moved * number
            kept[j] += squares[j] - moved * (sums[j] + left)
            shift[j] = after
            sums[j] = left
            squares[j] = zero

    @jitted()
    def go_down(
        x: Any, figures: Any, first: int, last: int, cols: int, column: int, count: int, to: int
    ) -> None:
        begin(x, first * cols + column, figures, to, count)
        shift, sums, squares, kept = figures
        bottom = first
        while bottom < last:
            top, bottom = bottom, min(last, bottom + (AT_FIRST if bottom == first else AT_ONCE))
            whole = bottom - (bottom - top) % unroll
            for i in range(top, whole, unroll):
                several(x, i * cols + column, cols, count, shift, sums, squares, to)
            for i in range(whole, bottom):
                one(x, i * cols + column, cols, count, shift, sums, squares, to)
            centre(bottom - first, figures, to, count)
        for j in range(to, to + count):
            kept[j] = zero if kept[j] < 0 else kept[j]  # a NaN stays one

    return go_down


def _statistics(
    config: Config, several: Callable[..., Any], one: Callable[..., Any], read: Callable[..., Any]
) -> Callable[..., None]:
    """Return the kernel of the statistics."""
    import numba

    block, parts = config["block"], config["parts"]
    go_down, (join, end) = _passing(config, several, one, read), _ends()
    address_of = address()

    def statistics(
        x: Any, running_mean: Any, running_var: Any, mean: Any, rstd: Any, new_mean: Any, new_var: Any,
        shift: Any, sums: Any, squares: Any, kept: Any, rows: int, cols: int, eps: Any, momentum: Any,
    ) -> None:  # fmt: skip
        blocks = (cols + block - 1) // block
        for task in numba.prange(blocks * parts):
            column, part = task // parts * block, task % parts
            first, last = rows * part // parts, rows * (part + 1) // parts
            count, to = min(block, cols - column), part * cols + column
            figures = address_of(shift), address_of(sums), address_of(squares), address_of(kept)
            go_down(address_of(x), figures, first, last, cols, column, count, to)
        for task in numba.prange(blocks):
            column = task * block
            count = min(block, cols - column)
            means_at, squares_at = address_of(shift), address_of(kept)
            for part in range(1, parts):
                before = rows * part // parts
                more = rows * (part + 1) // parts - before
                join(means_at, squares_at, column, part * cols + column, count, before, more)
            running = address_of(running_mean), address_of(running_var)
            batch, new = (address_of(mean), address_of(rstd)), (address_of(new_mean), address_of(new_var))
            end(means_at, squares_at, running, batch, new, column, count, rows, eps, momentum)

    return statistics


def _ends() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what joins a part to those before it, and what writes the results of all rows."""
    import numpy as np

    f32, unit = np.float32, np.float32(1)

    @jitted()
    def join(means: Any, squares: Any, to: int, other: int, count: int, before: int, more: int) -> None:
        share = f32(more / (before + more))
        weight = f32(before * (more / (before + more)))
        for j in range(count):
            apart = means[other + j] - means[to + j]
            means[to + j] += apart * share
            squares[to + j] += squares[other + j] + apart * apart * weight

    @jitted()
    def end(
        means: Any, squares: Any, running: Any, batch: Any, new: Any, column: int, count: int, rows: int,
        eps: Any, momentum: Any,
    ) -> None:  # fmt: skip
        running_mean, running_var = running
        mean, rstd = batch
        new_mean, new_var = new
        each, spread, rest = f32(1.0 / rows), f32(momentum / (rows - 1.0)), unit - momentum
        for j in range(column, column + count):
            mean[j] = means[j]
            rstd[j] = unit / np.sqrt(squares[j] * each + eps)
        for j in range(column, column + count):
            new_mean[j] = rest * running_mean[j] + momentum * means[j]
            new_var[j] = rest * running_var[j] + spread * squares[j]

    return join, end


VARIANT = NumbaCpuBatchNormStats()
