"""Tiles of a block that multiplies by wgmma: warpgroups, registers, shared memory, tensor maps, constraints.

Used by gemm, gated_gemm, conv2d and attention. The constraints are for spaces with the parameters bm, bn,
consumers, pingpong and min_blocks. A consumer is a warpgroup that multiplies; the producer is the warpgroup
that copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import DType, itemsize
from tunebench.kernels.common.product_execution import (
    FINISHING,
    INSTRUCTION_BYTES,
    LOOP_INSTRUCTIONS,
    START_CLOCKS,
    Results,
    chosen,
    direct_results,
    staged_results,
)
from tunebench.space import Config, Constraint, Table, takes_config
from tunebench.variant import Execution, TensorMap
from tunebench.workload import Tensor

__all__ = [
    "AFFORDABLE_FMA",
    "LINE_BYTES",
    "MOST_EXTENT",
    "OTHER_REGISTERS",
    "PRODUCER_REGISTERS",
    "TILE",
    "consumer_registers",
    "consumers_share_the_tile",
    "launched_registers",
    "least_copied",
    "main_loop",
    "moved_registers",
    "panel_map",
    "registers_move",
    "results",
    "rows",
    "shared_memory_fits",
    "smem_bytes",
    "staging_bytes",
    "sums",
    "sums_stay_in_registers",
    "threads",
]

TILE = ("bm", "bn", "bk", "consumers", "stages", "staged")
"""Parameters that decide the shared memory of a block."""

LINE_BYTES = 128
"""Bytes per line of a tile in shared memory: the longest swizzled line."""

MOST_EXTENT = 2**31 - 2048
"""Largest dimension: copies have signed 32-bit coordinates, and tiles may extend beyond the edge."""

REGISTERS = 65536
"""Registers of an SM."""

PRODUCER_REGISTERS = 32
"""Registers per thread of the producer: with fewer, code for clusters spills."""

OTHER_REGISTERS = 40
"""Registers per thread of a consumer in addition to its sums."""

INSTRUCTION_REGISTERS = 26
"""Registers at launch that one wgmma needs in addition to its sums; with fewer, ptxas fails.

Source: error C7602 of ptxas, for each width of wgmma.
"""

AFFORDABLE_FMA = 60_000_000
"""Most multiply-adds of an emulation workload: emulation of wgmma does them in a second."""


def threads(consumers: Any) -> Any:
    """Return the threads of a block: consumers and one producer warpgroup."""
    return 128 * (consumers + 1)


def rows(bm: Any, consumers: Any, pingpong: Any) -> Any:
    """Return the rows of a tile that one consumer multiplies."""
    return bm // np.where(pingpong == 1, 1, consumers)


def sums(bm: Any, bn: Any, consumers: Any, pingpong: Any) -> Any:
    """Return the sums per thread of a consumer."""
    return rows(bm, consumers, pingpong) * bn // 128


def launched_registers(consumers: Any, min_blocks: Any) -> Any:
    """Return the registers per thread at launch: the most that all threads can have, a multiple of 8."""
    return REGISTERS // (min_blocks * threads(consumers)) // 8 * 8


def consumer_registers(consumers: Any, min_blocks: Any, producer_registers: int = PRODUCER_REGISTERS) -> Any:
    """Return the registers per thread of a consumer after the producer has released some of its registers."""
    block = (consumers + 1) * launched_registers(consumers, min_blocks)
    return np.minimum(240, (block - producer_registers) // consumers // 8 * 8)


def registers_move(config: Config) -> bool:
    """Return whether registers move from the producer to consumers (setmaxnreg).

    They do not where every thread is launched with the most registers an instruction can address.
    """
    return bool(launched_registers(config["consumers"], config["min_blocks"]) < 240)


def moved_registers(config: Config, producer_registers: int = PRODUCER_REGISTERS) -> dict[str, int]:
    """Return the constants for setmaxnreg: registers per thread of producer and consumers, 0 if none move."""
    taken = consumer_registers(config["consumers"], config["min_blocks"], producer_registers)
    return {
        "PRODUCER_REGISTERS": producer_registers,
        "CONSUMER_REGISTERS": int(taken) if registers_move(config) else 0,
    }


def staging_bytes(consumers: Any, staged: Any = 1) -> Any:
    """Return the bytes of shared memory in which warps gather results.

    16 rows of 32 f32, padded by 8; or, if `staged` is 2, two boxes of 16 lines of 128 bytes.
    """
    per_row = (staged == 1) * (32 + 8) * 4 + (staged == 2) * 2 * LINE_BYTES
    return 4 * consumers * 16 * per_row


def smem_bytes(config: Any, dtype: DType, matrices: int = 1) -> Any:
    """Return the shared memory of a block in bytes: the ring, staging of results, barriers.

    Args:
        config: A configuration with `TILE`, or a table of them.
        dtype: Type of a and b.
        matrices: Number of matrices b. Their results pass through shared memory as one tile.
    """
    bm, bn, bk, consumers, stages, staged = (config[name] for name in TILE)
    barriers = (3 if dtype == "tf32" else 2) * stages + consumers  # tf32: one more when b has been rounded
    ring = stages * (bm + matrices * bn) * bk * itemsize(dtype)
    return ring + staging_bytes(consumers, staged) + 8 * barriers


def least_copied(last: Any, tile: Any, k: int, bk: Any, parts: Any, along_k: bool) -> Any:
    """Return a lower bound of the elements of an operand that the block with the shortest tile copies.

    Elements beyond the edge are not read. Each of the `parts` blocks of a cluster reads one part of a shared
    tile. Whether the other parts pass the same port is not known, so they are not counted.

    Args:
        last: Rows of op(a), or columns of op(b), of the shortest tile.
        tile: Rows or columns of a full tile.
        k: Elements of the summed dimension.
        bk: Extent of a tile along k.
        parts: Number of blocks that each copy a part of the tile.
        along_k: Whether the operand's lines run along k.
    """
    if along_k:  # parts are groups of lines, each of k elements
        return np.maximum(0, last - (parts - 1) * tile / parts) * k
    return last * np.where(parts == 1, k, k // bk * bk / parts)


def main_loop(
    table: Table,
    size: int,
    length: Any,
    *,
    products: Any,
    columns: Any,
    passes_of_b: int,
    tiles: Any,
    device: Device,
) -> Execution:
    """Return how a tile of gemm_wgmma.cuh is multiplied (`multiply`), without its epilogue.

    Args:
        table: Configurations with `TILE`, bn, pingpong, cluster_m, cluster_n, min_blocks.
        size: Bytes of an element.
        length: Elements of k of a tile.
        products: Instructions per 64 rows and 32 bytes of k.
        columns: Columns of all matrices b in a tile.
        passes_of_b: How often each element of b is written to shared memory.
        tiles: All tiles, which persistent blocks share.
        device: Device that executes it.
    """
    names = ("bm", "bk", "stages", "consumers", "min_blocks")
    bm, bk, stages, consumers, min_blocks = (table[name].astype(np.float64) for name in names)
    steps = np.ceil(length / bk)
    line_bytes, at_once = steps * bk * size, np.where(table["pingpong"] == 1, consumers, 1.0)
    clustered = table["cluster_m"] * table["cluster_n"] > 1
    # An instruction reads 64 rows of a and its columns of b from shared memory. Two that share an operand
    # read it twice.
    issued = bm / 64 * products * line_bytes / 32
    read_bytes = 32 * issued * (64 + columns / products)
    turns = np.maximum(1.0, np.ceil(tiles / (device.sm_count * min_blocks * at_once)))
    warps = 4.0 * np.where(table["pingpong"] == 1, 1.0, consumers)
    return Execution(
        registers=np.minimum(255, launched_registers(consumers, min_blocks)),
        # Four warps issue each product, a thread copies.
        instructions=4 * issued + LOOP_INSTRUCTIONS * steps * (warps + 1),
        passes=(read_bytes + line_bytes * (bm + columns * (2 * passes_of_b - 1))) / 128,
        prefetched_waits=steps / (stages - 1),
        # The first product of a tile waits for its buffer, and the epilogue for the last product.
        shared_waits=2.0,
        barriers=table["pingpong"] + 2 * clustered / turns,
        code_bytes=INSTRUCTION_BYTES * bk * size / 32 * products * 8,
        at_once=at_once,
        # Buffers of the next tile are filled while this one is stored.
        first_waits=1 / turns,
        serial_clocks=START_CLOCKS / turns,
        asynchronous=1.0,
    )


def results(table: Table, size: int, vec: int, has_residual: bool) -> Results:
    """Count the epilogue of a tile: `store_rows` in gemm_wgmma.cuh, `store_boxes` in stores_wgmma.cuh.

    Args:
        table: Configurations with bm and bn, and `staged` if the space has it.
        size: Bytes of a result.
        vec: Results per access at most.
        has_residual: Whether as many values are read.
    """
    bm, bn = table["bm"].astype(np.float64), table["bn"].astype(np.float64)
    elements, strip = bm * bn, 32 + 0 * bn
    staged = table["staged"] if "staged" in table.space.names else np.ones(len(table))
    by_strips = staged_results(bm, bn, 16 * np.ceil(bm / 64), strip, size, vec, has_residual)
    by_strips = dataclasses.replace(
        by_strips,
        memory_waits=by_strips.memory_waits * bn / strip,
        shared_waits=by_strips.shared_waits * bn / strip,
    )
    directly = direct_results(bm, bn, 16 + 0 * bm, bn, size, vec, has_residual)
    boxes = Results(
        instructions=FINISHING * elements / 32,
        accesses=elements / 2 * (1 + has_residual),
        passes=2 * elements * size / 128 + has_residual * 8 * elements / 64,
        l2_bytes=elements * size * (1 + has_residual * max(1.0, 32 / (8 * size))),
        memory_waits=has_residual * bn / 8,
        shared_waits=bn * size / LINE_BYTES,
    )
    return chosen(staged == 0, directly, chosen(staged == 1, by_strips, boxes))


def panel_map(tensor: Tensor, along_k: bool, extent: int, bk: int, parts: int) -> TensorMap:
    """Return the tensor map for tiles of a matrix, or of a batch of matrices: `extent` lines of x by `bk`.

    A box is one panel of `PanelTile`, with lines of 128 bytes. Blocks of a cluster that share tiles copy a
    part of each panel.

    Args:
        tensor: The matrix as it is stored.
        along_k: Whether its lines run along k.
        extent: Rows of op(a), or columns of op(b), of a tile.
        bk: Extent of a tile along k.
        parts: Number of blocks that each copy a part of the tile.
    """
    batch, lines, length = (1, *tensor.shape)[-3:]
    size = itemsize(tensor.dtype)
    return TensorMap(
        tensor=tensor.name,
        dtype=tensor.dtype,
        extents=(length, lines, batch),
        strides_bytes=(length * size, lines * length * size),
        box=(LINE_BYTES // size, (extent if along_k else bk) // parts, 1),
    )


# -- constraints --------------------------------------------------------------------------------------------


def consumers_share_the_tile(bm: Any, consumers: Any, pingpong: Any) -> Any:
    """A consumer must have 64 or 128 rows; pingpong needs two consumers or more."""
    of_one = rows(bm, consumers, pingpong)
    together = (pingpong == 1) | (bm % (64 * consumers) == 0)
    return together & ((of_one == 64) | (of_one == 128)) & ((pingpong == 0) | (consumers > 1))


def sums_stay_in_registers(matrices: int = 1, producer_registers: int = PRODUCER_REGISTERS) -> Constraint:
    """Return the constraint on the registers of a consumer.

    Args:
        matrices: Number of matrices b, each with its own sums.
        producer_registers: Registers per thread of the producer.
    """

    def holds(bm: Any, bn: Any, consumers: Any, pingpong: Any, min_blocks: Any) -> Any:
        """A consumer's sums must fit in its registers, and those of one wgmma in the registers at launch."""
        needed = matrices * sums(bm, bn, consumers, pingpong) + OTHER_REGISTERS
        product_registers = bn // 2 + INSTRUCTION_REGISTERS
        room = consumer_registers(consumers, min_blocks, producer_registers)
        return (needed <= room) & (product_registers <= launched_registers(consumers, min_blocks))

    return holds


def shared_memory_fits(*names: str, matrices: int = 1) -> Constraint:
    """Return the constraint on the shared memory of `min_blocks` blocks.

    Args:
        names: Parameters of `TILE` that the space has; without `staged`, results are always staged.
        matrices: Number of matrices b.
    """

    @takes_config(*names, "min_blocks")
    def holds(config: Mapping[str, Any], workload: Any, device: Device) -> Any:
        """`min_blocks` blocks must fit in the shared memory of an SM."""
        smem = smem_bytes({"staged": 1, **config}, workload.dtype, matrices)
        together = config["min_blocks"] * (smem + device.smem_reserved_bytes)
        return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)

    return holds
