"""Requirements on a pruner in any Optuna study; Optuna publishes no such tests."""

from __future__ import annotations

import math
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.samplers import BaseSampler, GridSampler, RandomSampler, TPESampler
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState, create_trial

from tunebench.errors import InputError
from tunebench.search.pruner import BOUND_US, BoundPruner

optuna.logging.set_verbosity(optuna.logging.WARNING)


def study(direction: str = "minimize", values: tuple[float, ...] = (10.0,), **options: Any) -> optuna.Study:
    created = optuna.create_study(direction=direction, pruner=BoundPruner(), **options)
    for value in values:
        created.add_trial(create_trial(value=value))
    return created


def prunes(optuna_study: optuna.Study, bound: object) -> bool:
    trial = optuna_study.ask()
    if bound is not None:
        trial.set_user_attr(BOUND_US, bound)
    return bool(trial.should_prune())


times = st.floats(0.1, 100) | st.just(math.inf)


@given(st.lists(times, max_size=4), times, st.sampled_from(["minimize", "maximize"]))
def test_pruner_stops_exactly_the_trials_that_cannot_win(
    values: list[float], bound: float, direction: str
) -> None:
    best = (min if direction == "minimize" else max)(values, default=None)
    wins = best is None or (bound <= best if direction == "minimize" else bound >= best)
    assert prunes(study(direction, tuple(values)), bound) is not wins


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("bound", [None, math.nan])
def test_without_a_bound_nothing_is_pruned(direction: str, bound: float | None) -> None:
    assert not prunes(study(direction), bound)


@pytest.mark.parametrize("bound", ["12", [12.0], True])
def test_non_numeric_bound_is_refused(bound: object) -> None:
    with pytest.raises(InputError, match="bound_us must be a number"):
        prunes(study(), bound)


def test_only_completed_trials_count() -> None:
    optuna_study = study(values=())
    optuna_study.add_trial(create_trial(state=TrialState.PRUNED, intermediate_values={0: 1.0}, value=1.0))
    optuna_study.add_trial(create_trial(state=TrialState.FAIL))
    optuna_study.ask().report(1.0, step=0)
    assert not prunes(optuna_study, 5.0)
    optuna_study.add_trial(create_trial(value=4.0))
    assert prunes(optuna_study, 5.0)


def test_intermediate_values_are_unchanged_and_ignored() -> None:
    optuna_study = study()

    def objective(trial: optuna.Trial) -> float:
        for step in range(5):
            trial.report(1e9 / (step + 1), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 20.0

    optuna_study.optimize(objective, n_trials=2)
    last = optuna_study.trials[-1]
    assert last.state == TrialState.COMPLETE
    assert last.intermediate_values == {step: 1e9 / (step + 1) for step in range(5)}


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(seed=0),
        TPESampler(seed=0, n_startup_trials=3),
        GridSampler({"x": list(range(1, 31))}, seed=0),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_with_any_sampler_the_optimum_survives(sampler: BaseSampler) -> None:
    optuna_study = study(values=(), sampler=sampler)
    pruned_by_hand = []

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_int("x", 1, 30)
        trial.set_user_attr(BOUND_US, 0.9 * x)
        best = min(
            (t.value for t in optuna_study.get_trials(states=(TrialState.COMPLETE,))), default=math.inf
        )
        if trial.should_prune():
            pruned_by_hand.append(0.9 * x > best)
            raise optuna.TrialPruned
        return float(x)

    optuna_study.optimize(objective, n_trials=30)
    asked = [trial.params["x"] for trial in optuna_study.trials]
    assert optuna_study.best_value == min(asked)
    assert pruned_by_hand
    assert all(pruned_by_hand)


def test_several_objectives_are_refused() -> None:
    optuna_study = optuna.create_study(directions=["minimize", "minimize"], pruner=BoundPruner())
    optuna_study.add_trial(create_trial(values=[1.0, 2.0]))
    trial = optuna_study.ask()
    trial.set_user_attr(BOUND_US, 5.0)
    with pytest.raises(NotImplementedError):  # Optuna itself refuses first
        trial.should_prune()
    with pytest.raises(InputError, match="expected a study of one objective"):
        BoundPruner().prune(optuna_study, optuna_study.trials[-1])


def test_another_attribute_may_hold_the_bound() -> None:
    optuna_study = optuna.create_study(direction="maximize", pruner=BoundPruner("gflops_at_most"))
    optuna_study.add_trial(create_trial(value=900.0))
    trial = optuna_study.ask()
    trial.set_user_attr(BOUND_US, 1e9)
    assert not trial.should_prune()
    trial.set_user_attr("gflops_at_most", 800.0)
    assert trial.should_prune()


def _shared(path: str) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(path))
    return optuna.create_study(study_name="s", storage=storage, load_if_exists=True, pruner=BoundPruner())


def _complete(path: str, value: float) -> None:
    shared = _shared(path)
    shared.tell(shared.ask(), value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_best_value_of_another_process_prunes_here(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    shared = _shared(path)
    trial = shared.ask()
    trial.set_user_attr(BOUND_US, 5.0)
    assert not trial.should_prune()
    for value, pruned in ((6.0, False), (4.0, True)):
        process = multiprocessing.get_context("spawn").Process(target=_complete, args=(path, value))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert trial.should_prune() is pruned


def test_pruner_can_be_pickled() -> None:
    pruner = pickle.loads(pickle.dumps(BoundPruner("other")))
    optuna_study = study()
    optuna_study.pruner = pruner
    trial = optuna_study.ask()
    trial.set_user_attr("other", 11.0)
    assert trial.should_prune()
