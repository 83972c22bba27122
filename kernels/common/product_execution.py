"""How blocks of matrix products are expected to execute: traffic of memory and L2, and stores of results.

The counts are for `Execution`, which only predictions use: what the code does in the usual case, not a floor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.common.warp_access import LANES, shared_passes
from tunebench.variant import Execution

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FINISHING",
    "INSTRUCTION_BYTES",
    "LOOP_INSTRUCTIONS",
    "SECTOR_BYTES",
    "START_CLOCKS",
    "Results",
    "TileCopy",
    "by_each",
    "chosen",
    "direct_results",
    "fragment_passes",
    "in_sectors",
    "line_bytes",
    "operand_bytes",
    "resident",
    "staged_results",
    "thread_results",
    "tile_copy",
    "tile_extent",
    "with_results",
]

SECTOR_BYTES = 32
"""Bytes that L2 transfers at least. Source: Nsight Compute, "Memory Tables"."""

INSTRUCTION_BYTES = 16
"""Machine code of one instruction. Source: disassembly of any binary from Volta on."""

START_CLOCKS = 300.0
"""Clocks from the start of a block to its first load: about 70 dependent instructions, of 4 clocks each."""

LOOP_INSTRUCTIONS = 20.0
"""Instructions of a warp per step besides loads and products: counters, addresses, bounds of k, branch."""

FINISHING = 2.0
"""Instructions per result of a thread's epilogue: its share of arithmetic, conversion and packing."""


def by_each(function: Callable[..., float], *columns: Any) -> NDArray[np.float64]:
    """Apply a function to columns, evaluating it once for each combination of values.

    Args:
        function: Function of integers.
        columns: Columns of one length, or numbers, of small integers that are not negative.
    """
    integers = [np.asarray(column).astype(np.int64) for column in columns]
    sizes = tuple(int(column.max(initial=0)) + 1 for column in integers)
    spread = np.broadcast_arrays(*map(np.atleast_1d, integers))
    which = np.ravel_multi_index(tuple(spread), sizes)
    occurring = np.zeros(math.prod(sizes), dtype=bool)
    occurring[which] = True
    values = np.zeros(len(occurring))
    for combination in np.flatnonzero(occurring):
        values[combination] = function(*map(int, np.unravel_index(combination, sizes)))
    column: NDArray[np.float64] = values[which]
    return column


# -- L2 and memory ------------------------------------------------------------------------------------------


def in_sectors(line_bytes: Any, pitch_bytes: int) -> Any:
    """Return the bytes of the sectors that a part of a line touches, as a mean over its starts.

    Args:
        line_bytes: Bytes of the part; parts follow one another along the line.
        pitch_bytes: Bytes from line to line.
    """
    whole = np.asarray(line_bytes).astype(np.int64)
    aligned = np.minimum(SECTOR_BYTES, np.minimum(whole & -whole, pitch_bytes & -pitch_bytes))
    return line_bytes + SECTOR_BYTES - np.maximum(1, aligned)


def line_bytes(extent: Any, tile: Any, bk: Any, size: int, pitch_bytes: int, along_k: bool) -> Any:
    """Return the bytes per element of k that a tile takes from L2, in whole sectors.

    Args:
        extent: Mean rows, or columns, of a tile within the matrix.
        tile: Rows, or columns, of a full tile.
        bk: Elements of k of a tile.
        size: Bytes of an element.
        pitch_bytes: Bytes from line to line of the matrix.
        along_k: Whether its lines run along k.
    """
    if along_k:
        return extent * in_sectors(bk * size, pitch_bytes) / bk
    return extent * in_sectors(tile * size, pitch_bytes) / tile


def tile_extent(extent: int, tile: Any) -> Any:
    """Return the mean rows, or columns, of a tile that are within a matrix of `extent` of them."""
    return extent / np.ceil(extent / tile)


def resident(threads: Any, registers: Any, smem_bytes: Any, device: Device) -> Any:
    """Return how many blocks an SM holds at the same time.

    Args:
        threads: Threads of a block.
        registers: Registers of a thread.
        smem_bytes: Shared memory of a block.
        device: Device whose limits apply.
    """
    by_registers = device.registers_per_sm // (threads * registers)
    by_smem = device.smem_per_sm_bytes // (smem_bytes + device.smem_reserved_bytes)
    by_threads = device.threads_per_sm // threads
    return np.maximum(1, np.minimum(np.minimum(by_registers, by_smem), by_threads))


def operand_bytes(
    a_bytes: float, b_bytes: float, tiles_m: Any, tiles_n: Any, *, height: Any, wave: Any, device: Device
) -> Any:
    """Return the bytes of both operands of a product that memory delivers.

    A wave of resident blocks computes tiles of some rows and columns, whose operands it reads from memory
    once, since its blocks advance together. The next waves compute further columns of the same rows, then
    further rows. What a wave needs again is still in L2 with the probability exp(-x), where x is what has
    been read since, as a multiple of L2. This is the survival of a line if new ones replace random others.

    Args:
        a_bytes: Bytes of op(A).
        b_bytes: Bytes of op(B).
        tiles_m: Tiles along the rows.
        tiles_n: Tiles along the columns.
        height: Rows of tiles whose columns are computed before those of further rows.
        wave: Tiles that are computed at the same time.
        device: GPU whose L2 holds a part of them.
    """
    rows = np.clip(np.maximum(height, wave / tiles_n), 1, tiles_m)
    columns = np.clip(wave / rows, 1, tiles_n)
    turns, sweeps = tiles_n / columns, tiles_m / rows
    rows_bytes, columns_bytes = a_bytes / sweeps, b_bytes / turns
    l2_bytes = max(1.0, float(device.l2_bytes))
    lost_a = -np.expm1(-(rows_bytes + columns_bytes) / l2_bytes)
    lost_b = -np.expm1(-(rows_bytes + b_bytes) / l2_bytes)
    return a_bytes * (1 + (turns - 1) * lost_a) + b_bytes * (1 + (sweeps - 1) * lost_b)


# -- tiles that pass registers ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCopy:
    """Work of a block that brings one tile from memory through registers to shared memory, as columns.

    Attributes:
        accesses: Loads and stores of lanes.
        passes: Passes through L1 and shared memory.
    """

    accesses: Any
    passes: Any

    def times(self, count: float) -> TileCopy:
        """Return the work for `count` tiles."""
        return TileCopy(accesses=count * self.accesses, passes=count * self.passes)


def tile_copy(extent: Any, bk: Any, vec: Any, size: int, along_k: bool) -> TileCopy:
    """Count `RegisterTile` in gemm_simt.cuh: wide loads, and stores of f32 as [k][extent].

    Args:
        extent: Rows or columns of the tile.
        bk: Elements of k of the tile.
        vec: Elements per load.
        size: Bytes of an element in memory.
        along_k: Whether lines in memory run along k, so that the tile is transposed element by element.
    """
    elements = 1.0 * extent * bk
    loads = elements / (LANES * vec)
    length = np.minimum(bk if along_k else extent, LANES * vec)  # elements of a line that a load reads
    lines = LANES * vec / length * np.maximum(1.0, length * size / 128)
    if along_k:
        stores = elements / LANES
        stored = by_each(_transposed_passes, extent, bk, vec)
    else:
        stores, stored = elements / (LANES * np.minimum(4, vec)), np.minimum(4, vec)
    return TileCopy(accesses=LANES * (loads + stores), passes=loads * lines + stores * stored)


@functools.cache
def _transposed_passes(extent: int, bk: int, vec: int) -> int:
    """Return the passes of one store of a transposed tile, whose lines have 4 words of padding."""
    lane, per_line = np.arange(LANES), bk // vec
    return shared_passes(lane % per_line * vec * (extent + 4) + lane // per_line, 1)


@functools.cache
def fragment_passes(lanes_n: int, chunk: int, of_a: int) -> int:
    """Return the passes of one load of a chunk from shared memory (`read_chunks` in gemm_simt.cuh).

    Args:
        lanes_n: Lanes of a warp along n.
        chunk: Values that a lane loads.
        of_a: 1 for a, whose chunks differ along m; 0 for b.
    """
    lane = np.arange(LANES)
    return shared_passes((lane // lanes_n if of_a else lane % lanes_n) * chunk, chunk)


# -- results ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Work of the epilogue for one tile, as columns; fields as those of `Execution`."""

    instructions: Any
    accesses: Any
    passes: Any
    l2_bytes: Any
    memory_waits: Any = 0.0
    shared_waits: Any = 0.0

    def times(self, count: Any) -> Results:
        """Return the work for `count` tiles, one after the other."""
        return Results(
            **{field.name: getattr(self, field.name) * count for field in dataclasses.fields(self)}
        )

    def plus(self, other: Results) -> Results:
        """Return the work of these results and of other ones, one after the other."""
        names = [field.name for field in dataclasses.fields(self)]
        return Results(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def clocks(self, device: Device) -> Any:
        """Return the clocks of the epilogue on an SM that does nothing else: those of its busiest pipe.

        Args:
            device: Device whose rates apply.
        """
        issued = self.instructions + self.accesses / LANES
        return np.maximum.reduce(
            np.broadcast_arrays(
                issued / device.issue_per_clock,
                self.accesses / device.accesses_per_clock,
                self.passes,
                self.l2_bytes / device.fill_bytes_per_clock,
            )
        )


def direct_results(bm: Any, bn: Any, rows: Any, columns: Any, size: int, vec: int, residual: bool) -> Results:
    """Count `store_fragments` in gemm_mma.cuh: 8 rows of a warp at a time, and 8 columns, two per lane.

    Args:
        bm: Rows of a tile.
        bn: Columns of a tile.
        rows: Rows of a warp.
        columns: Columns of a warp.
        size: Bytes of a result.
        vec: Results per access at most.
        residual: Whether as many values are read.
    """
    width, tensors = min(2, vec), 1 + residual
    stores = bm * bn / (LANES * width) * tensors
    return Results(
        instructions=FINISHING * bm * bn / LANES,
        accesses=LANES * stores,
        passes=8 * stores,  # a line of each row
        l2_bytes=8 * max(SECTOR_BYTES, 8 * size) * stores,
        # Four loads of a column's rows are in flight.
        memory_waits=residual * columns / 8 * np.ceil(rows / 32),
    )


def chosen(condition: Any, results: Results, otherwise: Results) -> Results:
    """Return the columns of `results` where a condition holds, and those of `otherwise` elsewhere."""
    names = [field.name for field in dataclasses.fields(Results)]
    return Results(**{n: np.where(condition, getattr(results, n), getattr(otherwise, n)) for n in names})


def with_results(loop: Execution, results: Results, device: Device, **columns: Any) -> Execution:
    """Return the execution of a main loop and of the epilogue after it.

    Args:
        loop: The main loop.
        results: Epilogues of a block.
        device: Device that executes it.
        columns: Values of other columns, which are added to those of the loop.
    """
    added = dataclasses.asdict(results) | {"serial_clocks": results.clocks(device)}
    sums = {name: getattr(loop, name) + value for name, value in added.items()}
    for name, value in columns.items():
        sums[name] = sums.get(name, getattr(loop, name)) + value
    return dataclasses.replace(loop, **sums)


def thread_results(
    bm: Any, bn: Any, tm: Any, tn: Any, lanes_n: Any, size: int, vec: Any, residual: bool
) -> Results:
    """Count `store_sums` in gemm_simt.cuh: a thread stores chunks of its tm x tn results.

    Args:
        bm: Rows of a tile.
        bn: Columns of a tile.
        tm: Rows of a thread.
        tn: Columns of a thread.
        lanes_n: Lanes of a warp along n.
        size: Bytes of a result.
        vec: Results per access.
        residual: Whether as many values are read.
    """
    stores, row_bytes = bm * bn / (LANES * vec) * (1 + residual), lanes_n * vec * size
    rows = LANES / lanes_n
    return Results(
        instructions=FINISHING * bm * bn / LANES,
        accesses=LANES * stores,
        passes=stores * rows * np.maximum(1.0, row_bytes / 128),
        l2_bytes=stores * rows * np.maximum(SECTOR_BYTES, row_bytes),
        # Four loads of a column's rows are in flight.
        memory_waits=residual * tn / vec * np.ceil(tm / 4),
    )


@functools.cache
def _gathered_passes(columns: int, vec: int) -> int:
    """Return the passes of a load of gathered sums, whose rows have 8 words of padding."""
    lane, per_row = np.arange(LANES), columns // vec
    words = lane // per_row * (columns + 8) + lane % per_row * vec
    return shared_passes(words, min(4, vec))


def staged_results(bm: Any, bn: Any, rows: Any, columns: Any, size: int, vec: int, residual: bool) -> Results:
    """Count `store_staged` in gemm_mma.cuh: a warp gathers 16 rows in shared memory and stores wide accesses.

    Arguments as of `direct_results`.
    """
    width, tensors, sums = min(4, vec), 1 + residual, bm * bn
    turns = 16 * columns / (vec * LANES)
    gathered = (
        sums / (LANES * width) * by_each(lambda warp_columns: _gathered_passes(warp_columns, vec), columns)
    )
    lines = sums / (LANES * vec) * np.maximum(LANES * vec / columns, LANES * vec * size / 128)
    return Results(
        instructions=FINISHING * sums / LANES,
        accesses=sums / 2 + sums / width + tensors * sums / vec,
        passes=4 * sums / 128 + gathered + tensors * lines,
        l2_bytes=tensors * sums / columns * np.maximum(SECTOR_BYTES, columns * size),
        memory_waits=residual * rows / 16 * np.ceil(turns / 4),
        shared_waits=rows / 16 * (1 + turns),
    )
