"""scatter_add on the CPU: rows of x are sorted by their index, then each row of out is summed once.

A counting sort lists the rows of x of each row of out, in their order. Blocks of rows of out are then summed
in parallel, a chunk of columns at a time in f32, and every element is stored once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, jitted, load, store
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant
from tunebench.workload import Tensor
from tunebench.workloads.operators.scatter_add import ScatterAdd

SPACE = Space(
    (
        Parameter("chunk", (64, 256, 1024, 4096), "columns that are summed at a time"),
        Parameter("bin_block", (1, 8, 64, 512), "rows of out of a task"),
    ),
    (
        lambda chunk, workload: (chunk == 64) | (chunk < 2 * workload.cols),
        lambda bin_block, workload: (bin_block == 1) | (bin_block * 2 <= workload.bins),
    ),
)


class NumbaCpuScatterAdd(NumbaCpuVariant[ScatterAdd]):
    """Variant for every size and type."""

    name = "numba_cpu"
    operator = ScatterAdd
    space = SPACE

    def default(self, workload: ScatterAdd, device: Device) -> Config:
        """Return whole rows of out, and blocks of them for 16 tasks or more."""
        chunk = max(c for c in (64, 256, 1024, 4096) if c == 64 or c < 2 * workload.cols)
        block = max(b for b in (1, 8, 64, 512) if b == 1 or b * 16 <= workload.bins)
        return Config({"chunk": chunk, "bin_block": block})

    def costs(self, workload: ScatterAdd, table: Table, device: Device) -> Costs:
        """Count the additions to the first row of each row of out."""
        added = 0 if workload.skipped >= 0 else max(0, workload.rows - workload.bins)
        return Costs(blocks=1, full_blocks=0, threads=1, fma=1.0 * added * workload.cols)

    def scratch(self, workload: ScatterAdd, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the end of each row of out in the sorted list, and for that list."""
        return (
            Tensor(name="ends", shape=(workload.bins + 1,), dtype="i32"),
            Tensor(name="order", shape=(workload.rows,), dtype="i32"),
        )

    def arguments(self, workload: ScatterAdd, config: Config) -> tuple[Argument, ...]:
        """Return all tensors: x for a missing base, which is not read."""
        return ("x", "index", "base" if workload.base else "x", "out", "ends", "order")

    def kernel(self, workload: ScatterAdd, config: Config) -> Callable[..., None]:
        """Return the kernel `(x, index, base, out, ends, order)`."""
        import numba

        sort, sum_block, address_of = _sort(workload), _sum_block(workload, config, self.fastmath), address()
        block = config["bin_block"]

        def scatter_add(x: Any, index: Any, base: Any, out: Any, ends: Any, order: Any) -> None:
            if not sort(index, ends, order):
                raise IndexError("an index in index is out of range")
            for task in numba.prange((len(out) + block - 1) // block):
                lists = (address_of(order), address_of(ends))
                sum_block(task, address_of(x), lists, address_of(base), address_of(out))

        return scatter_add


def _sort(workload: ScatterAdd) -> Callable[..., Any]:
    """Return the function that lists the rows of x by index; it returns whether all indices are valid."""
    bins, skipped, wraps = workload.bins, workload.skipped, workload.wraps

    @jitted()
    def sort(index: Any, ends: Any, order: Any) -> Any:
        ends[:] = 0
        for j in range(len(index)):
            row_of_out = index[j] + bins if wraps and index[j] < 0 else index[j]
            if row_of_out < 0 or row_of_out >= bins:
                return False
            if row_of_out != skipped:
                ends[row_of_out + 1] += 1
        for row in range(bins):
            ends[row + 1] += ends[row]
        # Each begin moves to the end of its rows, which is the begin of the next.
        for j in range(len(index)):
            row_of_out = index[j] + bins if wraps and index[j] < 0 else index[j]
            if row_of_out != skipped:
                order[ends[row_of_out]] = j
                ends[row_of_out] += 1
        return True

    return sort


def _sum_block(workload: ScatterAdd, config: Config, fastmath: frozenset[str]) -> Callable[..., Any]:
    """Return the function that sums a block of rows of out; it takes addresses."""
    import numpy as np

    read, write, has_base, zero = load(workload.dtype), store(workload.dtype), workload.base, np.float32(0)
    bins, cols, rows, chunk = workload.bins, workload.cols, config["bin_block"], config["chunk"]

    @jitted(fastmath)
    def start(base: Any, at: Any, sums: Any, count: Any) -> None:
        for j in range(count):
            sums[j] = read(base[at + j]) if has_base else zero

    @jitted(fastmath)
    def add(x: Any, at: Any, sums: Any, count: Any) -> None:
        for j in range(count):
            sums[j] += read(x[at + j])

    @jitted(fastmath)
    def end(sums: Any, out: Any, at: Any, count: Any) -> None:
        for j in range(count):
            out[at + j] = write(sums[j])

    @jitted(fastmath)
    def sum_block(task: Any, x: Any, lists: Any, base: Any, out: Any) -> None:
        order, ends = lists
        sums = np.empty(chunk, np.float32)
        for row in range(task * rows, min(bins, (task + 1) * rows)):
            begin = np.int64(ends[row - 1]) if row > 0 else np.int64(0)
            for first in range(0, cols, chunk):
                count = min(cols - first, chunk)
                start(base, row * cols + first, sums, count)
                for position in range(begin, np.int64(ends[row])):
                    add(x, np.int64(order[position]) * cols + first, sums, count)
                end(sums, out, row * cols + first, count)

    return sum_block


VARIANT = NumbaCpuScatterAdd()
