"""What variants of conv2d for Numba on the CPU share: the epilogue, and which of them does depthwise ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.kernels.common.numba_cpu import inlined, load, store
from tunebench.kernels.common.numba_expression import on_cpu
from tunebench.workloads.operators._activation import IDENTITY
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["depthwise_limit", "epilogue_tensors", "finisher"]

MOST_TAPS = 11
"""Taps along an axis that a compiler still writes out one after the other."""


def depthwise_limit(workload: Conv2d) -> str | None:
    """Return why a workload is not for loops along channels, each a group, or None."""
    w = workload
    if w.groups != w.c or w.k != w.c:
        return f"does groups of one channel and one filter: groups={w.groups}, c={w.c}, k={w.k}"
    if w.layout != "nhwc":
        return f"does layout nhwc, not {w.layout}"
    if w.pre != IDENTITY:
        return f"multiplies what it reads as it is: it has no place for pre={w.pre}"
    if max(w.r, w.s) > MOST_TAPS:
        return f"does filters of up to {MOST_TAPS} x {MOST_TAPS} taps"
    return None


def epilogue_tensors(workload: Conv2d) -> tuple[str, ...]:
    """Return the names of scale, bias and residual: the output's for one that is not there, and not read."""
    known, out = {tensor.name for tensor in workload.inputs()}, workload.outputs()[0].name
    return tuple(name if name in known else out for name in ("scale", "bias", "residual"))


def finisher(workload: Conv2d) -> Callable[..., Any]:
    """Return what turns one sum into an element of the output: `(operands, total, channel, place)`.

    Operands begin with the addresses ((images, filters, scale, bias, residual), output).
    """
    import numpy as np

    stored = workload.outputs()[0].dtype
    read, rounded, zero = load(stored), store(stored), np.float32(0)
    has_scale, has_bias = workload.has_scale, workload.has_bias
    has_residual, has_relu = workload.has_residual, workload.has_relu
    activate = on_cpu("none" if workload.act == IDENTITY else workload.act)

    @inlined
    def finish(operands: Any, total: Any, channel: int, place: int) -> None:
        if has_scale:
            total *= read(operands[0][2][channel])
        if has_bias:
            total += read(operands[0][3][channel])
        if has_residual:
            total += read(operands[0][4][place])
        if has_relu:
            total = max(total, zero)
        operands[1][place] = rounded(activate(total))

    return finish
