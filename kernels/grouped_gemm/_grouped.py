"""Host side of grouped_gemm kernels: number of tiles, alignment, arguments, emulation workloads.

Implements `tunebench.kernels.common.gemm_variant.GemmOperation`. The rows per group are known on the device
only, so that tile counts are bounds over all splits of the rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype
from tunebench.kernels.common.gemm import AFFORDABLE_FMA, MAX_BLOCKS, Share, alignment, keep_remainder
from tunebench.space import Parameter, Table
from tunebench.variant import Scalar, ceil_div
from tunebench.workloads.operators.gemm import Gemm
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

MATRICES = 1
"""Number of matrices b that the rows of a group are multiplied by."""

TURNS = (1, 2, 4, 8, 16)

TILES_A_BLOCK = Parameter("tiles_a_block", TURNS, "most tiles per block, one after the other")


@functools.lru_cache(maxsize=64)
def product(workload: GroupedGemm) -> Gemm:
    """Return the product of the rows of all groups with one matrix; cached, because constraints ask."""
    same = {name: getattr(workload, name) for name in ("m", "n", "k", "dtype", "trans", "out", "accumulate")}
    return Gemm(**same)


def workload_constants(workload: GroupedGemm) -> dict[str, str | bool | int]:
    """Return the compile-time constants that depend on the workload only; sizes are arguments."""
    return {
        "In": ctype(workload.dtype),
        "Out": ctype(workload.out),
        "A_K_CONTIGUOUS": True,
        "B_K_CONTIGUOUS": workload.trans == "nt",
    }


def injected(workload: GroupedGemm) -> str:
    """Return "": there is no activation."""
    return ""


def arguments(workload: GroupedGemm, group_m: int) -> tuple[str | Scalar, ...]:
    """Return the kernel's arguments: a, b, offsets, c, then sizes."""
    sizes = (workload.groups, workload.n, workload.k, group_m)
    return ("a", "b", "offsets", "c", *(Scalar("int", size) for size in sizes))


def widths(workload: GroupedGemm) -> tuple[int, int, int]:
    """Return the widest aligned access to a, b and c, in elements, for every offset of a group."""
    line_b = workload.k if workload.trans == "nt" else workload.n
    return (
        alignment(workload.k, workload.dtype),
        alignment(line_b, workload.dtype),
        alignment(workload.n, workload.out),
    )


def least_tiles(workload: GroupedGemm, bm: Any, bn: Any) -> Any:
    """Return the fewest tiles of bm x bn: one group has all rows."""
    return ceil_div(workload.m, bm) * ceil_div(workload.n, bn)


def most_blocks(workload: GroupedGemm, bm: Any, bn: Any) -> Any:
    """Return the most tiles of bm x bn: as many groups as possible end one row into a tile."""
    filled = workload.most_filled
    return (filled + (workload.m - filled) // bm) * ceil_div(workload.n, bn)


def usual_blocks(workload: GroupedGemm, bm: Any, bn: Any) -> Any:
    """Return the number of tiles if the sizes of all groups differ by a row at most."""
    filled = workload.most_filled
    size, larger = divmod(workload.m, filled)
    rows_of_tiles = larger * ceil_div(size + 1, bm) + (filled - larger) * ceil_div(size, bm)
    return rows_of_tiles * ceil_div(workload.n, bn)


def grid(workload: GroupedGemm, config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a grid that leaves each block `tiles_a_block` tiles at most, for every split of the rows."""
    tiles = most_blocks(workload, config["bm"], config["bn"])
    return (int(ceil_div(tiles, config.get("tiles_a_block", 1))), 1, 1)


def busiest_blocks(
    workload: GroupedGemm, bm: Any, bn: Any, tiles_a_block: Any, device: Device
) -> tuple[Any, Any, Any]:
    """Return the least work of the busiest blocks over all splits of the rows, as columns.

    G blocks take T tiles or more in turn. All of them compute ``T // G`` tiles at least; ``T - (t - 1) G`` of
    them compute ``t = ceil(T / G)``. The larger of both bounds on the busiest SM counts.

    Args:
        workload: The groups.
        bm: Rows of a tile, as floats.
        bn: Columns of a tile, as floats.
        tiles_a_block: Most tiles per block.
        device: GPU whose SMs share the blocks.

    Returns:
        Tiles of each full block, number of full blocks, and all work as a number of such blocks (a fraction).
    """
    least = least_tiles(workload, bm, bn)
    grid_blocks = ceil_div(most_blocks(workload, bm, bn), tiles_a_block)
    many, few = ceil_div(least, grid_blocks), np.maximum(1, least // grid_blocks)
    some, every = least - (many - 1) * grid_blocks, np.minimum(least, grid_blocks)

    def tiles_of_busiest(tiles: Any, full_blocks: Any) -> Any:
        return np.maximum(np.ceil(full_blocks / device.sm_count) * tiles, least / device.sm_count)

    better = tiles_of_busiest(few, every) > tiles_of_busiest(many, some)
    return (
        np.where(better, few, many),
        np.where(better, every, some),
        np.where(better, np.minimum(least / few, grid_blocks), least / many),
    )


def shares(workload: GroupedGemm, table: Table, device: Device) -> Share:
    """Return the share of the products that the busiest blocks compute, for each configuration.

    Tiles are counted for one group with all rows: no split of the rows has fewer.
    """
    bm, bn, bk = (table[name].astype(np.float64) for name in ("bm", "bn", "bk"))
    tiles_a_block = table["tiles_a_block"].astype(np.float64) if "tiles_a_block" in table.space.names else 1.0
    tiles, full_blocks, blocks = busiest_blocks(workload, bm, bn, tiles_a_block, device)
    return Share(
        length=tiles * (ceil_div(workload.k, bk) * bk),
        used_length=tiles * workload.k,
        edge_rows=1,
        full_blocks=full_blocks,
        blocks=blocks,
    )


def fits(bm: Any, bn: Any, workload: GroupedGemm) -> Any:
    """Tiles must fit in one grid, and be less than twice as large as c unless no smaller one exists."""
    worthwhile = ((bm < 2 * workload.m) | (bm <= 16)) & ((bn < 2 * workload.n) | (bn <= 16))
    # As floats: the number of tiles may exceed 64 bits.
    return worthwhile & (most_blocks(workload, 1.0 * bm, 1.0 * bn) <= MAX_BLOCKS)


def turns_fill_the_device(bm: Any, bn: Any, tiles_a_block: Any, workload: GroupedGemm, device: Device) -> Any:
    """A block may compute several tiles in turn if that leaves each SM a block."""
    return (tiles_a_block == 1) | (least_tiles(workload, bm, bn) >= 1.0 * tiles_a_block * device.sm_count)


def widest_turns(bm: int, bn: int, workload: GroupedGemm, device: Device) -> int:
    """Return the most tiles that a block may compute in turn."""
    return max(turns for turns in TURNS if turns_fill_the_device(bm, bn, turns, workload, device))


def too_many_blocks(workload: GroupedGemm, tiles: Iterable[tuple[int, int]]) -> str | None:
    """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""
    if any(fits(bm, bn, workload) for bm, bn in tiles):
        return None
    return f"c ({workload.m}, {workload.n}) in {workload.groups} groups takes more than {MAX_BLOCKS} tiles"


def shrink(
    workload: GroupedGemm, config: Mapping[str, Any], stages: int, affordable_fma: int = AFFORDABLE_FMA
) -> GroupedGemm:
    """Return a small workload with the same edges of n and k, alignment and pipeline as `workload`.

    n and k keep their remainders by the tile (see `tunebench.kernels.common.gemm.shrink`). There are enough
    rows for some groups of several tiles and for blocks that take several tiles, or fewer where emulation
    would be too slow.
    """
    bm = config["bm"]
    for groups, rows, tiles_n in ((5, 4 * bm + 5, 2), (4, 2 * bm + 5, 1), (3, bm + 5, 1)):
        small = dataclasses.replace(
            workload,
            groups=min(workload.groups, groups),
            m=min(workload.m, rows),
            n=keep_remainder(workload.n, config["bn"], tiles_n),
            k=keep_remainder(workload.k, config["bk"], stages + 1),
        )
        executed = usual_blocks(small, bm, config["bn"]) * bm * config["bn"] * small.k
        if executed <= affordable_fma:
            break
    return small
