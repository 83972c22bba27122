"""Softmax on the CPU with NaN and infinite inputs."""

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
def test_nan_and_infinity_propagate_within_a_row(passes: int, exp: str) -> None:
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


def test_negative_nan_propagates() -> None:
    chosen = variant("softmax/numba_cpu")
    config = chosen.default(WORKLOAD, local_cpu())
    softmax = load_numba_cpu(compile_numba_cpu(chosen, WORKLOAD, config), chosen, WORKLOAD, config)
    x = np.zeros((4, 70), np.float32)
    x[3, 69] = -np.float32(np.nan)
    y = np.zeros_like(x)
    softmax(x, np.float32(1), x, y)
    assert np.isnan(y[3]).all()
    assert (y[:3] > 0).all()


def test_log_softmax_of_masked_elements_is_minus_infinity() -> None:
    workload = parse("softmax:rows=3,cols=70,dtype=f32,log=true")
    chosen = variant("softmax/numba_cpu")
    config = Config({**chosen.default(workload, local_cpu()), "passes": 2, "chunk": 16})
    softmax = load_numba_cpu(compile_numba_cpu(chosen, workload, config), chosen, workload, config)
    x = np.random.default_rng(1).standard_normal((3, 70)).astype(np.float32)
    x[1, 33] = np.nan
    x[2, :40] = -np.inf
    y = np.full_like(x, 1)
    softmax(x, np.float32(1), x, y)
    assert np.isnan(y[1]).all()
    assert (y[2, :40] == -np.inf).all()
    np.testing.assert_allclose(np.exp(y[[0, 2]]).sum(axis=1), 1, rtol=1e-5)


def test_fully_masked_parts_do_not_change_the_loss() -> None:
    workload = parse("cross_entropy:rows=3,cols=70,dtype=f32")
    chosen = variant("cross_entropy/numba_cpu")
    config = Config({"chunk": 16, "parts": 4, "exp": "poly"})
    kernel = load_numba_cpu(compile_numba_cpu(chosen, workload, config), chosen, workload, config)
    x = np.random.default_rng(1).standard_normal((3, 70)).astype(np.float32)
    x[0, :40] = -np.inf
    x[1, 33] = np.nan
    target = np.full(3, 69, np.int32)
    loss, lse = np.zeros((2, 3), np.float32)
    kernel(x, target, loss, lse, np.empty((3, 4, 2), np.float32))
    right = np.log(np.exp(x[[0, 2]].astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(lse[[0, 2]], right, rtol=1e-6)
    np.testing.assert_allclose(loss[[0, 2]], right - x[[0, 2], 69], rtol=1e-5)
    assert np.isnan(lse[1])
