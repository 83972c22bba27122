"""Stopping rules of sampling, and the confidence interval of the median."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.errors import InputError
from tunebench.measure import timing
from tunebench.measure.timing import PATIENCE, Protocol, collect, median_interval


def test_steady_samples_stop_at_minimum_count() -> None:
    assert collect(lambda: 10.0, Protocol(min_samples=5, max_samples=50)).samples_us == (10.0,) * 5


def test_noisy_samples_continue_to_maximum_count() -> None:
    noise = itertools.cycle([1.0, 100.0])
    assert len(collect(lambda: next(noise), Protocol(min_samples=5, max_samples=20)).samples_us) == 20


def test_busy_machine_gets_as_many_samples_as_a_quiet_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the wall time is processor time."""
    noise, wall = itertools.cycle([1.0, 100.0]), itertools.count(0.0, 0.4)
    by_wall, by_processor = itertools.count(0.0, 0.4), itertools.count(0.0, 0.1)
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(wall))
    protocol = Protocol(warmups=0, min_samples=1, max_s=0.95)
    for clock, count in ((by_wall, 3), (by_processor, 10)):
        stopped = collect(lambda: next(noise), protocol, seconds=lambda clock=clock: next(clock))
        assert len(stopped.samples_us) == count


def test_wait_for_a_processor_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, wall = itertools.cycle([1.0, 100.0]), itertools.count(0.0, 1.0)
    monkeypatch.setattr(timing.time, "monotonic", lambda: next(wall))
    stopped = collect(lambda: next(noise), Protocol(warmups=0, min_samples=1, max_s=1.0), seconds=lambda: 0.0)
    assert len(stopped.samples_us) == PATIENCE


def test_warmup_runs_are_not_samples() -> None:
    values = iter([1e6, 1e6, *[5.0] * 10])
    stopped = collect(lambda: next(values), Protocol(warmups=2, min_samples=10, max_samples=10))
    assert max(stopped.samples_us) == 5.0


@pytest.mark.parametrize(("us", "hopeless"), [(16.0, True), (14.0, False)])
def test_configuration_far_above_incumbent_is_aborted(us: float, hopeless: bool) -> None:
    stopped = collect(lambda: us, Protocol(abort_after=2, abort_factor=1.5), abort_above_us=10.0)
    assert stopped.hopeless is hopeless
    assert len(stopped.samples_us) == (2 if hopeless else 10)


def test_single_slow_sample_does_not_abort() -> None:
    values = iter([1000.0, *[9.0] * 200])
    assert not collect(lambda: next(values), Protocol(warmups=0), abort_above_us=10.0).hopeless


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60))
def test_interval_contains_median(samples: list[float]) -> None:
    median, (low, high) = median_interval(samples)
    assert min(samples) <= low <= median <= high <= max(samples)


def test_interval_has_nominal_coverage() -> None:
    rng = np.random.default_rng(5)
    truth = np.exp(0.0)
    hits = 0
    for _ in range(2000):
        _, (low, high) = median_interval(list(rng.lognormal(0.0, 0.5, size=15)))
        hits += low <= truth <= high
    assert 0.94 <= hits / 2000 <= 0.995


@pytest.mark.parametrize(
    "wrong", [{"min_samples": 0}, {"min_samples": 9, "max_samples": 3}, {"abort_factor": 0.5}]
)
def test_inconsistent_protocol_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        Protocol(**wrong)
