"""Contract tests of Optuna samplers over tables of valid configurations.

    from tunebench.testing.sampler_contract import SamplerContract

    class TestMySampler(SamplerContract):
        sampler_class = MySampler  # a subclass of tunebench.search.sampler.TableSampler

They include Optuna's own tests of samplers (`optuna.testing.pytest_samplers`).
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)

from tunebench.search.sampler import TableSampler

__all__ = ["SPACE", "SamplerContract", "objective", "valid"]

SPACE: Mapping[str, BaseDistribution] = {
    "tile": CategoricalDistribution((16, 32, 64, 128)),
    "stages": IntDistribution(1, 6),
    "layout": CategoricalDistribution(("row", "column", None)),
    "split/k": FloatDistribution(0.0, 1.0, step=0.25),
}
"""Search space of the tests: choices, an integer range, a stepped float range."""


def valid(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration of `SPACE` satisfies the constraint of the tests."""
    return int(config["tile"]) * int(config["stages"]) <= 256 and config["layout"] != "column"


def objective(trial: optuna.Trial) -> float:
    """Return a value of a configuration of `SPACE`; the least of the valid ones is -2."""
    tile = trial.suggest_categorical("tile", (16, 32, 64, 128))
    stages = trial.suggest_int("stages", 1, 6)
    layout = trial.suggest_categorical("layout", ("row", "column", None))
    split = trial.suggest_float("split/k", 0.0, 1.0, step=0.25)
    return float((np.log2(tile) - 5) ** 2 + (stages - 4) ** 2 + 3 * (layout is None) + split - 2)


_COUNT = sum(
    valid({"tile": tile, "stages": stages, "layout": layout})
    for tile, stages, layout, _ in itertools.product((16, 32, 64, 128), range(1, 7), ("row", None), range(5))
)


class SamplerContract(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    """Tests that every `TableSampler` must pass.

    Attributes:
        sampler_class: The sampler under test, with the constructor of `TableSampler`.
    """

    sampler_class: ClassVar[type[TableSampler]]

    @pytest.fixture
    def sampler(self) -> Callable[[], BaseSampler]:
        """The factory that Optuna's tests call."""
        return lambda: self.sampler_class(seed=0)

    def _constrained(self, seed: int = 0) -> TableSampler:
        return self.sampler_class(space=SPACE, constraint=valid, seed=seed)

    def test_proposes_every_valid_configuration_once(self) -> None:
        sampler = self._constrained()
        study = optuna.create_study(sampler=sampler)
        study.optimize(objective, n_trials=_COUNT, n_jobs=2)
        assert all(valid(trial.params) for trial in study.trials)
        assert len({tuple(sorted(map(str, trial.params.items()))) for trial in study.trials}) == _COUNT
        assert sampler.exhausted
        assert study.best_value == -2

    def test_exhausted_sampler_repeats_valid_configurations(self) -> None:
        study = optuna.create_study(sampler=self._constrained())
        study.optimize(objective, n_trials=_COUNT + 3)
        assert len(study.trials) == _COUNT + 3
        assert all(valid(trial.params) for trial in study.trials)

    def test_same_seed_repeats_the_search(self) -> None:
        def params(seed: int) -> list[dict[str, Any]]:
            study = optuna.create_study(sampler=self._constrained(seed))
            study.optimize(objective, n_trials=12)
            return [trial.params for trial in study.trials]

        assert params(3) == params(3)

    def test_partly_enqueued_trial_is_completed_to_a_valid_configuration(self) -> None:
        study = optuna.create_study(sampler=self._constrained())
        for stages in (6, 5, 4):
            study.enqueue_trial({"stages": stages, "split/k": 0.75})
        study.optimize(objective, n_trials=3)
        assert [trial.params["stages"] for trial in study.trials] == [6, 5, 4]
        assert all(valid(trial.params) and trial.params["split/k"] == 0.75 for trial in study.trials)

    def test_running_trial_of_another_process_is_not_proposed_again(self) -> None:
        storage = optuna.storages.InMemoryStorage()
        one, two = (self.sampler_class(space={"x": IntDistribution(0, 5)}, seed=seed) for seed in range(2))
        study = optuna.create_study(storage=storage, sampler=one, study_name="shared")
        other = optuna.load_study(storage=storage, sampler=two, study_name="shared")
        assert one.space is not None
        space = dict(one.space.distributions)
        asked = [each.ask(space).params["x"] for _ in range(3) for each in (study, other)]
        assert sorted(asked) == [0, 1, 2, 3, 4, 5]

    def test_pickled_sampler_continues_without_repeats(self) -> None:
        sampler = self._constrained()
        study = optuna.create_study(sampler=sampler)
        study.optimize(objective, n_trials=18)
        again = optuna.create_study(sampler=pickle.loads(pickle.dumps(sampler)))  # noqa: S301 (our own bytes)
        again.add_trials(study.trials)
        again.optimize(objective, n_trials=2)
        assert len({str(trial.params) for trial in again.trials}) == 20
