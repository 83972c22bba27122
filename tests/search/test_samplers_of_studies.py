"""Samplers in arbitrary Optuna studies: guarantees beyond those of `SamplerContract`."""

from __future__ import annotations

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution

from tunebench.errors import InputError
from tunebench.search.sampler import Prospects
from tunebench.search.study_space import LEVELS, MOST_POINTS, StudySpace
from tunebench.search.surrogate_sampler import SurrogateSampler
from tunebench.testing.sampler_contract import SPACE, objective, valid


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_values_below_zero_and_either_direction_are_learned_from(direction: str) -> None:
    sign = 1 if direction == "minimize" else -1
    best_values = []
    for seed in range(4):
        sampler = SurrogateSampler(space=SPACE, constraint=valid, seed=seed)
        study = optuna.create_study(sampler=sampler, direction=direction)
        study.optimize(lambda trial: sign * objective(trial), n_trials=40)
        best_values.append(sign * study.best_value)
    assert sorted(best_values)[2] == -2  # three of four seeds find the optimum within a sixth of the space


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
