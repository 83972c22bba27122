"""Whether a larger micro-batch pays: the published estimate, and agreement with the simulation."""

from __future__ import annotations

import pytest

from tunebench.errors import InputError
from tunebench.training.pipeline import (
    balance,
    balanced_in_flight,
    estimate_microbatches,
    microbatch_speedup,
)
from tunebench.training.schedules import PipelineCosts, StageCosts, one_f_one_b, simulate_pipeline


def test_published_example_of_gpt3_96b() -> None:
    speedup = microbatch_speedup(batch=128, stages=8, larger=2, smaller=1, stage_speedup=55.2 / 37.8)
    assert speedup == pytest.approx(1.388, abs=5e-4)


def test_a_larger_microbatch_loses_if_its_stage_is_no_faster() -> None:
    assert microbatch_speedup(128, 8, 2, 1, 1.0) == pytest.approx(135 / 142)
    with pytest.raises(InputError, match="positive numbers"):
        microbatch_speedup(128, 8, 0, 1, 1.0)


def costs(size: int, ranks: int = 4) -> PipelineCosts:
    """Stages that take 10 us and 2 us per sequence for each pass."""
    time_us = 10.0 + 2 * size
    stage = StageCosts(
        forward_us=time_us,
        input_gradient_us=time_us,
        weight_gradient_us=time_us,
        activation_bytes=100 * size,
        static_bytes=50,
    )
    return PipelineCosts(stages=(stage,) * ranks)


def test_estimates_of_equal_stages_are_those_of_the_simulation() -> None:
    estimates = estimate_microbatches(costs, 32, (1, 2, 4, 8))
    assert estimates[0].speedup == 1.0
    for estimate in estimates:
        schedule = one_f_one_b(4, estimate.microbatches)
        plain = simulate_pipeline(schedule, costs(estimate.microbatch))
        assert estimate.step_us == pytest.approx(plain.step_us)
        assert estimate.speedup == pytest.approx(estimates[0].step_us / plain.step_us)
        assert estimate.peak_bytes == max(plain.peak_bytes)
        balanced = balance(schedule, costs(estimate.microbatch))
        assert estimate.balanced_bytes == max(
            simulate_pipeline(balanced, costs(estimate.microbatch)).peak_bytes
        )


def test_the_size_must_divide_the_batch() -> None:
    with pytest.raises(InputError, match="micro-batches of 3 sequences do not divide a batch of 32"):
        estimate_microbatches(costs, 32, (1, 3))


@pytest.mark.parametrize(("stages", "kept"), [(1, 1), (2, 2), (3, 3), (4, 3), (7, 5), (8, 5), (16, 9)])
def test_balanced_ranks_keep_half_of_the_stages_and_one_more(stages: int, kept: int) -> None:
    assert balanced_in_flight(stages, 64) == kept
    assert balanced_in_flight(stages, 2) == min(kept, 2)
