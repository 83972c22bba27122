"""Learned pruner: its miss rate on synthetic pairs of devices, its parts, and its use in a search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support import measured
from tunebench.outcome import Aborted, CompileFailed, Outcome, Pruned
from tunebench.search.learned_pruner import (
    LEAST_MEASURED,
    MISSED,
    MOST_CHANCE,
    TAIL_LOG,
    LearnedPruner,
    Residuals,
    chances,
    expected_log_us,
    least_likely,
    tail_between,
)
from tunebench.search.loop import optimality_proof
from tunebench.search.registry import SAMPLERS
from tunebench.search.sampler import Prospects
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Parameter, Space

ROWS = 4000
NO_BOUND = np.zeros(ROWS)


def family(seed: int, kind: str = "exponential", scatter: float = 0.12) -> tuple[np.ndarray, np.ndarray]:
    """Return times of a kernel on two devices that differ by a factor and residuals with the given tail."""
    rng = np.random.default_rng(seed)
    source_times = np.exp(rng.gamma(4.0, 0.25, ROWS))
    residuals = {
        "normal": rng.normal(size=ROWS),
        "exponential": rng.laplace(size=ROWS),
        "student": rng.standard_t(5, ROWS),
    }
    return 3.0 * source_times * np.exp(scatter * residuals[kind]), source_times


def after(times: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Return the times with all but `count` random rows unknown (NaN)."""
    measured_times = np.full(len(times), np.nan)
    rows = np.random.default_rng(seed).permutation(len(times))[:count]
    measured_times[rows] = times[rows]
    return measured_times


def account(
    times: np.ndarray, source_times: np.ndarray, bounds: np.ndarray, runs: int, count: int
) -> np.ndarray:
    """Return sums over runs: skipped rows, winners expected among them, winners among them, all winners."""
    total = np.zeros(4)
    for seed in range(runs):
        measured_times = after(times, count, seed)
        least = float(np.nanmin(measured_times))
        pruned = least_likely(
            chances(measured_times, expected_log_us((source_times,), ROWS), bounds, least, TAIL_LOG),
            np.isnan(measured_times),
        )
        wins = times < least
        total += pruned.count, pruned.winners, (wins & pruned.rows).sum(), wins.sum()
    return total


# -- miss rate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [50, 200])
@pytest.mark.parametrize(("kind", "share"), [("normal", 0.002), ("exponential", 0.02), ("student", 0.04)])
def test_miss_rate_is_as_announced(kind: str, share: float, count: int) -> None:
    """An exponential tail misses one winner in a hundred, a shorter tail fewer, a longer tail more."""
    total = np.zeros(4)
    for seed in range(8):
        times, source_times = family(seed, kind)
        total += account(times, source_times, NO_BOUND, 10, count)
    passed, expected, missed, winners = total
    assert passed > 80 * 0.4 * ROWS
    assert winners > 500
    assert missed <= share * winners
    assert (
        0.4 * MISSED * winners < expected < 2 * MISSED * winners
    )  # the predicted number of winners is right, too


def test_uncorrelated_devices_prune_nothing() -> None:
    times, source_times = family(2)
    source_times = np.random.default_rng(0).permutation(source_times)
    passed, _, missed, winners = account(times, source_times, NO_BOUND, 40, 50)
    assert passed < 40 * 0.1 * ROWS
    assert missed <= 0.05 * winners


def test_row_without_any_time_is_judged_by_its_bound() -> None:
    rng = np.random.default_rng(3)
    bounds = np.exp(rng.normal(1.0, 0.8, ROWS))
    times = bounds * np.exp(rng.gamma(3.0, 0.25, ROWS))
    nowhere = np.full(ROWS, np.nan)
    passed, expected, missed, winners = account(times, nowhere, bounds, 40, 50)
    assert passed > 40 * 0.4 * ROWS
    assert missed <= expected
    assert missed <= 2 * MISSED * winners


def test_nothing_is_skipped_without_devices_and_bounds() -> None:
    times, _ = family(4)
    measured_times = after(times, 100, 0)
    chance = chances(measured_times, np.full(ROWS, np.nan), NO_BOUND, float(np.nanmin(measured_times)))
    assert np.isnan(chance).all()
    assert least_likely(chance, np.isnan(measured_times)).count == 0


def test_too_few_measurements_prune_nothing() -> None:
    times, source_times = family(5)
    expected = expected_log_us((source_times,), ROWS)
    for count, finite in ((LEAST_MEASURED - 1, False), (LEAST_MEASURED, True)):
        measured_times = after(times, count, 0)
        assert (
            np.isfinite(chances(measured_times, expected, NO_BOUND, float(np.nanmin(measured_times)))).all()
            == finite
        )


def test_failures_elsewhere_are_tried_until_failures_here_agree() -> None:
    times, source_times = family(6)
    source_times[:1000] = np.inf
    runs = times.copy()
    times[:1000] = np.inf
    chance = {}
    for name, truth in (("fails", times), ("runs", runs)):
        measured_times = after(truth, 100, 1)
        chance[name] = chances(
            measured_times, expected_log_us((source_times,), ROWS), NO_BOUND, float(np.nanmin(measured_times))
        )[0]
    assert chance["fails"] < 0.001
    assert chance["runs"] > 0.008  # like any other: it is the best of a hundred


# -- parts of the learned pruner ---------------------------------------------------------------------


@given(arrays.arrays(float, st.integers(4, 60), elements=st.floats(-3, 3)), st.floats(0.01, 1))
def test_chances_are_probabilities_that_grow(residuals: np.ndarray, depth: float) -> None:
    below = Residuals.of(residuals, depth).below(np.linspace(-9, 9, 500))
    assert (below >= 0).all()
    assert (below <= 1).all()
    assert (np.diff(below) >= -1e-12).all()
    assert below[-1] == 1


def test_a_tail_is_as_deep_as_the_residuals() -> None:
    rng = np.random.default_rng(0)
    shallow, deep = (Residuals.of(scale * rng.standard_t(4, 200)) for scale in (0.05, 0.5))
    assert deep.depth > 5 * shallow.depth
    assert deep.below(np.array(-2.0)) > 100 * shallow.below(np.array(-2.0))


def test_ranks_are_those_of_one_more() -> None:
    residuals = Residuals.of(np.arange(99.0))
    assert residuals.below(np.array(49.0)) == pytest.approx(0.51)  # 50 as low, and itself
    assert residuals.below(np.array(23.999)) == pytest.approx(0.26, abs=1e-3)  # start of the tail


def test_devices_are_aligned_before_they_are_averaged() -> None:
    slow = np.array([*range(1, 31), np.nan, np.inf], float)
    fast = np.array([*(0.1 * slow[:30]), 2.0, np.inf], float)
    fast[0] = np.inf  # the configuration ran on one of the devices
    expected = np.exp(expected_log_us((slow, fast), 32))
    np.testing.assert_allclose(expected[:31] / expected[0], [*range(1, 31), 20.0])
    assert expected[31] == np.inf
    assert np.isnan(expected_log_us((), 3)).all()


def test_the_tail_before_any_measurement_is_that_between_the_least_alike_others() -> None:
    times, source_times = family(7, scatter=0.3)
    alike = source_times * np.exp(0.01 * np.random.default_rng(0).normal(size=ROWS))
    assert tail_between((source_times,)) == TAIL_LOG
    assert tail_between((source_times, alike)) < 0.02
    assert tail_between((source_times, alike, times)) > 0.2


@given(
    arrays.arrays(float, 50, elements=st.floats(0, 1) | st.just(math.nan)),
    arrays.arrays(bool, 50),
)
def test_least_likely_open_rows_are_skipped(chance: np.ndarray, open_rows: np.ndarray) -> None:
    skipped = least_likely(chance, open_rows)
    remaining = open_rows & ~skipped.rows & ~np.isnan(chance)
    assert not (skipped.rows & (~open_rows | np.isnan(chance))).any()
    assert skipped.winners <= MISSED * np.nansum(chance[open_rows]) + 1e-12
    assert (chance[skipped.rows] < MOST_CHANCE).all()
    assert skipped.count < open_rows.sum() or not open_rows.any()
    if skipped.count and remaining.any():
        assert chance[skipped.rows].max() <= chance[remaining].min()


# -- learned pruner in a search ----------------------------------------------------------------------

TABLE = Space((Parameter("a", tuple(range(16)), ""), Parameter("b", tuple(range(8)), ""))).enumerate()


def search(sampler: str, source_times: np.ndarray, **more: object) -> VariantSearch:
    prospects = Prospects(table=TABLE, bounds_us=np.zeros(len(TABLE)), elsewhere_us=(source_times,))
    return VariantSearch("any", prospects, sampler=sampler, seed=0, learned_pruner=True, **more)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_skipped_rows_stay_open(sampler: str) -> None:
    """The row that is best here is slowest on the other device; the search tries it late, but does."""
    source_times = 10.0 + 30.0 * TABLE["a"] + TABLE["b"]
    times = 2.0 * source_times
    times[-1] = 1.0
    looked_for = search(sampler, source_times)
    rows: list[int] = []
    max_postponed = 0
    while (proposal := looked_for.ask(looked_for.best_us)) is not None:
        rows.append(proposal.row)
        max_postponed = max(max_postponed, looked_for.postponed.count)
        assert looked_for.open.sum() == len(TABLE) - len(rows)
        looked_for.tell(proposal, measured(float(times[proposal.row])))
    assert sorted(rows) == list(range(len(TABLE)))
    assert looked_for.best_us == 1.0
    assert max_postponed > 0


def test_likely_rows_come_first_and_no_proof_closes_the_others() -> None:
    source_times = np.exp(0.1 * np.arange(len(TABLE)))
    looked_for = search("random", source_times)
    for _ in range(60):
        proposal = looked_for.ask(looked_for.best_us)
        assert proposal is not None
        assert not looked_for.postponed.rows[proposal.row]
        looked_for.tell(proposal, measured(2.0 * float(source_times[proposal.row])))
    assert looked_for.postponed.count > 30
    assert looked_for.unlikely(looked_for.best_us).winners < 0.05
    proof = optimality_proof([looked_for], looked_for.best_us)
    assert proof.open_count == len(TABLE) - 60
    assert not proof.proved


def test_rows_requested_first_are_tried_although_unlikely() -> None:
    source_times = np.exp(0.1 * np.arange(len(TABLE)))
    looked_for = search("random", source_times)
    for row in range(40):
        assert looked_for.remember(TABLE.config(row), measured(float(source_times[row])))
    last = TABLE.config(len(TABLE) - 1)
    assert looked_for.unlikely(looked_for.best_us).rows[-1]
    looked_for.first(last)
    proposal = looked_for.ask(looked_for.best_us)
    assert proposal is not None
    assert proposal.config == last


@pytest.mark.parametrize(
    ("outcome", "took_us"),
    [
        (measured(3.0), 3.0),
        (Aborted(samples_us=(9.0, 8.0), above_us=4.0), 8.0),
        (CompileFailed(reason="no"), math.inf),
        (Pruned(bound_us=5.0, incumbent_us=4.0), None),
    ],
)
def test_learned_pruner_receives_the_time_of_an_outcome(
    outcome: Outcome, took_us: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[tuple[int, float]] = []
    monkeypatch.setattr(LearnedPruner, "tell", lambda self, row, us: observed.append((row, us)))
    looked_for = search("random", np.ones(len(TABLE)))
    proposal = looked_for.ask(math.inf)
    assert proposal is not None
    looked_for.tell(proposal, outcome)
    assert observed == ([] if took_us is None else [(proposal.row, took_us)])
