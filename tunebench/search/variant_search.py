"""The search for the best configuration of one variant: one Optuna study, and what is known of each row."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.study import Study
from optuna.trial import Trial, TrialState, create_trial

from tunebench.errors import UnknownName
from tunebench.outcome import Aborted, Outcome, Pruned, failed, time_us
from tunebench.search.learned_pruner import LearnedPruner, PostponedConfigs
from tunebench.search.optimality_proof import ConfigStatus, config_status
from tunebench.search.pruner import BOUND_US, BoundPruner
from tunebench.search.sampler import BoundSampler, Prospects, RandomTableSampler, TableSampler
from tunebench.search.study_space import StudySpace
from tunebench.search.surrogate_sampler import OBSERVED_US, SurrogateSampler
from tunebench.space import Config

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["SAMPLERS", "Proposal", "VariantSearch"]

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
        audit: Whether its bound says that it cannot win, and it is run all the same to check the bound.
    """

    search: VariantSearch
    row: int
    config: Config
    trial: Trial
    audit: bool = False

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
        seed: Seed of the sampler, and of what is audited.
        calibrated: Whether to pass over what is unlikely to win.

    Attributes:
        bounds_us: Bound of each row; it rises where a binary tells more.
        standings: The `ConfigStatus` of each row.
        trusted: Whether the bounds prune; they do until one of them is violated.
        passed_over: What was unlikely to win when it was last asked.

    Raises:
        UnknownName: if there is no such sampler.
    """

    def __init__(
        self, key: str, prospects: Prospects, *, sampler: str, seed: int, learned_pruner: bool = False
    ) -> None:
        if sampler not in SAMPLERS:
            raise UnknownName("sampler", sampler, SAMPLERS)
        self.key, self.table = key, prospects.table
        self.bounds_us = np.array(prospects.bounds_us, dtype=np.float64)
        self.statuses = np.full(len(self.table), ConfigStatus.UNTRIED, dtype=np.int8)
        self.trusted = True
        self.sampler = SAMPLERS[sampler](prospects, seed)
        self._own = isinstance(self.sampler, TableSampler)
        own = self.sampler.open if isinstance(self.sampler, TableSampler) else None
        self.open = np.ones(len(self.table), bool) if own is None else own
        self.study: Study = _quiet_study(self.sampler)
        self._distributions = dict(StudySpace.of_table(self.table).distributions)
        self._masked = np.zeros(len(self.table), bool)
        self._pruned = np.zeros(len(self.table), bool)  # once they were compiled
        self._reopened: list[int] = []  # of those; samplers close for good what has a trial
        self._rng = np.random.default_rng(seed)
        self.asked = 0
        self.best_us = float("inf")
        self._first: list[Config] = []
        self._learned_pruner = LearnedPruner(prospects) if learned_pruner else None
        self.postponed = PostponedConfigs.none(len(self.table))

    def first(self, config: Config) -> None:
        """Propose `config` before anything else, if it is valid and unseen."""
        self._first.append(config)

    def remember(self, config: Config, outcome: Outcome) -> bool:
        """Take over an outcome that is known already; returns whether the configuration is of this space."""
        row = self.table.row(config)
        if row is None:
            return False
        self.open[row] = False
        self._learn(row, outcome)
        self._add(config, outcome)
        return True

    def tighten(self, row: int, bound_us: float) -> None:
        """Raise the bound of a row to what its binary tells, if that is more."""
        self.bounds_us[row] = max(self.bounds_us[row], bound_us)

    def distrust(self) -> None:
        """Prune by bound no more, and open again what it pruned: a run has violated it."""
        self.trusted = False
        self.open[self._masked] = True
        self._reopened += np.flatnonzero(self._pruned).tolist()
        self._masked[:] = self._pruned[:] = False

    @property
    def sound_bounds_us(self) -> Array:
        """The bounds, or zeros once they are not trusted."""
        return self.bounds_us if self.trusted else np.zeros(len(self.table))

    def ask(self, incumbent_us: float) -> Proposal | None:
        """Return what to try next, or None if nothing open could beat the incumbent.

        Args:
            incumbent_us: Best time of any variant; what is bound to be slower is masked.
        """
        if self.trusted:
            hopeless = self.open & (self.bounds_us > incumbent_us)
            self._masked |= hopeless
            self.open[hopeless] = False
        if not self._reopened and not self.open.any():
            return None
        with self._passing_over(incumbent_us):
            row, trial = self._ask()
        self.asked += 1
        return self._proposal(row, trial)

    def ask_audit(self) -> Proposal | None:
        """Return one of the configurations that the bound pruned, at random, or None if there is none."""
        rows = np.flatnonzero(self._masked | self._pruned)
        if not len(rows):
            return None
        row = int(self._rng.choice(rows))
        self._masked[row] = self._pruned[row] = False
        return self._proposal(row, self._enqueued(row), audit=True)

    @property
    def masked(self) -> int:
        """How many configurations were never asked for, since their bound exceeds the incumbent."""
        return int(self._masked.sum())

    def _proposal(self, row: int, trial: Trial, *, audit: bool = False) -> Proposal:
        self.open[row] = False
        trial.set_user_attr(BOUND_US, float(self.bounds_us[row]))
        return Proposal(search=self, row=row, config=self.table.config(row), trial=trial, audit=audit)

    def _enqueued(self, row: int) -> Trial:
        """Return a trial of that row, whatever the sampler would propose."""
        self.study.enqueue_trial(dict(self.table.config(row)))
        return self.study.ask(self._distributions)

    def unlikely(self, incumbent_us: float) -> PostponedConfigs:
        """Return the open rows that are unlikely to beat the incumbent: a guess, so they stay open."""
        if self._learned_pruner is None:
            return PostponedConfigs.none(len(self.table))
        return self._learned_pruner.unlikely(self.open, incumbent_us)

    @contextlib.contextmanager
    def _passing_over(self, incumbent_us: float) -> Iterator[None]:
        """Shut what is unlikely to win while the sampler chooses; that is never all that is open."""
        if self._learned_pruner is None:
            yield
            return
        self.postponed = self.unlikely(incumbent_us)
        rows = self.postponed.rows
        if self._first:  # a caller's wish goes before a guess
            rows = np.zeros_like(rows)
        self.open[rows] = False
        try:
            yield
        finally:
            self.open[rows] = True

    def _ask(self) -> tuple[int, Trial]:
        if self._reopened:
            again = self._reopened.pop()
            return again, self._enqueued(again)
        while self._first:
            row = self.table.row(self._first.pop(0))
            if row is not None and self.open[row]:
                return row, self._enqueued(row)
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
        self._learn(proposal.row, outcome)
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

    def _learn(self, row: int, outcome: Outcome) -> None:
        self.statuses[row] = config_status(outcome)
        self._calibrate(row, outcome)
        if isinstance(outcome, Pruned):
            self.tighten(row, outcome.bound_us)
            if self.trusted:
                self._pruned[row] = True
            else:  # it was under way when a bound turned out to be wrong
                self._reopened.append(row)

    def _calibrate(self, row: int, outcome: Outcome) -> None:
        """Let the calibrated pruner learn: an aborted run took at least its fastest sample."""
        took_us = float("inf") if failed(outcome) else time_us(outcome) or _observed(outcome).get(OBSERVED_US)
        if self._learned_pruner is not None and took_us is not None:
            self._learned_pruner.tell(row, took_us)

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
