"""Predicted steps of processes that share the cores of a machine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

pytest.importorskip("torch")

from benchmarks import plan_cluster_processor
from benchmarks.plan_cluster_measured import JOB, plan_of
from benchmarks.plan_cluster_processor import Calibration, Law, predicted_us


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cluster_processor.os, "cpu_count", lambda: 2)


def calibration(longer_us: Mapping[str, float] | None = None) -> Calibration:
    """Return laws of which some collectives have a longer fixed time."""
    return Calibration(
        product=Law(2.0, 1e5),
        moved=Law(1.0, 1e5),
        wide=Law(1.0, 1e4),
        collectives={
            (kind, size): Law(100.0 + (longer_us or {}).get(kind, 0.0), 2e3)
            for kind in ("all-reduce", "all-gather", "reduce-scatter")
            for size in (2, 4, 8)
        },
        divided_us={2: 500.0, 4: 1000.0, 8: 1000.0},
        send=Law(50.0, 5e3),
    )


@pytest.mark.parametrize(
    ("text", "longer"),
    [
        ("data=8", {"all-reduce": 1000.0}),
        ("data=8,sharding=optimizer", {"reduce-scatter": 400.0, "all-gather": 600.0}),
    ],
)
def test_sums_of_gradients_have_the_times_of_the_probes(text: str, longer: dict[str, float]) -> None:
    plan = plan_of(text)
    before, after = (predicted_us(calibration(latencies), JOB, plan) for latencies in ({}, longer))
    for before_us, after_us in zip(before, after, strict=True):
        assert after_us - before_us == pytest.approx(1000.0 * 8 / 2)


def test_a_process_that_waits_for_a_stage_leaves_its_core_to_others() -> None:
    fixed, shared = predicted_us(calibration(), JOB, plan_of("pipeline=2,data=4"))
    assert shared < 0.9 * fixed
    fixed, shared = predicted_us(calibration(), JOB, plan_of("data=8"))
    assert shared == pytest.approx(fixed)


def test_a_core_for_each_process_takes_the_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cluster_processor.os, "cpu_count", lambda: 8)
    fixed, shared = predicted_us(calibration(), JOB, plan_of("pipeline=2,data=4"))
    assert shared == fixed
