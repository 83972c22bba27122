"""Served kernels of GPUs, without one: against a driver of our own (see fake_driver.cpp)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fake_driver.build import seen_by

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What came of every scenario of served_driver_run.py."""
    return seen_by("dispatch_scenarios.py", tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("variant", ["right", "scratch", "numba", "mapped", "pixels"])
def test_it_runs_on_the_memory_it_is_given(seen: dict[str, Any], variant: str) -> None:
    assert [seen[f"{variant} {factor}"] for factor in ("2", "4", "0.5")] == [True, True, True]


def test_a_captured_call_runs_with_its_graph_on_what_it_was_given(seen: dict[str, Any]) -> None:
    assert seen["captured"] == {"before": False, "another call": True, "after": True}


def test_threads_do_not_mix_their_arguments(seen: dict[str, Any]) -> None:
    assert seen["wrong in threads"] == 0


def test_what_is_missing_or_refused_is_told(seen: dict[str, Any]) -> None:
    assert seen["scratch bytes"] == 4096  # of 4,000, aligned
    assert "4096 bytes of scratch" in seen["no scratch"]
    assert "1024 + 240000 bytes of shared memory" in seen["refused"]
    assert "CUDA_ERROR_INVALID_VALUE" in seen["refused at launch"]
