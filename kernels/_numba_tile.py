"""How threads of a Numba-CUDA kernel share a tile of c: gemm and grouped_gemm."""

from __future__ import annotations

from typing import Any

__all__ = [
    "MAX_STATIC_SMEM_BYTES",
    "USUAL",
    "smem_bytes",
    "static_smem_fits",
    "threads",
    "threads_are_reasonable",
]

MAX_STATIC_SMEM_BYTES = 48 * 1024
"""Most shared memory of fixed size. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

USUAL = ((64, 64, 4, 4), (32, 32, 2, 2), (16, 32, 1, 2), (16, 16, 1, 1))
"""Tiles (bm, bn, tm, tn) that tutorials and libraries use, largest first."""


def threads(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """Return the threads of a block."""
    return bm // tm * (bn // tn)


def smem_bytes(bm: Any, bn: Any, bk: Any) -> Any:
    """Return the shared memory of a block: a last element pads each line of a tile."""
    return 4 * (bm * (bk + 1) + bk * (bn + 1))


def threads_are_reasonable(bm: Any, bn: Any, tm: Any, tn: Any) -> Any:
    """A block has 64 to 1024 threads, and a thread at most 64 results, all in registers."""
    count = threads(bm, bn, tm, tn)
    return (count >= 64) & (count <= 1024) & (tm * tn <= 64) & (count * (tm * tn + 32) <= 65536)


def static_smem_fits(bm: Any, bn: Any, bk: Any) -> Any:
    """The tiles must fit in shared memory of fixed size."""
    return smem_bytes(bm, bn, bk) <= MAX_STATIC_SMEM_BYTES
