"""batchnorm_stats in CUDA C++, both directions: threads go down the rows of their columns, side by side.

Threads of a block lie `col_threads` along a row and `row_threads` down; a thread keeps two figures of each of
its `vector` columns, goes down the rows and has `unroll` of them in flight. Figures of threads below each
other meet in shared memory. Rows fall into `split` parts, so that few columns keep the device busy: each part
leaves its figures in scratch memory, and a second launch puts these together, in an order that is always the
same. Forward, the figures are a mean and the squared deviations from it, found in one pass; see
_batchnorm_stats.cuh.

Source: NVIDIA, "CUDA Pro Tip: Increase Performance with Vectorized Memory Access"; Chan, Golub and LeVeque,
"Algorithms for Computing the Sample Variance: Analysis and Recommendations", 1983.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels._cuda import ctype, flag, helpers
from tunebench.kernels._cuda_chain import threads_along
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Blocks that share what one of them would go down."""
MOST_BLOCKS = 4
"""Blocks for each SM beyond which nothing is split any further."""
SMALL = 2**20
"""Elements of a miniature, about, at most."""
SIDE_BY_SIDE = 64
"""Bytes of a row that threads of a block cover at least."""
OTHER_REGISTERS = 40
"""What a thread needs besides loaded vectors and the figures of its columns: addresses, loop state."""
STATIC_BYTES = 48 * 1024
"""Most shared memory that a kernel may have without asking for more."""
COLUMNS_AT_END, LINES_AT_END = 32, 8
"""Threads along and down in the launch that puts parts together."""
OPERATIONS = 3.0
"""Instructions of an element: a difference, a sum, and a product that is added up."""


def _along(workload: BatchNormStats, col_threads: Any, vector: Any) -> Any:
    """Return the blocks that lie side by side, for columns too."""
    return ceil_div(workload.cols, col_threads * vector)


def _read(workload: BatchNormStats) -> int:
    """Return how many matrices are read."""
    return 2 + workload.has_relu if workload.is_backward else 1


def _fit(threads: Any, vector: Any, unroll: Any, workload: BatchNormStats, device: Device) -> Any:
    """Tell whether a thread can hold what it has in flight, and four figures of each of its columns."""
    loaded = ceil_div(vector * unroll * _read(workload) * itemsize(workload.dtype), 4)
    words = loaded + 4 * vector + OTHER_REGISTERS
    return words <= np.minimum(255, device.registers_per_sm // threads)


SPACE = Space(
    (
        Parameter("col_threads", (1, 2, 4, 8, 16, 32, 64, 128, 256), "threads along a row"),
        Parameter("row_threads", (1, 2, 4, 8, 16, 32, 64, 128), "threads down the rows"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter("unroll", (1, 2, 4, 8), "rows a thread has in flight"),
        Parameter("split", SPLITS, "parts that rows fall into"),
    ),
    (
        lambda col_threads, row_threads: (
            (col_threads * row_threads >= 64) & (col_threads * row_threads <= 1024)
        ),
        # Both figures of all threads meet in shared memory.
        lambda col_threads, row_threads, vector: (
            (row_threads == 1) | (8 * col_threads * row_threads * vector <= STATIC_BYTES)
        ),
        # Every row must begin at a multiple of an access.
        lambda vector, workload: (workload.cols % vector == 0) & (vector * itemsize(workload.dtype) <= 16),
        # Threads without an element are of no use.
        lambda col_threads, vector, workload: (col_threads == 1) | (col_threads * vector < 2 * workload.cols),
        # Less than two sectors side by side waste what is fetched, unless rows are so short.
        lambda col_threads, vector, workload: (
            (col_threads * vector * itemsize(workload.dtype) >= SIDE_BY_SIDE)
            | (col_threads * vector >= workload.cols)
        ),
        lambda col_threads, row_threads, unroll, split, workload: (
            ((col_threads * row_threads == 64) & (unroll * split == 1))
            | (row_threads * unroll * split < 2 * workload.rows)
        ),
        lambda col_threads, row_threads, vector, unroll, workload, device: _fit(
            col_threads * row_threads, vector, unroll, workload, device
        ),
        # Parts are not more than keep the device busy.
        lambda col_threads, vector, split, workload, device: (
            (split == 1)
            | (
                (split <= workload.rows)
                & (_along(workload, col_threads, vector) * (split // 2) < MOST_BLOCKS * device.sm_count)
            )
        ),
    ),
)


class CudaColumnBatchNormStats(CudaVariant[BatchNormStats]):
    """Serves every size and type, both directions."""

    name = "cuda_column"
    operator = BatchNormStats
    space = SPACE

    def default(self, workload: BatchNormStats, device: Device) -> Config:
        """Return wide accesses, up to a warp along, 256 threads, and two blocks an SM if rows allow it."""
        widest = 16 // itemsize(workload.dtype)
        vector = max(v for v in (1, 2, 4, 8) if v <= widest and workload.cols % v == 0)
        col_threads = min(32, threads_along(workload.cols // vector))
        row_threads = max(64 // col_threads, 1)
        while row_threads * col_threads < 256 and row_threads < 128 and 2 * row_threads <= workload.rows:
            row_threads *= 2
        along = _along(workload, col_threads, vector)
        split = max(s for s in SPLITS if s == 1 or s * along <= 2 * device.sm_count)
        common = {"col_threads": col_threads, "row_threads": row_threads, "vector": vector}
        splits = (s for s in reversed(SPLITS) if s <= split)
        choices = (Config({**common, "unroll": n, "split": s}) for s in splits for n in (4, 2, 1))
        return self.space.first_valid(choices, workload=workload, device=device)

    def tiles(self, workload: BatchNormStats, config: Config) -> tuple[Tiling, ...]:
        """Return how blocks cut columns, and rows, if they do."""
        return (
            Tiling(dimension="cols", extent=workload.cols, tile=config["col_threads"] * config["vector"]),
            Tiling(dimension="rows", extent=workload.rows, tile=ceil_div(workload.rows, config["split"])),
        )

    def costs(self, workload: BatchNormStats, table: Table, device: Device) -> Costs:
        """Count a part of a block's columns: its operations, its loads, and the bytes nobody else reads."""
        split, vector, down = table["split"], table["vector"], table["row_threads"]
        tile, part, size = table["col_threads"] * vector, workload.rows // split, itemsize(workload.dtype)
        elements, whole, met = 1.0 * part * tile, _read(workload), down > 1
        moved = whole + workload.has_relu
        # A sector at either end of each row may have come with a neighbour's tile.
        row_bytes = np.maximum(0.0, tile * float(size) - 64.0)
        left_behind = np.where(met, 2.0 * down * tile, 0.0)
        adds = part // down + np.where(met, down - 1, 0) - 1.0
        return Costs(
            # Some parts have a row more than others.
            blocks=np.minimum(split, workload.rows / part) * workload.cols / tile,
            full_blocks=split * (workload.cols // tile),
            threads=table["col_threads"] * down,
            smem_bytes=4.0 * left_behind,
            fma=OPERATIONS * elements,
            # Written once and read once, four bytes a lane.
            smem_traffic_bytes=8.0 * left_behind,
            fill_bytes=whole * part * row_bytes,
            accesses=moved * elements / vector + 2.0 * left_behind,
            # The first load, one addition after the other, and what threads below each other leave.
            chain_clocks=np.where(row_bytes > 0, device.l2_latency, device.l1_latency)
            + np.maximum(0.0, adds) * device.fma_latency
            + met * device.smem_latency,
            serial_launches=np.where(split == 1, 1, 2),
        )

    def scratch(self, workload: BatchNormStats, config: Config) -> tuple[Tensor, ...]:
        """Return memory for both figures of each part, if there are parts."""
        if config["split"] == 1:
            return ()
        return (Tensor(name="partial", shape=(2, config["split"], workload.cols), dtype="f32"),)

    def claims(self, workload: BatchNormStats, config: Config) -> tuple[str, ...]:
        """Return the loads and stores, and the multiply-add that takes an element in."""
        return ("LDG", "STG", "FFMA")

    def source(self, workload: BatchNormStats, config: Config) -> str:
        """Return all kernels; the entries say which are instantiated."""
        return helpers("types", "reduce", "row_block", "batchnorm_stats")

    def launches(self, workload: BatchNormStats, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every part of some columns, and one more kernel if there are parts."""
        split, col_threads, row_threads = (config[name] for name in ("split", "col_threads", "row_threads"))
        shape = ", ".join(str(config[name]) for name in ("col_threads", "row_threads", "vector", "unroll"))
        read, kept, written, factors = _arguments(workload)
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        name, whole = "gradients" if workload.is_backward else "statistics", split == 1
        types = ctype(workload.dtype) + (f", {flag(workload.has_relu)}" if workload.is_backward else "")
        first = Launch(
            entry=f"{name}{'' if whole else '_of_part'}<{types}, {shape}>",
            grid=(int(_along(workload, col_threads, config["vector"])), split, 1),
            block=(col_threads * row_threads, 1, 1),
            arguments=(*read, *((*kept, *written, *factors) if whole else ("partial",)), *sizes),
        )
        if whole:
            return (first,)
        last = Launch(
            entry=f"end_{name}<{LINES_AT_END}>",
            grid=(ceil_div(workload.cols, COLUMNS_AT_END), 1, 1),
            block=(COLUMNS_AT_END * LINES_AT_END, 1, 1),
            arguments=(
                *("partial", *kept, *written, *factors),
                *(sizes[1:] if workload.is_backward else sizes),
                Scalar("int", split),
            ),
        )
        return (first, last)

    def miniature(self, workload: BatchNormStats, config: Config) -> BatchNormStats:
        """Return one full tile of columns and a cut one, with two full turns down the rows and a cut one."""
        turn = config["split"] * config["row_threads"] * config["unroll"]
        tile = config["col_threads"] * config["vector"]
        cols = workload.cols if workload.cols <= tile else tile + (workload.cols % tile or config["vector"])
        # Many parts have fewer turns, but some rows each.
        most = max(2 * config["split"] + 1, SMALL // cols)
        rows = min(workload.rows, 2 * turn + workload.rows % turn, most)
        return dataclasses.replace(workload, rows=rows, cols=cols)


def _arguments(workload: BatchNormStats) -> tuple[tuple[Argument, ...], ...]:
    """Return what is for elements, what is read for results, what is written, and numbers for results.

    Without relu x stands for what there is not; it is not touched.
    """
    written = tuple(tensor.name for tensor in workload.outputs() if len(tensor.shape) == 1)
    if workload.is_backward:
        with_relu = ("y", "dz") if workload.has_relu else ("x", "x")
        return ("dy", "x", "mean", *with_relu), ("rstd",), written, ()
    factors = (Scalar("float", workload.eps), Scalar("float", workload.momentum))
    return ("x",), ("running_mean", "running_var"), written, factors


VARIANT = CudaColumnBatchNormStats()
