"""The ask/tell loop: one Optuna study a variant, one budget for all of them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tunebench.outcome import Result
from tunebench.search.optimality_proof import OptimalityProof, certify
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.task import Executor

T = TypeVar("T")

__all__ = ["Budget", "optimality_proof", "run_search"]


@dataclass(slots=True, kw_only=True)
class Budget:
    """How much may be tried.

    Attributes:
        trials: Distinct configurations that may be launched or fail, known ones not counted.
        done: How many were.
        audit: How many configurations that the bound prunes are run all the same, as a share of `done`. Not
            of what is pruned: that may be a hundred thousand rows, and the audit would cost more than the
            search.
        audited: How many were.
        until: Reading of `time.monotonic` after which nothing more is begun; None if time is no matter.
    """

    trials: int
    done: int = field(default=0)
    audit: float = 0.0
    audited: int = field(default=0)
    until: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether the time is up."""
        return self.until is not None and time.monotonic() >= self.until

    @property
    def audits_due(self) -> int:
        """How many audits are due by now: at least one as soon as there is anything to audit."""
        return math.ceil(self.audit * self.done) - self.audited


def run_search(
    searches: Sequence[VariantSearch],
    executor: Executor[T],
    budget: Budget,
    *,
    make_task: Callable[[Proposal], T],
    claim: Callable[[Proposal], bool],
    on_result: Callable[[Proposal, Result], None],
    stop_at_gap: float | None = None,
) -> None:
    """Ask, submit, await, tell, until the budget is spent or nothing open could win.

    Args:
        searches: One for each variant.
        executor: Compiles and runs.
        budget: Is counted up as results come.
        make_task: Turns a proposal into what the executor takes.
        claim: Says whether this process may try a configuration; False if another one is at it.
        on_result: Is told of every result before the study is; recording is done there.
        stop_at_gap: Optimality gap that is good enough.
    """
    under_way: dict[Future[Result], Proposal] = {}
    while True:
        best_us = min(search.best_us for search in searches)
        executor.abort_above_us = best_us if np.isfinite(best_us) else None
        enough = stop_at_gap is not None and _within(stop_at_gap, searches, best_us)
        while not enough and not budget.is_overdue and len(under_way) < executor.capacity:
            proposal = _next(searches, budget, under_way.values(), best_us)
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
                budget.done += not proposal.audit
                budget.audited += proposal.audit
                on_result(proposal, result)
                proposal.search.tell(proposal, result.outcome)


def optimality_proof(searches: Sequence[VariantSearch], best_us: float) -> OptimalityProof:
    """Return what is proved of a best time among the configurations of all searches."""
    bounds_us = np.concatenate([search.sound_bounds_us for search in searches])
    return certify(bounds_us, np.concatenate([search.statuses for search in searches]), best_us)


def _within(gap: float, searches: Sequence[VariantSearch], best_us: float) -> bool:
    found = optimality_proof(searches, best_us).gap
    return found is not None and found <= gap


def _next(
    searches: Sequence[VariantSearch], budget: Budget, under_way: Collection[Proposal], incumbent_us: float
) -> Proposal | None:
    """Return what to try next: an audit if one is due, else what the search proposes within its budget."""
    auditing = sum(proposal.audit for proposal in under_way)
    turn = budget.audited + auditing if budget.audits_due > auditing else None
    proposal = _audit(searches, turn)
    if proposal is None and len(under_way) - auditing < budget.trials - budget.done:
        # Where nothing open could win any more, asking has just masked the rest: that may be audited.
        proposal = _propose(searches, incumbent_us) or _audit(searches, turn)
    return proposal


def _audit(searches: Sequence[VariantSearch], turn: int | None) -> Proposal | None:
    """Return something that the bound pruned, of one variant after the other; None if no audit is due."""
    if turn is None:
        return None
    first = turn % len(searches)
    audits = (search.ask_audit() for search in (*searches[first:], *searches[:first]))
    return next((audit for audit in audits if audit is not None), None)


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
