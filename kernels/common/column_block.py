"""Parameters, constraints and tiles of CUDA kernels whose threads own columns and iterate over rows."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda_expression import threads_along
from tunebench.kernels.common.expected import LANES, PROLOGUE, STEP, converted, l1_passes, sector_bytes
from tunebench.kernels.common.reduction import LOOP_REGISTERS, MOST_BLOCKS, SMALL, SPLITS
from tunebench.kernels.common.row_block import Rows, widest_vector
from tunebench.space import Config, Constraint, Parameter, Space, Table
from tunebench.variant import Costs, Execution, Tiling, ceil_div

__all__ = [
    "CONSTRAINTS",
    "PARAMETERS",
    "ColumnWork",
    "along",
    "column_costs",
    "default_config",
    "small",
    "tiles",
]

SIDE_BY_SIDE = 64
"""Least bytes of a row that the threads of a block cover."""


def along(workload: Rows, col_threads: Any, vector: Any) -> Any:
    """Return the number of blocks along a row; the arguments may be columns of a table."""
    return ceil_div(workload.cols, col_threads * vector)


PARAMETERS = (
    Parameter("col_threads", (1, 2, 4, 8, 16, 32, 64, 128, 256), "threads along a row"),
    Parameter("row_threads", (1, 2, 4, 8, 16, 32, 64, 128), "threads down the rows of a column"),
    Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
    Parameter("unroll", (1, 2, 4, 8), "rows that a thread has in flight"),
    Parameter("split", SPLITS, "parts that the rows are split into"),
)

CONSTRAINTS: tuple[Constraint, ...] = (
    lambda col_threads, row_threads: (col_threads * row_threads >= 64) & (col_threads * row_threads <= 1024),
    # Every row must start at a multiple of an access.
    lambda vector, workload: (workload.cols % vector == 0) & (vector * itemsize(workload.dtype) <= 16),
    # Threads without an element are useless.
    lambda col_threads, vector, workload: (col_threads == 1) | (col_threads * vector < 2 * workload.cols),
    # Less than two adjacent sectors waste fetched bytes, unless rows are that short.
    lambda col_threads, vector, workload: (
        (col_threads * vector * itemsize(workload.dtype) >= SIDE_BY_SIDE)
        | (col_threads * vector >= workload.cols)
    ),
    lambda col_threads, row_threads, unroll, split, workload: (
        ((col_threads * row_threads == 64) & (unroll * split == 1))
        | (row_threads * unroll * split < 2 * workload.rows)
    ),
    # No more parts than keep the device busy.
    lambda col_threads, vector, split, workload, device: (
        (split == 1)
        | (
            (split <= workload.rows)
            & (along(workload, col_threads, vector) * (split // 2) < MOST_BLOCKS * device.sm_count)
        )
    ),
)


def default_config(space: Space, workload: Rows, device: Device) -> Config:
    """Return wide accesses, up to a warp along a row, 256 threads, and two blocks per SM if rows allow it.

    Args:
        space: Space of the variant; the result is valid in it.
        workload: The workload.
        device: The device to choose for.
    """
    vector = widest_vector(workload)
    col_threads = min(32, threads_along(workload.cols // vector))
    row_threads = max(64 // col_threads, 1)
    while row_threads * col_threads < 256 and row_threads < 128 and 2 * row_threads <= workload.rows:
        row_threads *= 2
    blocks = along(workload, col_threads, vector)
    split = max(s for s in SPLITS if s == 1 or s * blocks <= 2 * device.sm_count)
    common = {"col_threads": col_threads, "row_threads": row_threads, "vector": vector}
    splits = (s for s in reversed(SPLITS) if s <= split)
    choices = (Config({**common, "unroll": n, "split": s}) for s in splits for n in (4, 2, 1))
    return space.first_valid(choices, workload=workload, device=device)


def tiles(workload: Rows, config: Config) -> tuple[Tiling, ...]:
    """Return the tiles of columns and of rows that a block processes."""
    return (
        Tiling(dimension="cols", extent=workload.cols, tile=config["col_threads"] * config["vector"]),
        Tiling(dimension="rows", extent=workload.rows, tile=ceil_div(workload.rows, config["split"])),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ColumnWork:
    """Work of a column kernel for each element.

    Attributes:
        read: Matrices that are read.
        moved: Matrices that are read or written.
        fma: Multiply-adds of an element.
        sfu: Special functions of an element.
        numbers: Numbers of a column that its threads exchange.
        is_sum: Whether an element is added to that of the row before.
        instructions: Expected instructions of an element, without conversions; 0 for twice its multiply-adds.
    """

    read: int
    moved: int
    fma: float
    sfu: float = 0.0
    numbers: int = 1
    is_sum: bool = True
    instructions: float = 0.0


def column_costs(workload: Rows, table: Table, device: Device, work: ColumnWork) -> Costs:
    """Return the costs of a part of a block's columns.

    Args:
        workload: The workload.
        table: Configurations with `PARAMETERS`.
        device: The device, for its latencies.
        work: Work for each element.
    """
    split, vector, down = table["split"], table["vector"], table["row_threads"]
    tile, part, size = table["col_threads"] * vector, workload.rows // split, itemsize(workload.dtype)
    elements, exchanges = 1.0 * part * tile, down > 1
    # One sector at either end of each row may be shared with another tile.
    row_bytes = np.maximum(0.0, tile * float(size) - 64.0)
    left_behind = np.where(exchanges, 1.0 * work.numbers * down * tile, 0.0)
    adds = part // down + np.where(exchanges, down - 1, 0) - 1.0
    return Costs(
        # Some parts have one more row.
        blocks=np.minimum(split, workload.rows / part) * workload.cols / tile,
        full_blocks=split * (workload.cols // tile),
        threads=table["col_threads"] * down,
        smem_bytes=4.0 * left_behind,
        fma=work.fma * elements,
        sfu=work.sfu * elements,
        # Written once and read once, four bytes per lane.
        smem_traffic_bytes=8.0 * left_behind,
        # Only bytes that no other block reads.
        fill_bytes=work.read * part * row_bytes,
        accesses=work.moved * elements / vector + 2.0 * left_behind,
        # The first load, sequential additions, and the exchange between threads of a column.
        chain_clocks=np.where(row_bytes > 0, device.l2_latency, device.l1_latency)
        + work.is_sum * np.maximum(0.0, adds) * device.fma_latency
        + exchanges * device.smem_latency,
        serial_launches=np.where(split == 1, 1, 2),
        execution=_execution(workload, table, work),
    )


def _execution(workload: Rows, table: Table, work: ColumnWork) -> Execution:
    """Describe a block: every `unroll` rows a thread waits; then the threads of a column join their numbers.

    Args:
        workload: The workload.
        table: Configurations with `PARAMETERS`.
        work: Work for each element.
    """
    names = ("col_threads", "row_threads", "vector", "unroll", "split")
    along_row, down, vector, unroll, split = (table[name] for name in names)
    size, threads, tile = itemsize(workload.dtype), along_row * down, along_row * vector
    part = ceil_div(workload.rows, split)
    turns = ceil_div(ceil_div(part, down), unroll)
    accessed = 1.0 * part * along_row  # vectors of a matrix
    adjacent = np.where(tile < workload.cols, along_row, LANES)
    of_element = (work.instructions or 2 * work.fma) + work.sfu + converted(size) * work.moved
    exchanges, pitch = down > 1, workload.cols * size
    # All threads store their numbers; some threads join those of one column each.
    exchanged = np.where(exchanges, 2.0 * work.numbers * down * tile, 0.0)
    columns_each = ceil_div(tile, threads)
    joining = np.where(exchanges, columns_each * work.numbers * down, 0)
    run_bytes = sector_bytes(tile * size, pitch)
    return Execution(
        registers=ceil_div(work.read * vector * unroll * size, 4)
        + 2 * work.numbers * vector
        + LOOP_REGISTERS,
        instructions=accessed * vector / LANES * of_element
        + threads / LANES * (PROLOGUE + STEP * turns * (1 + unroll / 4))
        + 2 * exchanged / LANES,
        accesses=work.moved * accessed + exchanged,
        passes=work.moved * accessed / LANES * l1_passes(adjacent, vector * size) + exchanged / LANES,
        l2_bytes=work.moved * part * run_bytes + 4.0 * work.numbers * tile,
        # A second launch starts, and waits for every fourth of the parts that a thread joins.
        memory_waits=turns + np.where(split > 1, 1 + ceil_div(split, 32), 0),
        # Eight loads of a joining thread are in flight.
        shared_waits=joining / 8.0,
        barriers=np.where(exchanges, 1.0, 0.0),
    )


def small(workload: Rows, config: Config) -> tuple[int, int]:
    """Return the rows and columns of the emulation workload.

    It has one full and one partial tile of columns, and two full and one partial iteration over rows.
    """
    turn = config["split"] * config["row_threads"] * config["unroll"]
    tile = config["col_threads"] * config["vector"]
    cols = workload.cols if workload.cols <= tile else tile + (workload.cols % tile or config["vector"])
    # With many parts there are fewer iterations, but each part keeps some rows.
    max_rows = max(2 * config["split"] + 1, SMALL // cols)
    return min(workload.rows, 2 * turn + workload.rows % turn, max_rows), cols
