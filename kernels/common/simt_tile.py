"""How threads share a block's tile on the ordinary units, and what that takes: gemm and its kin."""

from __future__ import annotations

import dataclasses
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.space import Table

__all__ = [
    "MAX_SUMS",
    "Term",
    "smem_bytes",
    "term",
    "threads",
    "threads_are_reasonable",
    "tiles_are_compact",
    "warps_cover_the_tile",
    "widths",
]

MAX_SUMS = 128
"""Sums a thread may keep: beyond that they do not stay in its 255 registers."""


def threads(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """Return the threads of a block."""
    return bm * bn // (tm * tn)


def smem_bytes(trans: str, bm: Any, bn: Any, bk: Any, stages: Any, matrices: int = 1) -> Any:
    """Return the shared memory of a block: a transposed tile has 4 more floats a line."""
    a_pitch, b_pitch = bm + 4 * (trans[0] == "n"), bn + 4 * (trans[1] == "t")
    return 4 * stages * bk * (a_pitch + matrices * b_pitch)


def widths(aligned: tuple[int, int, int], trans: str, bk: Any) -> tuple[Any, Any]:
    """Return the most elements that an access to a and to b moves: of what is aligned, within a step."""
    a, b, _ = aligned
    return (np.minimum(a, bk) if trans[0] == "n" else a), (np.minimum(b, bk) if trans[1] == "t" else b)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What a block does to add one term of k to its sums, as columns.

    Attributes:
        fma: Multiply-adds.
        smem_bytes: Traffic of shared memory.
        accesses: Loads and stores of shared memory by threads.
        instructions: Instructions of warps.
    """

    fma: Any
    smem_bytes: Any
    accesses: Any
    instructions: Any


def term(table: Table, device: Device, matrices: int = 1) -> Term:
    """Return what a term takes in each configuration, with sums of `matrices` matrices b."""
    bm, bn, tm, tn = (table[name].astype(np.float64) for name in ("bm", "bn", "tm", "tn"))
    warps = threads(bm, bn, tm, tn) / 32
    # Reading a chunk takes a pass of 128 bytes at least, more if the lanes' chunks are more.
    chunk_m, chunk_n = np.minimum(tm, 4), np.minimum(tn, 4)
    pass_m = np.maximum(128.0, 32 // table["lanes_n"] * chunk_m * 4)
    pass_n = np.maximum(128.0, table["lanes_n"] * chunk_n * 4)
    of_a, of_b, lines = tm / chunk_m, matrices * tn / chunk_n, bm + matrices * bn
    # sm_100 on can do two multiply-adds by one instruction.
    packed = 2.0 if device.compute_capability >= (10, 0) else 1.0
    return Term(
        fma=matrices * bm * bn,
        smem_bytes=warps * (of_a * pass_m + of_b * pass_n) + 4 * lines,
        # A chunk is one load of a thread; tiles are stored four values at a time, or fewer.
        accesses=32 * warps * (of_a + of_b) + lines / 4,
        instructions=warps * (matrices * tm * tn / packed + of_a + of_b),
    )


def warps_cover_the_tile(bm: Any, bn: Any, tm: Any, tn: Any, lanes_n: Any) -> Any:
    """A warp's results must tile the block's in both directions."""
    return (bm % (32 // lanes_n * tm) == 0) & (bn % (lanes_n * tn) == 0)


def threads_are_reasonable(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """A block has 32 to 512 threads, and a thread no more sums than its registers hold."""
    count = threads(bm, bn, tm, tn)
    return (count >= 32) & (count <= 512) & (tm * tn <= MAX_SUMS)


def tiles_are_compact(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """A block's and a thread's results must be at most 4 times as many one way as the other."""
    return (bm <= 4 * bn) & (bn <= 4 * bm) & (tm <= 4 * tn) & (tn <= 4 * tm)
