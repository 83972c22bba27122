"""Early-abort benchmark: counting rules, and the saving on recorded spaces."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import early_abort as benchmark
from tests.public_data import IS_WHOLE, found
from tunebench.measure.timing import Protocol, collect

SAMPLES = np.array([[10.0, 10.0, 10.0], [14.0, 14.0, 14.0], [16.0, 8.0, 8.0], [100.0, 100.0, 100.0]])


def test_saving_is_the_samples_after_the_decision() -> None:
    run = benchmark.abort(SAMPLES[:2], np.array([0, 1]), after=1, factor=1.2)
    assert (run.share, run.given_up, run.lost) == (28 / 72, 0.5, False)


def test_first_configuration_is_never_aborted() -> None:
    assert benchmark.abort(SAMPLES[:2], np.array([1, 0]), after=1, factor=1.2).given_up == 0


def test_optimum_with_slow_first_sample_needs_two_samples() -> None:
    order = np.array([0, 2, 3])
    assert benchmark.abort(SAMPLES, order, after=1, factor=1.5).lost
    assert not benchmark.abort(SAMPLES, order, after=2, factor=1.5).lost


@given(
    st.lists(st.lists(st.floats(1, 100), min_size=4, max_size=4), min_size=2, max_size=8),
    st.integers(1, 3),
    st.sampled_from([1.0, 1.5, 3.0]),
)
def test_benchmark_aborts_the_same_configurations_as_timing(
    samples: list[list[float]], after: int, factor: float
) -> None:
    protocol = Protocol(
        warmups=0, min_samples=4, max_samples=4, max_s=9.0, abort_after=after, abort_factor=factor
    )
    incumbent, given_up = None, 0
    for taken in samples:
        stopped = collect(iter(taken).__next__, protocol, abort_above_us=incumbent)
        given_up += stopped.hopeless
        if not stopped.hopeless:
            incumbent = min(incumbent or np.inf, float(np.median(taken)))
    run = benchmark.abort(np.array(samples), np.arange(len(samples)), after=after, factor=factor)
    assert run.given_up == given_up / len(samples)


def test_recorded_convolution_saves_most_of_the_time_and_keeps_the_optimum() -> None:
    samples = benchmark.read(found("recorded/convolution_milo/A100.json.gz"))
    assert samples.shape == (4201, 32) if IS_WHOLE else len(samples) > 100
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(samples))
        for after, least in ((1, 0.94), (2, 0.90)):
            run = benchmark.abort(samples, order, after=after, factor=1.5)
            assert run.share > (least if IS_WHOLE else 0.8)
            assert not run.lost


def test_recorded_space_of_similar_times_saves_little() -> None:
    samples = benchmark.read(found("recorded/dedispersion_milo/A100.json.gz"))
    run = benchmark.abort(samples, np.random.default_rng(0).permutation(len(samples)), after=1, factor=1.5)
    assert 0 < run.share < 0.05
    assert not run.lost
