"""What CUDA C++ variants of attention share, of either direction: zeros of a head, limits, small sizes."""

from __future__ import annotations

from tunebench.variant import ceil_div
from tunebench.workloads.operators.attention import Attention

__all__ = ["kept", "multiplies_lines", "padded"]


def padded(workload: Attention, multiple: int = 16) -> int:
    """Return head_dim with the zeros that kernels add to it."""
    return int(ceil_div(workload.head_dim, multiple) * multiple)


def multiplies_lines(workload: Attention, key: str, most: int) -> str | None:
    """Return what keeps a problem from products of 16-bit types, or from copies of 16 bytes, or None.

    Args:
        workload: The problem.
        key: Whose limits they are.
        most: Largest head_dim.
    """
    if workload.dtype not in ("f16", "bf16"):
        return f"{key} multiplies f16 and bf16, not {workload.dtype}"
    if workload.head_dim % 8 or workload.head_dim > most:
        return f"{key} takes head_dim up to {most} in multiples of 8, not {workload.head_dim}"
    return None


def kept(extent: int, tile: int, tiles: int) -> int:
    """Return what a small problem keeps of an extent: so many whole tiles, and the edge."""
    return min(extent, tile * tiles + extent % tile)
