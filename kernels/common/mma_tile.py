"""Tiles of a block that multiplies by mma.sync: threads, shared memory, instruction counts and constraints.

Used by the cuda_mma variants of gemm, gated_gemm and grouped_gemm (through `mma_gemm`) and by implicit-GEMM
convolutions. Spaces have the parameters bm, bn, bk, warps_m, warps_n.
"""

from __future__ import annotations

from typing import Any

from tunebench._lazy import np
from tunebench.dtype import DType, itemsize

__all__ = [
    "COPY_BYTES",
    "MAX_SUMS",
    "TILE",
    "instructions",
    "least_bk",
    "smem_bytes",
    "threads",
    "tile_is_compact",
    "usual_bk",
    "warps_cover_the_tile",
    "work_is_worth_the_warps",
]

TILE = ("bm", "bn", "bk", "warps_m", "warps_n", "stages", "staged")
"""Parameters that decide the shared memory of a block."""

MAX_SUMS = 128
"""Most sums per thread: more do not stay in its 255 registers."""

COPY_BYTES = 4
"""Fewest bytes that cp.async copies."""


def threads(warps_m: Any, warps_n: Any) -> Any:
    """Return the threads of a block."""
    return 32 * warps_m * warps_n


def smem_bytes(config: Any, dtype: DType, matrices: int = 1) -> Any:
    """Return the shared memory of a block in bytes: the buffers of tiles, reused later for results.

    Args:
        config: A configuration with `TILE`, or a table of them.
        dtype: Type of a and b.
        matrices: Number of matrices b. Their results pass through shared memory as one tile.
    """
    bm, bn, bk, warps_m, warps_n, stages, staged = (config[name] for name in TILE)
    tiles = stages * (bm + matrices * bn) * bk * itemsize(dtype)
    results = staged * 4 * warps_m * warps_n * 16 * (bn // warps_n + 8)
    return np.maximum(tiles, results)


def least_bk(dtype: DType) -> int:
    """Return the shortest step along k: one instruction of 8-bit elements, two of tf32."""
    return max(16, 32 // itemsize(dtype))


def usual_bk(line_bytes: int, workload: Any) -> int:
    """Return the longest step of up to `line_bytes` that is less than twice k, or the shortest step."""
    least, longest = least_bk(workload.dtype), line_bytes // itemsize(workload.dtype)
    return max(b for b in (16, 32, 64, 128) if b == least or (least < b <= longest and b < 2 * workload.k))


def instructions(table: Any, line_bytes: Any, matrices: int = 1) -> tuple[Any, Any]:
    """Return the mma instructions that a block's warps issue, and the fragments that they read.

    A warp reads its fragments of 16 x 32 bytes, 512 in all, once per 32 bytes of k.

    Args:
        table: Configurations with bm, bn, warps_m and warps_n.
        line_bytes: Bytes along k, in whole steps.
        matrices: Number of matrices b.
    """
    bm, bn, warps_m, warps_n = (table[name].astype(np.float64) for name in ("bm", "bn", "warps_m", "warps_n"))
    rounds = warps_m * warps_n * line_bytes / 32
    rows, columns = bm / warps_m, matrices * bn / warps_n
    return rounds * (rows / 16 * columns / 8), rounds * (rows / 16 + columns / 16)


# -- constraints --------------------------------------------------------------------------------------------


def tile_is_compact(bm: Any, bn: Any) -> Any:
    """The sides of a block's tile must differ by a factor of 8 at most."""
    return (bm <= 8 * bn) & (bn <= 8 * bm)


def warps_cover_the_tile(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A warp must have multiples of 16 x 16 results, whose sides differ by a factor of 4 at most."""
    m, n = bm // warps_m, bn // warps_n
    return (m >= 16) & (n >= 16) & (m * n <= 32 * MAX_SUMS) & (m <= 4 * n) & (n <= 4 * m)


def work_is_worth_the_warps(bm: Any, bn: Any, warps_m: Any, warps_n: Any) -> Any:
    """A block must have 8 warps or fewer, and 32 x 32 results per warp if it has more than 4."""
    warps = warps_m * warps_n
    return (warps <= 8) & ((warps <= 4) | (bm * bn >= 1024 * warps))
