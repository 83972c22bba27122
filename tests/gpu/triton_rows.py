"""Softmax, layernorm and rmsnorm in Triton, as in its tutorials: one program per row.

The row is held in registers, padded to a power of two; longer rows use more warps. Operands are torch tensors
(rows, cols) of at most `LONGEST` columns.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["LONGEST", "layernorm", "rmsnorm", "softmax"]

LONGEST = 65536
"""Longest row, in elements, that one program holds."""


@triton.jit
def _softmax(x, y, cols, scale, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < cols
    z = tl.load(x + row * cols + at, mask=inside, other=-float("inf")).to(tl.float32) * scale
    e = tl.exp(z - tl.max(z, axis=0))
    tl.store(y + row * cols + at, (e / tl.sum(e, axis=0)).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _normalise(x, gamma, beta, y, cols, eps, CENTRED: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < cols
    z = tl.load(x + row * cols + at, mask=inside, other=0).to(tl.float32)
    if CENTRED:
        z = tl.where(inside, z - tl.sum(z, axis=0) / cols, 0.0)
    z = z / tl.sqrt(tl.sum(z * z, axis=0) / cols + eps)
    z = z * tl.load(gamma + at, mask=inside, other=0).to(tl.float32)
    if CENTRED:
        z += tl.load(beta + at, mask=inside, other=0).to(tl.float32)
    tl.store(y + row * cols + at, z.to(y.dtype.element_ty), mask=inside)


def _shape(cols: int) -> dict[str, int]:
    block = triton.next_power_of_2(cols)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def softmax(x: Any, y: Any, scale: float = 1.0) -> None:
    """Write the softmax of each row of scale x to y."""
    _softmax[(x.shape[0],)](x, y, x.shape[1], scale, **_shape(x.shape[1]))


def layernorm(x: Any, gamma: Any, beta: Any, y: Any, eps: float) -> None:
    """Write (x - mean) / sqrt(variance + eps) * gamma + beta to y, with the moments of each row."""
    _normalise[(x.shape[0],)](x, gamma, beta, y, x.shape[1], eps, CENTRED=True, **_shape(x.shape[1]))


def rmsnorm(x: Any, gamma: Any, y: Any, eps: float) -> None:
    """Write x / sqrt(mean of x^2 + eps) * gamma to y, with the mean of each row."""
    _normalise[(x.shape[0],)](x, gamma, gamma, y, x.shape[1], eps, CENTRED=False, **_shape(x.shape[1]))
