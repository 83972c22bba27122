"""Reductions of an expression by Numba: the neutral element, joins of results, and exact functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.kernels.common.numba_cpu import inlined
from tunebench.workloads.operators._reduced import ReducedExpression

__all__ = ["TAKEN", "exact", "join_of", "neutral_of"]

TAKEN = {
    "sum": "total = total + each",
    "mean": "total = total + each",
    # These keep NaN.
    "max": "total = each if each > total or each != each else total",
    "min": "total = each if each < total or each != each else total",
}
"""Statement of a Numba-CUDA kernel that adds `each` to `total`, by reduction."""


def neutral_of(workload: ReducedExpression) -> Any:
    """Return the f32 with which a result begins."""
    import numpy as np

    return np.float32({"max": -np.inf, "min": np.inf}.get(workload.reduce, 0.0))


def join_of(workload: ReducedExpression) -> Callable[..., Any]:
    """Return the function that joins two results; NaN is kept."""

    @inlined
    def added(a: Any, b: Any) -> Any:
        return a + b

    @inlined
    def greater(a: Any, b: Any) -> Any:
        return b if b > a or b != b else a

    @inlined
    def less(a: Any, b: Any) -> Any:
        return b if b < a or b != b else a

    return {"max": greater, "min": less}.get(workload.reduce, added)


def exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is inlined into its callers, with operations in the order of the expression.

    The error bound holds in that order. Sums over elements may be reordered.
    """
    import numba

    made: Callable[..., Any] = numba.njit(
        fastmath={"contract", "nsz"}, error_model="numpy", forceinline=True, no_cpython_wrapper=True
    )(function)
    return made
