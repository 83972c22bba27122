"""Backward variant of layernorm and rmsnorm in CUDA C++ (norm_backward.cuh).

As in forward kernels (`tunebench.kernels.common.row_block`), threads share a row. Blocks are persistent: each
processes several groups of rows, and sums the gradients of the weights. `sums` selects where the sums are:

- ``registers``: of the thread that has the columns, if its elements fit.
- ``shared``: in shared memory, if a row of each gradient fits; one row at a time.
- ``apart``: in a separate kernel, which reads everything again and owns columns.

Where the length of rows is no multiple of an access, rows have edges (row_edges.cuh). The kernel that owns
columns then loads each vector by two aligned accesses.
"""

from __future__ import annotations

from typing import Any, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.cuda import flag, helpers
from tunebench.kernels.common.expected import PROLOGUE, STEP, converted, exchange, l1_passes, sector_bytes
from tunebench.kernels.common.norm import is_centred, norm_type
from tunebench.kernels.common.row_block import (
    EDGE_PROLOGUE,
    edge_elements,
    kernels_for_rows,
    least_vectors,
    lines_of_access,
    rows_of,
    shifted_instructions,
    widest_with_edges,
)
from tunebench.kernels.common.row_split import read_again_bytes
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.common.norm import Norm

__all__ = ["CudaBackwardNorm"]

N = TypeVar("N", bound=Norm)

BLOCKS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
HELD_ELEMENTS = 32
"""Most elements of a row per thread."""
OTHER_REGISTERS, WIDE_REGISTERS = 32, 20
"""Registers of a thread for addresses and constants of a row; and for vectors in flight."""
MAX_SCRATCH_BYTES = 2**28
"""Most scratch memory for partial sums."""
LEAST_TURNS = 8
"""Least groups of rows per block, if there are enough blocks."""
COLUMN_LINES, FINISH_LINES, LANES = 8, 16, 32
"""Shapes of the blocks that own columns, in lines of a warp's threads."""


def _sums(workload: Norm) -> int:
    """Return the number of gradients of weights."""
    return 2 if is_centred(workload) else 1


def _held(workload: Norm, row_threads: Any, vector: Any) -> Any:
    """Return the elements of a row per thread; the arguments may be columns of a table."""
    vectors = ceil_div(workload.cols // vector, row_threads)
    return vectors * vector + ceil_div(edge_elements(workload, vector), row_threads)


def fits_registers(
    sums: Any, reads: Any, row_threads: Any, rows: Any, vector: Any, workload: Norm, device: Device
) -> Any:
    """A thread that reads its elements once, or sums them in registers, must have room for them."""
    elements_per_thread = _held(workload, row_threads, vector)
    registers_per_element = 2 * (reads == 1) + _sums(workload) * (sums == "registers")
    room = np.minimum(255, device.registers_per_sm // (row_threads * rows))
    other_registers = OTHER_REGISTERS + WIDE_REGISTERS * (vector > 1)
    return (registers_per_element == 0) | (
        (elements_per_thread <= HELD_ELEMENTS)
        & (elements_per_thread * registers_per_element + other_registers <= room)
    )


def fits_shared(sums: Any, row_threads: Any, rows: Any, workload: Norm, device: Device) -> Any:
    """Rows of sums must fit in shared memory, and only one line of threads may add to them."""
    scratch = 8 * ceil_div(row_threads, LANES)
    fits = 4.0 * _sums(workload) * workload.cols + scratch <= device.smem_per_block_bytes
    return (sums != "shared") | ((rows == 1) & fits)


def unroll_is_useful(
    sums: Any, reads: Any, row_threads: Any, vector: Any, unroll: Any, workload: Norm
) -> Any:
    """Vectors in flight are a choice only where the elements of a thread are not unrolled."""
    loops = (reads == 2) & (sums != "registers") & (row_threads * vector * unroll < 2 * workload.cols)
    return (unroll == 1) | loops


def parts_are_useful(sums: Any, rows: Any, vector: Any, blocks: Any, workload: Norm) -> Any:
    """Fewer blocks must be another launch, and partial sums must fit in the scratch memory."""
    fewer = np.asarray(BLOCKS)[np.maximum(0, np.searchsorted(BLOCKS, blocks) - 1)]
    parts = _partial_sums(sums, rows, vector, blocks, workload)
    per_part = np.where(sums == "apart", 1, rows)
    fits = 4.0 * parts * per_part * _sums(workload) * workload.cols <= MAX_SCRATCH_BYTES
    return (blocks == BLOCKS[0]) | ((parts > _partial_sums(sums, rows, vector, fewer, workload)) & fits)


def _partial_sums(sums: Any, rows: Any, vector: Any, blocks: Any, workload: Norm) -> Any:
    """Return the blocks that leave a partial sum of a column: each has rows.

    Args:
        sums: Where gradients of the weights are summed.
        rows: Rows that a block processes at a time.
        vector: Elements of an access.
        blocks: Persistent blocks, or blocks that own columns.
        workload: The workload.
    """
    groups = ceil_div(workload.rows, np.where(sums == "apart", COLUMN_LINES, rows))
    across = np.where(sums == "apart", ceil_div(workload.cols, LANES * vector), 1)
    return np.minimum(groups, ceil_div(blocks, across))


SPACE = Space(
    (
        Parameter("sums", ("registers", "shared", "apart"), "where gradients of the weights are summed"),
        Parameter(
            "reads", (1, 2), "1: a row stays in registers until its means are known; 2: it is read again"
        ),
        Parameter("row_threads", (8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
        Parameter("rows", (1, 2, 4, 8, 16), "rows that a block processes at a time"),
        Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
        Parameter(
            "unroll", (1, 2, 4), "vectors that a thread has in flight where its elements are not unrolled"
        ),
        Parameter("blocks", BLOCKS, "persistent blocks, or blocks that own columns"),
    ),
    (
        lambda row_threads, rows: (row_threads <= 32) | (rows == 1),
        lambda row_threads, rows: (row_threads * rows >= 32) & (row_threads * rows <= 1024),
        # Every row must start at a multiple of an access, or have a vector wherever it starts.
        lambda vector, workload: (
            ((workload.cols % vector == 0) | (workload.cols >= 2 * vector))
            & (vector * itemsize(workload.dtype) <= 16)
        ),
        # Threads without a vector are useless.
        lambda row_threads, vector, workload: (row_threads == 8) | (row_threads * vector < 2 * workload.cols),
        fits_registers,
        fits_shared,
        unroll_is_useful,
        parts_are_useful,
    ),
)


# -- launches -----------------------------------------------------------------------------------------------


def _groups(workload: Norm, config: Config) -> int:
    return int(ceil_div(workload.rows, config["rows"]))


def _grid(workload: Norm, config: Config) -> int:
    """Return the blocks that own rows; they are persistent if they sum gradients."""
    groups = _groups(workload, config)
    return groups if config["sums"] == "apart" else min(config["blocks"], groups)


def _column_grid(workload: Norm, config: Config) -> tuple[int, int]:
    """Return the blocks that own columns: tiles of columns, and parts of the rows."""
    across = int(ceil_div(workload.cols, LANES * config["vector"]))
    max_parts = int(ceil_div(workload.rows, COLUMN_LINES))
    return across, max(1, min(max_parts, int(ceil_div(config["blocks"], across))))


def _parts(workload: Norm, config: Config) -> int:
    """Return the number of partial sums that the last kernel adds."""
    if config["sums"] == "apart":
        return _column_grid(workload, config)[1]
    return _grid(workload, config) * int(config["rows"])


def _inputs(workload: Norm) -> tuple[Argument, ...]:
    return ("x", "gamma", "mean" if is_centred(workload) else "rstd", "rstd", "dy")


def _sizes(*numbers: int) -> tuple[Scalar, ...]:
    return tuple(Scalar("int", number) for number in numbers)


def _rows(workload: Norm, config: Config) -> Launch:
    row_threads, rows, vector, sums = (config[name] for name in ("row_threads", "rows", "vector", "sums"))
    once = config["reads"] == 1
    unrolled = once or sums == "registers"
    batch = int(ceil_div(workload.cols // vector, row_threads)) if unrolled else config["unroll"]
    where = {"registers": "SumsInRegisters", "shared": "SumsInShared", "apart": "SumsApart"}[sums]
    return Launch(
        entry=f"norm_backward<{norm_type(workload)}, {where}, {str(once).lower()}, "
        f"{row_threads}, {rows}, {vector}, {batch}>",
        grid=(_grid(workload, config), 1, 1),
        block=(row_threads * rows, 1, 1),
        arguments=(*_inputs(workload), "dx", "partial", *_sizes(workload.rows, workload.cols)),
        smem_bytes=4 * _sums(workload) * workload.cols if sums == "shared" else 0,
    )


def _columns(workload: Norm, config: Config) -> Launch:
    return Launch(
        entry=f"norm_columns<{norm_type(workload)}, {config['vector']}>",
        grid=(*_column_grid(workload, config), 1),
        block=(LANES * COLUMN_LINES, 1, 1),
        arguments=(*_inputs(workload), "partial", *_sizes(workload.rows, workload.cols)),
    )


def _finish(workload: Norm, config: Config) -> Launch:
    shift = "dbeta" if is_centred(workload) else "dgamma"
    edged = workload.cols % config["vector"] != 0
    lines = f", {config['vector']}, {flag(config['sums'] != 'apart')}" if edged else ""
    return Launch(
        entry=f"norm_finish<{norm_type(workload)}{lines}>",
        grid=(int(ceil_div(_sums(workload) * workload.cols, LANES)), 1, 1),
        block=(LANES * FINISH_LINES, 1, 1),
        arguments=("partial", "dgamma", shift, *_sizes(_parts(workload, config), workload.cols)),
    )


# -- variant ------------------------------------------------------------------------------------------------


class CudaBackwardNorm(CudaVariant[N]):
    """Backward variant for every size and type."""

    name = "cuda_backward"
    direction = "backward"
    space = SPACE

    def default(self, workload: N, device: Device) -> Config:
        """Return sums in registers where they fit, about 16 elements per thread, and some blocks per SM."""
        vector = widest_with_edges(workload)
        row_threads = next((t for t in (8, 16, 32, 64, 128, 256, 512) if workload.cols <= 16 * t), 1024)
        while row_threads > 8 and row_threads * vector >= 2 * workload.cols:
            row_threads //= 2
        rows = max(1, 128 // row_threads) if row_threads <= 32 else 1
        shape = {"row_threads": row_threads, "rows": rows, "vector": vector}
        # As many blocks as an SM has registers for, but several groups each: every block leaves a partial
        # sum.
        resident = device.sm_count * max(2, 512 // (row_threads * rows))
        turns = ceil_div(workload.rows, LEAST_TURNS * rows)
        max_blocks = max(BLOCKS[0], min(resident, max(2 * device.sm_count, turns)))
        usual = [blocks for blocks in reversed(BLOCKS) if blocks <= max_blocks]
        ways = (("registers", 1, 1), ("registers", 2, 1), ("shared", 2, 2), ("shared", 2, 1), ("apart", 2, 1))
        # Blocks that own rows are then many, and those that own columns as many as fit.
        narrow = {**shape, "row_threads": min(row_threads, 128)}
        return SPACE.first_valid(
            (
                {
                    **(narrow if sums == "apart" else shape),
                    "sums": sums,
                    "reads": reads,
                    "unroll": unroll,
                    "blocks": blocks,
                }
                for sums, reads, unroll in ways
                for blocks in (reversed(BLOCKS) if sums == "apart" else usual)
            ),
            workload=workload,
            device=device,
        )

    def tiles(self, workload: N, config: Config) -> tuple[Tiling, ...]:
        """Return the rows of a block, and the elements of an access by all threads of a row."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["row_threads"] * config["vector"]),
        )

    def costs(self, workload: N, table: Table, device: Device) -> Costs:
        """Count the kernel that owns rows, at two operations per instruction.

        An element takes the normalised value, g, its means, dx and, if they are summed here, the gradients of
        the weights. A full block processes the maximum number of groups.
        """
        # A block with room for more rows than there are counts as full.
        rows, sums = np.minimum(table["rows"], workload.rows), table["sums"]
        groups = ceil_div(workload.rows, rows)
        grid = np.where(sums == "apart", groups, np.minimum(table["blocks"], groups))
        turns = ceil_div(groups, grid)
        # The last group may be partial; it belongs to the last of the blocks with the most groups.
        full = groups - grid * (turns - 1) - (workload.rows % rows != 0)
        elements, sum_count = turns * rows * float(workload.cols), _sums(workload)
        # At least; edges are read once, and their sums are in registers.
        in_vectors = elements - turns * rows * edge_elements(workload, table["vector"])
        summed, shared, reads_twice = sums != "apart", sums == "shared", table["reads"] == 2
        fma_per_element = (2.5 if sum_count == 2 else 2.0) + 0.5 * sum_count * summed
        repeated_fma = (1.0 if sum_count == 2 else 0.5) * reads_twice
        far = workload.cols * itemsize(workload.dtype) > 64  # otherwise another row may have brought it to L1
        exchanges = turns * (table["row_threads"] > LANES)
        # A thread adds the products g n of a row sequentially; rows may overlap.
        vectors = ceil_div(least_vectors(workload, table["vector"]), table["row_threads"])
        adds = vectors * table["vector"] - 1
        return Costs(
            blocks=workload.rows / (rows * turns),
            full_blocks=full,
            threads=table["row_threads"] * table["rows"],
            smem_bytes=np.where(shared, 4.0 * sum_count * workload.cols, 0.0),
            fma=fma_per_element * elements + repeated_fma * in_vectors,
            # Each sum is read and written: four bytes per lane, without bank conflicts.
            smem_traffic_bytes=np.where(shared, 8.0 * sum_count * in_vectors, 0.0),
            # One sector at either end of a row may be shared with another row.
            fill_bytes=2.0 * np.maximum(0.0, elements * itemsize(workload.dtype) - 64.0 * turns),
            accesses=in_vectors * ((2.0 * table["reads"] + 1.0) / table["vector"] + 2.0 * sum_count * shared),
            # No other block reads a row; its means are exchanged through shared memory.
            chain_clocks=(device.l2_latency if far else device.l1_latency)
            + exchanges * device.smem_latency
            + adds * device.fma_latency,
            serial_launches=np.where(summed, 2, 3),
            execution=self._execution(workload, table, device, turns, grid),
        )

    def _execution(self, workload: N, table: Table, device: Device, turns: Any, grid: Any) -> Execution:
        """Describe a block that owns rows, and its share of the kernels for columns and for the final sum.

        Args:
            workload: The workload.
            table: Configurations.
            device: The device, for its L2.
            turns: Groups of rows of a block.
            grid: Blocks that own rows.
        """
        sums, reads, row_threads, rows, vector = (
            table[name] for name in ("sums", "reads", "row_threads", "rows", "vector")
        )
        size, sum_count, threads = itemsize(workload.dtype), _sums(workload), row_threads * rows
        shared, apart, held = sums == "shared", sums == "apart", reads == 1
        each = ceil_div(workload.cols // vector, row_threads)  # vectors of a thread
        edged, edges = workload.cols % vector != 0, edge_elements(workload, vector)
        unrolled = held | (sums == "registers")
        batches = np.where(unrolled, 1, ceil_div(each, table["unroll"]))
        lanes = np.minimum(LANES, row_threads)
        accessed = turns * rows * ceil_div(workload.cols // vector, lanes) * lanes
        single = turns * rows * ceil_div(edges, lanes) * lanes
        moved = 3.0 * reads + 1  # x, dy and gamma, and dx
        # Gamma, and x and dy of the kernel for columns, start anywhere: two aligned accesses.
        unaligned = edged * (reads + 2.0 * apart)
        moved_lines = (2.0 * reads + 1) * lines_of_access(edged, vector * size) + reads + 2 * apart
        of_element = 2.0 * (3 + 0.5 * sum_count + 2 * (reads == 2)) + moved * converted(size)
        in_shared = np.where(shared, 2.0 * sum_count * accessed * vector, 0.0)
        exchanged = exchange(row_threads, threads, turns)
        # The kernel for columns reads x and dy again. The last one reads the sums that blocks leave.
        columns_parts = ceil_div(table["blocks"], ceil_div(workload.cols, LANES * vector))
        parts = np.where(apart, np.minimum(columns_parts, ceil_div(workload.rows, COLUMN_LINES)), grid * rows)
        part_bytes = 4.0 * sum_count * workload.cols
        again_bytes = np.where(apart, 2.0 * turns * rows * workload.cols * size, 0.0)
        left_bytes = 2.0 * part_bytes * parts / grid
        row_bytes = sector_bytes(workload.cols * size, workload.cols * size)
        adjacent = np.where(row_threads * vector < workload.cols, row_threads, LANES)
        column_waits = 1 + ceil_div(workload.rows, parts * COLUMN_LINES * 2)
        per_element = 2 * held + sum_count * (sums == "registers")
        in_flight = np.where(unrolled, each, table["unroll"]) * vector * np.where(unrolled, per_element, 2)
        return Execution(
            registers=in_flight + OTHER_REGISTERS + WIDE_REGISTERS * (vector > 1),
            instructions=(accessed * vector + single) / LANES * of_element * np.where(apart, 1.5, 1.0)
            + accessed / LANES * unaligned * shifted_instructions(edged, vector * size)
            + threads / LANES * (PROLOGUE + (STEP + 10 + EDGE_PROLOGUE * edged) * turns * (1 + batches))
            + 2 * exchanged.instructions
            + in_shared / LANES,
            accesses=accessed * (moved + 2 * apart + unaligned)
            + 4.0 * single
            + in_shared
            + 2 * exchanged.accesses,
            passes=accessed / LANES * (moved_lines + unaligned) * l1_passes(adjacent, vector * size)
            + 4.0 * single / LANES * (LANES / lanes + 1)
            + in_shared / LANES,
            l2_bytes=turns * rows * row_bytes * (2 * reads + 1) + again_bytes + left_bytes,
            # The last kernel starts, and adds every 16th part, four in flight.
            memory_waits=turns * batches
            + 1
            + ceil_div(parts, 4 * FINISH_LINES)
            + np.where(apart, column_waits, 0),
            l2_waits=turns * np.where(reads == 2, batches, 0),
            shared_waits=exchanged.waits + np.where(shared, turns * batches, 0),
            barriers=exchanged.barriers,
            memory_bytes=workload.traffic().total_bytes
            + np.where(apart, read_again_bytes(2.0 * workload.rows * workload.cols * size, device), 0.0),
        )

    def scratch(self, workload: N, config: Config) -> tuple[Tensor, ...]:
        """Return the partial sums of the gradients of weights."""
        vector, cols = config["vector"], workload.cols
        pitch = cols if cols % vector == 0 else int(ceil_div(cols + vector - 1, vector)) * vector
        shape = (_parts(workload, config), _sums(workload), pitch)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def source(self, workload: N, config: Config) -> str:
        """Return all kernels; the entries select those that are instantiated."""
        kernels = kernels_for_rows(helpers("norm", "norm_backward"), workload, config)
        return helpers("types", "reduce", "row_block") + kernels

    def launches(self, workload: N, config: Config) -> tuple[Launch, ...]:
        """Launch the kernel that owns rows, then the one for columns if needed, then the final sum."""
        by_columns = (_columns(workload, config),) if config["sums"] == "apart" else ()
        return (_rows(workload, config), *by_columns, _finish(workload, config))

    def emulation_workload(self, workload: N, config: Config) -> N:
        """Return rows for a second iteration of two blocks, the last of them partial."""
        return rows_of(workload, (config["blocks"] + 1) * config["rows"] + 1)
