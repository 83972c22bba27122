"""Activations for Numba on the CPU: accurate over all of f32, and vectorised."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import pytest

from tunebench.kernels.common.numba_epilogue import FAST

EXACT: dict[str, Callable[[float], float]] = {
    "none": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: 0.5 * x * math.erfc(-x * math.sqrt(0.5)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


def over(name: Any) -> Any:
    """Return a jitted loop over an activation, as in kernels."""
    function = FAST[name]()

    @numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")
    def loop(x: Any, y: Any) -> None:
        for i in range(x.size):
            y[i] = function(x[i])

    return loop


@pytest.mark.parametrize("name", EXACT)
def test_activations_match_their_reference(name: str) -> None:
    x = np.concatenate([np.linspace(-20, 20, 4001), [-700, -126, -88, 88, 126, 700, math.nan]]).astype(
        np.float32
    )
    y, loop = np.empty_like(x), over(name)
    loop(x, y)
    exact = np.array([EXACT[name](float(v)) for v in x])
    # 1 + erf cancels for negative x; the exponent of e**-x is rounded.
    rounding = 6 * np.abs(x) if name == "gelu" else (8 + 2 * np.abs(x)) * np.abs(exact)
    allowed = 2.0**-24 * rounding + 1e-35
    assert np.all(np.abs(y[:-1] - exact[:-1]) <= allowed[:-1])
    assert math.isnan(y[-1])
    assert "vector.body" in loop.inspect_llvm(loop.signatures[0])
