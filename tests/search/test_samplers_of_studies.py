"""Samplers in arbitrary Optuna studies: Optuna's own sampler tests, and guarantees beyond them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)

from tunebench.errors import InputError
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler, TableSampler
from tunebench.search.study_space import LEVELS, MOST_POINTS, StudySpace
from tunebench.search.surrogate_sampler import DESIGN, SurrogateSampler

OWN = [SurrogateSampler, BoundSampler, RandomTableSampler]


class TestOptunasOwn(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    @pytest.fixture(params=OWN)
    def sampler(self, request: pytest.FixtureRequest) -> Callable[[], BaseSampler]:
        return lambda: request.param(seed=0)


SPACE = {
    "tile": CategoricalDistribution((16, 32, 64, 128)),
    "stages": IntDistribution(1, 6),
    "layout": CategoricalDistribution(("row", "column", None)),
    "split/k": FloatDistribution(0.0, 1.0, step=0.25),
}


def valid(config: dict[str, object]) -> bool:
    return int(config["tile"]) * int(config["stages"]) <= 256 and config["layout"] != "column"  # type: ignore[call-overload]


def objective(trial: optuna.Trial) -> float:
    tile = trial.suggest_categorical("tile", (16, 32, 64, 128))
    stages = trial.suggest_int("stages", 1, 6)
    layout = trial.suggest_categorical("layout", ("row", "column", None))
    split = trial.suggest_float("split/k", 0.0, 1.0, step=0.25)
    return (np.log2(tile) - 5) ** 2 + (stages - 4) ** 2 + 3 * (layout is None) + split - 2


COUNT = sum(
    valid({"tile": tile, "stages": stages, "layout": layout})
    for tile, stages, layout, _ in itertools.product((16, 32, 64, 128), range(1, 7), ("row", None), range(5))
)


@pytest.mark.parametrize("kind", OWN)
def test_valid_from_the_first_trial_on_and_none_twice(kind: type[TableSampler]) -> None:
    sampler = kind(space=SPACE, constraint=valid, seed=0)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=COUNT, n_jobs=2)
    assert all(valid(trial.params) for trial in study.trials)
    assert len({tuple(sorted(map(str, t.params.items()))) for t in study.trials}) == COUNT
    assert sampler.exhausted
    assert study.best_value == -2


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_values_below_zero_and_either_direction_are_learned_from(direction: str) -> None:
    sign = 1 if direction == "minimize" else -1
    found = []
    for seed in range(4):
        sampler = SurrogateSampler(space=SPACE, constraint=valid, seed=seed)
        study = optuna.create_study(sampler=sampler, direction=direction)
        study.optimize(lambda trial: sign * objective(trial), n_trials=40)
        found.append(sign * study.best_value)
    assert sorted(found)[2] == -2  # three of four seeds find the optimum within a sixth of the space


def test_partial_enqueued_trial_is_completed_to_a_valid_one() -> None:
    study = optuna.create_study(sampler=SurrogateSampler(space=SPACE, constraint=valid, seed=0))
    for stages in (6, 5, 4):
        study.enqueue_trial({"stages": stages, "split/k": 0.75})
    study.optimize(objective, n_trials=3)
    assert [trial.params["stages"] for trial in study.trials] == [6, 5, 4]
    assert all(valid(trial.params) and trial.params["split/k"] == 0.75 for trial in study.trials)


def test_extra_parameters_are_drawn_at_random_and_the_others_learned() -> None:
    study = optuna.create_study(sampler=SurrogateSampler(space=SPACE, constraint=valid, seed=3))
    study.optimize(lambda trial: objective(trial) + trial.suggest_float("noise", 0, 1e-6), n_trials=50)
    assert study.best_value < -1.7
    assert len({trial.params["noise"] for trial in study.trials}) == 50


def test_sampler_without_a_space_uses_parameters_common_to_all_trials() -> None:
    values = []
    for seed in range(3):
        study = optuna.create_study(sampler=SurrogateSampler(seed=seed))
        study.optimize(
            lambda t: (t.suggest_float("x", -10, 10) - 3) ** 2 + abs(t.suggest_int("y", 0, 99) - 40),
            n_trials=60,
        )
        values.append(study.best_value)
    assert max(values) < 4


def test_a_trial_that_runs_elsewhere_is_not_proposed_again() -> None:
    storage = optuna.storages.InMemoryStorage()
    one, two = (RandomTableSampler(space={"x": IntDistribution(0, 5)}, seed=seed) for seed in range(2))
    study = optuna.create_study(storage=storage, sampler=one, study_name="shared")
    other = optuna.load_study(storage=storage, sampler=two, study_name="shared")
    asked = [each.ask(dict(one.space.distributions)).params["x"] for _ in range(3) for each in (study, other)]
    assert sorted(asked) == [0, 1, 2, 3, 4, 5]


def test_a_sampler_travels_to_another_process() -> None:
    sampler = SurrogateSampler(space=SPACE, constraint=valid, seed=0)
    study = optuna.create_study(sampler=sampler)
    study.optimize(objective, n_trials=DESIGN + 2)
    copy = pickle.loads(pickle.dumps(sampler))
    again = optuna.create_study(sampler=copy)
    again.add_trials(study.trials)
    again.optimize(objective, n_trials=2)
    assert len({str(t.params) for t in again.trials}) == DESIGN + 4


def test_continuous_ranges_become_grids_and_vast_spaces_samples() -> None:
    rng = np.random.default_rng(0)
    grid = StudySpace.of({"x": FloatDistribution(1e-3, 10, log=True)}, None, rng)
    levels = np.array(grid.levels[0])
    assert len(levels) == LEVELS
    np.testing.assert_allclose(np.diff(np.log(levels)), np.log(1e4) / (LEVELS - 1))
    assert grid.row({"x": 0.0999}) == grid.row({"x": 0.1}) == LEVELS // 2
    assert grid.row({"x": 11.0}) is None
    vast = StudySpace.of({name: FloatDistribution(-1, 1) for name in "abcdefghijklmno"}, None, rng)
    assert 0.99 * MOST_POINTS < len(vast.table) <= MOST_POINTS
    row = vast.row(vast.params(12345))
    assert row == 12345


def test_unusable_search_space_is_refused() -> None:
    with pytest.raises(InputError, match="satisfies"):
        SurrogateSampler(space=SPACE, constraint=lambda config: False)
    table = StudySpace.of(SPACE, valid, np.random.default_rng(0)).table
    with pytest.raises(InputError, match="either"):
        SurrogateSampler(Prospects(table=table, bounds_us=np.zeros(len(table))), space=SPACE)
