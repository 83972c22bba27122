"""Limits, padding and emulation sizes that the CUDA C++ variants of attention share."""

from __future__ import annotations

from tunebench.variant import ceil_div
from tunebench.workloads.operators.attention import Attention

__all__ = ["kept", "least_keys", "mma_refusal", "padded", "unmodified_refusal"]


def padded(workload: Attention, multiple: int = 16) -> int:
    """Return head_dim padded with zeros to a multiple.

    Args:
        workload: The workload.
        multiple: Multiple that head_dim is padded to.
    """
    return int(ceil_div(workload.head_dim, multiple) * multiple)


def mma_refusal(workload: Attention, key: str, most: int) -> str | None:
    """Return why a workload cannot use 16-bit products and 16-byte copies, or None.

    Args:
        workload: The workload.
        key: Key of the variant, for the message.
        most: Largest head_dim of the variant.
    """
    if workload.dtype not in ("f16", "bf16"):
        return f"{key} multiplies f16 and bf16, not {workload.dtype}"
    if workload.head_dim % 8 or workload.head_dim > most:
        return f"{key} takes head_dim up to {most} in multiples of 8, not {workload.head_dim}"
    return None


def unmodified_refusal(workload: Attention, key: str) -> str | None:
    """Return why a variant without biases, windows and ``align=first`` refuses a workload, or None.

    Args:
        workload: The workload.
        key: Key of the variant, for the message.
    """
    if workload.has_bias:
        return f"{key} adds no bias to scores: bias={workload.bias}"
    if not workload.has_simple_mask:
        return f"{key} has no mask with align={workload.align}, window={workload.window}"
    return None


def least_keys(workload: Attention, seq_q: int) -> int:
    """Return the smallest seq_k with which the mask lets each of `seq_q` queries see a key.

    Args:
        workload: The workload, for its mask.
        seq_q: Number of queries.
    """
    if workload.causal and workload.align == "last":
        return seq_q
    return max(1, seq_q - workload.window + 1) if workload.window else 1


def kept(extent: int, tile: int, tiles: int) -> int:
    """Return the length that an emulation workload keeps: `tiles` full tiles and the partial one.

    Args:
        extent: Length in the full workload.
        tile: Length of a tile.
        tiles: Full tiles to keep.
    """
    return min(extent, tile * tiles + extent % tile)
