"""Division of one budget of trials between the workloads of a suite, by expected saving.

The saving of the next trials of a workload is its number of calls times the expected fall of its best time. A
random sequence sets new records at an even rate in the logarithm of its length, so the best time is assumed
to fall as a power of the number of trials. The power is estimated for each workload from a prior: where
nothing improved for long, little is expected, but never nothing. After the first dozen trials a search has
learned where to look, and what later trials gain falls faster, in recorded spaces by about one more power of
the trials. The lower bound limits the saving, and an optimality proof ends it.

Source: A. Rényi, "Théorie des éléments saillants d'une suite d'observations", 1962, for the rate of records.
Zheng et al., "Ansor", OSDI 2020, section 6, for the gradient of the model's time by the trials of a workload;
its optimistic estimate, a best time inverse to the trials, is the prior here. Alternatives that were
measured: `docs/decisions/0042-suite-budget-by-expected-saving.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["FIRST", "ROUND", "BudgetScheduler", "TaskState"]

FIRST = 12
"""Trials of the first round of a workload, with which the surrogate sampler starts."""

FIRST_SHARE = 0.5
"""Fraction of the budget that all first rounds may take together."""

ROUND = 4
"""Trials of each later round."""

PRIOR_POWER = 1.0
"""Prior of the power of the trials by which the best time falls: inverse proportion."""

PRIOR_WEIGHT = 2.0
"""Weight of the prior against observations, in units of log(trials)."""

FRUITLESS = 24
"""Trials without a success after which a workload receives no further trials."""

K = TypeVar("K")


@dataclass(slots=True, kw_only=True)
class TaskState:
    """State of one workload.

    Attributes:
        count: Number of calls per inference.
        expected_us: Predicted time of its best configuration, used until one is measured.
        trials: Configurations with a known outcome, including those of earlier runs.
        best_us: Best time, in microseconds; infinite if there is none.
        floor_us: Lower bound of all open configurations, in microseconds; 0 if unknown.
        closed: Whether the workload gets no more trials.
        first: Trials and best time when there first was a best time.
    """

    count: int
    expected_us: float
    trials: int = 0
    best_us: float = math.inf
    floor_us: float = 0.0
    closed: bool = False
    first: tuple[int, float] | None = None

    def update(self, *, trials: int, best_us: float, floor_us: float, closed: bool = False) -> None:
        """Set the state, before the first round and after each."""
        self.trials, self.best_us, self.floor_us = trials, best_us, floor_us
        fruitless = math.isinf(best_us) and trials >= FRUITLESS
        self.closed = self.closed or closed or fruitless or floor_us >= best_us
        if self.first is None and math.isfinite(best_us):
            self.first = (trials, best_us)

    @property
    def time_us(self) -> float:
        """Time of all calls of the workload, in microseconds."""
        return self.count * (self.best_us if math.isfinite(self.best_us) else self.expected_us)

    @property
    def power(self) -> float:
        """Estimated power of the trials by which the best time falls."""
        if self.first is None:
            return PRIOR_POWER
        trials, best_us = self.first
        # Weighted mean of the prior and the observed power log_fall / log(trials), which weighs log(trials).
        log_fall = math.log(best_us / self.best_us)
        return (PRIOR_WEIGHT * PRIOR_POWER + log_fall) / (PRIOR_WEIGHT + math.log(self.trials / trials))

    def saving_us(self, trials: int) -> float:
        """Return the expected saving per trial of the next `trials`, in microseconds; 0 if closed."""
        if self.closed:
            return 0.0
        # The best time is proportional to trials ** -power, so this fraction of it falls off.
        share = 1 - math.exp(-self.power * math.log1p(trials / max(1, self.trials)))
        # One more power of the trials after the first round: the search has learned where to look.
        share *= FIRST / max(FIRST, self.trials)
        # Infinite before the first success, and then no limit.
        most_us = self.count * (self.best_us - self.floor_us)
        return min(share * self.time_us, most_us) / trials


class BudgetScheduler(Generic[K]):
    """Assigns rounds of a budget of trials to workloads.

    Every workload gets a first round, the one with the most time first; each further round goes to the
    workload with the greatest expected saving.

    Args:
        states: State of each workload; the caller updates it after each round.
        total: The budget, in trials.
        round_trials: Trials of each round after the first.
    """

    def __init__(self, states: Mapping[K, TaskState], total: int, *, round_trials: int = ROUND) -> None:
        self._states, self._total, self._round = states, total, round_trials

    def next(self, left: int, total: int | None = None) -> tuple[K, int] | None:
        """Return the next workload and its number of trials; None if all are closed or the budget is spent.

        Args:
            left: Remaining trials of the budget.
            total: Trials of the budget, if its time limit allows fewer than the number of trials.
        """
        total = self._total if total is None else total
        first_trials = max(1, min(FIRST, int(FIRST_SHARE * total) // max(1, len(self._states))))
        open_ = {key: state for key, state in self._states.items() if not state.closed}
        if not open_ or left < 1:
            return None
        fresh = {key: state.time_us for key, state in open_.items() if state.trials < first_trials}
        if fresh:
            first = max(fresh, key=fresh.__getitem__)
            return first, min(left, first_trials - open_[first].trials)
        saving = {key: state.saving_us(self._round) for key, state in open_.items()}
        return max(saving, key=saving.__getitem__), min(left, self._round)
