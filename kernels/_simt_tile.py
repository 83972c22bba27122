"""How threads share a block's tile on the ordinary units: gemm and grouped_gemm."""

from __future__ import annotations

from typing import Any

__all__ = ["MAX_SUMS", "threads", "threads_are_reasonable", "tiles_are_compact", "warps_cover_the_tile"]

MAX_SUMS = 128
"""Sums a thread may keep: beyond that they do not stay in its 255 registers."""


def threads(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """Return the threads of a block."""
    return bm * bn // (tm * tn)


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
