"""Matrix product in Triton, as in its tutorial, autotuned over a few tile shapes.

Blocks run in groups of rows that share the tiles they read. Each block accumulates a tile over k, in f32, or
in i32 for integers. Batches and epilogues are not supported.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["matmul"]

TILES = (
    (128, 256, 64, 3, 8),
    (128, 128, 64, 4, 4),
    (256, 128, 64, 3, 8),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4),
    (128, 128, 32, 4, 4),
    (32, 64, 64, 5, 2),
)
"""Rows, columns and depth of a tile, pipeline stages, warps."""


CONFIGS = [
    triton.Config({"BM": bm, "BN": bn, "BK": bk, "GROUP": 8}, num_stages=stages, num_warps=warps)
    for bm, bn, bk, stages, warps in TILES
]


@triton.autotune(configs=CONFIGS, key=["m", "n", "k", "PRECISION"])
@triton.jit
def _product(
    a, b, c, m, n, k,
    a_row, a_col, b_row, b_col, c_row,
    PRECISION: tl.constexpr, SUMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows_of_blocks, cols_of_blocks = tl.cdiv(m, BM), tl.cdiv(n, BN)
    group = block // (GROUP * cols_of_blocks)
    height = min(rows_of_blocks - group * GROUP, GROUP)
    within = block % (GROUP * cols_of_blocks)
    top, left = (group * GROUP + within % height) * BM, within // height * BN
    rows, cols, depth = top + tl.arange(0, BM), left + tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=SUMS)
    for start in range(0, k, BK):
        at = start + depth
        here = a + (rows % m)[:, None] * a_row + at[None, :] * a_col
        there = b + at[:, None] * b_row + (cols % n)[None, :] * b_col
        x = tl.load(here, mask=at[None, :] < k, other=0)
        y = tl.load(there, mask=at[:, None] < k, other=0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    to = c + rows[:, None] * c_row + cols[None, :]
    tl.store(to, total.to(c.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


def matmul(a: Any, b: Any, c: Any, precision: str = "ieee") -> None:
    """Compute c (m, n) = a (m, k) @ b (k, n) on torch tensors; a and b may be transposed views.

    Args:
        a: Matrix of a floating-point dtype or int8.
        b: Matrix of the same dtype.
        c: Output of any floating-point dtype or int32; overwritten.
        precision: Precision of f32 products: ``"ieee"`` or ``"tf32"``.
    """
    (m, k), n = a.shape, b.shape[1]

    def blocks(chosen: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, chosen["BM"]) * triton.cdiv(n, chosen["BN"]),)

    sums = tl.float32 if a.dtype.is_floating_point else tl.int32
    strides = (*a.stride(), *b.stride(), c.stride(0))
    _product[blocks](a, b, c, m, n, k, *strides, PRECISION=precision, SUMS=sums)
