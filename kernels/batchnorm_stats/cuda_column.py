"""Batch statistics and their gradients in CUDA C++: threads own columns and iterate over rows.

A block has `col_threads` threads along a row and `row_threads` down the rows. A thread keeps two numbers for
each of its `vector` columns, and loads `unroll` rows at a time. Threads of a column exchange their numbers
through shared memory. Rows are split into `split` parts, so that few columns keep the device busy: each part
stores its numbers in scratch memory, and a second launch joins them in a fixed order. Forward, the numbers
are a mean and the squared deviations from it, computed in one pass; see batchnorm_stats.cuh.

Source: NVIDIA, "CUDA Pro Tip: Increase Performance with Vectorized Memory Access"; Chan, Golub and LeVeque,
"Algorithms for Computing the Sample Variance: Analysis and Recommendations", 1983.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common import column_block
from tunebench.kernels.common.column_block import ColumnWork
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.space import Config, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.batchnorm_stats import BatchNormStats

OTHER_REGISTERS = 40
"""Registers of a thread in addition to loaded vectors and the numbers of its columns."""
STATIC_BYTES = 48 * 1024
"""Most shared memory of a kernel without an explicit request for more."""
COLUMNS_AT_END, LINES_AT_END = 32, 8
"""Threads along and down in the launch that joins parts."""
OPERATIONS = 3.0
"""Instructions of an element: a difference, a sum, and a product that is added."""


def _read(workload: BatchNormStats) -> int:
    """Return the number of matrices that are read."""
    return 2 + workload.has_relu if workload.is_backward else 1


def _fit(threads: Any, vector: Any, unroll: Any, workload: BatchNormStats, device: Device) -> Any:
    """Return whether registers suffice for loaded vectors and four numbers of each column."""
    loaded = ceil_div(vector * unroll * _read(workload) * itemsize(workload.dtype), 4)
    words = loaded + 4 * vector + OTHER_REGISTERS
    return words <= np.minimum(255, device.registers_per_sm // threads)


SPACE = Space(
    column_block.PARAMETERS,
    (
        *column_block.CONSTRAINTS,
        # Both numbers of all threads must fit in shared memory.
        lambda col_threads, row_threads, vector: (
            (row_threads == 1) | (8 * col_threads * row_threads * vector <= STATIC_BYTES)
        ),
        lambda col_threads, row_threads, vector, unroll, workload, device: _fit(
            col_threads * row_threads, vector, unroll, workload, device
        ),
    ),
)


class CudaColumnBatchNormStats(CudaVariant[BatchNormStats]):
    """Variant for every size and type, both directions."""

    name = "cuda_column"
    operator = BatchNormStats
    space = SPACE

    def default(self, workload: BatchNormStats, device: Device) -> Config:
        """Return wide accesses, up to a warp along a row, 256 threads, and two blocks per SM if possible."""
        return column_block.default_config(self.space, workload, device)

    def tiles(self, workload: BatchNormStats, config: Config) -> tuple[Tiling, ...]:
        """Return the tiles of columns and of rows."""
        return column_block.tiles(workload, config)

    def costs(self, workload: BatchNormStats, table: Table, device: Device) -> Costs:
        """Count the operations and accesses of an element; threads of a column exchange two numbers."""
        read = _read(workload)
        work = ColumnWork(read=read, moved=read + workload.has_relu, fma=OPERATIONS, numbers=2)
        return column_block.column_costs(workload, table, device, work)

    def scratch(self, workload: BatchNormStats, config: Config) -> tuple[Tensor, ...]:
        """Return memory for both numbers of each part, if there are parts."""
        if config["split"] == 1:
            return ()
        return (Tensor(name="partial", shape=(2, config["split"], workload.cols), dtype="f32"),)

    def claims(self, workload: BatchNormStats, config: Config) -> tuple[str, ...]:
        """Return loads and stores, and the multiply-add of an element."""
        return ("LDG", "STG", "FFMA")

    def source(self, workload: BatchNormStats, config: Config) -> str:
        """Return all kernels; the entries select those that are instantiated."""
        return helpers("types", "reduce", "row_block", "batchnorm_stats")

    def launches(self, workload: BatchNormStats, config: Config) -> tuple[Launch, ...]:
        """Launch a block for every part of some columns, and a second kernel if there are parts."""
        split, col_threads, row_threads = (config[name] for name in ("split", "col_threads", "row_threads"))
        shape = ", ".join(str(config[name]) for name in ("col_threads", "row_threads", "vector", "unroll"))
        read, statistics, written, factors = _arguments(workload)
        sizes = (Scalar("int", workload.rows), Scalar("int", workload.cols))
        name, whole = "gradients" if workload.is_backward else "statistics", split == 1
        types = ctype(workload.dtype) + (f", {flag(workload.has_relu)}" if workload.is_backward else "")
        first = Launch(
            entry=f"{name}{'' if whole else '_of_part'}<{types}, {shape}>",
            grid=(int(column_block.along(workload, col_threads, config["vector"])), split, 1),
            block=(col_threads * row_threads, 1, 1),
            arguments=(*read, *((*statistics, *written, *factors) if whole else ("partial",)), *sizes),
        )
        if whole:
            return (first,)
        last = Launch(
            entry=f"end_{name}<{LINES_AT_END}>",
            grid=(ceil_div(workload.cols, COLUMNS_AT_END), 1, 1),
            block=(COLUMNS_AT_END * LINES_AT_END, 1, 1),
            arguments=(
                *("partial", *statistics, *written, *factors),
                *(sizes[1:] if workload.is_backward else sizes),
                Scalar("int", split),
            ),
        )
        return (first, last)

    def emulation_workload(self, workload: BatchNormStats, config: Config) -> BatchNormStats:
        """Return 2 tiles of columns and 3 iterations over rows, the last of each partial."""
        rows, cols = column_block.small(workload, config)
        return dataclasses.replace(workload, rows=rows, cols=cols)


def _arguments(workload: BatchNormStats) -> tuple[tuple[Argument, ...], ...]:
    """Return the arguments for elements, for results, the outputs, and the numbers for results.

    Without relu, x replaces the missing tensors and is not accessed.
    """
    written = tuple(tensor.name for tensor in workload.outputs() if len(tensor.shape) == 1)
    if workload.is_backward:
        with_relu = ("y", "dz") if workload.has_relu else ("x", "x")
        return ("dy", "x", "mean", *with_relu), ("rstd",), written, ()
    factors = (Scalar("float", workload.eps), Scalar("float", workload.momentum))
    return ("x",), ("running_mean", "running_var"), written, factors


VARIANT = CudaColumnBatchNormStats()
