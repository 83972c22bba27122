"""Error limits of sums in f32, and the blocks of rows in which references are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tunebench._lazy import np
from tunebench.dtype import DType, underflow, unit_roundoff
from tunebench.errors import InputError

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = [
    "F32",
    "PROMOTED_TERMS",
    "REASON",
    "REASON_E4M3",
    "REASON_PROMOTED",
    "check",
    "error",
    "excess_rounding",
    "row_blocks",
    "sum_error",
]

F32 = unit_roundoff("f32")

REASON = (
    "f32 sums of K products err by 2 sqrt(K) u of the magnitude summed with overwhelming probability "
    "(products of f16 or bf16 are exact in f32), truncating tensor cores included; "
    "rounding to tf32 errs by 2 * 2**-11 a product, independently, so by 3 / sqrt(K) of that over K > 9"
)
REASON_E4M3 = (
    "tensor cores add products of e4m3 to 13 fraction bits, truncating: by (8 + sqrt(K) / 8) 2**-13 more"
)
REASON_PROMOTED = (
    "tensor cores add up to 256 products of e4m3 to 13 fraction bits, before these sums are added in f32: "
    "by 10 * 2**-13 sqrt(256 / K) more over K > 256"
)
E4M3_FRACTION_BITS = 13
"""Fraction bits that tensor cores keep of a sum of e4m3 products, documented as f32 (sm_89, sm_90).

Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.5.2; Zhang et al.,
"SageAttention2", 2024.
"""

PROMOTED_TERMS = 256
"""Most products of e4m3 that tensor cores may sum before the sum is added in f32, where `accumulate` is f32.

DeepGEMM and CUTLASS add every 128.

Source: DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.3.2.
"""


def check(operator: str, accumulate: str, dtype: DType) -> None:
    """Refuse accumulate=f32 of types whose sums are as accurate without it, so that a product has one text.

    Raises:
        InputError: The type is not e4m3.
    """
    if accumulate == "f32" and dtype != "e4m3":
        raise InputError(f"{operator}: accumulate=f32 is for dtype=e4m3; leave it out for {dtype}")


def error(terms: int, dtype: DType, fewest: int | None = None, *, promoted: bool = False) -> float:
    """Return the relative error limit of an f32 sum of `terms` products, per unit of the sum of magnitudes.

    The worst case, terms * u, never occurs in practice and would hide a wrong element. Rounding errors of
    zero mean add up as the square root of their number. On random data, tensor cores, which truncate after
    each 4 products or more, stay within the same limit.

    Args:
        terms: Largest number of products that an output sums.
        dtype: Type in which the factors are multiplied.
        fewest: Smallest number of products that an output sums, if it differs from `terms`: errors of a few
            products do not average out.
        promoted: Whether sums of at most `PROMOTED_TERMS` products of e4m3 are added in f32.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019; Fasi, Higham,
    Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021.
    """
    total = 2.0 * math.sqrt(terms) * unit_roundoff("f32")
    if dtype == "tf32":
        total += 2.0 * unit_roundoff(dtype) * min(1.0, 3.0 / math.sqrt(fewest or terms))
    if dtype == "e4m3":
        # Each product is truncated at the last place of the sum, independently, which costs a constant share
        # of the magnitude summed. The sum is truncated towards zero every 32 products, which costs sqrt(K).
        group = min(terms, PROMOTED_TERMS) if promoted else terms
        of_group = 2.0**-E4M3_FRACTION_BITS * min(group, 8.0 + math.sqrt(group) / 8.0)
        # Errors of groups are independent.
        total += of_group * math.sqrt(group / terms)
    return total


def sum_error(terms: int) -> float:
    """Return the relative error of an f32 sum followed by a few roundings, per unit of magnitude.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019.
    """
    return (2.0 * math.sqrt(terms) + 8.0) * F32


def excess_rounding(value: Array64, dtype: DType) -> Array64:
    """Return the error of rounding to a type in excess of rounding to f32; tiny values may become 0."""
    return (unit_roundoff(dtype) - F32) * np.abs(value) + underflow(dtype)


def row_blocks(rows: int, cols: int, elements: int) -> Iterator[slice]:
    """Yield slices of rows of a matrix that hold about as many elements as given, at least one row each."""
    step = max(1, elements // max(1, cols))
    return (slice(first, min(rows, first + step)) for first in range(0, rows, step))
