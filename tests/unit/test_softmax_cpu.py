"""What softmax on the CPU makes of inputs that are no ordinary numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tunebench.compile.numba_cpu import compile_numba_cpu, load_numba_cpu
from tunebench.device import local_cpu
from tunebench.kernels import variant
from tunebench.space import Config
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=4,cols=70,dtype=f32")


@pytest.mark.parametrize("exp", ["poly", "libm"])
@pytest.mark.parametrize("passes", [2, 3])
def test_nan_spreads_over_its_row_and_infinity_does_not_hide(passes: int, exp: str) -> None:
    chosen = variant("softmax/numba_cpu")
    config = Config({**chosen.default(WORKLOAD, local_cpu()), "passes": passes, "exp": exp, "chunk": 16})
    softmax = load_numba_cpu(compile_numba_cpu(chosen, WORKLOAD, config), chosen, WORKLOAD, config)
    x = np.random.default_rng(1).standard_normal((4, 70)).astype(np.float32)
    x[1, 33] = np.nan
    x[2, :40] = -np.inf
    y = np.full_like(x, -1)
    softmax(x, np.float32(1), x, y)
    assert np.isnan(y[1]).all()
    assert (y[2, :40] == 0).all()
    np.testing.assert_allclose(y[[0, 2, 3]].sum(axis=1), 1, rtol=1e-5)


def test_negative_nan_spreads_too() -> None:
    chosen = variant("softmax/numba_cpu")
    config = chosen.default(WORKLOAD, local_cpu())
    softmax = load_numba_cpu(compile_numba_cpu(chosen, WORKLOAD, config), chosen, WORKLOAD, config)
    x = np.zeros((4, 70), np.float32)
    x[3, 69] = -np.float32(np.nan)
    y = np.zeros_like(x)
    softmax(x, np.float32(1), x, y)
    assert np.isnan(y[3]).all()
    assert (y[:3] > 0).all()
