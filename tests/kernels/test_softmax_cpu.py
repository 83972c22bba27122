"""Softmax on the CPU with NaN and infinite inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels.kernel_checks import run_on_cpu
from tunebench.device import local_cpu
from tunebench.kernels import variant
from tunebench.space import Config
from tunebench.variant import NumbaCpuVariant
from tunebench.workload import Workload
from tunebench.workloads import parse

WORKLOAD = parse("softmax:rows=4,cols=70,dtype=f32")


def outputs_of(workload: Workload, inputs: dict[str, Any], **choices: int | str) -> dict[str, Any]:
    """Run the operator's CPU variant with the default configuration but for `choices`."""
    chosen = variant(f"{workload.operator}/numba_cpu")
    assert isinstance(chosen, NumbaCpuVariant)
    config = Config({**chosen.default(workload, local_cpu()), **choices})
    return run_on_cpu(chosen, workload, config, inputs)


@pytest.mark.parametrize("exp", ["poly", "libm"])
@pytest.mark.parametrize("passes", [2, 3])
def test_nan_and_infinity_propagate_within_a_row(passes: int, exp: str) -> None:
    x = np.random.default_rng(1).standard_normal((4, 70)).astype(np.float32)
    x[1, 33] = np.nan
    x[2, :40] = -np.inf
    y = outputs_of(WORKLOAD, {"x": x}, passes=passes, exp=exp, chunk=16)["y"]
    assert np.isnan(y[1]).all()
    assert (y[2, :40] == 0).all()
    np.testing.assert_allclose(y[[0, 2, 3]].sum(axis=1), 1, rtol=1e-5)


def test_negative_nan_propagates() -> None:
    x = np.zeros((4, 70), np.float32)
    x[3, 69] = -np.float32(np.nan)
    y = outputs_of(WORKLOAD, {"x": x})["y"]
    assert np.isnan(y[3]).all()
    assert (y[:3] > 0).all()


def test_log_softmax_of_masked_elements_is_minus_infinity() -> None:
    workload = parse("softmax:rows=3,cols=70,dtype=f32,log=true")
    x = np.random.default_rng(1).standard_normal((3, 70)).astype(np.float32)
    x[1, 33] = np.nan
    x[2, :40] = -np.inf
    y = outputs_of(workload, {"x": x}, passes=2, chunk=16)["y"]
    assert np.isnan(y[1]).all()
    assert (y[2, :40] == -np.inf).all()
    np.testing.assert_allclose(np.exp(y[[0, 2]]).sum(axis=1), 1, rtol=1e-5)


def test_fully_masked_parts_do_not_change_the_loss() -> None:
    workload = parse("cross_entropy:rows=3,cols=70,dtype=f32")
    x = np.random.default_rng(1).standard_normal((3, 70)).astype(np.float32)
    x[0, :40] = -np.inf
    x[1, 33] = np.nan
    target = np.full(3, 69, np.int32)
    outputs = outputs_of(workload, {"x": x, "target": target}, chunk=16, parts=4, exp="poly")
    loss, lse = outputs["loss"], outputs["lse"]
    right = np.log(np.exp(x[[0, 2]].astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(lse[[0, 2]], right, rtol=1e-6)
    np.testing.assert_allclose(loss[[0, 2]], right - x[[0, 2], 69], rtol=1e-5)
    assert np.isnan(lse[1])
