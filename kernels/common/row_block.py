"""Search space and costs of CUDA C++ kernels that normalise rows: threads share a row.

A thread processes every `row_threads`-th vector of its row, so that the accesses of a warp are contiguous. If
at most a warp shares a row, several rows share a block and reduce by shuffles only. Otherwise a block has one
row. `cache` selects where a row is kept until statistics of all its elements are known:

- ``registers``: unrolled, if the elements of a thread fit; read once.
- ``shared``: in shared memory, if the rows of a block fit as f32; read once.
- ``online``: not kept; statistics are updated while reading, and the row is read a second time.

Vectors are aligned in memory. Where the length of rows is no multiple of them, a row has edges: elements
before its first and after its last vector, which are accessed one by one (row_edges.cuh).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import DType, itemsize
from tunebench.kernels.common.cuda import helpers
from tunebench.kernels.common.expected import (
    LANES,
    LINE,
    PROLOGUE,
    SECTOR,
    STEP,
    converted,
    exchange,
    l1_passes,
    sector_bytes,
)
from tunebench.kernels.common.warp_access import shared_passes
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Execution, Launch, Tiling, ceil_div
from tunebench.workload import Workload

__all__ = [
    "EDGE_PROLOGUE",
    "OTHER_REGISTERS",
    "SPACE",
    "WIDE_REGISTERS",
    "CudaRowBlock",
    "Kept",
    "RowWork",
    "Rows",
    "default_config",
    "edge_elements",
    "kernels_for_rows",
    "least_vectors",
    "lines_of_access",
    "most_held",
    "row_costs",
    "row_space",
    "rows_of",
    "shifted_instructions",
    "widest_vector",
    "widest_with_edges",
]

HELD_ELEMENTS = 64
"""Most elements of a row that a thread keeps in registers."""
OTHER_REGISTERS, WIDE_REGISTERS = 24, 8
"""Further registers of a thread: addresses, loop state and reductions; vectors in flight."""
SCRATCH_BYTES = 128
"""Static shared memory of a block reduction: one f32 for each of at most 32 warps."""
LEAST_VECTORS = 16
"""Vectors in a row from which edges are worth wider accesses."""
EDGE_PROLOGUE = 15
"""Instructions of a warp that find the edges of its row."""
SHIFT_PROLOGUE = 6
"""Instructions of a warp that find the aligned accesses of a vector of weights."""


class Rows(Protocol):
    """A workload on a matrix (rows, cols) of one type."""

    @property
    def rows(self) -> int:
        """Rows."""

    @property
    def cols(self) -> int:
        """Elements of a row."""

    @property
    def dtype(self) -> DType:
        """Type of an element."""


Kept = Callable[[Any], int]
"""Function from a workload to the elements, of all tensors, that are kept for each element of a row."""


def _one(workload: Any) -> int:
    return 1


def _held(workload: Rows, row_threads: Any, vector: Any) -> Any:
    """Return the most elements of a row per thread; the arguments may be columns of a table."""
    vectors = ceil_div(workload.cols // vector, row_threads)
    return vectors * vector + ceil_div(edge_elements(workload, vector), row_threads)


def edge_elements(workload: Rows, vector: Any) -> Any:
    """Return the most elements of a row outside of aligned vectors; `vector` may be a column of a table."""
    return (workload.cols % vector != 0) * 2 * (vector - 1)


def least_vectors(workload: Rows, vector: Any) -> Any:
    """Return the fewest vectors of a row wherever it starts; `vector` may be a column of a table."""
    # A row has the fewest if it starts one element after a multiple of an access.
    return (workload.cols - (workload.cols % vector != 0) * (vector - 1)) // vector


def lines_of_access(edged: Any, lane_bytes: Any, adjacent: Any = LANES) -> Any:
    """Return the mean cache lines for each line that an access of a warp has, for numbers or columns.

    Vectors of rows with edges start anywhere in a line, so that lanes served together may be on two.

    Args:
        edged: Whether rows have edges.
        lane_bytes: Bytes of a lane.
        adjacent: Lanes with adjacent vectors.
    """
    return 1 + edged * (np.minimum(LINE, adjacent * lane_bytes) - lane_bytes) / LINE


def shifted_instructions(edged: Any, lane_bytes: Any) -> Any:
    """Return the further instructions that load a vector of weights in rows with edges (row_edges.cuh).

    Each power of two of the shift selects among the words of two aligned accesses.

    Args:
        edged: Whether rows have edges.
        lane_bytes: Bytes of a vector.
    """
    words = np.maximum(1, lane_bytes // 4)
    return edged * (SHIFT_PROLOGUE + (2 * words - 1) * (1 + np.log2(words)))


def most_held(threads: Any, vector: Any, device: Device) -> Any:
    """Return the elements that a thread can keep without spilling, in a block of `threads` threads.

    Args:
        threads: Threads of a block.
        vector: Elements of an access.
        device: The device, for its registers.
    """
    other_registers = OTHER_REGISTERS + WIDE_REGISTERS * (vector > 1)
    return np.minimum(HELD_ELEMENTS, device.registers_per_sm // threads - other_registers)


CACHES = ("registers", "shared", "online")
"""Where a row may be kept."""


def row_space(kept: Kept = _one, caches: tuple[str, ...] = CACHES, *, edges: bool = False) -> Space:
    """Return the search space of row kernels.

    Args:
        kept: Function to the elements that are kept for each element of a row.
        caches: Values of the parameter `cache`.
        edges: Whether rows may have edges.
    """
    return Space(
        (
            Parameter("cache", caches, "where a row is kept until its statistics are known"),
            Parameter("row_threads", (4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
            Parameter("rows", (1, 2, 4, 8, 16, 32), "rows of a block"),
            Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
            Parameter(
                "unroll", (1, 2, 4), "vectors that a thread has in flight where the row is not in registers"
            ),
        ),
        (
            lambda row_threads, rows: (row_threads <= 32) | (rows == 1),
            lambda row_threads, rows: (row_threads * rows >= 32) & (row_threads * rows <= 1024),
            # Every row must start at a multiple of an access, or have a vector wherever it starts.
            lambda vector, workload: (
                ((workload.cols % vector == 0) | (edges & (workload.cols >= 2 * vector)))
                & (vector * itemsize(workload.dtype) <= 16)
            ),
            # Threads without a vector are useless.
            lambda row_threads, vector, workload: (
                (row_threads == 4) | (row_threads * vector < 2 * workload.cols)
            ),
            lambda cache, row_threads, rows, vector, workload, device: (
                (cache != "registers")
                | (
                    kept(workload) * _held(workload, row_threads, vector)
                    <= most_held(row_threads * rows, vector, device)
                )
            ),
            lambda row_threads, rows, vector, unroll, workload, device: (
                kept(workload) * vector * unroll <= most_held(row_threads * rows, vector, device)
            ),
            lambda cache, rows, workload, device: (
                (cache != "shared") | _fits(kept(workload) * rows * workload.cols, device)
            ),
            lambda cache, row_threads, vector, unroll, workload: (
                (unroll == 1) | ((cache != "registers") & (row_threads * vector * unroll < 2 * workload.cols))
            ),
        ),
    )


def _fits(elements: Any, device: Device) -> Any:
    """Return whether `elements` f32 fit in the shared memory of a block; a number or a column."""
    return 4 * elements + SCRATCH_BYTES <= device.smem_per_block_bytes


SPACE = row_space()


def widest_vector(workload: Rows) -> int:
    """Return the widest access, in elements, at which every row may start."""
    widest = 16 // itemsize(workload.dtype)
    return max(v for v in (1, 2, 4, 8) if v <= widest and workload.cols % v == 0)


def widest_with_edges(workload: Rows) -> int:
    """Return the widest access whose vectors have most of a row's elements wherever it starts."""
    widest = 16 // itemsize(workload.dtype)
    useful = (v for v in (1, 2, 4, 8) if v <= widest and workload.cols >= LEAST_VECTORS * v)
    return max(widest_vector(workload), *useful, 1)


def default_config(
    workload: Rows,
    device: Device,
    kept: Kept = _one,
    caches: tuple[str, ...] = CACHES,
    *,
    edges: bool = False,
) -> Config:
    """Return the widest accesses, and as few threads per row as leave each about 16 elements.

    Args:
        workload: The workload.
        device: The device to choose for.
        kept: Function to the elements that are kept for each element of a row.
        caches: Values of `cache` that the space has.
        edges: Whether rows may have edges.
    """
    vector = widest_with_edges(workload) if edges else widest_vector(workload)
    row_threads = next((t for t in (4, 8, 16, 32, 64, 128, 256, 512) if workload.cols <= 16 * t), 1024)
    while row_threads > 4 and row_threads * vector >= 2 * workload.cols:
        row_threads //= 2
    rows = max(1, 128 // row_threads) if row_threads <= 32 else 1
    elements = kept(workload) * _held(workload, row_threads, vector)
    fits_registers = elements <= most_held(row_threads * rows, vector, device)
    fits = "shared" in caches and _fits(kept(workload) * workload.cols, device)
    cache = "registers" if fits_registers else "shared" if fits else "online"
    unroll = 2 if cache != "registers" and 2 * row_threads * vector < 2 * workload.cols else 1
    return Config(
        {"cache": cache, "row_threads": row_threads, "rows": rows, "vector": vector, "unroll": unroll}
    )


R = TypeVar("R", bound=Workload)


class CudaRowBlock(CudaVariant[R]):
    """A variant whose blocks have some rows, each shared by some threads.

    Attributes:
        caches: Values of the parameter `cache`.
        edges: Whether rows may have edges.
    """

    space = SPACE
    caches: ClassVar[tuple[str, ...]] = CACHES
    edges: ClassVar[bool] = False

    def kept(self, workload: Any) -> int:
        """Return the elements, of all tensors, that are kept for each element of a row (override)."""
        return 1

    def default(self, workload: Any, device: Device) -> Config:
        """Return wide accesses and about 16 elements of each tensor per thread."""
        return default_config(workload, device, self.kept, self.caches, edges=self.edges)

    def tiles(self, workload: Any, config: Config) -> tuple[Tiling, ...]:
        """Return the rows of a block, and the elements of an access by all threads of a row."""
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
            Tiling(dimension="cols", extent=workload.cols, tile=config["row_threads"] * config["vector"]),
        )

    def launch(
        self, workload: Any, config: Config, kernel: str, types: str, arguments: tuple[Argument, ...]
    ) -> tuple[Launch, ...]:
        """Return the launch of one block for every `rows` rows.

        Args:
            workload: The workload.
            config: The configuration.
            kernel: Name of the kernel without that of the cache.
            types: First arguments of its template; the others are sizes.
            arguments: Arguments of the kernel.
        """
        cache, row_threads, rows, vector, unroll = (config[p.name] for p in self.space.parameters)
        # The vectors that a thread processes together: all of its row, or `unroll` of them.
        batch = ceil_div(workload.cols // vector, row_threads) if cache == "registers" else unroll
        kept_bytes = 4 * self.kept(workload) * rows * workload.cols
        return (
            Launch(
                entry=f"{kernel}_{cache}<{types}, {row_threads}, {rows}, {vector}, {batch}>",
                grid=(ceil_div(workload.rows, rows), 1, 1),
                block=(row_threads * rows, 1, 1),
                arguments=arguments,
                smem_bytes=kept_bytes if cache == "shared" else 0,
            ),
        )

    def emulation_workload(self, workload: R, config: Config) -> R:
        """Return two full blocks of rows and a partial one; the length of rows decides the unrolling."""
        return rows_of(workload, 2 * config["rows"] + 1)


def kernels_for_rows(kernels: str, workload: Rows, config: Config) -> str:
    """Return the text of kernels for the rows of a workload.

    With edges, `EdgedShare` and `EdgedPart` replace `Share` and `Part`, and lines that end with `// aligned`
    are left out. Without edges, lines that end with `// edges` are.

    Args:
        kernels: The text, with lines for edges.
        workload: The workload.
        config: The configuration.
    """
    edged = workload.cols % config["vector"] != 0
    other_lines = "  // aligned\n" if edged else "  // edges\n"
    text = "".join(line for line in kernels.splitlines(keepends=True) if not line.endswith(other_lines))
    if not edged:
        return text
    for shared in _SHARED:
        text = text.replace(shared, f"Edged{shared}")
    return helpers("row_edges") + text


_SHARED = ("Share<ROW_THREADS, ROWS, V> my(", "Part<THREADS, V>")
"""Uses of the types that edges replace."""


def rows_of(workload: R, rows: int) -> R:
    """Return the workload with at most `rows` rows."""
    return dataclasses.replace(workload, rows=min(workload.rows, rows))  # type: ignore[attr-defined, call-arg]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """Work of a row kernel for each element of a row.

    Attributes:
        row_tensors: Inputs whose elements are each read by one block only.
        fma: Multiply-adds of an element if the row is kept, and if it is read twice.
        sfu: Special functions of an element, likewise.
        sums: Reductions over a row that add one number for each vector of a thread.
        row_outputs: Outputs of the size of the matrix.
        reductions: Sequential reductions over a row; a kept row is read after each.
        kept: Function to the elements that are kept for each element of a row.
        read_again: Inputs that are read twice if the row is not kept; None for all of them.
        weights: Vectors of the length of a row that all rows read for their results.
    """

    row_tensors: int
    fma: tuple[float, float]
    sfu: tuple[float, float]
    sums: int
    row_outputs: int = 1
    reductions: int = 2
    kept: Kept = _one
    read_again: int | None = None
    weights: int = 0


def row_costs(workload: Rows, table: Table, device: Device, work: RowWork) -> Costs:
    """Return the costs of a row kernel.

    Args:
        workload: The workload.
        table: Configurations of a `row_space`.
        device: The device, for its latencies.
        work: Work for each element.
    """
    rows = np.minimum(table["rows"], workload.rows)  # a block with room for more rows counts as full
    elements = rows * float(workload.cols)
    # At least; edges stay in registers.
    in_vectors = elements - rows * edge_elements(workload, table["vector"])
    shared, online = table["cache"] == "shared", table["cache"] == "online"
    # One sector at either end may be shared with another row.
    fill_bytes = np.maximum(0.0, (elements * itemsize(workload.dtype) - 64.0) * work.row_tensors)
    repeated_reads = work.row_tensors if work.read_again is None else work.read_again
    vectors = work.row_tensors + repeated_reads * online + work.row_outputs
    waiting = np.where(shared, work.kept(workload) * (1.0 + work.reductions) * in_vectors, 0.0)
    scratch_bytes = np.where(table["row_threads"] > 32, table["row_threads"] / 8.0, 0.0)
    return Costs(
        blocks=workload.rows / rows,
        full_blocks=workload.rows // rows,
        threads=table["row_threads"] * table["rows"],
        smem_bytes=np.where(shared, 4.0 * work.kept(workload) * table["rows"] * workload.cols, 0.0)
        + scratch_bytes,
        fma=elements * work.fma[0] + np.where(online, in_vectors * (work.fma[1] - work.fma[0]), 0.0),
        sfu=elements * np.where(online, work.sfu[1], work.sfu[0]),
        # Written once and read after each reduction: four bytes per lane, without bank conflicts.
        smem_traffic_bytes=4.0 * waiting,
        fill_bytes=fill_bytes,
        # Vectors are read once or twice, and written; a row in shared memory is accessed by single elements.
        # Edges, which take more accesses, count as vectors.
        accesses=elements * vectors / table["vector"] + waiting,
        chain_clocks=_chain_clocks(workload, table, device, work.sums, work.reductions),
        execution=_execution(workload, table, device, work),
    )


def _execution(workload: Rows, table: Table, device: Device, work: RowWork) -> Execution:
    """Describe a block: loads of the row, reductions, and results.

    A row in registers is loaded at once. Otherwise a thread waits for its edges, if any, and for every
    `unroll` vectors; if it reads the row again, L2 answers.
    """
    names = ("cache", "row_threads", "rows", "vector", "unroll")
    cache, row_threads, rows, vector, unroll = (table[name] for name in names)
    kept, shared, online = cache == "registers", cache == "shared", cache == "online"
    size, threads = itemsize(workload.dtype), row_threads * rows
    again = work.row_tensors if work.read_again is None else work.read_again
    vectors = ceil_div(workload.cols // vector, row_threads)  # of a thread
    turns = np.where(kept, 1, ceil_div(vectors, unroll))
    edged, edges = workload.cols % vector != 0, edge_elements(workload, vector)
    # A warp with any vector takes as long as a full one.
    lanes = np.minimum(LANES, row_threads)
    accessed = rows * ceil_div(workload.cols // vector, lanes) * lanes  # vectors of a matrix
    moved = work.row_tensors + again * online + work.row_outputs
    single = rows * ceil_div(edges, lanes) * lanes  # edges of a matrix, which are read once
    moved_single = work.row_tensors + work.row_outputs
    adjacent = np.where(row_threads * vector < workload.cols, row_threads, LANES)
    lane_bytes = vector * size
    lines = lines_of_access(edged, lane_bytes, adjacent)
    # Weights of vectors that start anywhere are two aligned accesses.
    weights = work.weights * (1 + edged)
    passes = accessed / LANES * (moved * lines + weights) * l1_passes(adjacent, lane_bytes)
    # The last elements of a row are next to the first ones of the next row.
    passes = passes + single / LANES * (moved_single + work.weights) * (LANES / lanes + 1)
    kept_words = accessed * vector * work.kept(workload) * (1.0 + work.reductions) * shared
    conflicts = np.array([_kept_passes(int(count), workload.cols) for count in row_threads])
    exchanged = exchange(row_threads, threads, work.reductions)
    # Two operations of each multiply-add are expected to be two instructions.
    fma, sfu = (np.where(online, counts[1], counts[0]) for counts in (work.fma, work.sfu))
    of_element = 2 * fma + sfu + converted(size) * (moved + work.weights)
    unrolled = np.where(kept, vectors, unroll) * vector + ceil_div(edges, row_threads)
    row_bytes, pitch = workload.cols * size, workload.cols * size
    # Lanes of a warp store one run; what they load is in L1 for the next warp of the row.
    run = np.minimum(row_bytes, lanes * lane_bytes)
    run_bytes = np.where(edged, run + SECTOR - lane_bytes, sector_bytes(run, pitch))
    stored = row_bytes / run * run_bytes + edged * 2 * SECTOR
    # L1 holds weights if they take at most half of it.
    missed = work.weights * row_bytes if 2 * work.weights * row_bytes > device.smem_per_sm_bytes else 0
    return Execution(
        registers=unrolled * work.kept(workload) + OTHER_REGISTERS + WIDE_REGISTERS * (vector > 1),
        instructions=(accessed * vector + single) / LANES * of_element
        + accessed / LANES * work.weights * shifted_instructions(edged, lane_bytes)
        + threads
        / LANES
        * (PROLOGUE + EDGE_PROLOGUE * edged + STEP * turns * np.where(kept, 1, 1 + work.reductions))
        + exchanged.instructions,
        accesses=accessed * (moved + weights)
        + single * (moved_single + work.weights)
        + kept_words
        + exchanged.accesses,
        passes=passes + kept_words / LANES * conflicts,
        l2_bytes=rows
        * (
            (work.row_tensors + again * online) * sector_bytes(row_bytes, pitch)
            + work.row_outputs * stored
            + missed
        ),
        memory_waits=turns + (edged & ~kept),
        l2_waits=np.where(online & (again > 0), turns, (work.weights > 0) * turns),
        shared_waits=exchanged.waits + np.where(shared, work.reductions * turns, 0),
        barriers=exchanged.barriers,
        code_bytes=16 * of_element * unrolled,
    )


@functools.lru_cache(256)
def _kept_passes(row_threads: int, cols: int) -> int:
    """Return the passes of a warp's access to rows in shared memory: an element of each thread's vector."""
    lane = np.arange(LANES)
    return shared_passes(lane // row_threads * cols + lane % row_threads, 1)


def _chain_clocks(workload: Rows, table: Table, device: Device, sums: int, reductions: int) -> Any:
    """Return the clocks from a row's first load to its statistics.

    No other block reads the row, so that it comes from L2. Reductions within a warp are not counted. If a row
    is not kept, all sums are updated together, and one addition per vector waits for the previous one.
    """
    vector = table["vector"]
    vectors = ceil_div(least_vectors(workload, vector), table["row_threads"])
    adds = np.where(table["cache"] == "online", min(sums, 1), sums) * (vectors - 1)
    exchanges = reductions * (table["row_threads"] > 32)  # through shared memory
    far = workload.cols * itemsize(workload.dtype) > 64  # otherwise another row may have brought it to L1
    first = device.l2_latency if far else device.l1_latency
    return first + exchanges * device.smem_latency + adds * device.fma_latency
