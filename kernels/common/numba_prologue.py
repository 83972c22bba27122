"""Prologue of gemm and conv2d for Numba: a function applied to the left operand as it is packed or loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tunebench.dtype import storage
from tunebench.expression import parse
from tunebench.kernels.common.expression import CodePrinter, compiled
from tunebench.kernels.common.numba_cpu import inlined, jitted, load, store
from tunebench.kernels.common.numba_expression import NUMBA_CUDA_PRINTER, PRINTER, by_polynomials
from tunebench.workloads.common.prologue import vectors

__all__ = ["ahead_in_cuda", "line_ahead", "taken_ahead"]


def ahead_in_cuda(workload: Any) -> Callable[..., Any]:
    """Return the inlined function `(x, scale, shift)` of f32 values, for Numba-CUDA."""
    return _function(workload.pre, NUMBA_CUDA_PRINTER, {"math": math})


def taken_ahead(workload: Any) -> Callable[..., Any]:
    """Return the inlined function `(source, place, scale, shift, at)` that applies the prologue.

    It reads the element at `place`, and scale and shift at `at`, and rounds the result
    to the type of the operand. A vector that the expression does not use is not read.
    """
    import numpy as np

    dtype = storage(workload.dtype)
    read, rounded = load(dtype), store(dtype)
    ahead = _function(workload.pre, PRINTER, {"np": np, **by_polynomials()})
    scale_at, shift_at = (_element(read, name in vectors(workload.pre)) for name in ("scale", "shift"))

    @inlined
    def taken(source: Any, place: int, scale: Any, shift: Any, at: int) -> Any:
        return read(rounded(ahead(read(source[place]), scale_at(scale, at), shift_at(shift, at))))

    return taken


def line_ahead(
    workload: Any, place: Callable[..., Any], numbers: Callable[..., Any], *, along_depth: bool
) -> Callable[[int], Callable[..., None]]:
    """Return the `line` of an operand with a prologue (see `Operand`).

    Args:
        workload: A workload with `pre` and `dtype`.
        place: As for `stored_line`.
        numbers: `inlined` function `(operands)` that returns the addresses of scale and shift.
        along_depth: Whether a line runs along the depth, not at a fixed term.
    """
    taken = taken_ahead(workload)

    def line(stride: int) -> Callable[..., None]:
        @jitted(frozenset({"contract", "nsz"}))
        def pack_line(
            operands: Any, z: int, fixed: int, start: int, count: int, panel: Any, offset: int
        ) -> None:
            source, of_line = place(operands, z, fixed)
            scale, shift = numbers(operands)
            begin = of_line + start
            for t in range(count):
                at = start + t if along_depth else fixed
                panel[offset + t * stride] = taken(source, begin + t, scale, shift, at)

        return pack_line

    return line


def _element(read: Callable[..., Any], is_there: bool) -> Callable[..., Any]:
    """Return the inlined function `(vector, at)` that reads an element, or returns 0 for a missing vector."""
    import numpy as np

    zero = np.float32(0)

    @inlined
    def element(vector: Any, at: int) -> Any:
        return read(vector[at])

    @inlined
    def none(vector: Any, at: int) -> Any:
        return zero

    return element if is_there else none


def _function(expression: str, spelling: CodePrinter, scope: dict[str, Any]) -> Callable[..., Any]:
    """Return the inlined function `(in_x, in_scale, in_shift)`."""
    import numpy as np

    assignments, result = spelling.write(parse(expression))
    lines = [f"    {line.strip()}" for line in (*assignments, f"return f32({result})")]
    source = "\n".join(["def ahead(in_x, in_scale, in_shift):", *lines, ""])
    return inlined(compiled(source, "ahead", {"__name__": __name__, "f32": np.float32, **scope}))
