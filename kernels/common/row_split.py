"""Rows that are too few and too long for a block each: several blocks share one, and a second launch ends it.

The first launch leaves what each part adds to the row in scratch memory; the second has as many blocks, of
which each puts the parts of its row together again, in an order that is always the same, before it writes its
own.
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.row_block import Rows, most_held, widest_vector
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Costs, Tiling, ceil_div

__all__ = ["SPACE", "block", "default_config", "grid", "part_costs", "refusal", "split_space", "tiles"]

SPLITS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
WARP = 32
"""Vectors that a warp accesses at once; parts begin at multiples of them."""
MOST_BLOCKS = 4
"""Blocks for each SM beyond which rows are not split any further."""


def _lines(workload: Rows, vector: Any) -> Any:
    """Return what a row has of the accesses of a warp, the last one cut perhaps; for columns too."""
    return ceil_div(workload.cols // vector, WARP)


def split_space(tensors: int = 1) -> Space:
    """Return the space of kernels that have vectors of so many tensors in flight together."""
    return Space(
        (
            Parameter("split", SPLITS, "blocks that share a row"),
            Parameter("threads", (64, 128, 256, 512, 1024), "threads of a block"),
            Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
            Parameter("unroll", (1, 2, 4), "vectors a thread has in flight"),
        ),
        (
            lambda split, workload, device: workload.rows * (split // 2) < MOST_BLOCKS * device.sm_count,
            # Every row must begin at a multiple of an access.
            lambda vector, workload: (
                (workload.cols % vector == 0) & (vector * itemsize(workload.dtype) <= 16)
            ),
            # Threads without a vector are of no use, nor are parts that have none.
            lambda split, threads, vector, unroll, workload: (
                (_lines(workload, vector) >= split)
                & (1.0 * split * threads * vector * unroll < 2 * workload.cols)
            ),
            lambda threads, vector, unroll, device: (
                tensors * vector * unroll <= most_held(threads, vector, device)
            ),
        ),
    )


SPACE = split_space()
LEAST_COLS = 2 * 2 * 64
"""Columns from which on there is a valid configuration, whatever the alignment."""


def refusal(workload: Rows, device: Device) -> str | None:
    """Return why rows are not worth splitting, or None if they are."""
    if workload.cols < LEAST_COLS:
        return f"rows of {workload.cols} elements are too short to be split"
    if workload.rows >= MOST_BLOCKS * device.sm_count:
        return f"{workload.rows} rows are enough for all of the device without being split"
    return None


def default_config(workload: Rows, device: Device) -> Config:
    """Return wide accesses, two blocks for each SM, and threads that have some vectors each."""
    vector, split = widest_vector(workload), SPLITS[0]
    while split < SPLITS[-1] and 2 * split * workload.rows <= 2 * device.sm_count:
        split *= 2
    # A block's part keeps 64 threads busy with an access each.
    while split > SPLITS[0] and split * 64 * vector > workload.cols:
        split //= 2
    while vector > 1 and not _is_of_use(workload, split, 64, vector, 1):
        vector //= 2
    threads = max(t for t in (64, 128, 256) if t == 64 or 4 * split * t * vector <= workload.cols)
    unroll = max(u for u in (1, 2, 4) if u == 1 or _is_of_use(workload, split, threads, vector, u))
    return Config({"split": split, "threads": threads, "vector": vector, "unroll": unroll})


def _is_of_use(workload: Rows, split: int, threads: int, vector: int, unroll: int) -> bool:
    each = split * threads * vector * unroll
    return bool(_lines(workload, vector) >= split and each < 2 * workload.cols)


def grid(workload: Rows, config: Config) -> tuple[int, int, int]:
    """Return the blocks of a launch: rows, and parts of a row."""
    return (workload.rows, int(config["split"]), 1)


def block(config: Config) -> tuple[int, int, int]:
    """Return the threads of a block."""
    return (int(config["threads"]), 1, 1)


def tiles(workload: Rows, config: Config) -> tuple[Tiling, ...]:
    """Return how blocks cut rows: a row each, and equal parts of it, as far as whole accesses go."""
    part = ceil_div(_lines(workload, config["vector"]), config["split"]) * WARP * config["vector"]
    return (
        Tiling(dimension="rows", extent=workload.rows, tile=1),
        Tiling(dimension="cols", extent=workload.cols, tile=int(part)),
    )


def part_costs(
    workload: Rows,
    table: Table,
    device: Device,
    *,
    row_tensors: int,
    fma: Any,
    sfu: float,
    reductions: int,
) -> Costs:
    """Return what the first launch must do: floors of launches that follow each other are not added.

    Args:
        workload: The matrix.
        table: Configurations of `SPACE`.
        device: Whose latencies hold.
        row_tensors: Inputs of which every element is read by one block alone.
        fma: Multiply-adds an element, a number or a column.
        sfu: Special functions an element.
        reductions: Of a block over its part.
    """
    split, vector = table["split"], table["vector"]
    elements = 1.0 * (_lines(workload, vector) // split * WARP * vector)
    met = table["threads"] > WARP
    return Costs(
        # Some parts have one access of a warp more, the last one may have less.
        blocks=np.minimum(workload.rows * split, workload.rows * (workload.cols / elements)),
        full_blocks=workload.rows * (split - 1),
        threads=table["threads"],
        smem_bytes=np.where(met, table["threads"] / 8.0, 0.0),
        fma=fma * elements,
        sfu=sfu * elements,
        # A sector at either end may have come with a neighbour's part.
        fill_bytes=np.maximum(0.0, (elements * itemsize(workload.dtype) - 64.0) * row_tensors),
        accesses=elements * row_tensors / vector,
        # The first load; a thread's additions, one a vector; what the threads of a block leave each other.
        chain_clocks=device.l2_latency
        + device.fma_latency * (ceil_div(elements, table["threads"] * vector) - 1.0)
        + np.where(met, reductions * device.smem_latency, 0.0),
        serial_launches=2,
    )
