"""Forward attention in Triton, as in its tutorial (FlashAttention-2), autotuned over a few tile shapes."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["attention"]

TILES = ((128, 128, 3, 8), (128, 64, 3, 8), (128, 64, 3, 4), (64, 64, 3, 4), (64, 32, 4, 4))
"""Queries per tile, keys per tile, pipeline stages, warps."""


CONFIGS = [
    triton.Config({"BM": bm, "BN": bn}, num_stages=stages, num_warps=warps) for bm, bn, stages, warps in TILES
]


@triton.jit
def _forward(
    q, k, v, o, lse, scale, heads, group, seq_q, seq_k,
    CAUSAL: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    shared = head // heads * (heads // group) + head % heads // group
    rows, dims = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, PADDED)
    at_q = head * seq_q * DIM + rows[:, None] * DIM + dims[None, :]
    in_q = (rows[:, None] < seq_q) & (dims[None, :] < DIM)
    mine = tl.load(q + at_q, mask=in_q, other=0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, PADDED], tl.float32)
    before = seq_k - seq_q
    end = min(seq_k, tl.program_id(0) * BM + BM + before) if CAUSAL else seq_k
    for start in range(0, end, BN):
        keys = start + tl.arange(0, BN)
        at_k = shared * seq_k * DIM + keys[:, None] * DIM + dims[None, :]
        in_k = (keys[:, None] < seq_k) & (dims[None, :] < DIM)
        scores = tl.dot(mine, tl.trans(tl.load(k + at_k, mask=in_k, other=0))) * (scale * 1.4426950408889634)
        seen = keys[None, :] < seq_k
        if CAUSAL:
            seen = seen & (keys[None, :] <= rows[:, None] + before)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        values = tl.load(v + at_k, mask=in_k, other=0)
        sums = tl.dot(p.to(values.dtype), values, sums * fade[:, None])
        top = higher
    tl.store(o + at_q, (sums / total[:, None]).to(o.dtype.element_ty), mask=in_q)
    tl.store(lse + head * seq_q + rows, (top + tl.log2(total)) * 0.6931471805599453, mask=rows < seq_q)


_tuned = triton.autotune(configs=CONFIGS, key=["seq_q", "seq_k", "CAUSAL", "DIM"])(_forward)


def attention(
    q: Any, k: Any, v: Any, o: Any, lse: Any, *, causal: bool, kernel: Any = _tuned, **tile: int
) -> None:
    """Compute o and lse of q (batch, heads, seq_q, dim) on torch tensors; k and v may have fewer heads.

    Args:
        q: Queries, contiguous, in f16 or bf16.
        k: Keys (batch, heads_k, seq_k, dim).
        v: Values, like the keys.
        o: Output, like q; overwritten.
        lse: Log-sum-exp (batch, heads, seq_q) in f32; overwritten.
        causal: Whether query i sees only the keys up to i + seq_k - seq_q.
        kernel: The autotuned kernel, or the plain one, which also needs `tile`.
        tile: `BM` and `BN` of the plain kernel.
    """
    batch, heads, seq_q, dim = q.shape

    def blocks(chosen: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(seq_q, chosen["BM"]), batch * heads

    sizes = (dim**-0.5, heads, heads // k.shape[1], seq_q, k.shape[2])
    padded = max(16, triton.next_power_of_2(dim))
    kernel[blocks](q, k, v, o, lse, *sizes, CAUSAL=causal, DIM=dim, PADDED=padded, **tile)
