"""Requirements on every sampler, in an ordinary Optuna study and in the search loop."""

from __future__ import annotations

import numpy as np
import optuna
import pytest

from tests.support import measured
from tunebench.errors import UnknownName
from tunebench.outcome import CompileFailed
from tunebench.search.registry import SAMPLERS
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler, TableSampler
from tunebench.search.surrogate_sampler import SurrogateSampler
from tunebench.search.variant_search import VariantSearch
from tunebench.space import Config, Parameter, Space, Table

SPACE = Space(
    (
        Parameter("a", (1, 2, 4, 8), "first"),
        Parameter("b", (1, 2, 4, 8), "second"),
        Parameter("mode", ("x", "y"), "third"),
    ),
    (lambda a, b: a * b <= 16, lambda a, mode: (a > 1) | (mode == "x")),
)
TABLE = SPACE.enumerate()
TIMES = np.array([10.0 + TABLE["a"][i] + 3 * TABLE["b"][i] for i in range(len(TABLE))])
BOUNDS = 0.9 * TIMES
PROSPECTS = Prospects(table=TABLE, bounds_us=BOUNDS)


def search(
    sampler: str, *, seed: int = 0, table: Table = TABLE, bounds: np.ndarray = BOUNDS
) -> VariantSearch:
    return VariantSearch(
        "softmax/numba_cpu", Prospects(table=table, bounds_us=bounds), sampler=sampler, seed=seed
    )


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_every_valid_configuration_once_and_no_other(name: str) -> None:
    looked_for = search(name, bounds=np.zeros(len(TABLE)))
    rows = []
    while (proposal := looked_for.ask(float("inf"))) is not None:
        assert TABLE.config(proposal.row) == proposal.config
        rows.append(proposal.row)
        looked_for.tell(proposal, measured(float(TIMES[proposal.row])))
    assert sorted(rows) == list(range(len(TABLE)))
    assert looked_for.best_us == TIMES.min()


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_bounds_above_the_incumbent_are_masked_and_the_optimum_never(name: str) -> None:
    looked_for = search(name)
    tried = 0
    while (proposal := looked_for.ask(looked_for.best_us)) is not None:
        assert proposal.bound_us <= looked_for.best_us
        tried += 1
        looked_for.tell(proposal, measured(float(TIMES[proposal.row])))
    assert looked_for.best_us == TIMES.min()
    assert looked_for.masked + tried == len(TABLE)
    assert looked_for.masked > 0


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_failed_and_pending_configurations_are_not_proposed_again(name: str) -> None:
    looked_for = search(name, bounds=np.zeros(len(TABLE)))
    under_way = [looked_for.ask(float("inf")) for _ in range(5)]
    for proposal in under_way:
        looked_for.tell(proposal, CompileFailed(reason="no"))
    rest = []
    while (proposal := looked_for.ask(float("inf"))) is not None:
        rest.append(proposal.row)
    assert len({p.row for p in under_way} | set(rest)) == len(TABLE)
    assert len(rest) == len(TABLE) - 5


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_known_configurations_are_not_proposed_and_the_default_comes_first(name: str) -> None:
    looked_for = search(name, bounds=np.zeros(len(TABLE)))
    remembered = TABLE.config(4)
    assert looked_for.remember(remembered, measured(99.0))
    assert not looked_for.remember(Config({"a": 8, "b": 8, "mode": "x"}), measured(1.0))
    looked_for.first(remembered)
    looked_for.first(TABLE.config(7))
    proposals = []
    while (proposal := looked_for.ask(float("inf"))) is not None:
        proposals.append(proposal.config)
    assert proposals[0] == TABLE.config(7)
    assert remembered not in proposals
    assert looked_for.best_us == 99.0


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_seed_repeats_a_search(name: str) -> None:
    def rows(seed: int) -> list[int]:
        looked_for = search(name, seed=seed, bounds=np.zeros(len(TABLE)))
        proposed = []
        for _ in range(8):
            proposal = looked_for.ask(float("inf"))
            proposed.append(proposal.row)
            looked_for.tell(proposal, measured(float(TIMES[proposal.row])))
        return proposed

    assert rows(3) == rows(3)
    assert rows(3) != rows(4)


def test_an_unknown_sampler_lists_the_known() -> None:
    with pytest.raises(UnknownName, match=", ".join(sorted(SAMPLERS))):
        search("grid")


@pytest.mark.parametrize(
    "sampler",
    [kind(PROSPECTS, seed=1) for kind in (RandomTableSampler, BoundSampler, SurrogateSampler)],
    ids=["random", "bound", "surrogate"],
)
def test_table_samplers_work_in_an_ordinary_study(sampler: TableSampler) -> None:
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(dict(TABLE.config(2)))

    def objective(trial: optuna.Trial) -> float:
        a = trial.suggest_categorical("a", (1, 2, 4, 8))
        b = trial.suggest_categorical("b", (1, 2, 4, 8))
        mode = trial.suggest_categorical("mode", ("x", "y"))
        row = TABLE.row({"a": a, "b": b, "mode": mode})
        assert row is not None
        return float(TIMES[row])

    study.optimize(objective, n_trials=len(TABLE))
    assert len({tuple(t.params.values()) for t in study.trials}) == len(TABLE)
    assert sampler.exhausted
    study.optimize(
        objective, n_trials=3
    )  # no new configuration is left, so the sampler repeats one instead of failing
    assert len(study.trials) == len(TABLE) + 3


def test_lowest_bound_first() -> None:
    looked_for = search("bound")
    bounds = []
    while (proposal := looked_for.ask(float("inf"))) is not None:
        bounds.append(proposal.bound_us)
    assert bounds == sorted(bounds)
