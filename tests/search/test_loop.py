"""Search loop: audits of pruned configurations, violated bounds, and the end of a search."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import InstantExecutor, measured
from tunebench.outcome import Pruned, Result
from tunebench.search.loop import Budget, optimality_proof, run_search
from tunebench.search.optimality_proof import violates
from tunebench.search.registry import SAMPLERS
from tunebench.search.sampler import Prospects
from tunebench.search.variant_search import Proposal, VariantSearch
from tunebench.space import Parameter, Space

TABLE = Space((Parameter("a", tuple(range(100)), "nothing"),)).enumerate()
TIMES = 10.0 + np.abs(TABLE["a"] - 17.0)
SOUND = 0.95 * TIMES
CAPACITY = 4
WRONG = np.where(TABLE["a"] == 40, 50.0, SOUND)  # bound of 50 us for a configuration that takes 33 us


def search(bounds_us: np.ndarray = SOUND, sampler: str = "random") -> VariantSearch:
    return VariantSearch("v", Prospects(table=TABLE, bounds_us=bounds_us), sampler=sampler, seed=0)


def go(searches: list[VariantSearch], budget: Budget, stop_at_gap: float | None = None) -> list[Proposal]:
    asked: list[Proposal] = []

    def on_result(proposal: Proposal, result: Result) -> None:
        asked.append(proposal)
        if violates(result.outcome, proposal.bound_us):
            proposal.search.distrust()

    run_search(
        searches,
        InstantExecutor(lambda proposal: measured(float(TIMES[proposal.row])), CAPACITY),
        budget,
        make_task=lambda proposal: proposal,
        claim=lambda proposal: True,
        on_result=on_result,
        stop_at_gap=stop_at_gap,
    )
    return asked


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_a_search_to_the_end_proves_the_optimum(sampler: str) -> None:
    tiny_search = search(sampler=sampler)
    asked = go([tiny_search], Budget(trials=1000))
    proof = optimality_proof([tiny_search], tiny_search.best_us)
    assert tiny_search.best_us == 10
    assert proof.proved
    assert proof.timed == len(asked) < len(TABLE)
    assert proof.bounded == tiny_search.masked == len(TABLE) - len(asked)


def test_a_budget_leaves_a_gap_to_the_lowest_open_bound() -> None:
    tiny_search = search()
    asked = go([tiny_search], Budget(trials=5))
    untried = [bound for row, bound in enumerate(SOUND) if row not in {p.row for p in asked}]
    proof = optimality_proof([tiny_search], tiny_search.best_us)
    assert proof.gap == tiny_search.best_us / min(untried)
    assert not proof.proved


@pytest.mark.parametrize("gap", [1.6, 1.06, 1.0])
def test_search_ends_at_the_requested_optimality_gap(gap: float) -> None:
    tiny_search = search(sampler="bound")
    asked = go([tiny_search], Budget(trials=1000), stop_at_gap=gap)
    reached = optimality_proof([tiny_search], tiny_search.best_us).gap
    assert reached is not None
    assert reached <= gap
    if gap == 1.6:
        assert len(asked) <= CAPACITY


def test_audits_are_a_share_of_the_trials_and_of_what_is_pruned() -> None:
    first, second = search(sampler="bound"), search(2 * SOUND)
    budget = Budget(trials=20, audit=0.1)
    asked = go([first, second], budget)
    audits = [proposal for proposal in asked if proposal.audit]
    assert (budget.done, budget.audited, len(audits)) == (len(asked) - len(audits), len(audits), 2)
    assert all(proposal.bound_us > 10 for proposal in audits)
    assert len({(proposal.search.key, id(proposal.search), proposal.row) for proposal in asked}) == len(asked)


def test_without_a_share_nothing_is_audited() -> None:
    assert not any(proposal.audit for proposal in go([search()], Budget(trials=1000)))


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_violated_bound_no_longer_prunes_in_its_variant(sampler: str) -> None:
    """After the violation, each pruned configuration is searched once; the other variant still prunes."""
    wrong, right = search(WRONG, sampler), search(SOUND, sampler)
    asked = go([wrong, right], Budget(trials=1000, audit=100))
    rows = [proposal.row for proposal in asked if proposal.search is wrong]
    assert sorted(rows) == list(range(len(TABLE)))
    assert (wrong.masked, wrong.trusted, right.trusted) == (0, False, True)
    assert optimality_proof([wrong, right], 10.0).open == {"failed": 1}  # the time below its bound


def test_an_untrusted_bound_closes_nothing() -> None:
    tiny_search = search()
    go([tiny_search], Budget(trials=30))
    trusted = optimality_proof([tiny_search], tiny_search.best_us)
    tiny_search.distrust()
    untrusted = optimality_proof([tiny_search], tiny_search.best_us)
    assert (untrusted.gap, untrusted.bounded) == (None, 0)
    assert untrusted.open_count == trusted.open_count + trusted.bounded


def test_bound_after_compilation_closes_a_row_until_it_is_distrusted() -> None:
    tiny_search = search(np.zeros(len(TABLE)))
    proposal = tiny_search.ask(float("inf"))
    assert proposal is not None
    tiny_search.tell(proposal, Pruned(bound_us=12.0, incumbent_us=10.0))
    assert tiny_search.bounds_us[proposal.row] == 12.0
    assert optimality_proof([tiny_search], 10.0).bounded == 1
    assert optimality_proof([tiny_search], 13.0).bounded == 0  # the incumbent was a lucky one
    assert tiny_search.masked == 0
    audit = tiny_search.ask_audit()
    assert audit is not None
    assert (audit.row, audit.audit) == (proposal.row, True)
    tiny_search.tell(audit, Pruned(bound_us=12.0, incumbent_us=10.0))
    tiny_search.distrust()
    reopened = tiny_search.ask(10.0)
    assert reopened is not None
    assert reopened.row == proposal.row
    tiny_search.tell(reopened, Pruned(bound_us=12.0, incumbent_us=10.0))  # it was under way meanwhile
    assert tiny_search.ask(10.0).row == proposal.row  # type: ignore[union-attr]
    assert tiny_search.ask(10.0).row != proposal.row  # type: ignore[union-attr]
