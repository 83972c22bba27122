"""Error limits of sums in f32, and the blocks of rows in which references are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import DType, is_integer, underflow, unit_roundoff
from tunebench.errors import InputError
from tunebench.stress import Stress, StressKind

if TYPE_CHECKING:
    from tunebench.workload import Array64

__all__ = [
    "F32",
    "PROMOTED_TERMS",
    "check",
    "error",
    "excess_rounding",
    "factors",
    "product_scale",
    "reason",
    "relative_error",
    "row_blocks",
    "sum_error",
    "sum_error_of",
]

F32 = unit_roundoff("f32")

ROUNDINGS = 4.0
"""Error of an f32 sum in units of u sqrt(K) times the 2-norm of its products, and times its own magnitude."""

_REASON_F32 = (
    "f32 sums of K products in random order err by 4 u sqrt(K) of the 2-norm of the products and of the sum "
    "with overwhelming probability, in whatever order kernels add them: factors rounded to tf32 or bf16 err "
    "by more for every K"
)
_REASON = (
    "f32 sums of K products err by 2 sqrt(K) u of the magnitude summed with overwhelming probability "
    "(products of f16 or bf16 are exact in f32), truncating tensor cores included; "
    "rounding to tf32 errs by 2 * 2**-11 a product, independently, so by 3 / sqrt(K) of that over K > 9"
)
_REASON_E4M3 = (
    "tensor cores add products of e4m3 to 13 fraction bits, truncating: by (8 + sqrt(K) / 8) 2**-13 more"
)
_REASON_PROMOTED = (
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
    """Return the error limit of an f32 sum of `terms` products, in the unit of `product_scale`.

    The worst case, terms * u, never occurs in practice and would hide a wrong element. Rounding errors of
    zero mean add up as the square root of their number. On random data, tensor cores, which truncate after
    each 4 products or more, stay within the same limit of the sum of magnitudes.

    Products of f32 are not truncated. Their limit follows from the partial sums: each rounding errs by up to
    u times the partial sum, and the errors have zero mean. For products in random order, the squares of the
    partial sums add up to K / 2 times the sum of squares of the products, plus K / 3 times the square of the
    total. The limit is 14 standard deviations for roundings of uniform error.

    Args:
        terms: Largest number of products that an output sums.
        dtype: Type in which the factors are multiplied.
        fewest: Smallest number of products that an output sums, if it differs from `terms`: errors of a few
            products do not average out.
        promoted: Whether sums of at most `PROMOTED_TERMS` products of e4m3 are added in f32.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019, and "Sharper
    probabilistic backward error analysis for basic linear algebra kernels with random data", 2020 (f32);
    Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021.
    """
    if dtype == "f32":
        return ROUNDINGS * math.sqrt(terms) * F32
    total = 2.0 * math.sqrt(terms) * F32
    if dtype == "tf32":
        total += 2.0 * unit_roundoff(dtype) * min(1.0, 3.0 / math.sqrt(fewest or terms))
    if dtype == "e4m3":
        total += float(_truncation(float(terms), promoted=promoted))
    return total


def reason(dtype: DType, *, promoted: bool = False) -> str:
    """Return the derivation of `error`, for `Tolerance.reason`.

    Args:
        dtype: Type in which the factors are multiplied.
        promoted: As for `error`.
    """
    if dtype == "f32":
        return _REASON_F32
    of_e4m3 = _REASON_PROMOTED if promoted else _REASON_E4M3
    return f"{_REASON}; {of_e4m3}" if dtype == "e4m3" else _REASON


def _truncation(terms: Any, *, promoted: bool) -> Any:
    """Return the relative error of adding products of e4m3 on tensor cores, for any number of terms.

    Each product is truncated at the last place of the sum, independently, which costs a constant share of the
    magnitude summed. The sum is truncated towards zero every 32 products, which costs sqrt(K).
    """
    group = np.minimum(terms, PROMOTED_TERMS) if promoted else terms
    of_group = 2.0**-E4M3_FRACTION_BITS * np.minimum(group, 8.0 + np.sqrt(group) / 8.0)
    return of_group * np.sqrt(group / terms)  # errors of groups are independent


def relative_error(terms: int, dtype: DType) -> float:
    """Return the error limit of a sum in relation to its own magnitude, in addition to `error`."""
    return error(terms, dtype) if dtype == "f32" else 0.0


def product_scale(a: Array64, b: Array64, terms: int, dtype: DType, *, promoted: bool = False) -> Array64:
    """Return the magnitudes of sums of products to which `error` applies.

    For f32 it is the 2-norm of the products, for other types the sum of their magnitudes. Vectors with few
    elements that are not 0 have few roundings, and a smaller magnitude.

    Args:
        a: Left factor (m, k).
        b: Right factor (k, n).
        terms: Number of products for which `error` is stated.
        dtype: Type in which the factors are multiplied.
        promoted: As for `error`.

    Returns:
        Magnitudes (m, n).
    """
    scale: Array64
    if is_integer(dtype):
        scale = np.abs(a) @ np.abs(b)
        return scale
    rounded = np.minimum(_filled(a, 1)[:, None], _filled(b, 0)[None, :])
    if dtype == "f32":
        scale = np.sqrt(np.square(a) @ np.square(b)) * np.sqrt(rounded / terms)
        return scale
    magnitudes, limit = np.abs(a) @ np.abs(b), 2.0 * F32 * np.sqrt(rounded)
    if dtype == "e4m3":
        limit = limit + _truncation(rounded, promoted=promoted)
    allowed = magnitudes * limit
    if dtype == "tf32":
        norms = np.sqrt(np.square(a) @ np.square(b))
        allowed = allowed + 2.0 * unit_roundoff(dtype) * np.minimum(magnitudes, 3.0 * norms)
    scale = allowed / error(terms, dtype, promoted=promoted)
    return scale


def _filled(factor: Array64, axis: int) -> Array64:
    """Return the number of elements that are not 0 along an axis, at least 1."""
    counts: Array64 = ((np.abs(factor) > 0.0) * 1.0).sum(axis=axis)
    return np.maximum(counts, 1.0)


def factors(dtype: DType, axes: tuple[int, int], out: DType, *, bounded: bool = False) -> dict[str, Stress]:
    """Return the kinds of vectors of the factors a and b of a product for which it is defined.

    Args:
        dtype: Type in which the factors are multiplied.
        axes: Axis of a, and of b, over which products are summed.
        out: Type of the result: f16 overflows.
        bounded: Whether an expression of the elements or of the result is defined for moderate values only.
    """
    kinds: tuple[StressKind, ...] = ("sparse", "mixed", "offset", "large", "tiny", "constant", "zeros")
    if is_integer(dtype):
        kinds = ("extreme", "sparse", "zeros")
    elif dtype == "e4m3" or bounded:
        kinds = ("sparse", "constant", "zeros")
    elif "f16" in (dtype, out):
        kinds = tuple(kind for kind in kinds if kind not in ("large", "offset"))
    of_b = tuple(kind for kind in kinds if kind in ("sparse", "mixed", "tiny", "zeros", "extreme"))
    return {"a": Stress(kinds=kinds, axes=axes[:1]), "b": Stress(kinds=of_b, axes=axes[1:])}


def sum_error(terms: int) -> float:
    """Return the relative error of an f32 sum followed by a few roundings, per unit of magnitude.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019.
    """
    return (2.0 * math.sqrt(terms) + 8.0) * F32


def sum_error_of(total: Array64, squares: Array64, terms: Array64) -> Array64:
    """Return the error limit of f32 sums from what was summed (see `error`), and of a few roundings.

    Args:
        total: The sums.
        squares: Sums of the squares of the terms.
        terms: Number of terms of each sum that are not 0.
    """
    rounding = ROUNDINGS * F32 * np.sqrt(terms)
    limit: Array64 = rounding * (np.sqrt(squares) + np.abs(total)) + 8.0 * F32 * np.abs(total)
    return limit


def excess_rounding(value: Array64, dtype: DType) -> Array64:
    """Return the error of rounding to a type in excess of rounding to f32; tiny values may become 0."""
    return (unit_roundoff(dtype) - F32) * np.abs(value) + underflow(dtype)


def row_blocks(rows: int, cols: int, elements: int) -> Iterator[slice]:
    """Yield slices of rows of a matrix that hold about as many elements as given, at least one row each."""
    step = max(1, elements // max(1, cols))
    return (slice(first, min(rows, first + step)) for first in range(0, rows, step))
