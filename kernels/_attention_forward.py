"""What variants of forward attention share on the Python side: rows, tiles of keys, parts, arguments.

A block has `bm` rows: queries of one head or, with `pack_heads`, of all heads that share keys. It takes those
tiles of `bn` keys that any of its rows sees, or with `split` an even part of them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tunebench._lazy import np
from tunebench.kernels._attention import kept
from tunebench.kernels._cuda import ctype
from tunebench.kernels._gemm import MAX_BLOCKS
from tunebench.variant import Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

__all__ = [
    "LOG2_E",
    "SPLITS",
    "Share",
    "blocks",
    "combine",
    "rows",
    "scalars",
    "scratch",
    "shares",
    "shrink",
    "split_is_of_use",
    "tiles",
    "tiles_fit",
]

LOG2_E = math.log2(math.e)

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Blocks that may share the keys of some rows."""

MAX_SCRATCH_BYTES = 2**30
"""Most memory that results of parts may take."""

LEAST_TILES = 2
"""Tiles of keys that are worth a part of their own."""

COMBINE_THREADS = 128
"""Threads of a block of `attention_combine`, which has a row."""


def rows(workload: Attention, pack_heads: Any) -> Any:
    """Return the rows that share keys: queries, of one head or of all of a group."""
    return workload.seq_q * np.where(pack_heads == 1, workload.group, 1)


def _heads(workload: Attention, pack_heads: Any) -> Any:
    """Return how often there are such rows."""
    return workload.batch * np.where(pack_heads == 1, workload.heads_k, workload.heads)


def blocks(workload: Attention, bm: Any, pack_heads: Any) -> Any:
    """Return the tiles of rows, of all heads."""
    return _heads(workload, pack_heads) * ceil_div(rows(workload, pack_heads), bm)


def scalars(workload: Attention) -> tuple[Scalar, ...]:
    """Return the sizes and the factor that kernels take: group, seq_q, seq_k, unit."""
    sizes = (workload.group, workload.seq_q, workload.seq_k)
    return (*(Scalar("int", size) for size in sizes), Scalar("float", workload.scale * LOG2_E))


def tiles(workload: Attention, bm: int, bn: int, pack_heads: int, dim_step: int) -> tuple[Tiling, ...]:
    """Return how tiles cut rows, keys and head_dim."""
    return (
        Tiling(
            dimension="seq_q*group" if pack_heads else "seq_q",
            extent=int(rows(workload, pack_heads)),
            tile=bm,
        ),
        Tiling(dimension="seq_k", extent=workload.seq_k, tile=bn),
        Tiling(dimension="head_dim", extent=workload.head_dim, tile=dim_step),
    )


# -- parts of keys ------------------------------------------------------------------------------------------


def split_is_of_use(workload: Attention, bm: Any, bn: Any, pack_heads: Any, split: Any, sm_count: int) -> Any:
    """Keys are split only where blocks are few, into parts of some tiles."""
    few = blocks(workload, 1.0 * bm, pack_heads) * (split // 2) < 2 * sm_count
    return (split == 1) | (few & (ceil_div(workload.seq_k, bn) >= LEAST_TILES * split))


def scratch_fits(workload: Attention, parts: Any) -> Any:
    """Results of all parts must fit in the scratch."""
    o_rows = float(workload.batch * workload.heads * workload.seq_q)
    return (parts == 1) | (4 * o_rows * parts * (workload.head_dim + 1) <= MAX_SCRATCH_BYTES)


def scratch(workload: Attention, parts: int) -> tuple[Tensor, ...]:
    """Return where parts leave their results and the logarithms of their sums, if there are any."""
    if parts == 1:
        return ()
    o_rows = workload.batch * workload.heads * workload.seq_q
    return (
        Tensor(name="partial", shape=(parts, o_rows, workload.head_dim), dtype="f32"),
        Tensor(name="partial_lse", shape=(parts, o_rows), dtype="f32"),
    )


def combine(workload: Attention, parts: int) -> tuple[Launch, ...]:
    """Return the launch that puts parts together, if there are any."""
    if parts == 1:
        return ()
    o_rows = workload.batch * workload.heads * workload.seq_q
    return (
        Launch(
            entry=f"attention_combine<{ctype(workload.dtype)}, {workload.head_dim}, {COMBINE_THREADS}>",
            grid=(o_rows, 1, 1),
            block=(COMBINE_THREADS, 1, 1),
            arguments=(
                "partial",
                "partial_lse",
                "o",
                "lse",
                Scalar("long long", o_rows),
                Scalar("int", parts),
            ),
        ),
    )


# -- how much there is to do --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What blocks do, as columns.

    Attributes:
        tiles: Tiles of keys of a block that has most: of the last rows, which see all keys.
        keys: Keys that exist in these, at least.
        rows: Rows that exist of such a block.
        full_blocks: How many blocks have as many tiles.
        blocks: How many blocks of as many tiles would do all there is.
    """

    tiles: Any
    keys: Any
    rows: Any
    full_blocks: Any
    blocks: Any


def shares(workload: Attention, *, bm: Any, bn: Any, pack_heads: Any = 0, split: Any = 1) -> Share:
    """Return what blocks do, by columns."""
    bm, bn, pack_heads, split = np.broadcast_arrays(bm, bn, pack_heads, split)
    count, heads = rows(workload, pack_heads), 1.0 * _heads(workload, pack_heads)
    all_tiles, row_tiles = ceil_div(workload.seq_k, bn), ceil_div(count, bm)
    most, over = ceil_div(all_tiles, split), all_tiles % split
    together = row_tiles * all_tiles
    if workload.causal:
        unlike, of_row = np.unique(np.stack((bm, bn, pack_heads)), axis=1, return_inverse=True)
        together = np.array([_tiles_seen(workload, *each) for each in unlike.T.tolist()])[of_row.ravel()]
    return Share(
        tiles=most,
        # The last tile of keys may be short, and be among these.
        keys=most * bn - (all_tiles * bn - workload.seq_k),
        rows=count - (row_tiles - 1) * bm,
        full_blocks=heads * np.where(over > 0, over, split) * (1 if workload.causal else row_tiles),
        blocks=heads * together / most,
    )


def _tiles_seen(workload: Attention, bm: int, bn: int, pack_heads: int) -> int:
    """Return the tiles of keys that the rows of a head, or of a group, see together under a causal mask."""
    count = int(rows(workload, pack_heads))
    last = np.minimum(np.arange(bm, count + bm, bm), count) - 1
    seen = last // (workload.group if pack_heads else 1) + 1 + workload.seq_k - workload.seq_q
    return int(ceil_div(seen, bn).sum())


def tiles_fit(workload: Attention, bm: Any, bn: Any, pack_heads: Any, least: tuple[int, int]) -> Any:
    """No tile may be twice as large as the problem if a smaller one exists; all parts must be in one grid."""
    worthwhile = ((bm < 2 * rows(workload, pack_heads)) | (bm <= least[0])) & (
        (bn < 2 * workload.seq_k) | (bn <= least[1])
    )
    return worthwhile & (blocks(workload, 1.0 * bm, pack_heads) <= MAX_BLOCKS / SPLITS[-1])


def shrink(workload: Attention, bm: int, bn: int, pack_heads: int, key_tiles: int) -> Attention:
    """Return a small problem with the same edges: few tiles of rows and of keys, of one group of heads."""
    group = workload.group
    tall = max(1, ceil_div(bm, group)) if pack_heads else bm
    seq_q = kept(workload.seq_q, tall, 1)
    seq_k = max(kept(workload.seq_k, bn, key_tiles), seq_q if workload.causal else 1)
    heads_k = min(workload.heads_k, 2 if group == 1 else 1)
    return dataclasses.replace(
        workload,
        batch=min(workload.batch, 2 if heads_k == 1 and group < 3 else 1),
        heads=heads_k * group,
        heads_k=heads_k,
        seq_q=seq_q,
        seq_k=seq_k,
    )
