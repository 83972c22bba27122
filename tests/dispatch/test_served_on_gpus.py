"""Dispatched GPU kernels with a fake driver (see fake_driver.cpp), without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_driver.build import seen_by

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of all scenarios of tests/fake_driver/dispatch_scenarios.py."""
    return seen_by("dispatch_scenarios.py", tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("variant", ["right", "scratch", "numba", "triton", "mapped", "pixels"])
def test_kernel_runs_on_the_given_memory(seen: dict[str, Any], variant: str) -> None:
    assert [seen[f"{variant} {factor}"] for factor in ("2", "4", "0.5")] == [True, True, True]


def test_captured_call_replays_on_the_same_memory(seen: dict[str, Any]) -> None:
    assert seen["captured"] == {"before": False, "another call": True, "after": True}


def test_threads_do_not_mix_their_arguments(seen: dict[str, Any]) -> None:
    assert seen["wrong in threads"] == 0


def test_missing_scratch_and_refused_launch_are_errors(seen: dict[str, Any]) -> None:
    assert seen["scratch bytes"] == 4096  # 4,000 bytes, aligned
    assert "4096 bytes of scratch" in seen["no scratch"]
    assert "1024 + 240000 bytes of shared memory" in seen["refused"]
    assert "CUDA_ERROR_INVALID_VALUE" in seen["refused at launch"]
