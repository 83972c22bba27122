"""Who gets the next trials, where one budget is for many problems: whose trials save a model most time.

What the next trials of a problem save is how often the model runs it, times how far its best time will fall.
A random sequence sets its records at an even rate in the logarithm of its length; so the best time is taken
to fall as a power of the trials. The power is learned problem by problem, from a belief held beforehand:
where nothing was found for long, little is expected, and never nothing. Past the first dozen trials a search
has learned where to look, and what it leaves to later ones dwindles faster: in recorded spaces about as the
trials, once more. The bound says what there is to be had at most, and the optimality proof when nothing is left.

Source: A. Rényi, "Théorie des éléments saillants d'une suite d'observations", 1962, for the rate of records.
Zheng et al., "Ansor", OSDI 2020, section 6, for the gradient of the model's time by the trials of a problem;
its optimistic guess, a best time inverse to the trials, is the belief here. What else was tried, and
what it gave: `docs/decisions/0042-suite-budget-by-expected-saving.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["FIRST", "ROUND", "BudgetScheduler", "TaskState"]

FIRST = 12
"""Trials of a problem's first round: so many far apart begin a search by the surrogate."""

FIRST_SHARE = 0.5
"""Share of the budget that first rounds may take together."""

ROUND = 4
"""Trials that are given out at a time after that."""

BELIEVED = 1.0
"""Power of the trials by which the best time is believed to fall before that is seen: inversely to them."""

WEIGHT = 2.0
"""What the belief counts against what is seen, in units of log(trials)."""

FRUITLESS = 24
"""Trials without a success after which a problem gets no more."""

K = TypeVar("K")


@dataclass(slots=True, kw_only=True)
class TaskState:
    """What is known of one problem.

    Attributes:
        count: How often the model runs it.
        expected_us: What its best configuration is believed to take, for as long as nothing has a time.
        trials: Configurations of it whose outcome is known, those of earlier runs among them.
        best_us: Best time; infinite if there is none.
        floor_us: Nothing that is open is faster; 0 if that is not known.
        closed: Whether it gets no more.
        first: Trials and best time as of when there first was one.
    """

    count: int
    expected_us: float
    trials: int = 0
    best_us: float = math.inf
    floor_us: float = 0.0
    closed: bool = False
    first: tuple[int, float] | None = None

    def tell(self, *, trials: int, best_us: float, floor_us: float, closed: bool = False) -> None:
        """Learn where the problem stands, before the first round and after each."""
        self.trials, self.best_us, self.floor_us = trials, best_us, floor_us
        fruitless = math.isinf(best_us) and trials >= FRUITLESS
        self.closed = self.closed or closed or fruitless or floor_us >= best_us
        if self.first is None and math.isfinite(best_us):
            self.first = (trials, best_us)

    @property
    def time_us(self) -> float:
        """What the model spends on it, as far as is known."""
        return self.count * (self.best_us if math.isfinite(self.best_us) else self.expected_us)

    @property
    def power(self) -> float:
        """The power of the trials by which the best time falls: the belief, and what was seen since."""
        if self.first is None:
            return BELIEVED
        trials, best_us = self.first
        fallen = math.log(best_us / self.best_us)
        return (WEIGHT * BELIEVED + fallen) / (WEIGHT + math.log(self.trials / trials))

    def saving_us(self, trials: int) -> float:
        """Return what each of the next trials is expected to save the model; 0 if nothing is left."""
        if self.closed:
            return 0.0
        share = 1 - math.exp(-self.power * math.log1p(trials / max(1, self.trials)))
        share *= FIRST / max(FIRST, self.trials)
        most_us = self.count * (self.best_us - self.floor_us)
        return min(share * self.time_us, most_us) / trials


class BudgetScheduler(Generic[K]):
    """Gives out a budget of trials, a round at a time.

    Every problem gets a first round as long as the budget allows it, in the order of the model's time; from
    then on each round goes where the greatest saving is expected.

    Args:
        accounts: A problem each; whoever makes the trials tells them how these went.
        total: The budget.
        round_trials: Trials that are given out at a time after the first round.
    """

    def __init__(self, accounts: Mapping[K, TaskState], total: int, *, round_trials: int = ROUND) -> None:
        self._accounts, self._round = accounts, round_trials
        self._first = max(1, min(FIRST, int(FIRST_SHARE * total) // max(1, len(accounts))))

    def next(self, left: int) -> tuple[K, int] | None:
        """Return which problem is next, and how many trials it gets; None if there is nothing left to do.

        Args:
            left: What is left of the budget.
        """
        open_ = {key: account for key, account in self._accounts.items() if not account.closed}
        if not open_ or left < 1:
            return None
        fresh = {key: account.time_us for key, account in open_.items() if account.trials < self._first}
        if fresh:
            first = max(fresh, key=fresh.__getitem__)
            return first, min(left, self._first - open_[first].trials)
        saving = {key: account.saving_us(self._round) for key, account in open_.items()}
        return max(saving, key=saving.__getitem__), min(left, self._round)
