"""Expressions for Numba, in f32; their functions on the CPU by polynomials, which vectorise, or by libm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tunebench.expression import parse, steps
from tunebench.kernels.common.expression import CodePrinter, compiled
from tunebench.kernels.common.numba_cpu import exp2, inlined
from tunebench.kernels.common.numba_epilogue import activation as named
from tunebench.kernels.common.numba_epilogue import erf
from tunebench.workloads.operators._activation import STEPS
from tunebench.workloads.operators._expression_workload import ExpressionWorkload

__all__ = [
    "NUMBA_CUDA_PRINTER",
    "PRINTER",
    "TWO_FORMS",
    "by_libm",
    "by_polynomials",
    "has_two_forms",
    "in_cuda",
    "on_cpu",
]

Functions = dict[str, Callable[..., Any]]

TWO_FORMS = ("erf", "exp", "gelu", "log", "sigmoid", "silu", "tanh")
"""Functions that may be polynomials or calls."""

_ALIKE = {
    "neg": "-{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "abs": "abs({0})",
    "step": "(f32(1) if {0} > f32(0) else f32(0))",
    "square": "{0} * {0}",
}
"""What is spelled alike for processors and for GPUs."""

PRINTER = CodePrinter(
    assign="        {0} = {1}",
    number="f32({0})",
    operations={
        **_ALIKE,
        # Written so that a NaN stays one, and comparisons become selections.
        "max": "{1} if {0} < {1} else {0}",
        "min": "{1} if {1} < {0} else {0}",
        "relu": "f32(0) if {0} < f32(0) else {0}",
        "sqrt": "np.sqrt({0})",
        "rsqrt": "f32(1) / np.sqrt({0})",
        **{name: f"{name}({{0}})" for name in TWO_FORMS},
    },
)

NUMBA_CUDA_PRINTER = CodePrinter(
    assign="{0} = {1}",
    number="f32({0})",
    operations={
        **_ALIKE,
        "max": "max({0}, {1})",
        "min": "min({0}, {1})",
        "relu": "max({0}, f32(0))",
        **{name: f"f32(math.{name}({{0}}))" for name in ("erf", "exp", "log", "sqrt", "tanh")},
        "rsqrt": "f32(1) / f32(math.sqrt({0}))",
        "gelu": "f32(0.5) * {0} * (f32(1) + f32(math.erf({0} * f32(0.7071067811865476))))",
        "sigmoid": "f32(1) / (f32(1) + f32(math.exp(-{0})))",
        "silu": "{0} / (f32(1) + f32(math.exp(-{0})))",
    },
)


def has_two_forms(workload: ExpressionWorkload) -> bool:
    """Tell whether an expression has one of `TWO_FORMS`."""
    return any(step.operation in TWO_FORMS for step in steps(workload.tree))


def by_libm() -> Functions:
    """Return the functions that have two forms, by one call of the C library an element."""
    import numpy as np

    one, half, root = np.float32(1), np.float32(0.5), np.float32(math.sqrt(0.5))

    @inlined
    def erf(x: Any) -> Any:
        return np.float32(math.erf(x))

    @inlined
    def exp(x: Any) -> Any:
        return np.exp(x)

    @inlined
    def gelu(x: Any) -> Any:
        return half * x * (one + math.erf(x * root))

    @inlined
    def log(x: Any) -> Any:
        return np.log(x)

    @inlined
    def sigmoid(x: Any) -> Any:
        return one / (one + np.exp(-x))

    @inlined
    def silu(x: Any) -> Any:
        return x / (one + np.exp(-x))

    @inlined
    def tanh(x: Any) -> Any:
        return np.tanh(x)

    return {
        "erf": erf,
        "exp": exp,
        "gelu": gelu,
        "log": log,
        "sigmoid": sigmoid,
        "silu": silu,
        "tanh": tanh,
    }


def by_polynomials() -> Functions:
    """Return the same functions, with exponentials as powers of two (see `numba_cpu.exp2`)."""
    import numpy as np

    power, log2_e = exp2(), np.float32(math.log2(math.e))
    one, two, highest = np.float32(1), np.float32(2), np.float32(129)

    @inlined
    def exp(x: Any) -> Any:
        t = x * log2_e
        # One less, and twice the power: 2**127.5 is a number, and 2**129 is infinite, as it must be.
        return power((highest if t > highest else t) - one) * two

    return {
        "erf": erf(),
        "exp": exp,
        "log": _log(),
        "tanh": _tanh(),
        **{name: named(name) for name in ("gelu", "sigmoid", "silu")},
    }


def _log() -> Callable[..., Any]:
    """Return log: x is 2**e m, m around 1, and log m = 2 artanh s, s = (m - 1) / (m + 1), by its series.

    The first term left out is 3e-9 of the result, |s| being at most 0.1716. ln 2 is split, so that e times
    its first part is exact.
    """
    import numpy as np

    least, place, lowest, up = np.int32(0x3F3504F3), np.int32(23), np.float32(2.0**-126), np.float32(2.0**23)
    zero, one, two, infinite = np.float32(0), np.float32(1), np.float32(2), np.float32(np.inf)
    high, low = np.float32(45426 / 65536), np.float32(math.log(2) - 45426 / 65536)
    c3, c5, c7, c9 = (np.float32(2 / n) for n in (3, 5, 7, 9))

    @inlined
    def log(x: Any) -> Any:
        tiny = x < lowest
        bits = np.float32(x * up if tiny else x).view(np.int32)
        e = np.int32(np.int32(bits - least) >> place)
        m = np.int32(bits - np.int32(e << place)).view(np.float32)
        s = (m - one) / (m + one)
        t = s * s
        k = np.float32(e) - (np.float32(23) if tiny else zero)
        series = two * s + s * t * (c3 + t * (c5 + t * (c7 + t * c9)))
        # Of 0 it is minus infinity; NaN of NaN and of what is negative.
        outside = -infinite if x == zero else (x if x > zero else np.float32(np.nan))
        return k * high + (k * low + series) if zero < x < infinite else outside

    return log


def _tanh() -> Callable[..., Any]:
    """Return tanh: its Taylor series up to 0.5, where the other form cancels; beyond, by an exponential.

    The first term left out is 1e-8 of the result at 0.5.
    """
    import numpy as np

    power, zero, one, edge = exp2(), np.float32(0), np.float32(1), np.float32(0.5)
    minus_two_log2_e = np.float32(-2 * math.log2(math.e))
    c3, c5, c7, c9 = map(np.float32, (-1 / 3, 2 / 15, -17 / 315, 62 / 2835))
    c11, c13, c15 = map(np.float32, (-1382 / 155925, 21844 / 6081075, -929569 / 638512875))

    @inlined
    def tanh(x: Any) -> Any:
        s = x * x
        series = x + x * s * (c3 + s * (c5 + s * (c7 + s * (c9 + s * (c11 + s * (c13 + s * c15))))))
        small = power(abs(x) * minus_two_log2_e)
        far = (one - small) / (one + small)
        return series if abs(x) < edge else (-far if x < zero else far)

    return tanh


# -- an expression in x as a function ------------------------------------------------------------------------


def on_cpu(activation: str) -> Callable[[Any], Any]:
    """Return the inlined function of an f32 on the CPU that has this name, or is this expression in x."""
    import numpy as np

    if activation in STEPS:
        return named(activation)  # type: ignore[arg-type]  # one of the names
    return _function(activation, PRINTER, {"np": np, **by_polynomials()})


def in_cuda(expression: str) -> Callable[[Any], Any]:
    """Return the same for kernels of Numba-CUDA: inlined before they are compiled: no driver is asked."""
    return _function(expression, NUMBA_CUDA_PRINTER, {"math": math})


def _function(expression: str, spelling: CodePrinter, scope: dict[str, Any]) -> Callable[[Any], Any]:
    import numpy as np

    assignments, result = spelling.write(parse(expression))
    lines = [f"    {line.strip()}" for line in (*assignments, f"return f32({result})")]
    source = "\n".join(["def activation(in_x):", *lines, ""])
    return inlined(compiled(source, "activation", {"__name__": __name__, "f32": np.float32, **scope}))
