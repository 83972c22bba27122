"""How warpgroups that multiply by wgmma share a block's tile, and what that takes: gemm and its kin, conv2d.

Constraints here are of spaces with parameters bm, bn, consumers, pingpong, min_blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import DType, itemsize
from tunebench.space import Config, Constraint, takes_config
from tunebench.variant import TensorMap, ceil_div
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
    "moved_registers",
    "panel_map",
    "registers_move",
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
"""A line of a tile in shared memory: the longest that is swizzled."""

MOST_EXTENT = 2**31 - 2048
"""Coordinates of copies are 32-bit and signed; a cluster's tiles may reach so far beyond the edge."""

REGISTERS = 65536
"""Of an SM."""

PRODUCER_REGISTERS = 32
"""What the copying warpgroup keeps: with less, code for clusters spills."""

OTHER_REGISTERS = 40
"""What a multiplying thread needs besides its sums."""

INSTRUCTION_REGISTERS = 26
"""What one wgmma needs besides its sums, of the registers a thread is launched with, or ptxas refuses it.

Source: its error C7602, for each width of wgmma.
"""

AFFORDABLE_FMA = 60_000_000
"""Multiply-adds that emulation does in a second: it multiplies by whole warpgroups."""


def threads(consumers: Any) -> Any:
    """Return the threads of a block: those that multiply, and a warpgroup that copies."""
    return 128 * (consumers + 1)


def rows(bm: Any, consumers: Any, pingpong: Any) -> Any:
    """Return the rows of a tile that one consumer multiplies."""
    return bm // np.where(pingpong == 1, 1, consumers)


def sums(bm: Any, bn: Any, consumers: Any, pingpong: Any) -> Any:
    """Return the sums that a multiplying thread keeps."""
    return rows(bm, consumers, pingpong) * bn // 128


def launched_registers(consumers: Any, min_blocks: Any) -> Any:
    """Return the registers a thread is launched with: what there is for all, by 8."""
    return REGISTERS // (min_blocks * threads(consumers)) // 8 * 8


def consumer_registers(consumers: Any, min_blocks: Any, producer_registers: int = PRODUCER_REGISTERS) -> Any:
    """Return the registers a multiplying thread may have when the copying ones have given theirs."""
    block = (consumers + 1) * launched_registers(consumers, min_blocks)
    return np.minimum(240, (block - producer_registers) // consumers // 8 * 8)


def registers_move(config: Config) -> bool:
    """Tell whether they must: not where every thread is launched with as many as it can name."""
    return bool(launched_registers(config["consumers"], config["min_blocks"]) < 240)


def moved_registers(config: Config, producer_registers: int = PRODUCER_REGISTERS) -> dict[str, int]:
    """Return what a kernel is told of the registers that warpgroups keep; 0 if none move."""
    taken = consumer_registers(config["consumers"], config["min_blocks"], producer_registers)
    return {
        "PRODUCER_REGISTERS": producer_registers,
        "CONSUMER_REGISTERS": int(taken) if registers_move(config) else 0,
    }


def staging_bytes(consumers: Any, staged: Any = 1) -> Any:
    """Return what the warps gather results in: 16 rows of 32 columns of f32, and 8 to spread the banks."""
    return staged * 4 * consumers * 16 * (32 + 8) * 4


def smem_bytes(config: Any, dtype: DType, matrices: int = 1) -> Any:
    """Return the shared memory of a block in bytes: the ring, staging of results, barriers.

    Args:
        config: A configuration with `TILE`, or a table of them.
        dtype: Type of a and b.
        matrices: Number of matrices b. Their results pass through shared memory as one tile.
    """
    bm, bn, bk, consumers, stages, staged = (config[name] for name in TILE)
    barriers = 2 * stages + consumers
    ring = stages * (bm + matrices * bn) * bk * itemsize(dtype)
    return ring + staging_bytes(consumers, staged) + 8 * barriers


def least_copied(extent: int, tile: Any, k: int, bk: Any, parts: Any, along_k: bool) -> Any:
    """Return the elements of an operand that the block with the last, shortest tile copies at least.

    Zeros come from nowhere. Of what `parts` blocks of a cluster share, each reads a part; whether the rest
    passes the same port is not known.
    """
    last = extent - (ceil_div(extent, tile) - 1) * tile
    if along_k:  # parts are of lines, each of k elements
        return np.maximum(0, last - (parts - 1) * tile / parts) * k
    return last * np.where(parts == 1, k, k // bk * bk / parts)


def panel_map(tensor: Tensor, along_k: bool, extent: int, bk: int, parts: int) -> TensorMap:
    """Return how tiles of a matrix, or of a batch of them, are copied: `extent` lines of x by `bk`.

    A box is one panel of `PanelTile`: lines of 128 bytes, cut across in `parts` if blocks of a cluster share
    them.

    Args:
        tensor: The matrix as it is stored.
        along_k: Whether its lines run along k.
        extent: Rows of op(a), or columns of op(b), of a tile.
        bk: Its extent along k.
        parts: Blocks that copy a part of the tile each.
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
    """A consumer must have 64 or 128 rows; one alone has nobody to take turns with."""
    of_one = rows(bm, consumers, pingpong)
    together = (pingpong == 1) | (bm % (64 * consumers) == 0)
    return together & ((of_one == 64) | (of_one == 128)) & ((pingpong == 0) | (consumers > 1))


def sums_stay_in_registers(matrices: int = 1, producer_registers: int = PRODUCER_REGISTERS) -> Constraint:
    """Return the constraint on what a consumer keeps.

    Args:
        matrices: Matrices b, each with sums of its own.
        producer_registers: What the copying warpgroup keeps.
    """

    def holds(bm: Any, bn: Any, consumers: Any, pingpong: Any, min_blocks: Any) -> Any:
        """A consumer's sums must fit in its registers, and those of one wgmma in what it is launched with."""
        needed = matrices * sums(bm, bn, consumers, pingpong) + OTHER_REGISTERS
        one = bn // 2 + INSTRUCTION_REGISTERS
        room = consumer_registers(consumers, min_blocks, producer_registers)
        return (needed <= room) & (one <= launched_registers(consumers, min_blocks))

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
