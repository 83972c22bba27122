"""What variants of grouped_gemm share: how many tiles there may be, alignment, arguments, small problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.kernels.common.cuda import ctype
from tunebench.kernels.common.gemm import AFFORDABLE_FMA, MAX_BLOCKS, alignment
from tunebench.space import Parameter
from tunebench.variant import Scalar, Tiling, ceil_div
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

__all__ = [
    "TILES_A_BLOCK",
    "arguments",
    "fits",
    "grid",
    "least_tiles",
    "most_tiles",
    "problem",
    "share",
    "shrink",
    "tiles",
    "turns_fill_the_device",
    "usual_tiles",
    "widest_turns",
    "widths",
]

TURNS = (1, 2, 4, 8, 16)

TILES_A_BLOCK = Parameter("tiles_a_block", TURNS, "most tiles that a block computes, one after the other")

Tile = tuple[int, int]


def problem(workload: GroupedGemm) -> dict[str, str | bool | int]:
    """Return the constants that the problem decides, whatever the configuration; sizes are arguments."""
    return {
        "In": ctype(workload.dtype),
        "Out": ctype(workload.out),
        "B_K_CONTIGUOUS": workload.trans == "nt",
    }


def arguments(workload: GroupedGemm, group_m: int) -> tuple[str | Scalar, ...]:
    """Return what the kernels take: a, b, offsets, c, sizes."""
    sizes = (workload.groups, workload.n, workload.k, group_m)
    return ("a", "b", "offsets", "c", *(Scalar("int", size) for size in sizes))


def widths(workload: GroupedGemm) -> tuple[int, int, int]:
    """Return the widest aligned access, in elements, to a, b and c, wherever the rows of a group start."""
    line_b = workload.k if workload.trans == "nt" else workload.n
    return (
        alignment(workload.k, workload.dtype),
        alignment(line_b, workload.dtype),
        alignment(workload.n, workload.out),
    )


def least_tiles(workload: GroupedGemm, bm: Any, bn: Any) -> Any:
    """Return how many tiles of bm x bn there are if one group has all rows: no split has fewer."""
    return ceil_div(workload.m, bm) * ceil_div(workload.n, bn)


def most_tiles(workload: GroupedGemm, bm: Any, bn: Any) -> Any:
    """Return how many tiles there are if as many groups as can be have one row more than whole tiles."""
    filled = workload.most_filled
    return (filled + (workload.m - filled) // bm) * ceil_div(workload.n, bn)


def usual_tiles(workload: GroupedGemm, bm: int, bn: int) -> int:
    """Return how many tiles there are if groups are of one size, or of two that differ by a row."""
    filled = workload.most_filled
    size, larger = divmod(workload.m, filled)
    rows_of_tiles = larger * ceil_div(size + 1, bm) + (filled - larger) * ceil_div(size, bm)
    return int(rows_of_tiles * ceil_div(workload.n, bn))


def grid(workload: GroupedGemm, bm: int, bn: int, tiles_a_block: int) -> tuple[int, int, int]:
    """Return a grid of which each block has `tiles_a_block` tiles at most, however rows are split."""
    return (int(ceil_div(most_tiles(workload, bm, bn), tiles_a_block)), 1, 1)


def tiles(workload: GroupedGemm, config: Mapping[str, Any]) -> tuple[Tiling, ...]:
    """Return how tiles of bm x bn, in steps of bk, cut the product if one group has all rows."""
    return tuple(
        Tiling(dimension=name, extent=getattr(workload, name), tile=config[f"b{name}"]) for name in "mnk"
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What blocks have at least, however rows are split: columns.

    Attributes:
        tiles: Tiles of each full block.
        full_blocks: Blocks that have as many.
        blocks: How many blocks of as many tiles would do no more than all blocks together, in fractions.
    """

    tiles: Any
    full_blocks: Any
    blocks: Any


def share(workload: GroupedGemm, bm: Any, bn: Any, tiles_a_block: Any, device: Device) -> Share:
    """Return the share of a block that takes every so many tiles one, of at least `least_tiles`.

    Of T tiles or more, taken in turn by G blocks, all blocks have ``T // G`` at least, and ``T - (t - 1) G``
    of them have ``t = ceil(T / G)``. Both are true; which says more of the busiest SM is what counts.
    """
    least = least_tiles(workload, bm, bn)
    grid_blocks = ceil_div(most_tiles(workload, bm, bn), tiles_a_block)
    many, few = ceil_div(least, grid_blocks), np.maximum(1, least // grid_blocks)
    some, every = least - (many - 1) * grid_blocks, np.minimum(least, grid_blocks)

    def tiles_of_busiest(tiles: Any, full_blocks: Any) -> Any:
        return np.maximum(np.ceil(full_blocks / device.sm_count) * tiles, least / device.sm_count)

    better = tiles_of_busiest(few, every) > tiles_of_busiest(many, some)
    return Share(
        tiles=np.where(better, few, many),
        full_blocks=np.where(better, every, some),
        blocks=np.where(better, np.minimum(least / few, grid_blocks), least / many),
    )


def fits(bm: Any, bn: Any, workload: GroupedGemm) -> Any:
    """Tiles must fit in one grid, and none may be twice as large as the problem if a smaller one exists."""
    worthwhile = ((bm < 2 * workload.m) | (bm <= 16)) & ((bn < 2 * workload.n) | (bn <= 16))
    # As floats: the product may exceed 64 bits.
    return worthwhile & (most_tiles(workload, 1.0 * bm, 1.0 * bn) <= MAX_BLOCKS)


def turns_fill_the_device(bm: Any, bn: Any, tiles_a_block: Any, workload: GroupedGemm, device: Device) -> Any:
    """A block may take tiles in turn if that leaves each SM a block."""
    return (tiles_a_block == 1) | (least_tiles(workload, bm, bn) >= 1.0 * tiles_a_block * device.sm_count)


def widest_turns(bm: int, bn: int, workload: GroupedGemm, device: Device) -> int:
    """Return the most tiles that a block may take in turn."""
    return max(turns for turns in TURNS if turns_fill_the_device(bm, bn, turns, workload, device))


def too_many_tiles(workload: GroupedGemm, tiles: tuple[Tile, ...]) -> str | None:
    """Return why none of `tiles` (bm, bn) covers c in one grid, or None if one does."""
    if any(fits(bm, bn, workload) for bm, bn in tiles):
        return None
    return f"c ({workload.m}, {workload.n}) in {workload.groups} groups takes more than {MAX_BLOCKS} tiles"


def shrink(workload: GroupedGemm, config: Mapping[str, Any], stages: int) -> GroupedGemm:
    """Return a small problem with the same edges of n and k, alignment and pipeline as `workload`.

    n and k keep their remainders by the tile, as `tunebench.kernels.common.gemm.shrink` says. Rows are as many as
    make some groups of more than a tile, and blocks that take several tiles, with their groups drawn alike;
    fewer where emulation cannot afford so many.
    """

    def keep(extent: int, tile: int, tiles: int) -> int:
        # 16 elements are at least 16 bytes of any type: a multiple of them stays aligned.
        tile, tiles = max(16, tile), ceil_div(tile * tiles, max(16, tile))
        return min(extent, tile * tiles + extent % tile)

    bm = config["bm"]
    for groups, rows, tiles_n in ((5, 4 * bm + 5, 2), (4, 2 * bm + 5, 1), (3, bm + 5, 1)):
        small = dataclasses.replace(
            workload,
            groups=min(workload.groups, groups),
            m=min(workload.m, rows),
            n=keep(workload.n, config["bn"], tiles_n),
            k=keep(workload.k, config["bk"], stages + 1),
        )
        executed = usual_tiles(small, bm, config["bn"]) * bm * config["bn"] * small.k
        if executed <= AFFORDABLE_FMA:
            break
    return small
