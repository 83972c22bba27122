"""The search of one variant: an Optuna study, and the bound and status of each configuration."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import Trial, TrialState, create_trial

from tunebench.objective import TIME_ONLY, Goal
from tunebench.outcome import Aborted, Outcome, Pruned, failed, time_us
from tunebench.search.learned_pruner import LearnedPruner, PostponedConfigs
from tunebench.search.optimality_proof import ConfigStatus, config_status
from tunebench.search.pruner import BOUND_US, BoundPruner
from tunebench.search.registry import make_sampler
from tunebench.search.sampler import Prospects, TableSampler
from tunebench.search.study_space import StudySpace
from tunebench.search.surrogate_sampler import OBSERVED_US
from tunebench.space import Config

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Proposal", "VariantSearch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One configuration to try.

    Attributes:
        search: The search that proposed it.
        row: Its row in the table of the search.
        config: The configuration.
        trial: The trial of Optuna.
        audit: Whether it is bound-pruned and runs as a check of the bound.
    """

    search: VariantSearch
    row: int
    config: Config
    trial: Trial
    audit: bool = False

    @property
    def bound_us(self) -> float:
        """Lower bound, in microseconds."""
        return float(self.search.bounds_us[self.row])


class VariantSearch:
    """Proposes valid, unseen configurations of one variant and learns from their outcomes.

    Args:
        key: `Variant.key`, or any other name of the search.
        prospects: The valid configurations, with their bounds.
        sampler: A name of `tunebench.search.registry.samplers`.
        seed: Seed of the sampler and of the audits.
        learned_pruner: Whether to postpone configurations that are unlikely to win.
        goal: The objectives, and what the best must satisfy; without one, the time is minimised.

    Attributes:
        bounds_us: Lower bound of each row, in microseconds; raised once the binary is known.
        statuses: The `ConfigStatus` of each row.
        trusted: Whether the bounds prune: until one of them is violated.
        postponed: The configurations postponed at the last proposal.
        asked: Number of proposals, without audits.
        share: Its share of the trials before it has a time, relative to the fastest variant.
        best_us: Best time so far of what the goal allows, in microseconds; infinite without one.
        goal: The objectives.

    Raises:
        UnknownName: if there is no such sampler.
    """

    def __init__(
        self,
        key: str,
        prospects: Prospects,
        *,
        sampler: str,
        seed: int,
        learned_pruner: bool = False,
        goal: Goal = TIME_ONLY,
    ) -> None:
        self.key, self.table, self.goal = key, prospects.table, goal
        self.bounds_us = np.array(prospects.bounds_us, dtype=np.float64)
        self.statuses = np.full(len(self.table), ConfigStatus.UNTRIED, dtype=np.int8)
        self.trusted = True
        self.sampler = make_sampler(sampler, prospects, seed)
        self._own = isinstance(self.sampler, TableSampler)
        sampler_open = self.sampler.open if isinstance(self.sampler, TableSampler) else None
        # The same array as the sampler's: rows that are closed here are closed there.
        self.open = np.ones(len(self.table), bool) if sampler_open is None else sampler_open
        self.study: Study = _quiet_study(self.sampler, goal)
        self._distributions = dict(StudySpace.of_table(self.table).distributions)
        self._masked = np.zeros(len(self.table), bool)
        self._pruned = np.zeros(len(self.table), bool)  # after compiling
        self._reopened: list[int] = []  # pruned rows to propose again, which samplers treat as tried
        self._rng = np.random.default_rng(seed)
        self.asked = 0
        self.share = 1.0
        self.best_us = math.inf
        self._first: list[Config] = []
        self._learned_pruner = LearnedPruner(prospects) if learned_pruner else None
        self.postponed = PostponedConfigs.none(len(self.table))

    def first(self, config: Config) -> None:
        """Propose `config` before others, if it is valid and unseen."""
        self._first.append(config)

    def remember(self, config: Config, outcome: Outcome) -> bool:
        """Add a known outcome; returns whether the configuration is in the table."""
        row = self.table.row(config)
        if row is None:
            return False
        self.open[row] = False
        self._learn(row, outcome)
        self._add(config, outcome)
        return True

    def tighten(self, row: int, bound_us: float) -> None:
        """Raise the bound of a row, in microseconds; a lower value is ignored."""
        self.bounds_us[row] = max(self.bounds_us[row], bound_us)

    def again(self, row: int) -> None:
        """Propose a row next that was proposed before.

        Args:
            row: Its row in the table.
        """
        self._reopened.append(row)

    def distrust(self) -> None:
        """Stop pruning by bound and reopen the rows it pruned, after a run violated a bound."""
        self.trusted = False
        self.open[self._masked] = True
        # Samplers count these as tried, so they are proposed explicitly.
        self._reopened += np.flatnonzero(self._pruned).tolist()
        self._masked[:] = self._pruned[:] = False

    @property
    def sound_bounds_us(self) -> Array:
        """The lower bounds, in microseconds; zeros after a violation."""
        return self.bounds_us if self.trusted else np.zeros(len(self.table))

    def ask(self, incumbent_us: float) -> Proposal | None:
        """Return the next proposal, or None if no open configuration could beat the incumbent.

        Args:
            incumbent_us: Best time of any variant, in microseconds; rows with a higher bound are masked.
        """
        if self.trusted and self.goal.is_time:
            # Masked rows are remembered apart from tried ones: an audit may run them, and a violated bound
            # reopens them.
            hopeless = self.open & (self.bounds_us > incumbent_us)
            self._masked |= hopeless
            self.open[hopeless] = False
        if not self._reopened and not self.open.any():
            return None
        with self._postponing(incumbent_us):
            row, trial = self._ask()
        self.asked += 1
        return self._proposal(row, trial)

    def ask_audit(self) -> Proposal | None:
        """Return a random bound-pruned configuration, or None if there is none."""
        rows = np.flatnonzero(self._masked | self._pruned)
        if not len(rows):
            return None
        row = int(self._rng.choice(rows))
        self._masked[row] = self._pruned[row] = False
        return self._proposal(row, self._enqueued(row), audit=True)

    @property
    def masked(self) -> int:
        """Number of configurations that were pruned by bound without a trial."""
        return int(self._masked.sum())

    def _proposal(self, row: int, trial: Trial, *, audit: bool = False) -> Proposal:
        self.open[row] = False
        trial.set_user_attr(BOUND_US, float(self.bounds_us[row]))
        return Proposal(search=self, row=row, config=self.table.config(row), trial=trial, audit=audit)

    def _enqueued(self, row: int) -> Trial:
        """Return a trial of that row, regardless of the sampler."""
        self.study.enqueue_trial(dict(self.table.config(row)))
        return self.study.ask(self._distributions)

    def unlikely(self, incumbent_us: float) -> PostponedConfigs:
        """Return the open rows that are unlikely to beat the incumbent; they stay open."""
        if self._learned_pruner is None:
            return PostponedConfigs.none(len(self.table))
        return self._learned_pruner.unlikely(self.open, incumbent_us)

    @contextlib.contextmanager
    def _postponing(self, incumbent_us: float) -> Iterator[None]:
        """Close the unlikely rows while the sampler chooses; they are never all open rows."""
        if self._learned_pruner is None:
            yield
            return
        self.postponed = self.unlikely(incumbent_us)
        rows = self.postponed.rows
        if self._first:  # requested configurations are never postponed
            rows = np.zeros_like(rows)
        self.open[rows] = False
        try:
            yield
        finally:
            self.open[rows] = True

    def _ask(self) -> tuple[int, Trial]:
        if self._reopened:
            reopened = self._reopened.pop()
            return reopened, self._enqueued(reopened)
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
        """Return the open row nearest to the proposal of a sampler that does not know the table."""
        proposed = np.array(self.table.space.ordinals(params))
        spans = np.maximum(1, [len(p.values) - 1 for p in self.table.space.parameters])
        rows = np.flatnonzero(self.open)
        distance = (np.abs(self.table.ordinals[rows] - proposed) / spans).sum(axis=1)
        return int(rows[int(np.argmin(distance))])

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """Learn the outcome of a proposal."""
        self._learn(proposal.row, outcome)
        values = self.goal.values(outcome)
        for name, figure in _observed(outcome).items():
            proposal.trial.set_user_attr(name, figure)
        if Config(proposal.trial.params) != proposal.config:  # another row was run than the sampler proposed
            self.drop(proposal)
            self._add(proposal.config, outcome)
        elif values is None:
            self.drop(proposal)
        else:
            self.study.tell(proposal.trial, values)

    def _learn(self, row: int, outcome: Outcome) -> None:
        self.statuses[row] = config_status(outcome)
        took_us = time_us(outcome)
        if took_us is not None and self.goal.allows(outcome):
            self.best_us = min(self.best_us, took_us)
        self._update_pruner(row, outcome)
        if isinstance(outcome, Pruned):
            self.tighten(row, outcome.bound_us)
            if self.trusted:
                self._pruned[row] = True
            else:  # a bound was violated while it ran
                self._reopened.append(row)

    def _update_pruner(self, row: int, outcome: Outcome) -> None:
        """Update the learned pruner; the fastest sample of an aborted run counts as its time."""
        took_us = math.inf if failed(outcome) else time_us(outcome) or _observed(outcome).get(OBSERVED_US)
        if self._learned_pruner is not None and took_us is not None:
            self._learned_pruner.tell(row, took_us)

    def drop(self, proposal: Proposal) -> None:
        """End the trial of a proposal without a value, such as that of one which another process tries."""
        self.study.tell(proposal.trial, state=TrialState.FAIL)

    def _add(self, config: Config, outcome: Outcome) -> None:
        values = self.goal.values(outcome)
        self.study.add_trial(
            create_trial(
                params=dict(config),
                distributions=self._distributions,
                values=values,
                user_attrs=_observed(outcome),
                state=TrialState.COMPLETE if values is not None else TrialState.FAIL,
            )
        )


def _observed(outcome: Outcome) -> dict[str, float]:
    """Return the user attributes of an outcome: of an aborted run, its fastest sample."""
    return {OBSERVED_US: min(outcome.samples_us)} if isinstance(outcome, Aborted) else {}


def _quiet_study(sampler: BaseSampler, goal: Goal) -> Study:
    """Return a study without the log lines of Optuna and its warnings of experimental arguments."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with contextlib.ExitStack() as stack:
        stack.callback(optuna.logging.set_verbosity, verbosity)
        return optuna.create_study(directions=goal.directions, sampler=sampler, pruner=BoundPruner())
