"""The ask/tell loop: one Optuna study per variant, one budget for all of them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tunebench.outcome import Outcome, Result
from tunebench.search.optimality_proof import OptimalityProof, believable, certify
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.task import Executor

T = TypeVar("T")

__all__ = ["Budget", "optimality_proof", "run_search", "share_of"]


@dataclass(slots=True, kw_only=True)
class Budget:
    """The budget of a search.

    Attributes:
        trials: Distinct configurations to launch, failures included; known ones are free.
        done: Finished trials.
        audit: Number of bound-pruned configurations to run as a check, as a fraction of `done`. It is not a
            fraction of the pruned ones: there may be a hundred thousand, and the audit would cost more than
            the search.
        audited: Finished audits.
        until: Reading of `time.monotonic` after which no trial starts; None has no limit.
    """

    trials: int
    done: int = field(default=0)
    audit: float = 0.0
    audited: int = field(default=0)
    until: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether the time limit is reached."""
        return self.until is not None and time.monotonic() >= self.until

    @property
    def audits_due(self) -> int:
        """Number of audits due: at least one as soon as there is a configuration to audit."""
        return math.ceil(self.audit * self.done) - self.audited


def run_search(
    searches: Sequence[VariantSearch],
    executor: Executor[T],
    budget: Budget,
    *,
    make_task: Callable[[Proposal], T],
    claim: Callable[[Proposal], bool],
    on_result: Callable[[Proposal, Result], Outcome | None],
    stop_at_gap: float | None = None,
) -> None:
    """Ask, submit, wait and tell until the budget is spent or no open configuration could win.

    Args:
        searches: One search per variant.
        executor: Compiles and measures.
        budget: The budget; its counts are updated.
        make_task: Turns a proposal into a task of the executor.
        claim: Returns whether this process may try a configuration; False if another process tries it.
        on_result: Called with every result before the study learns it, to record it. It may return the
            outcome to learn instead, such as one with computed metrics.
        stop_at_gap: Optimality gap at which the search stops.
    """
    in_flight: dict[Future[Result], Proposal] = {}
    is_time = all(search.goal.is_time for search in searches)
    while True:
        best_us = min(search.best_us for search in searches)
        # Workers stop timing a configuration whose first samples are far above this.
        executor.abort_above_us = best_us if is_time and np.isfinite(best_us) else None
        enough = stop_at_gap is not None and _within(stop_at_gap, searches, best_us)
        while not enough and not budget.is_overdue and len(in_flight) < executor.capacity:
            proposal = _next(searches, budget, in_flight.values(), best_us)
            if proposal is None:
                break
            if claim(proposal):
                in_flight[executor.submit(make_task(proposal))] = proposal
            else:
                proposal.search.drop(proposal)
        if not in_flight:
            return
        finished, _ = wait(in_flight, return_when=FIRST_COMPLETED)
        for future in finished:
            proposal = in_flight.pop(future)
            # A cancelled task was never run: its configuration stays unseen, and is not charged to the
            # budget.
            with contextlib.suppress(CancelledError):
                result = future.result()
                budget.done += not proposal.audit
                budget.audited += proposal.audit
                outcome = on_result(proposal, result) or result.outcome
                proposal.search.tell(proposal, believable(outcome, proposal.bound_us))


def optimality_proof(searches: Sequence[VariantSearch], best_us: float) -> OptimalityProof:
    """Return the optimality proof of a best time over the configurations of all searches."""
    bounds_us = np.concatenate([search.sound_bounds_us for search in searches])
    return certify(bounds_us, np.concatenate([search.statuses for search in searches]), best_us)


def _within(gap: float, searches: Sequence[VariantSearch], best_us: float) -> bool:
    proven_gap = optimality_proof(searches, best_us).gap
    return proven_gap is not None and proven_gap <= gap


def _next(
    searches: Sequence[VariantSearch], budget: Budget, in_flight: Collection[Proposal], incumbent_us: float
) -> Proposal | None:
    """Return the next proposal: an audit if one is due, else that of a search if the budget allows it."""
    auditing = sum(proposal.audit for proposal in in_flight)
    # Audits in flight count, or the same audit would be due again while it runs.
    turn = budget.audited + auditing if budget.audits_due > auditing else None
    proposal = _audit(searches, turn)
    if proposal is None and len(in_flight) - auditing < budget.trials - budget.done:
        # If no open configuration could win, asking has masked the rest, which may now be audited.
        proposal = _propose(searches, incumbent_us) or _audit(searches, turn)
    return proposal


def _audit(searches: Sequence[VariantSearch], turn: int | None) -> Proposal | None:
    """Return a bound-pruned configuration, of each variant in turn; None if no audit is due."""
    if turn is None:
        return None
    first = turn % len(searches)
    audits = (search.ask_audit() for search in (*searches[first:], *searches[:first]))
    return next((audit for audit in audits if audit is not None), None)


def _propose(searches: Sequence[VariantSearch], incumbent_us: float) -> Proposal | None:
    """Ask the variant that is furthest below its share of the budget; faster variants have larger shares."""
    # The fewest proposals relative to its share first, so that counts approach the shares.
    for search in sorted(searches, key=lambda s: (s.asked + 1) / _share(s, incumbent_us)):
        proposal = search.ask(incumbent_us)
        if proposal is not None:
            return proposal
    return None


def _share(search: VariantSearch, incumbent_us: float) -> float:
    """Return the weight of a variant; if other objectives than the time count, all have the same."""
    if not search.goal.is_time or not np.isfinite(search.best_us) or not np.isfinite(incumbent_us):
        return search.share
    return share_of(search.best_us, incumbent_us)


def share_of(best_us: float, incumbent_us: float) -> float:
    """Return the share of the trials of a variant: 1 for the fastest, at least 0.05.

    Args:
        best_us: Its best time, in microseconds.
        incumbent_us: Best time of all variants, in microseconds.
    """
    # The fourth power: a variant that is twice as slow gets a sixteenth of the trials, but never none.
    return float(max(0.05, (incumbent_us / best_us) ** 4))
