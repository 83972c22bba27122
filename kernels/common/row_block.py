"""The space of kernels that normalise rows in CUDA C++: threads a row, accesses, where a row is kept.

A thread takes every `row_threads`-th vector of its row, so that a warp's accesses are contiguous. Up to a
warp a row, several rows share a block and reduce by shuffles alone; above, a row has a block of its own.
`cache` says where a row waits for what is computed of the whole of it:

- ``registers``: unrolled, as long as a thread's share fits; read once.
- ``shared``: as long as the rows of a block fit as f32; read once.
- ``online``: nowhere: it is summed up on the way and read a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import DType, itemsize
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Tiling, ceil_div

__all__ = [
    "SPACE",
    "Kept",
    "Rows",
    "batch",
    "default_config",
    "most_held",
    "row_costs",
    "row_space",
    "smem_bytes",
    "tiles",
    "widest_vector",
]

HELD_ELEMENTS = 64
"""Most elements of a row that a thread keeps in registers."""
OTHER_REGISTERS, WIDE_REGISTERS = 24, 8
"""What a thread needs besides those: addresses, loop state, what reductions use; and vectors under way."""
SCRATCH_BYTES = 128
"""Static shared memory of a reduction over a block: one f32 for each of at most 32 warps."""


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
"""How many elements of a workload wait for each element of a row: those of several tensors, perhaps."""


def _one(workload: Any) -> int:
    return 1


def _held(workload: Rows, row_threads: Any, vector: Any) -> Any:
    """Return the elements of a row that each of its threads keeps in registers, for columns too."""
    return ceil_div(workload.cols, row_threads * vector) * vector


def most_held(threads: Any, vector: Any, device: Device) -> Any:
    """Return how many a thread can keep in a block of so many threads without spilling."""
    others = OTHER_REGISTERS + WIDE_REGISTERS * (vector > 1)
    return np.minimum(HELD_ELEMENTS, device.registers_per_sm // threads - others)


CACHES = ("registers", "shared", "online")
"""Where a row may wait."""


def row_space(kept: Kept = _one, caches: tuple[str, ...] = CACHES) -> Space:
    """Return the space of kernels that keep `kept` elements for each of a row, in some of the `CACHES`."""
    return Space(
        (
            Parameter("cache", caches, "where a row waits until all of it is known"),
            Parameter("row_threads", (4, 8, 16, 32, 64, 128, 256, 512, 1024), "threads that share a row"),
            Parameter("rows", (1, 2, 4, 8, 16, 32), "rows of a block"),
            Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
            Parameter(
                "unroll", (1, 2, 4), "vectors a thread has in flight where the row is not in registers"
            ),
        ),
        (
            lambda row_threads, rows: (row_threads <= 32) | (rows == 1),
            lambda row_threads, rows: (row_threads * rows >= 32) & (row_threads * rows <= 1024),
            # Every row must begin at a multiple of an access.
            lambda vector, workload: (
                (workload.cols % vector == 0) & (vector * itemsize(workload.dtype) <= 16)
            ),
            # Threads without a vector are of no use.
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
    """Tell whether so many f32 fit the shared memory of a block, for columns too."""
    return 4 * elements + SCRATCH_BYTES <= device.smem_per_block_bytes


SPACE = row_space()


def widest_vector(workload: Rows) -> int:
    """Return the most elements of an access at which every row may begin."""
    widest = 16 // itemsize(workload.dtype)
    return max(v for v in (1, 2, 4, 8) if v <= widest and workload.cols % v == 0)


def default_config(
    workload: Rows, device: Device, kept: Kept = _one, caches: tuple[str, ...] = CACHES
) -> Config:
    """Return the widest accesses, and as few threads a row as leave each about 16 elements."""
    vector = widest_vector(workload)
    row_threads = next((t for t in (4, 8, 16, 32, 64, 128, 256, 512) if workload.cols <= 16 * t), 1024)
    while row_threads > 4 and row_threads * vector >= 2 * workload.cols:
        row_threads //= 2
    rows = max(1, 128 // row_threads) if row_threads <= 32 else 1
    elements = kept(workload) * _held(workload, row_threads, vector)
    held = elements <= most_held(row_threads * rows, vector, device)
    fits = "shared" in caches and _fits(kept(workload) * workload.cols, device)
    cache = "registers" if held else "shared" if fits else "online"
    unroll = 2 if cache != "registers" and 2 * row_threads * vector < 2 * workload.cols else 1
    return Config(
        {"cache": cache, "row_threads": row_threads, "rows": rows, "vector": vector, "unroll": unroll}
    )


def batch(workload: Rows, config: Config) -> int:
    """Return the vectors a thread handles together: all of its row, or `unroll` of them."""
    if config["cache"] != "registers":
        return int(config["unroll"])
    vector = config["vector"]
    return int(_held(workload, config["row_threads"], vector) // vector)


def smem_bytes(workload: Rows, config: Config, kept: Kept = _one) -> int:
    """Return the dynamic shared memory of a block, which keeps its rows as f32."""
    return int(4 * kept(workload) * config["rows"] * workload.cols) if config["cache"] == "shared" else 0


def tiles(workload: Rows, config: Config) -> tuple[Tiling, ...]:
    """Return how blocks cut the rows, and accesses of all threads of a row its elements."""
    return (
        Tiling(dimension="rows", extent=workload.rows, tile=config["rows"]),
        Tiling(dimension="cols", extent=workload.cols, tile=config["row_threads"] * config["vector"]),
    )


def row_costs(
    workload: Rows,
    table: Table,
    device: Device,
    *,
    row_tensors: int,
    fma: tuple[float, float],
    sfu: tuple[float, float],
    sums: int,
    row_outputs: int = 1,
    reductions: int = 2,
    kept: Kept = _one,
    read_again: int | None = None,
) -> Costs:
    """Return what any such kernel must do.

    Args:
        workload: The matrix.
        table: Configurations of `SPACE`.
        device: Whose latencies hold.
        row_tensors: Inputs of which every element is read by one block alone.
        fma: Multiply-adds an element, if the row is kept and if it is read twice.
        sfu: Special functions an element, likewise.
        sums: Of the reductions over a row, those that add up one figure of each of a thread's vectors.
        row_outputs: Outputs as large as the matrix.
        reductions: Reductions over a row, one after the other; a row that waits is read after each.
        kept: Elements that wait for each of a row.
        read_again: Inputs that are read a second time if the row is not kept; all of them if None.
    """
    rows = np.minimum(table["rows"], workload.rows)  # a block with room for more is as full as any
    elements = rows * float(workload.cols)
    shared, online = table["cache"] == "shared", table["cache"] == "online"
    # A sector at either end may have come with a neighbour's row.
    fill_bytes = np.maximum(0.0, (elements * itemsize(workload.dtype) - 64.0) * row_tensors)
    again = row_tensors if read_again is None else read_again
    vectors = row_tensors + again * online + row_outputs
    waiting = np.where(shared, kept(workload) * (1.0 + reductions) * elements, 0.0)
    scratch_bytes = np.where(table["row_threads"] > 32, table["row_threads"] / 8.0, 0.0)
    return Costs(
        blocks=workload.rows / rows,
        full_blocks=workload.rows // rows,
        threads=table["row_threads"] * table["rows"],
        smem_bytes=np.where(shared, 4.0 * kept(workload) * table["rows"] * workload.cols, 0.0)
        + scratch_bytes,
        fma=elements * np.where(online, fma[1], fma[0]),
        sfu=elements * np.where(online, sfu[1], sfu[0]),
        # Written once and read after each reduction, four bytes a lane, without conflicts.
        smem_traffic_bytes=4.0 * waiting,
        fill_bytes=fill_bytes,
        # Vectors are read, once or twice, and written; what waits in shared memory is so by single elements.
        accesses=elements * vectors / table["vector"] + waiting,
        chain_clocks=_chain_clocks(workload, table, device, sums, reductions),
    )


def _chain_clocks(workload: Rows, table: Table, device: Device, sums: int, reductions: int) -> Any:
    """Return the clocks from a row's first load on: what a thread adds up, and what its block reduces.

    Nobody else reads the row, so that it comes from L2. Reductions within a warp are not counted. Where a
    row is not kept, all sums are taken together: then one addition a vector waits for the one before.
    """
    vectors = ceil_div(workload.cols, table["row_threads"] * table["vector"])
    adds = np.where(table["cache"] == "online", min(sums, 1), sums) * (vectors - 1)
    met = reductions * (table["row_threads"] > 32)  # by way of shared memory
    far = workload.cols * itemsize(workload.dtype) > 64  # else a neighbour's row may have brought it to L1
    first = device.l2_latency if far else device.l1_latency
    return first + met * device.smem_latency + adds * device.fma_latency
