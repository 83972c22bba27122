"""Statistical comparison of configurations: false positives under noise, and machine drift."""

from __future__ import annotations

import numpy as np
import pytest

from tunebench.errors import InputError
from tunebench.measure.comparison import compare, student_probability, student_quantile


def rounds(
    rng: np.random.Generator, us: float, drift: tuple[float, ...] = (1.0,) * 4, spread: float = 0.03
) -> list[list[float]]:
    """Return samples of skewed kernel times in microseconds, in rounds with machine drift."""
    return [list(us * d * (1 + spread * rng.exponential(size=30))) for d in drift]


def test_clear_difference_is_found_with_its_size() -> None:
    rng = np.random.default_rng(0)
    comparison = compare(rounds(rng, 10.0), rounds(rng, 12.0))
    assert comparison.faster
    assert not comparison.tied
    assert comparison.probability > 0.99
    assert comparison.ratio == pytest.approx(1.2, rel=0.02)
    assert comparison.low < comparison.ratio < comparison.high


def test_swapping_both_sides_reverses_the_verdict() -> None:
    rng = np.random.default_rng(1)
    a, b = rounds(rng, 10.0), rounds(rng, 10.5)
    forward, reverse = compare(a, b), compare(b, a)
    assert forward.ratio == pytest.approx(1 / reverse.ratio)
    assert forward.faster
    assert not reverse.faster
    assert not reverse.tied


def test_false_positive_rate_is_nominal() -> None:
    """This includes noise common to a round, which more samples per round do not reduce."""
    rng = np.random.default_rng(2)

    def noisy() -> list[list[float]]:
        return rounds(rng, 10.0, tuple(1 + 0.01 * rng.standard_normal(4)))

    verdicts = [compare(noisy(), noisy()) for _ in range(800)]
    assert 0.01 < np.mean([verdict.faster for verdict in verdicts]) < 0.04  # one side of 95 %
    assert 0.92 < np.mean([verdict.tied for verdict in verdicts]) < 0.98
    certain = np.mean([verdict.probability for verdict in verdicts])
    assert certain == pytest.approx(0.5, abs=0.04)


def test_common_drift_hides_no_difference() -> None:
    rng = np.random.default_rng(3)
    drift = (1.0, 1.3, 0.8, 1.1)
    assert compare(rounds(rng, 10.0, drift), rounds(rng, 10.4, drift)).faster


def test_difference_in_one_round_only_is_not_significant() -> None:
    rng = np.random.default_rng(4)
    comparison = compare(rounds(rng, 10.0, (1.0, 1.0, 1.06, 1.0)), rounds(rng, 10.3))
    assert comparison.tied
    assert 0.5 < comparison.probability < 1


def test_constant_times_are_a_significant_difference_or_a_tie() -> None:
    same = compare([[5.0] * 9] * 4, [[5.0] * 9] * 4)
    assert (same.ratio, same.low, same.high, same.probability) == (1, 1, 1, 0.5)
    assert same.tied
    assert compare([[5.0]] * 4, [[6.0]] * 4).probability == 1
    assert compare([[6.0]] * 4, [[5.0]] * 4).probability == 0


def test_one_round_gives_no_verdict() -> None:
    comparison = compare([[5.0] * 9], [[7.0] * 9])
    assert comparison.tied
    assert (comparison.ratio, comparison.low, comparison.probability) == (pytest.approx(1.4), 0, 0.5)
    assert comparison.to_json()["high"] is None


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (29, 2.045)]
)
def test_student_t_distribution_matches_tables(freedom: int, t: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(t, abs=6e-4)
    assert student_probability(-t, freedom) == pytest.approx(0.025, abs=1e-4)
    assert student_probability(0.0, freedom) == 0.5


def test_verdict_is_deterministic() -> None:
    rng = np.random.default_rng(5)
    a, b = rounds(rng, 10.0), rounds(rng, 10.1)
    assert compare(a, b) == compare(a, b)


@pytest.mark.parametrize(("this", "other"), [([], []), ([[1.0]], []), ([[1.0]], [[]])])
def test_both_sides_must_be_timed_in_every_round(this: list[list[float]], other: list[list[float]]) -> None:
    with pytest.raises(InputError, match="every round"):
        compare(this, other)
