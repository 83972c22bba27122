"""Search space and costs of CUDA kernels for few long rows: blocks share a row, in two launches.

The first launch stores the contribution of each part of a row in scratch memory. In the second, each block
merges the contributions of its row, in a fixed order, and writes its part. The first block of a row also has
its edges: elements before the first and after the last vector that is aligned in memory (row_edges.cuh).
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.common.expected import PROLOGUE, STEP, converted, exchange, l1_passes, sector_bytes
from tunebench.kernels.common.row_block import (
    EDGE_PROLOGUE,
    OTHER_REGISTERS,
    WIDE_REGISTERS,
    Rows,
    edge_elements,
    least_vectors,
    lines_of_access,
    most_held,
    rows_of,
    widest_with_edges,
)
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, CudaVariant, Execution, Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor, Workload

__all__ = ["CudaRowSplit", "part_costs", "read_again_bytes", "split_space"]

R = TypeVar("R", bound=Workload)

SPLITS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
WARP = 32
"""Vectors that a warp accesses at once; parts start at multiples of them."""
MOST_BLOCKS = 4
"""Blocks per SM above which rows are not split further."""


def _lines(workload: Rows, vector: Any) -> Any:
    """Return the least warp accesses of a row, the last one possibly partial; for numbers or columns."""
    return ceil_div(least_vectors(workload, vector), WARP)


def split_space(tensors: int = 1) -> Space:
    """Return the search space of kernels that load vectors of `tensors` tensors at the same time."""
    return Space(
        (
            Parameter("split", SPLITS, "blocks that share a row"),
            Parameter("threads", (64, 128, 256, 512, 1024), "threads of a block"),
            Parameter("vector", (1, 2, 4, 8), "elements of an access, up to 16 bytes"),
            Parameter("unroll", (1, 2, 4), "vectors that a thread has in flight"),
        ),
        (
            lambda split, workload, device: workload.rows * (split // 2) < MOST_BLOCKS * device.sm_count,
            lambda vector, workload: vector * itemsize(workload.dtype) <= 16,
            # Threads without a vector are useless, and so are empty parts.
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
"""Columns from which a valid configuration exists for every alignment."""


def _is_useful(workload: Rows, split: int, threads: int, vector: int, unroll: int) -> bool:
    elements_per_turn = split * threads * vector * unroll
    return bool(_lines(workload, vector) >= split and elements_per_turn < 2 * workload.cols)


class CudaRowSplit(CudaVariant[R]):
    """A variant for few long rows, each split among `split` blocks.

    Attributes:
        partial_shape: Shape of the numbers that each part of a row leaves behind.
    """

    space = SPACE
    partial_shape: ClassVar[tuple[int, ...]] = (2,)

    def limits(self, workload: Any, device: Device) -> str | None:
        """Return why rows are not worth splitting, or None if they are."""
        if workload.cols < LEAST_COLS:
            return (
                f"rows of {workload.cols} elements are too short to be split; expected {LEAST_COLS} or more"
            )
        if workload.rows >= MOST_BLOCKS * device.sm_count:
            return f"{workload.rows} rows keep the device busy without being split"
        return None

    def default(self, workload: Any, device: Device) -> Config:
        """Return wide accesses, two blocks per SM, and threads with some vectors each."""
        vector, split = widest_with_edges(workload), SPLITS[0]
        while split < SPLITS[-1] and 2 * split * workload.rows <= 2 * device.sm_count:
            split *= 2
        # The part of a block keeps 64 threads busy with one access each.
        while split > SPLITS[0] and split * 64 * vector > workload.cols:
            split //= 2
        while vector > 1 and not _is_useful(workload, split, 64, vector, 1):
            vector //= 2
        threads = max(t for t in (64, 128, 256) if t == 64 or 4 * split * t * vector <= workload.cols)
        unroll = max(u for u in (1, 2, 4) if u == 1 or _is_useful(workload, split, threads, vector, u))
        return Config({"split": split, "threads": threads, "vector": vector, "unroll": unroll})

    def tiles(self, workload: Any, config: Config) -> tuple[Tiling, ...]:
        """Return one row per block, and the elements of a part: equal parts up to whole warp accesses."""
        lines = ceil_div(workload.cols // config["vector"], WARP)
        part = ceil_div(lines, config["split"]) * WARP * config["vector"]
        return (
            Tiling(dimension="rows", extent=workload.rows, tile=1),
            Tiling(dimension="cols", extent=workload.cols, tile=int(part)),
        )

    def scratch(self, workload: Any, config: Config) -> tuple[Tensor, ...]:
        """Return memory for the numbers of each part."""
        shape = (workload.rows, config["split"], *self.partial_shape)
        return (Tensor(name="partial", shape=shape, dtype="f32"),)

    def launch(self, workload: Any, config: Config, kernel: str, types: str, *arguments: Argument) -> Launch:
        """Return the launch of a block for every part of a row.

        Args:
            workload: The workload.
            config: The configuration.
            kernel: Name of the kernel.
            types: First arguments of its template; the others are sizes.
            arguments: Arguments of the kernel before the length of rows.
        """
        return Launch(
            entry=f"{kernel}<{types}, {config['threads']}, {config['vector']}, {config['unroll']}>",
            grid=(workload.rows, config["split"], 1),
            block=(config["threads"], 1, 1),
            arguments=(*arguments, Scalar("int", workload.cols)),
        )

    def emulation_workload(self, workload: R, config: Config) -> R:
        """Return two rows; their length decides the size of the parts."""
        return rows_of(workload, 2)


def part_costs(
    workload: Rows,
    table: Table,
    device: Device,
    *,
    row_tensors: int,
    fma: Any,
    sfu: float,
    reductions: int,
    read_again: int = 0,
) -> Costs:
    """Return the costs of the first launch; lower bounds of consecutive launches are not added.

    A block is expected to take the time of both launches.

    Args:
        workload: The workload.
        table: Configurations of a `split_space`.
        device: The device, for its latencies.
        row_tensors: Inputs whose elements are each read by one block only.
        fma: Multiply-adds of an element, a number or a column.
        sfu: Special functions of an element.
        reductions: Block reductions over a part.
        read_again: Inputs that the second launch reads, to write a result of their size; 0 if a warp finishes
            a row.
    """
    split, vector = table["split"], table["vector"]
    elements = 1.0 * (_lines(workload, vector) // split * WARP * vector)
    exchanges = table["threads"] > WARP
    return Costs(
        # Some parts have one more warp access; the last one may have less.
        blocks=np.minimum(workload.rows * split, workload.rows * (workload.cols / elements)),
        full_blocks=workload.rows * (split - 1),
        threads=table["threads"],
        smem_bytes=np.where(exchanges, table["threads"] / 8.0, 0.0),
        fma=fma * elements,
        sfu=sfu * elements,
        # One sector at either end may be shared with another part.
        fill_bytes=np.maximum(0.0, (elements * itemsize(workload.dtype) - 64.0) * row_tensors),
        accesses=elements * row_tensors / vector,
        # The first load, one addition per vector of a thread, and exchanges through shared memory.
        chain_clocks=device.l2_latency
        + device.fma_latency * (ceil_div(elements, table["threads"] * vector) - 1.0)
        + np.where(exchanges, reductions * device.smem_latency, 0.0),
        serial_launches=2,
        execution=_execution(
            workload,
            table,
            device,
            of_element=2 * fma + sfu,
            reductions=reductions,
            first=row_tensors,
            second=read_again,
        ),
    )


def read_again_bytes(total_bytes: Any, device: Device) -> Any:
    """Return the bytes of a second launch that memory answers again: L2 holds only a part of the first's.

    Args:
        total_bytes: Bytes that both launches read.
        device: The device, for its L2.
    """
    return np.maximum(0.0, 1.0 * total_bytes - device.l2_bytes)


def _execution(
    workload: Any, table: Table, device: Device, *, of_element: Any, reductions: int, first: int, second: int
) -> Execution:
    """Describe a block of either launch, one after the other.

    Args:
        workload: The workload.
        table: Configurations of a `split_space`.
        device: The device, for its L2.
        of_element: Instructions of an element, without conversions.
        reductions: Block reductions over a part.
        first: Inputs that the first launch reads.
        second: Inputs that the second launch reads; then it also writes a result of their size.
    """
    split, threads, vector, unroll = (table[name] for name in ("split", "threads", "vector", "unroll"))
    size, warps = itemsize(workload.dtype), threads / WARP
    part = ceil_div(_lines(workload, vector), split) * WARP  # vectors
    turns, writes = ceil_div(ceil_div(part, threads), unroll), second > 0
    moved = first + second + writes
    edged, edges = workload.cols % vector != 0, edge_elements(workload, vector)
    pitch, run = workload.cols * size, WARP * vector * size
    part_bytes = sector_bytes(part * vector * size, pitch)
    exchanged = exchange(threads, threads, reductions * (1 + writes))
    reads_bytes = float(second * workload.rows * workload.cols * size)
    return Execution(
        registers=first * vector * unroll + OTHER_REGISTERS + WIDE_REGISTERS * (vector > 1),
        instructions=part * vector / WARP * ((1 + writes) * of_element + moved * converted(size))
        + warps * (1 + writes) * (PROLOGUE + EDGE_PROLOGUE * edged + STEP * turns)
        + exchanged.instructions,
        accesses=part * moved + edges / split * moved + exchanged.accesses,
        passes=part / WARP * moved * l1_passes(WARP, vector * size) * lines_of_access(edged, vector * size),
        l2_bytes=(first + second) * part_bytes
        + writes * part * vector * size / run * sector_bytes(run, pitch),
        # The second launch starts, and waits for the numbers of all parts. Edges are in flight meanwhile.
        memory_waits=turns + 2,
        l2_waits=turns * writes,
        shared_waits=exchanged.waits,
        barriers=exchanged.barriers,
        memory_bytes=workload.traffic().total_bytes + read_again_bytes(reads_bytes, device),
    )
