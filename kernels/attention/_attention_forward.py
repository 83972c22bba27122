"""Rows, key tiles, splits and arguments that the CUDA variants of forward attention share.

A block has `bm` rows: queries of one head or, with `pack_heads`, of all heads that share keys. It processes
the tiles of `bn` keys that any of its rows attends to, or with `split` an equal part of those tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize
from tunebench.kernels.attention import _attention_scores as _scores
from tunebench.kernels.attention._attention import kept, least_keys
from tunebench.kernels.common.cuda import ctype, helpers
from tunebench.kernels.common.gemm import MAX_BLOCKS
from tunebench.space import Config, Constraint, Parameter, Value
from tunebench.variant import Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

__all__ = [
    "CONSTRAINTS",
    "LOG2_E",
    "PARAMETERS",
    "ForwardWork",
    "blocks",
    "headers",
    "launches",
    "merge_waits",
    "refusal",
    "rows",
    "scalars",
    "scratch",
    "shares",
    "shrink",
    "softmax_clocks",
    "softmax_instructions",
    "store_bytes",
    "tiles",
    "tiles_fit",
    "usual",
    "workload_constants",
]

LOG2_E = math.log2(math.e)

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Blocks that may share the keys of some rows."""

MAX_SCRATCH_BYTES = 2**30
"""Most scratch memory for the results of parts."""

LEAST_TILES = 2
"""Least tiles of keys of a part."""

COMBINE_THREADS = 128
"""Threads of a block of `attention_combine`, which processes a row."""


def rows(workload: Attention, pack_heads: Any) -> Any:
    """Return the rows that share keys: queries of one head, or of a group of heads."""
    return workload.seq_q * np.where(pack_heads == 1, workload.group, 1)


def _heads(workload: Attention, pack_heads: Any) -> Any:
    """Return the number of heads, or of groups of heads."""
    return workload.batch * np.where(pack_heads == 1, workload.heads_k, workload.heads)


def blocks(workload: Attention, bm: Any, pack_heads: Any) -> Any:
    """Return the number of row tiles, for all heads."""
    return _heads(workload, pack_heads) * ceil_div(rows(workload, pack_heads), bm)


def refusal(workload: Attention, key: str, fits: Any) -> str | None:
    """Return why a forward variant does not support a workload, or None.

    Args:
        workload: The workload.
        key: Key of the variant, for the message.
        fits: Whether any tile fits the workload.
    """
    if not fits:
        return f"q ({workload.batch}, {workload.heads}, {workload.seq_q}) has too many tiles for {key}"
    return None


def scalars(workload: Attention) -> tuple[Scalar, ...]:
    """Return the size and scale arguments of the kernels: group, seq_q, seq_k, unit."""
    sizes = (workload.group, workload.seq_q, workload.seq_k)
    return (*(Scalar("int", size) for size in sizes), Scalar("float", workload.scale * LOG2_E))


def tiles(workload: Attention, bm: int, bn: int, pack_heads: int, dim_step: int) -> tuple[Tiling, ...]:
    """Return the tiles of rows, keys and head_dim.

    Args:
        workload: The workload.
        bm: Rows of a tile.
        bn: Keys of a tile.
        pack_heads: Whether heads that share keys are rows of one tile.
        dim_step: Elements of head_dim that a product or an access processes.
    """
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


def _heads_are_shared(pack_heads: Any, workload: Attention) -> Any:
    """Heads form one tile only if they share keys."""
    return (pack_heads == 0) | (workload.group > 1)


def _split_is_useful(
    bm: Any, bn: Any, pack_heads: Any, split: Any, workload: Attention, device: Device
) -> Any:
    """Keys are split only if there are few blocks, into parts of several tiles."""
    few = blocks(workload, 1.0 * bm, pack_heads) * (split // 2) < 2 * device.sm_count
    return (split == 1) | (few & (ceil_div(workload.seq_k, bn) >= LEAST_TILES * split))


def _scratch_fits(split: Any, workload: Attention) -> Any:
    """The results of all parts must fit in the scratch memory."""
    o_rows = float(_rows_of_o(workload))
    return (split == 1) | (4 * o_rows * split * (workload.head_dim + 1) <= MAX_SCRATCH_BYTES)


PARAMETERS = (
    Parameter("pack_heads", (0, 1), "1: heads that share keys are rows of one tile"),
    Parameter("split", SPLITS, "blocks that share the keys of a row tile"),
)
CONSTRAINTS: tuple[Constraint, ...] = (_heads_are_shared, _split_is_useful, _scratch_fits)


def usual(
    workload: Attention, device: Device, tiles: Sequence[Mapping[str, Value]]
) -> Iterator[dict[str, Value]]:
    """Yield tiles that give every SM a block, then the others with split keys, smallest first.

    Args:
        workload: The workload.
        device: The device, for its number of SMs.
        tiles: Values of `bm` and other parameters, largest tile first.
    """
    pack = int(workload.group > 1 and workload.seq_q < 64)
    counts = [int(blocks(workload, tile["bm"], pack)) for tile in tiles]
    tile_counts = list(zip(tiles, counts, strict=True))
    few = sorted((pair for pair in tile_counts if pair[1] < device.sm_count), key=lambda pair: pair[0]["bm"])
    for tile, count in (*(pair for pair in tile_counts if pair[1] >= device.sm_count), *few):
        target_split = 1 if count >= device.sm_count else ceil_div(2 * device.sm_count, count)
        for split in reversed([split for split in SPLITS if split <= target_split]):
            yield {**tile, "pack_heads": pack, "split": split}


def workload_constants(workload: Attention, config: Config) -> dict[str, str | bool | int]:
    """Return the constants that depend on the workload, and `PARAMETERS`; other sizes are arguments."""
    of_bias = {"BIAS_VEC": _scores.bias_vector(workload)} if workload.has_bias else {}
    return {
        "In": ctype(workload.dtype),
        "HEAD_DIM": workload.head_dim,
        "CAUSAL": workload.causal,
        "PACK_HEADS": bool(config["pack_heads"]),
        "IN_PARTS": config["split"] > 1,
        **of_bias,
    }


def headers(workload: Attention) -> str:
    """Return the headers for rows, masks, biases and softmax; they need types.cuh and reduce.cuh."""
    mask = _scores.header(workload, "attention_forward_mask", "attention_forward_window")
    return helpers("attention_forward_rows") + mask + helpers("attention_forward")


def launches(
    workload: Attention, config: Config, entry: str, threads: int, smem_bytes: int
) -> tuple[Launch, ...]:
    """Return the launch of a kernel with `PARAMETERS`, and of the merge if keys are split.

    Args:
        workload: The workload.
        config: The configuration.
        entry: Entry of the attention kernel.
        threads: Threads of a block.
        smem_bytes: Shared memory of a block.
    """
    bm, pack, parts = config["bm"], config["pack_heads"], config["split"]
    sizes = (
        Scalar("int", int(ceil_div(rows(workload, pack), bm))),
        Scalar("int", parts),
        Scalar("long long", _rows_of_o(workload)),
    )
    # Without parts, nothing is written to the arguments for parts.
    partial = ("partial", "partial_lse") if parts > 1 else ("lse", "lse")
    attention = Launch(
        entry=entry,
        grid=(int(blocks(workload, bm, pack)) * parts, 1, 1),
        block=(threads, 1, 1),
        arguments=(
            *("q", "k", "v", "o", "lse", *partial),
            *(*scalars(workload), *sizes, *_scores.arguments(workload)),
        ),
        smem_bytes=smem_bytes,
    )
    return (attention, _combine(workload, parts)) if parts > 1 else (attention,)


def _rows_of_o(workload: Attention) -> int:
    return workload.batch * workload.heads * workload.seq_q


def scratch(workload: Attention, parts: int) -> tuple[Tensor, ...]:
    """Return memory for the results of parts and the logarithms of their sums, if there are parts."""
    if parts == 1:
        return ()
    o_rows = _rows_of_o(workload)
    return (
        Tensor(name="partial", shape=(parts, o_rows, workload.head_dim), dtype="f32"),
        Tensor(name="partial_lse", shape=(parts, o_rows), dtype="f32"),
    )


def _combine(workload: Attention, parts: int) -> Launch:
    """Return the launch that merges parts."""
    o_rows = _rows_of_o(workload)
    return Launch(
        entry=f"attention_combine<{ctype(workload.dtype)}, {workload.head_dim}, {COMBINE_THREADS}>",
        grid=(o_rows, 1, 1),
        block=(COMBINE_THREADS, 1, 1),
        arguments=(
            *("partial", "partial_lse", "o", "lse"),
            Scalar("long long", o_rows),
            Scalar("int", parts),
        ),
    )


# -- expected execution -------------------------------------------------------------------------------------

OF_SCORE = 4.5
"""Instructions of a score: comparison with the maximum, argument, power, sum, and half of a conversion."""
OF_ROWS = 40
"""Instructions of a warp for each tile of keys: exchange of maxima, factors, counters, addresses."""
EXCHANGE_CLOCKS = 100.0
"""Clocks from a thread's maximum to the factors of its rows: two shuffles, and a power of two."""
OF_MASK = 2.0
"""Instructions that hide a score: a comparison and a selection."""


def softmax_instructions(
    workload: Attention, share: ForwardWork, bm: Any, bn: Any, dim: Any, warps: Any
) -> Any:
    """Return the instructions of a block between products, without those of accesses.

    Args:
        workload: The workload.
        share: Work of the block.
        bm: Rows of a tile.
        bn: Keys of a tile.
        dim: Columns of results, times the warps that share their rows.
        warps: Warps that multiply.
    """
    masked = (
        np.minimum(share.tiles, bm / bn + 1) * bm * bn * OF_MASK * (workload.causal and workload.seq_q > 1)
    )
    bias = 3.0 * workload.has_bias
    of_tile = bm * bn * (OF_SCORE + bias) / 32 + bm * dim / 32 + OF_ROWS * warps
    return share.tiles * of_tile + masked / 32


def softmax_clocks(scores: Any, results: Any, device: Device) -> Any:
    """Return the clocks of a warp from its scores to its exponentials, and rescaled results, of one tile.

    Args:
        scores: Scores of a lane.
        results: Results of a lane.
        device: The device, for its special-function units.
    """
    # Powers of two; before and after them maxima and conversions of pairs, both at half of the full rate.
    powers = scores * 32 * device.partitions / device.sfu_per_clock
    return powers + 3 * scores + results + EXCHANGE_CLOCKS


def store_bytes(workload: Attention, share: ForwardWork, bm: Any, split: Any) -> Any:
    """Return the bytes that a block writes, and those that the merge of parts reads for it.

    Args:
        workload: The workload.
        share: Work of the block.
        bm: Rows of a tile.
        split: Blocks that share the keys of a row tile.
    """
    stored = np.minimum(bm, share.rows) * (
        workload.head_dim * np.where(split > 1, 8, itemsize(workload.dtype)) + 4
    )
    return 1.0 * stored


def merge_waits(split: Any) -> Any:
    """Return the waits of the launch that merges parts: its start, logarithms of sums, and results."""
    return np.where(split > 1, 2 + ceil_div(split, 16), 0)


# -- work of blocks -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForwardWork:
    """Work of the blocks, as columns over configurations.

    Attributes:
        tiles: Key tiles of the longest block.
        keys: Least existing keys of those tiles.
        rows: Existing rows of that block.
        full_blocks: Number of blocks with that many tiles.
        blocks: Number of blocks of that length with the same total work.
    """

    tiles: Any
    keys: Any
    rows: Any
    full_blocks: Any
    blocks: Any


def shares(workload: Attention, *, bm: Any, bn: Any, pack_heads: Any = 0, split: Any = 1) -> ForwardWork:
    """Return the work of the blocks for columns of configurations.

    Args:
        workload: The workload.
        bm: Rows of a tile.
        bn: Keys of a tile.
        pack_heads: Whether heads that share keys are rows of one tile.
        split: Blocks that share the keys of a row tile.
    """
    bm, bn, pack_heads, split = np.broadcast_arrays(bm, bn, pack_heads, split)
    count, heads = rows(workload, pack_heads), 1.0 * _heads(workload, pack_heads)
    row_tiles = ceil_div(count, bm)
    longest = all_tiles = ceil_div(workload.seq_k, bn)
    together = row_tiles * all_tiles
    if workload.causal:
        unlike, of_row = np.unique(np.stack((bm, bn, pack_heads)), axis=1, return_inverse=True)
        seen = np.array([_tiles_seen(workload, *tile_shape) for tile_shape in unlike.T.tolist()])[
            of_row.ravel()
        ]
        together, longest = seen.T
    most_tiles, over = ceil_div(longest, split), longest % split
    return ForwardWork(
        tiles=most_tiles,
        # The last key tile may be partial, and may be among these.
        keys=most_tiles * bn - (all_tiles * bn - workload.seq_k),
        rows=count - (row_tiles - 1) * bm,
        full_blocks=heads * np.where(over > 0, over, split) * (1 if workload.causal else row_tiles),
        blocks=heads * together / most_tiles,
    )


def _tiles_seen(workload: Attention, bm: int, bn: int, pack_heads: int) -> tuple[int, int]:
    """Return the key tiles that the rows of a head, or of a group, attend to under a causal mask.

    Returns:
        The sum over all row tiles, and the largest number of one row tile.
    """
    count, group = int(rows(workload, pack_heads)), workload.group if pack_heads else 1
    first = np.arange(0, count, bm)
    begin, _ = workload.keys_of(first // group)
    _, end = workload.keys_of((np.minimum(first + bm, count) - 1) // group)
    seen = ceil_div(end, bn) - begin // bn
    return int(seen.sum()), int(seen.max())


def tiles_fit(workload: Attention, bm: Any, bn: Any, pack_heads: Any, least: tuple[int, int]) -> Any:
    """No tile is twice as large as the workload if a smaller one exists; all parts fit in one grid."""
    worthwhile = ((bm < 2 * rows(workload, pack_heads)) | (bm <= least[0])) & (
        (bn < 2 * workload.seq_k) | (bn <= least[1])
    )
    return worthwhile & (blocks(workload, 1.0 * bm, pack_heads) <= MAX_BLOCKS / SPLITS[-1])


def shrink(workload: Attention, bm: int, bn: int, pack_heads: int, key_tiles: int) -> Attention:
    """Return a small workload with few row and key tiles, the same partial tiles, and one group of heads.

    Args:
        workload: The full workload.
        bm: Rows of a tile.
        bn: Keys of a tile.
        pack_heads: Whether heads that share keys are rows of one tile.
        key_tiles: Key tiles to keep.
    """
    group = workload.group
    tall = max(1, ceil_div(bm, group)) if pack_heads else bm
    seq_q = kept(workload.seq_q, tall, 1)
    seq_k = max(kept(workload.seq_k, bn, key_tiles), least_keys(workload, seq_q))
    heads_k = min(workload.heads_k, 2 if group == 1 else 1)
    return dataclasses.replace(
        workload,
        batch=min(workload.batch, 2 if heads_k == 1 and group < 3 else 1),
        heads=heads_k * group,
        heads_k=heads_k,
        seq_q=seq_q,
        seq_k=seq_k,
    )
