"""How warps that multiply by mma.sync share a block's tile, and what that takes: gemm and its kin, conv2d.

Constraints here are of spaces with parameters bm, bn, bk, warps_m, warps_n, stages, staged, min_blocks, and
of workloads that have dtype and k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import DType, itemsize
from tunebench.space import Config, Constraint
from tunebench.variant import ceil_div

__all__ = [
    "COPY_BYTES",
    "MAX_SUMS",
    "choices",
    "copies_are_few",
    "fill_bytes",
    "instructions",
    "least_bk",
    "min_blocks_is_of_use",
    "shared_memory_fits",
    "smem_bytes",
    "smem_bytes_of",
    "stages_have_tiles",
    "steps_are_of_use",
    "threads",
    "tile_is_compact",
    "usual_bk",
    "warps_cover_the_tile",
    "work_is_worth_the_warps",
]

MAX_SUMS = 128
"""Sums a thread may keep: beyond that they do not stay in its 255 registers."""

COPY_BYTES = 4
"""Least that cp.async copies."""

MAX_COPIES = 32
"""Copies of a thread to the tiles of a step, each with an address of its own: with more, sums are spilled."""


def threads(warps_m: Any, warps_n: Any) -> Any:
    """Return the threads of a block."""
    return 32 * warps_m * warps_n


def smem_bytes(
    dtype: DType,
    bm: Any,
    bn: Any,
    bk: Any,
    warps_m: Any,
    warps_n: Any,
    stages: Any,
    staged: Any,
    *,
    matrices: int = 1,
) -> Any:
    """Return the shared memory of a block: buffers of tiles, and in their place the results later.

    `matrices` is how many matrices b the tile of a is multiplied by; its results come together as one tile.
    """
    tiles = stages * (bm + matrices * bn) * bk * itemsize(dtype)
    results = staged * 4 * warps_m * warps_n * 16 * (bn // warps_n + 8)
    return np.maximum(tiles, results)


def smem_bytes_of(config: Any, dtype: DType, matrices: int = 1) -> Any:
    """Return `smem_bytes` of a configuration or of a table of them."""
    names = ("bm", "bn", "bk", "warps_m", "warps_n", "stages", "staged")
    return smem_bytes(dtype, *(config[name] for name in names), matrices=matrices)


def choices(config: Config, widths: tuple[int, int, int]) -> dict[str, str | bool | int]:
    """Return the constants that the configuration decides, and the accesses to a, b and c."""
    names = ("bm", "bn", "bk", "warps_m", "warps_n", "stages", "min_blocks")
    return {
        **{name.upper(): config[name] for name in names},
        "THREADS": threads(config["warps_m"], config["warps_n"]),
        "STAGED": bool(config["staged"]),
        **dict(zip(("VEC_A", "VEC_B", "VEC_C"), widths, strict=True)),
    }


def least_bk(dtype: DType) -> int:
    """Return the shortest step: one instruction of 8-bit elements, two of tf32."""
    return max(16, 32 // itemsize(dtype))


def usual_bk(line_bytes: int, workload: Any) -> int:
    """Return the longest step of so many bytes that `steps_are_of_use` admits, or the shortest one."""
    least, wanted = least_bk(workload.dtype), line_bytes // itemsize(workload.dtype)
    return max(b for b in (16, 32, 64, 128) if b == least or (least < b <= wanted and b < 2 * workload.k))


def instructions(
    bm: Any, bn: Any, warps_m: Any, warps_n: Any, line_bytes: Any, matrices: int = 1
) -> tuple[Any, Any]:
    """Return how many products a block's warps issue, and how many fragments they read.

    A warp reads its fragments of 16 x 32 bytes, 512 in all, once every 32 bytes of k.

    Args:
        bm: Rows of the tile.
        bn: Columns of the tile.
        warps_m: Warps along m.
        warps_n: Warps along n.
        line_bytes: Bytes along k, whole steps.
        matrices: Matrices b, each with as many columns.
    """
    rounds = warps_m * warps_n * line_bytes / 32
    rows, columns = bm / warps_m, matrices * bn / warps_n
    return rounds * (rows / 16 * columns / 8), rounds * (rows / 16 + columns / 16)


def fill_bytes(
    workload: Any, widths: tuple[int, int, int], bm: Any, bn: Any, length: Any, matrices: int = 1
) -> Any:
    """Return what the least block, at the corner of c, copies past L1: only copies of 16 bytes do.

    Args:
        workload: The problem, with m and n.
        widths: Elements of an access to a, b and c.
        bm: Rows of the tile.
        bn: Columns of the tile.
        length: Elements along k.
        matrices: Matrices b, each with as many columns.
    """
    size = itemsize(workload.dtype)
    rows = workload.m - (ceil_div(workload.m, bm) - 1) * bm
    columns = workload.n - (ceil_div(workload.n, bn) - 1) * bn
    wide_a, wide_b = (width * size == 16 for width in widths[:2])
    return (wide_a * rows + wide_b * matrices * columns) * length * size


# -- constraints --------------------------------------------------------------------------------------------


def tile_is_compact(bm: Any, bn: Any) -> Any:
    """A block's results must be at most 8 times as many one way as the other."""
    return (bm <= 8 * bn) & (bn <= 8 * bm)


def warps_cover_the_tile(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A warp must have 16 x 16 results or a multiple, at most 4 times as many one way as the other."""
    m, n = bm // warps_m, bn // warps_n
    return (m >= 16) & (n >= 16) & (m * n <= 32 * MAX_SUMS) & (m <= 4 * n) & (n <= 4 * m)


def work_is_worth_the_warps(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A block must have 8 warps or fewer, and give each 32 x 32 results if it has more than 4."""
    warps = warps_m * warps_n
    return (warps <= 8) & ((warps <= 4) | (bm * bn >= 1024 * warps))


def steps_are_of_use(bk: Any, workload: Any) -> Any:
    """A step must be up to 128 bytes long, and not twice as long as k if a shorter one exists."""
    least = least_bk(workload.dtype)
    return (bk >= least) & (bk * itemsize(workload.dtype) <= 128) & ((bk == least) | (bk < 2 * workload.k))


def stages_have_tiles(bk: Any, stages: Any, workload: Any) -> Any:
    """There must be as many steps of k as buffers under way."""
    return (stages == 2) | (stages <= ceil_div(workload.k, bk) + 1)


def copies_are_few(widths: Callable[[Any], tuple[int, int, int]], matrices: int = 1) -> Constraint:
    """Return the constraint on copies.

    Args:
        widths: Returns the elements of an access to a, b and c.
        matrices: Matrices b, each with a tile of its own.
    """

    def holds(bm: Any, bn: Any, bk: Any, warps_m: Any, warps_n: Any, workload: Any) -> Any:
        """A thread must fill its share of the tiles by 32 copies or fewer."""
        vec_a, vec_b, _ = widths(workload)
        copies = bm * bk // vec_a + matrices * bn * bk // vec_b
        return copies <= MAX_COPIES * threads(warps_m, warps_n)

    return holds


def shared_memory_fits(matrices: int = 1) -> Constraint:
    """Return the constraint on shared memory of a block that multiplies by `matrices` matrices b."""

    def holds(
        bm: Any,
        bn: Any,
        bk: Any,
        warps_m: Any,
        warps_n: Any,
        stages: Any,
        staged: Any,
        workload: Any,
        device: Device,
    ) -> Any:
        """The buffers must fit in the shared memory of a block."""
        smem = smem_bytes(workload.dtype, bm, bn, bk, warps_m, warps_n, stages, staged, matrices=matrices)
        return smem <= device.smem_per_block_bytes

    return holds


def min_blocks_is_of_use(other_registers: int, matrices: int = 1) -> Constraint:
    """Return the constraint on `min_blocks` for threads that need so many registers besides their sums.

    Args:
        other_registers: What is not sums.
        matrices: Matrices b, each with sums of its own.
    """

    def holds(
        bm: Any,
        bn: Any,
        bk: Any,
        warps_m: Any,
        warps_n: Any,
        stages: Any,
        staged: Any,
        min_blocks: Any,
        workload: Any,
        device: Device,
    ) -> Any:
        """`min_blocks` must fit on an SM without spilling sums, and limit what the compiler would take."""
        all_threads = min_blocks * threads(warps_m, warps_n)
        smem = smem_bytes(workload.dtype, bm, bn, bk, warps_m, warps_n, stages, staged, matrices=matrices)
        sums = matrices * bm * bn // threads(warps_m, warps_n)
        return (min_blocks == 1) | (
            (all_threads <= device.threads_per_sm)
            & (min_blocks * (smem + device.smem_reserved_bytes) <= device.smem_per_sm_bytes)
            & (all_threads * (sums + sums // 4 + other_registers) <= device.registers_per_sm)
            & (all_threads * (2 * sums + 64) > device.registers_per_sm)
        )

    return holds
