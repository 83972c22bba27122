"""Predictions of the Gaussian process, and proposals of the sampler that uses it."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest

from tests.support import measured
from tunebench.outcome import Aborted, CompileFailed
from tunebench.search.sampler import Prospects
from tunebench.search.study_space import StudySpace
from tunebench.search.surrogate import Coordinates, GaussianProcess, Posterior, _Scales, expected_improvement
from tunebench.search.surrogate_sampler import CANDIDATES, DESIGN, OBSERVED_US, SurrogateSampler
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Parameter, Space, Table

SPACE = Space(
    (
        Parameter("tile", tuple(2**i for i in range(8)), "first"),
        Parameter("stages", (1, 2, 3, 4, 5, 6), "second"),
        Parameter("mode", ("b", "a", "c"), "third"),
        Parameter("fixed", (7,), "never varies"),
    ),
    (lambda tile, stages: tile * stages <= 512,),
)
TABLE = SPACE.enumerate()


def times(table: Table = TABLE) -> np.ndarray:
    tile, stages = np.log2(table["tile"]), table["stages"]
    return np.exp(0.1 * (tile - 5) ** 2 + 0.05 * (stages - 4) ** 2 + 0.3 * (table["mode"] != "a"))


def prospects(table: Table = TABLE, **more: object) -> Prospects:
    return Prospects(table=table, bounds_us=np.zeros(len(table)), **more)  # type: ignore[arg-type]


def searched(asks: int, seed: int, candidates: Prospects, truth: np.ndarray) -> VariantSearch:
    search = VariantSearch("any", candidates, sampler="surrogate", seed=seed)
    for _ in range(asks):
        proposal = search.ask(math.inf)
        assert proposal is not None
        search.tell(proposal, measured(float(truth[proposal.row])))
    return search


def best_after(asks: int, seed: int, candidates: Prospects, truth: np.ndarray) -> float:
    return searched(asks, seed, candidates, truth).best_us


def test_coordinates_are_scaled_from_zero_to_one() -> None:
    threads = TABLE["tile"] * 32.0
    coordinates = Coordinates.of(TABLE, {"threads": threads, "constant": np.full(len(TABLE), 3.0)})
    assert coordinates.place.shape == (len(TABLE), 4)  # three varying parameters and one cost figure
    assert coordinates.choice.shape == (len(TABLE), 3)
    assert coordinates.choices == 8 + 6 + 3
    assert coordinates.place.min() == 0
    assert coordinates.place.max() == 1
    np.testing.assert_allclose(
        coordinates.place[:, 0], np.log2(TABLE["tile"]) / 7, rtol=1e-6
    )  # numbers by their logarithm
    np.testing.assert_allclose(coordinates.place[:, 3], coordinates.place[:, 0], rtol=1e-6)
    assert set(coordinates.place[TABLE["mode"] == "a", 2]) == {0.5}  # words by their rank
    differing = (TABLE.ordinals[:30, None] != TABLE.ordinals[50:90]).sum(axis=2)
    np.testing.assert_array_equal(
        coordinates.take(slice(30)).differing(coordinates.take(slice(50, 90))), differing
    )


def test_prediction_matches_observations_and_is_uncertain_far_away() -> None:
    coordinates = Coordinates.of(TABLE, {})
    process = GaussianProcess(3)
    rows = np.random.default_rng(1).choice(len(TABLE), 60, replace=False)
    truth = np.log(times())
    process.fit(coordinates.take(rows), truth[rows], steps=60)
    seen, unseen = (
        process.predict(coordinates.take(rows)),
        process.predict(coordinates.take(np.arange(len(TABLE)))),
    )
    assert np.abs(seen.mean - truth[rows]).max() < 0.1 * np.ptp(truth)
    unseen_rows = np.setdiff1d(np.arange(len(TABLE)), rows)
    assert np.abs(unseen.mean - truth)[unseen_rows].mean() < 0.1 * np.ptp(truth)
    assert seen.sigma.mean() < 0.7 * unseen.sigma[unseen_rows].mean()


def test_expected_improvement_is_that_of_a_normal_distribution() -> None:
    posterior = Posterior(mean=np.array([0.0, 1.0, -2.0]), sigma=np.array([1.0, 0.5, 0.1]))
    drawn = np.random.default_rng(0).normal(posterior.mean, posterior.sigma, (400_000, 3))
    expected = np.maximum(0.5 - drawn, 0).mean(axis=0)
    np.testing.assert_allclose(
        expected_improvement(posterior, np.full(3, 0.5)), expected, rtol=0.02, atol=1e-3
    )


def test_the_optimum_is_found_in_a_fifth_of_the_space() -> None:
    truth = times()
    assert len(TABLE) > 120
    reached = [best_after(len(TABLE) // 5, seed, prospects(), truth) for seed in range(5)]
    assert sum(us == truth.min() for us in reached) >= 4


def test_search_starts_with_the_fastest_of_other_devices() -> None:
    truth = times()
    elsewhere = truth * np.random.default_rng(0).uniform(0.95, 1.05, len(truth))
    elsewhere[3], elsewhere[5] = np.inf, np.nan
    candidates = prospects(elsewhere_us=(elsewhere,))
    cold = [best_after(DESIGN, seed, prospects(), truth) for seed in range(5)]
    warm = [best_after(DESIGN, seed, candidates, truth) for seed in range(5)]
    assert max(warm) <= truth.min() * 1.02
    assert np.mean(warm) < np.mean(cold)


def test_misleading_devices_lose_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = times()
    opposite = prospects(elsewhere_us=(1 / truth,))
    doubting = np.mean([best_after(20, seed, opposite, truth) for seed in range(8)])
    assert max(best_after(26, seed, opposite, truth) for seed in range(8)) < 1.01 * truth.min()
    monkeypatch.setattr("tunebench.search.surrogate_sampler.DOUBTED", 10**9)
    assert doubting < 0.8 * np.mean([best_after(20, seed, opposite, truth) for seed in range(8)])


def test_scales_climb_along_the_slope() -> None:
    coordinates = Coordinates.of(TABLE, {})
    rows = np.random.default_rng(1).choice(len(TABLE), 40, replace=False)
    process = GaussianProcess(3)
    process._seen = coordinates.take(rows)
    differing = process._seen.differing(process._seen).astype(np.float64)
    standard = (np.log(times())[rows] - 0.4) / 0.3
    logs = np.array([0.2, -0.4, 0.3, 0.5, -4.0, -0.2])

    def score(at: np.ndarray) -> float:
        return process._explain(_Scales(at), differing, standard)[0]

    _, slope, _ = process._explain(_Scales(logs), differing, standard)
    steps = 1e-5 * np.eye(len(logs))
    numeric = [(score(logs + step) - score(logs - step)) / 2e-5 for step in steps]
    np.testing.assert_allclose(slope, numeric, rtol=1e-4, atol=1e-4)


def test_sampler_learns_from_failures_and_aborts() -> None:
    """Half of the space fails or is aborted: the sampler moves to the other half."""
    truth = times()
    search = VariantSearch("any", prospects(), sampler="surrogate", seed=1)
    asked = []
    for _ in range(40):
        proposal = search.ask(math.inf)
        assert proposal is not None
        asked.append(bad := TABLE["mode"][proposal.row] == "c")
        slow = Aborted(samples_us=(9.0, 8.0), above_us=2.0)
        failed = slow if TABLE["stages"][proposal.row] % 2 else CompileFailed(reason="no")
        search.tell(proposal, failed if bad else measured(float(truth[proposal.row])))
    assert sum(asked[DESIGN:]) < sum(asked[:DESIGN])
    aborted = [t for t in search.study.trials if OBSERVED_US in t.user_attrs]
    assert all(t.user_attrs[OBSERVED_US] == 8.0 for t in aborted)


def test_pending_trials_are_not_repeated_and_proposals_spread() -> None:
    search = searched(20, 2, prospects(), times())
    pending = [search.ask(math.inf) for _ in range(6)]
    assert len({p.row for p in pending if p is not None}) == 6


def test_very_many_configurations_are_sampled() -> None:
    space = Space(tuple(Parameter(name, tuple(range(1, 9)), "") for name in "abcdef"))
    table = space.enumerate()
    assert len(table) > 10 * CANDIDATES
    sampler = SurrogateSampler(prospects(table), seed=0)
    study = optuna.create_study(sampler=sampler)
    for _ in range(DESIGN + 3):
        trial = study.ask(dict(StudySpace.of_table(table).distributions))
        study.tell(trial, 1.0 + sum(abs(value - 4) for value in trial.params.values()))
    best = sorted(table.row(t.params) for t in study.best_trials)
    candidates = sampler._candidates(np.array(best))
    assert 0.9 * CANDIDATES < len(candidates) <= CANDIDATES
    assert len(candidates) == len(set(candidates))
    differing = (table.ordinals[candidates] != table.ordinals[best[0]]).sum(axis=1)
    assert (differing <= 2).sum() > 500  # all near configurations except the tried ones
