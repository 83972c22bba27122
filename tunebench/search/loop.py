"""The ask/tell loop: one Optuna study a variant, one budget for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import Trial, TrialState, create_trial

from tunebench.errors import UnknownName
from tunebench.outcome import Aborted, Outcome, Result, time_us
from tunebench.search.executor import Executor
from tunebench.search.pruner import BOUND_US, BoundPruner
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler, TableSampler
from tunebench.search.study_space import StudySpace
from tunebench.search.surrogate_sampler import OBSERVED_US, SurrogateSampler
from tunebench.space import Config

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

T = TypeVar("T")

__all__ = ["SAMPLERS", "Budget", "Proposal", "VariantSearch", "run"]

SAMPLERS: dict[str, Callable[[Prospects, int], BaseSampler]] = {
    "bound": lambda known, seed: BoundSampler(known, seed=seed),
    "random": lambda known, seed: RandomTableSampler(known, seed=seed),
    "surrogate": lambda known, seed: SurrogateSampler(known, seed=seed),
    "tpe": lambda known, seed: TPESampler(seed=seed, multivariate=True, constant_liar=True),
}
"""Samplers by the name a user gives; each is built from prospects and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One configuration to find out about.

    Attributes:
        search: The search that proposed it.
        row: Its row in the search's table.
        config: The same as a `Config`.
        trial: Optuna's trial, to be told of the outcome.
    """

    search: VariantSearch
    row: int
    config: Config
    trial: Trial

    @property
    def bound_us(self) -> float:
        """No run of it can be faster."""
        return float(self.search.bounds_us[self.row])


class VariantSearch:
    """Proposes valid, unseen configurations of one variant and learns of outcomes.

    Args:
        key: Whose configurations these are: `Variant.key`, or any other name.
        prospects: All valid ones, with their bounds.
        sampler: A name of `SAMPLERS`.
        seed: Seed of the sampler.

    Raises:
        UnknownName: if there is no such sampler.
    """

    def __init__(self, key: str, prospects: Prospects, *, sampler: str, seed: int) -> None:
        if sampler not in SAMPLERS:
            raise UnknownName("sampler", sampler, SAMPLERS)
        self.key, self.table, self.bounds_us = key, prospects.table, prospects.bounds_us
        self.sampler = SAMPLERS[sampler](prospects, seed)
        self._own = isinstance(self.sampler, TableSampler)
        own = self.sampler.open if isinstance(self.sampler, TableSampler) else None
        self.open = np.ones(len(self.table), bool) if own is None else own
        self.study: Study = _quiet_study(self.sampler)
        self._distributions = dict(StudySpace.of_table(self.table).distributions)
        self.masked = 0
        self.asked = 0
        self.best_us = float("inf")
        self._first: list[Config] = []

    def first(self, config: Config) -> None:
        """Propose `config` before anything else, if it is valid and unseen."""
        self._first.append(config)

    def remember(self, config: Config, outcome: Outcome) -> bool:
        """Take over an outcome that is known already; returns whether the configuration is of this space."""
        row = self.table.row(config)
        if row is None:
            return False
        self.open[row] = False
        self._add(config, outcome)
        return True

    def ask(self, incumbent_us: float) -> Proposal | None:
        """Return what to try next, or None if nothing open could beat the incumbent.

        Args:
            incumbent_us: Best time of any variant; what is bound to be slower is masked.
        """
        hopeless = self.open & (self.bounds_us > incumbent_us)
        self.masked += int(hopeless.sum())
        self.open[hopeless] = False
        if not self.open.any():
            return None
        row, trial = self._ask()
        self.open[row] = False
        self.asked += 1
        trial.set_user_attr(BOUND_US, float(self.bounds_us[row]))
        return Proposal(search=self, row=row, config=self.table.config(row), trial=trial)

    def _ask(self) -> tuple[int, Trial]:
        while self._first:
            row = self.table.row(self._first.pop(0))
            if row is not None and self.open[row]:
                self.study.enqueue_trial(dict(self.table.config(row)))
                return row, self.study.ask(self._distributions)
        trial = self.study.ask(self._distributions)
        row = self.table.row(trial.params)
        if self._own and row is not None:
            return row, trial
        if row is None or not self.open[row]:
            row = self._nearest_open(trial.params)
        return row, trial

    def _nearest_open(self, params: dict[str, Any]) -> int:
        """Snap what a sampler without knowledge of the space asked for to the nearest open row."""
        wanted = np.array(self.table.space.ordinals(params))
        spans = np.maximum(1, [len(p.values) - 1 for p in self.table.space.parameters])
        rows = np.flatnonzero(self.open)
        distance = (np.abs(self.table.ordinals[rows] - wanted) / spans).sum(axis=1)
        return int(rows[int(np.argmin(distance))])

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """Learn what became of a proposal."""
        value = time_us(outcome)
        if value is not None:
            self.best_us = min(self.best_us, value)
        for name, figure in _observed(outcome).items():
            proposal.trial.set_user_attr(name, figure)
        if Config(proposal.trial.params) != proposal.config:  # it was snapped: tell of what was really run
            self.study.tell(proposal.trial, state=TrialState.FAIL)
            self._add(proposal.config, outcome)
        elif value is None:
            self.study.tell(proposal.trial, state=TrialState.FAIL)
        else:
            self.study.tell(proposal.trial, value)

    def drop(self, proposal: Proposal) -> None:
        """Forget a proposal that will not be tried here, since another tuner is at it."""
        self.study.tell(proposal.trial, state=TrialState.FAIL)

    def _add(self, config: Config, outcome: Outcome) -> None:
        value = time_us(outcome)
        if value is not None:
            self.best_us = min(self.best_us, value)
        self.study.add_trial(
            create_trial(
                params=dict(config),
                distributions=self._distributions,
                value=value,
                user_attrs=_observed(outcome),
                state=TrialState.COMPLETE if value is not None else TrialState.FAIL,
            )
        )


def _observed(outcome: Outcome) -> dict[str, float]:
    """Return what a sampler may learn from an outcome that holds no time: how long its samples took."""
    return {OBSERVED_US: min(outcome.samples_us)} if isinstance(outcome, Aborted) else {}


def _quiet_study(sampler: BaseSampler) -> Study:
    """Make a study without Optuna's log line per trial and its notes on experimental arguments."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with contextlib.ExitStack() as stack:
        stack.callback(optuna.logging.set_verbosity, verbosity)
        return optuna.create_study(direction="minimize", sampler=sampler, pruner=BoundPruner())


@dataclass(slots=True, kw_only=True)
class Budget:
    """How much may be tried.

    Attributes:
        trials: Distinct configurations that may be launched or fail, known ones not counted.
        done: How many were.
    """

    trials: int
    done: int = field(default=0)


def run(
    searches: Sequence[VariantSearch],
    executor: Executor[T],
    budget: Budget,
    *,
    make_task: Callable[[Proposal], T],
    claim: Callable[[Proposal], bool],
    on_result: Callable[[Proposal, Result], None],
) -> None:
    """Ask, submit, await, tell, until the budget is spent or nothing open could win.

    Args:
        searches: One for each variant.
        executor: Compiles and runs.
        budget: Is counted up as results come.
        make_task: Turns a proposal into what the executor takes.
        claim: Says whether this process may try a configuration; False if another one is at it.
        on_result: Is told of every result before the study is; recording is done there.
    """
    under_way: dict[Future[Result], Proposal] = {}
    while True:
        best_us = min(search.best_us for search in searches)
        executor.abort_above_us = best_us if np.isfinite(best_us) else None
        while len(under_way) < min(executor.capacity, budget.trials - budget.done):
            proposal = _propose(searches, best_us)
            if proposal is None:
                break
            if claim(proposal):
                under_way[executor.submit(make_task(proposal))] = proposal
            else:
                proposal.search.drop(proposal)
        if not under_way:
            return
        finished, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in finished:
            proposal = under_way.pop(future)
            with contextlib.suppress(CancelledError):
                result = future.result()
                budget.done += 1
                on_result(proposal, result)
                proposal.search.tell(proposal, result.outcome)


def _propose(searches: Sequence[VariantSearch], incumbent_us: float) -> Proposal | None:
    """Ask the variant that is furthest behind its share; variants near the best have larger shares."""
    for search in sorted(searches, key=lambda s: (s.asked + 1) / _share(s.best_us, incumbent_us)):
        proposal = search.ask(incumbent_us)
        if proposal is not None:
            return proposal
    return None


def _share(best_us: float, incumbent_us: float) -> float:
    """Return a variant's weight in the budget: 1 for the leader or one not tried yet, 0.05 at least."""
    if not np.isfinite(best_us) or not np.isfinite(incumbent_us):
        return 1.0
    return float(max(0.05, (incumbent_us / best_us) ** 4))
