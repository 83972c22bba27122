"""Kernel passes over the scores that the CUDA variants of attention gradients share, and their costs.

A block owns a tile of rows of one side: keys for dk and dv, or queries for dq. It iterates over the rows of
the other side that may attend to them, or that they may attend to, `step` rows at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from tunebench._lazy import np
from tunebench.kernels.attention import _attention_scores as _scores
from tunebench.kernels.attention._attention import kept, least_keys
from tunebench.kernels.common.cuda import ctype, flag, helpers
from tunebench.kernels.common.gemm import MAX_BLOCKS, alignment
from tunebench.space import Parameter
from tunebench.variant import Argument, Costs, Launch, Scalar, TensorMap, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.attention import Attention

__all__ = [
    "TOGETHER",
    "LoopCounts",
    "PassWork",
    "Side",
    "as_costs",
    "blocks",
    "headers",
    "heads_of",
    "is_useful",
    "lengths_differ",
    "loop_counts",
    "pass_launch",
    "refusal",
    "rows_of",
    "scalars",
    "shrink",
    "terms_launch",
    "terms_scratch",
    "tiles",
    "workload_constants",
]

Side = Literal["keys", "queries"]

MAX_SEQUENCE = 2**30
"""Longest sequence, for which row numbers with the overhang of tiles fit in 32 bits."""
TERMS_THREADS = 256
"""Threads of a block of `attention_terms`."""
AFFORDABLE_FMA = 10_000_000
"""Multiply-adds that emulation computes in a fraction of a second."""


# -- loop counts of blocks -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoopCounts:
    """Loop iterations of the blocks of a pass, as columns over configurations.

    Attributes:
        blocks: Blocks of all heads.
        most: Iterations of the longest block.
        full: Number of blocks with that many iterations.
        steps: Iterations of all blocks.
        rows: Least existing rows of a tile.
        lines: Least rows of the other side that the longest block copies.
        all_lines: Least rows of the other side that all blocks copy.
    """

    blocks: Any
    most: Any
    full: Any
    steps: Any
    rows: Any
    lines: Any
    all_lines: Any


def rows_of(workload: Attention, side: Side) -> int:
    """Return the sequence length of a side."""
    return workload.seq_k if side == "keys" else workload.seq_q


def heads_of(workload: Attention, side: Side) -> int:
    """Return the heads of a side, for the whole batch."""
    return workload.batch * (workload.heads_k if side == "keys" else workload.heads)


def blocks(workload: Attention, side: Side, tile: Any) -> Any:
    """Return the number of tiles of `tile` rows (a number or a column) on a side.

    Args:
        workload: The workload.
        side: Side whose rows the blocks own.
        tile: Rows of a tile, a number or a column.
    """
    return heads_of(workload, side) * ceil_div(rows_of(workload, side), tile)


def loop_counts(workload: Attention, side: Side, tile: Any, step: Any) -> LoopCounts:
    """Return the loop iterations of a pass, for each row of a table.

    Args:
        workload: The workload.
        side: Side whose rows the blocks own.
        tile: Rows of a block.
        step: Rows of the other side in an iteration.
    """
    pairs, of_row = np.unique(np.stack(np.broadcast_arrays(tile, step)), axis=1, return_inverse=True)
    longest, full, steps = (
        np.array(column, dtype=np.float64)[of_row.reshape(-1)]
        for column in zip(*(_of_head(workload, side, int(t), int(s)) for t, s in pairs.T), strict=True)
    )
    heads = heads_of(workload, side)
    other_length = workload.seq_q if side == "keys" else workload.seq_k
    # Blocks of keys iterate over each head of their group; the last tile of each head may be partial.
    times = workload.group if side == "keys" else 1
    missing = ceil_div(other_length, step) * step - other_length
    count = 1.0 * blocks(workload, side, tile)
    rows = rows_of(workload, side)
    return LoopCounts(
        blocks=count,
        most=times * longest,
        full=heads * full,
        steps=heads * times * steps,
        rows=rows - (ceil_div(rows, tile) - 1) * tile,
        lines=times * (longest * step - missing),
        all_lines=times * (heads * steps * step - count * missing),
    )


def _of_head(workload: Attention, side: Side, tile: int, step: int) -> tuple[int, int, int]:
    """Return the iterations of a head: of the longest block, the number of such blocks, and the total."""
    first = np.arange(0, rows_of(workload, side), tile)
    last = np.minimum(first + tile, rows_of(workload, side)) - 1
    if side == "queries":
        (begin, _), (_, end) = map(workload.keys_of, (first, last))
    else:
        begin, end = 0 * first, 0 * first + workload.seq_q
        if workload.causal:
            begin = np.maximum(0, first - workload.before)
        if workload.window:
            end = np.minimum(end, last - workload.before + workload.window)
    iterations = np.where(begin < end, ceil_div(end, step) - begin // step, 0)
    return int(iterations.max()), int((iterations == iterations.max()).sum()), int(iterations.sum())


# -- spaces --------------------------------------------------------------------------------------------------

TOGETHER = Parameter(
    "together", ("head", "length"), "blocks that run at the same time: of one head, or of equal length"
)


def lengths_differ(together: Any, workload: Attention) -> Any:
    """Without a mask all blocks have the same length."""
    return (together == "head") | workload.causal


def is_useful(workload: Attention, tile: Any, least: int) -> Any:
    """Tiles must not be twice as long as both sequences if smaller tiles exist."""
    return (tile == least) | (tile < 2 * max(workload.seq_q, workload.seq_k))


def tiles(workload: Attention, keys: int, queries: int, head: int) -> tuple[Tiling, ...]:
    """Return the tiles of both sequences for blocks of keys, and the tile of head_dim in products.

    Args:
        workload: The workload.
        keys: Keys of a block.
        queries: Queries of an iteration.
        head: Elements of head_dim that products process.
    """
    return (
        Tiling(dimension="seq_k", extent=workload.seq_k, tile=keys),
        Tiling(dimension="seq_q", extent=workload.seq_q, tile=queries),
        Tiling(dimension="head_dim", extent=workload.head_dim, tile=head),
    )


# -- costs ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PassWork:
    """Costs of a pass for an iteration, and further costs for a block, by field of `Costs`.

    Attributes:
        met: Loop iterations of the blocks.
        of_step: Costs of an iteration.
        of_block: Least further costs of the longest block.
        of_all: Further costs of all blocks; `blocks` times `of_block` for fields that are missing.
    """

    met: LoopCounts
    of_step: dict[str, Any]
    of_block: dict[str, Any] = dataclasses.field(default_factory=dict)
    of_all: dict[str, Any] = dataclasses.field(default_factory=dict)

    def of_busiest(self, name: str) -> Any:
        """Return the costs of the longest block in one field."""
        return self.met.most * self.of_step.get(name, 0.0) + self.of_block.get(name, 0.0)

    def total(self, name: str) -> Any:
        """Return the costs of all blocks in one field."""
        further = self.of_all.get(name, self.met.blocks * self.of_block.get(name, 0.0))
        return self.met.steps * self.of_step.get(name, 0.0) + further


def as_costs(
    works: tuple[PassWork, ...], product: str, figures: tuple[str, ...], **figures_per_block: Any
) -> Costs:
    """Return the costs of consecutive kernels, expressed in blocks of the first kernel.

    The number of blocks is that of the first kernel's blocks that would multiply as much as all kernels do.
    In any other field a block has its own cost, or its share of the total if that is less.

    Args:
        works: Costs of each kernel; full blocks are the longest of the first.
        product: Field that counts products.
        figures: Fields to compute.
        figures_per_block: Fields with known values.
    """
    first = works[0]
    count = sum(work.total(product) for work in works) / first.of_busiest(product)
    shares = {
        name: np.minimum(first.of_busiest(name), sum(work.total(name) for work in works) / count)
        for name in figures
    }
    return Costs(blocks=count, full_blocks=first.met.full, **shares, **figures_per_block)


# -- launches ------------------------------------------------------------------------------------------------


def refusal(workload: Attention, key: str, least_tile: int) -> str | None:
    """Return why a backward variant does not support a workload, or None.

    Args:
        workload: The workload.
        key: Key of the variant, for the message.
        least_tile: Rows of the smallest tile.
    """
    if max(workload.seq_q, workload.seq_k) > MAX_SEQUENCE:
        return f"{key} takes sequences of up to {MAX_SEQUENCE}"
    max_blocks = max(blocks(workload, "keys", least_tile), blocks(workload, "queries", least_tile))
    rows = workload.batch * workload.heads * workload.seq_q
    if max_blocks > MAX_BLOCKS or rows // 8 >= MAX_BLOCKS:
        return f"{key} would take more than {MAX_BLOCKS} blocks"
    return None


def workload_constants(workload: Attention) -> dict[str, str | bool | int]:
    """Return the constants that depend on the workload; sizes other than head_dim are arguments."""
    vec = alignment(workload.head_dim, workload.dtype)
    accesses = ceil_div(workload.head_dim, vec)
    return {
        "In": ctype(workload.dtype),
        "HEAD_DIM": workload.head_dim,
        "CAUSAL": workload.causal,
        "VEC": vec,
        "LANES": min(32, 1 << (accesses - 1).bit_length()),
    }


def headers(workload: Attention) -> str:
    """Return the headers for tiles, masks, biases and terms; they need types.cuh and reduce.cuh."""
    mask = _scores.header(workload, "attention_backward_mask", "attention_backward_window")
    return helpers("attention_backward_tiles") + mask + helpers("attention_backward")


def scalars(workload: Attention) -> tuple[Scalar, ...]:
    """Return the size and scale arguments of a pass: group, seq_q, seq_k, scale."""
    return (
        Scalar("int", workload.group),
        Scalar("int", workload.seq_q),
        Scalar("int", workload.seq_k),
        Scalar("float", workload.scale),
    )


def pass_launch(
    workload: Attention,
    side: Side,
    *,
    tile: int,
    threads: int,
    smem_bytes: int,
    inputs: tuple[Argument | TensorMap, ...] = ("q", "k", "v", "do"),
    flags: tuple[bool, ...] = (),
    more: tuple[Argument, ...] = (),
    parts: int = 1,
) -> Launch:
    """Return the launch of one pass over the scores.

    Args:
        workload: The workload.
        side: Side whose gradients the pass computes.
        tile: Rows of a block.
        threads: Threads of a block.
        smem_bytes: Shared memory of a block.
        inputs: Inputs in addition to the terms of queries.
        flags: Template arguments after the side.
        more: Arguments after those that all passes have.
        parts: Blocks that share a tile.
    """
    of_queries = side == "queries"
    return Launch(
        entry=f"attention_gradients<{', '.join(['Choice', *map(flag, (of_queries, *flags))])}>",
        grid=(int(blocks(workload, side, tile)) * parts, 1, 1),
        block=(threads, 1, 1),
        arguments=(
            *(*inputs, "terms"),
            *(("dq", "dq") if of_queries else ("dv", "dk")),
            *(*scalars(workload), *more, *_scores.arguments(workload)),
        ),
        smem_bytes=smem_bytes,
    )


def terms_scratch(workload: Attention, multiple: int = 1) -> Tensor:
    """Return memory for the results of `attention_terms`; the queries of a head are padded to a multiple.

    Args:
        workload: The workload.
        multiple: Multiple that the queries of a head are padded to.
    """
    pitch = ceil_div(workload.seq_q, multiple) * multiple
    return Tensor(name="terms", shape=(workload.batch, workload.heads, pitch, 2), dtype="f32")


def terms_launch(workload: Attention, sums: str, multiple: int = 1, cleared: int | None = None) -> Launch:
    """Return the launch of the first kernel.

    Args:
        workload: The workload.
        sums: Tensor that the kernel clears, if the configuration uses it.
        multiple: Multiple that the queries of a head are padded to.
        cleared: Lines that it clears there; default: one per query.
    """
    pitch = terms_scratch(workload, multiple).shape[2]
    rows = workload.batch * workload.heads * pitch
    cleared = rows if cleared is None else cleared
    a_block = TERMS_THREADS // int(workload_constants(workload)["LANES"])
    return Launch(
        entry="attention_terms<Choice>",
        grid=(int(ceil_div(max(rows, cleared), a_block)), 1, 1),
        block=(TERMS_THREADS, 1, 1),
        arguments=(
            *("o", "do", "lse", "terms", sums),
            Scalar("long long", rows),
            Scalar("int", workload.seq_q),
            Scalar("int", pitch),
            Scalar("long long", cleared),
        ),
    )


def shrink(workload: Attention, tile_q: int, tile_k: int) -> Attention:
    """Return a small workload with two heads, and two full tiles and the partial tile of either side.

    Args:
        workload: The full workload.
        tile_q: Queries of a tile.
        tile_k: Keys of a tile.
    """
    small = workload
    for tiles in (2, 1):
        seq_q = kept(workload.seq_q, tile_q, tiles)
        seq_k = kept(workload.seq_k, tile_k, tiles)
        if seq_k < least_keys(workload, seq_q):  # keep the position of the diagonal in its tile, or nearly so
            seq_q = seq_k
        group = min(2, workload.group)
        heads_k = min(workload.heads_k, 2 // group)
        small = dataclasses.replace(
            workload,
            batch=min(workload.batch, 2 // heads_k // group),
            heads=heads_k * group,
            heads_k=heads_k,
            seq_q=seq_q,
            seq_k=seq_k,
        )
        if small.flops() <= 2 * AFFORDABLE_FMA:
            break
    return small
