"""How far sums of products in f32 may be from exact ones: shared by operators that accumulate."""

from __future__ import annotations

import math

from tunebench.dtype import DType, unit_roundoff

__all__ = ["REASON", "error"]

REASON = (
    "f32 sums of K products err by 2 sqrt(K) u of the magnitude summed with overwhelming probability "
    "(products of f16 or bf16 are exact in f32), truncating tensor cores included; "
    "rounding to tf32 errs by 2 * 2**-11 a product, independently, so by 3 / sqrt(K) of that over K > 9"
)


def error(terms: int, dtype: DType, fewest: int | None = None) -> float:
    """Return the relative error of an f32 sum of `terms` products, per unit of the sum of magnitudes.

    The worst case, terms * u, is never met and would hide a wrong element; rounding errors of zero mean
    add up as the root of their number. On random data tensor cores, which truncate after each 4 products
    or more, stay within the same limit.

    Args:
        terms: Most products that an output sums.
        dtype: Type they are multiplied in.
        fewest: Fewest products that an output sums, where that differs: errors of a few do not average out.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019; Fasi, Higham,
    Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021.
    """
    total = 2.0 * math.sqrt(terms) * unit_roundoff("f32")
    if dtype == "tf32":
        total += 2.0 * unit_roundoff(dtype) * min(1.0, 3.0 / math.sqrt(fewest or terms))
    return total
