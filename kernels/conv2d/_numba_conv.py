"""Parts of conv2d for Numba on the CPU that several variants share: the epilogue and limits of depthwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunebench.kernels.common.numba_cpu import inlined, load, store
from tunebench.kernels.common.numba_expression import on_cpu
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["depthwise_limit", "epilogue_tensors", "finisher"]

MOST_TAPS = 11
"""Most taps along an axis that the compiler unrolls."""


def depthwise_limit(workload: Conv2d) -> str | None:
    """Return why a workload is not a depthwise convolution that loops along channels can do, or None."""
    w = workload
    if w.groups != w.c or w.k != w.c:
        return f"computes groups of one channel and one filter: groups={w.groups}, c={w.c}, k={w.k}"
    if w.layout != "nhwc":
        return f"supports layout nhwc, not {w.layout}"
    if w.pre != IDENTITY:
        return f"does not support a prologue: pre={w.pre}"
    if max(w.r, w.s) > MOST_TAPS:
        return f"supports filters of up to {MOST_TAPS} x {MOST_TAPS} taps"
    return None


def epilogue_tensors(workload: Conv2d) -> tuple[str, ...]:
    """Return the names of scale, bias and residual, or of the output for a missing one, which is not read."""
    known, out = {tensor.name for tensor in workload.inputs()}, workload.outputs()[0].name
    return tuple(name if name in known else out for name in ("scale", "bias", "residual"))


def finisher(workload: Conv2d) -> Callable[..., Any]:
    """Return the function `(operands, total, channel, place)` that applies the epilogue to one sum.

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
