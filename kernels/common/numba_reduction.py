"""Reductions of an expression by Numba: the neutral element, joins of results, and Numba-CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tunebench.kernels.common.expression import compiled, function_text
from tunebench.kernels.common.numba_cpu import inlined
from tunebench.kernels.common.numba_cuda_rows import block_reduction, device_function
from tunebench.space import Config
from tunebench.variant import Launch, Scalar, ceil_div
from tunebench.workloads.common.reduced_expression import ReducedExpression

__all__ = ["TAKEN", "cuda_kernel", "cuda_launches", "exact", "join_of", "neutral_of"]

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


def cuda_kernel(
    workload: ReducedExpression, config: Config, text: str, functions: Mapping[str, Any] | None = None
) -> Callable[..., None]:
    """Return the Numba-CUDA kernel `reduction` of generated code, which also defines its function `join`.

    Args:
        workload: The workload.
        config: The configuration: `threads` of a result, and `others`, the results of a block.
        text: The generated code.
        functions: Further functions that it calls, by name.
    """
    import math

    import numpy as np
    from numba import cuda, float32

    scope: dict[str, Any] = {"__name__": __name__, "cuda": cuda, "math": math, "f32": np.float32}
    scope |= {**(functions or {}), "float32": float32, "neutral": float(neutral_of(workload))}
    scope |= {name: config[name] for name in ("threads", "others")}
    join = device_function(compiled(function_text(text, "join"), "join", dict(scope)))
    scope["reduce"] = block_reduction(config["threads"], join)
    return compiled(function_text(text, "reduction"), "reduction", scope)


def cuda_launches(
    workload: ReducedExpression, config: Config, inputs: Iterable[str], *, reduced_lanes: bool
) -> tuple[Launch, ...]:
    """Return the launch of one block for every `others` results.

    Args:
        workload: The workload.
        config: The configuration: `threads` of a result, and `others`, the results of a block.
        inputs: Names of the inputs, in the order of the kernel's parameters.
        reduced_lanes: Whether adjacent threads share a result; otherwise they have adjacent results.
    """
    threads, others = config["threads"], config["others"]
    return (
        Launch(
            grid=(ceil_div(workload.results, others), 1, 1),
            block=(threads, others, 1) if reduced_lanes else (others, threads, 1),
            arguments=(*inputs, "out", Scalar("float", workload.factor)),
        ),
    )
