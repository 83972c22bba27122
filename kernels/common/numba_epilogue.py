"""Activations of the epilogue for Numba on the CPU, as inlined functions so that loops vectorise.

These are faster than the functions that `numba_expression` generates from definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tunebench.kernels.common.numba_cpu import exp2, inlined

__all__ = ["FAST", "erf"]


def _identity() -> Callable[..., Any]:
    @inlined
    def identity(x: Any) -> Any:
        return x

    return identity


def _relu() -> Callable[..., Any]:
    import numpy as np

    zero = np.float32(0)

    @inlined
    def relu(x: Any) -> Any:
        return max(x, zero)

    return relu


# erf(x) / x as a quotient of polynomials in x**2 on |x| <= 4; beyond 4, erf is 1 in f32. Source: fitted for
# this project by iterated weighted least squares on Chebyshev nodes; relative error below 4e-7 evaluated in
# f32.
_ERF_P = (1.12837911, 0.193510875, 0.0530972034, 0.00388188474, 0.000284533802, 1.98704333e-06)
_ERF_Q = (1.0, 0.504827142, 0.115335852, 0.0152043132, 0.00118521973, 3.74212286e-05)


def erf() -> Callable[..., Any]:
    """Return the error function. `_gelu` repeats its lines, because a call would change its machine code."""
    import numpy as np

    p0, p1, p2, p3, p4, p5 = map(np.float32, _ERF_P)
    q0, q1, q2, q3, q4, q5 = map(np.float32, _ERF_Q)
    limit = np.float32(4)

    @inlined
    def erf(x: Any) -> Any:
        z = min(max(x, -limit), limit)
        t = z * z
        numerator = ((((p5 * t + p4) * t + p3) * t + p2) * t + p1) * t + p0
        denominator = ((((q5 * t + q4) * t + q3) * t + q2) * t + q1) * t + q0
        return z * numerator / denominator

    return erf


def _gelu() -> Callable[..., Any]:
    import numpy as np

    p0, p1, p2, p3, p4, p5 = map(np.float32, _ERF_P)
    q0, q1, q2, q3, q4, q5 = map(np.float32, _ERF_Q)
    half, one, root, limit = np.float32(0.5), np.float32(1), np.float32(0.5**0.5), np.float32(4)

    @inlined
    def gelu(x: Any) -> Any:
        z = min(max(x * root, -limit), limit)
        t = z * z
        numerator = ((((p5 * t + p4) * t + p3) * t + p2) * t + p1) * t + p0
        denominator = ((((q5 * t + q4) * t + q3) * t + q2) * t + q1) * t + q0
        return half * x * (one + z * numerator / denominator)

    return gelu


def _sigmoid() -> Callable[..., Any]:
    """Return 1 / (1 + e**-x): error within a few roundings, about |x| of them for negative x."""
    import numpy as np

    power, one, two, most = exp2(), np.float32(1), np.float32(2), np.float32(129)
    minus_log2_e = np.float32(-1 / math.log(2))

    @inlined
    def sigmoid(x: Any) -> Any:
        t = x * minus_log2_e
        # An exponent less by one, then twice the power: 2**129 must be infinite, so that silu(-1e38) is 0.
        return one / (one + power((most if t > most else t) - one) * two)

    return sigmoid


def _silu() -> Callable[..., Any]:
    """Return x / (1 + e**-x)."""
    sigmoid = _sigmoid()

    @inlined
    def silu(x: Any) -> Any:
        return x * sigmoid(x)

    return silu


FAST: Mapping[str, Callable[[], Callable[[Any], Any]]] = {
    "none": _identity,
    "relu": _relu,
    "gelu": _gelu,
    "silu": _silu,
    "sigmoid": _sigmoid,
}
"""Makers of inlined activations by name, functions of one f32. NaN stays NaN."""
