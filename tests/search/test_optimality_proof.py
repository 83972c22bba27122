"""Optimality proof compared with brute force, and outcomes that close a configuration or leave it open."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import VERIFIED, measured
from tunebench.outcome import (
    Aborted,
    CompileFailed,
    Crashed,
    LaunchFailed,
    Outcome,
    Predicted,
    Pruned,
    TimedOut,
    WrongResult,
)
from tunebench.search.optimality_proof import ConfigStatus, certify, config_status, violates

OUTCOMES: list[tuple[Outcome | None, str | None]] = [
    (None, "untried"),
    (measured(5.0), None),
    (Predicted(predicted_us=1.0, verification=VERIFIED), "untried"),
    (Aborted(samples_us=(50.0,), above_us=10.0), "aborted"),
    (Pruned(bound_us=11.0, incumbent_us=10.0), "untried"),
    (CompileFailed(reason="no"), None),
    (CompileFailed(reason="the compiler hung", refused=False), "failed"),
    (LaunchFailed(reason="too many registers", refused=True), None),
    (LaunchFailed(reason="out of memory"), "failed"),
    (WrongResult(reason="y[0]"), None),
    (TimedOut(reason="60 s"), "timed_out"),
    (Crashed(reason="SIGSEGV"), "crashed"),
]
"""Outcomes, each with the list that its configuration is in while its bound does not exclude it."""

rows = st.lists(
    st.tuples(st.sampled_from(OUTCOMES), st.sampled_from([0.0, 1.0, 4.0, 5.0, 6.0, 9.0])),
    min_size=1,
    max_size=30,
)


@given(rows, st.sampled_from([4.0, 5.0, 7.0, math.inf]))
def test_optimality_proof_equals_brute_force_over_all_rows(
    space: list[tuple[tuple[Outcome | None, str | None], float]], best_us: float
) -> None:
    floor, listed, bounded = best_us, [], 0
    for (_, name), bound_us in space:
        if name is None:
            continue
        if bound_us > best_us:
            bounded += 1
            continue
        listed.append(name)
        floor = min(floor, bound_us)
    proof = certify(
        np.array([bound_us for _, bound_us in space]),
        np.array([config_status(outcome) if outcome else ConfigStatus.UNTRIED for (outcome, _), _ in space]),
        best_us,
    )
    assert proof.open == {name: listed.count(name) for name in set(listed)}
    assert proof.open_count == len(listed)
    assert proof.bounded == bounded
    assert proof.floor_us == floor
    assert proof.proved == (not listed and math.isfinite(best_us))
    assert proof.gap == (best_us / floor if floor > 0 and math.isfinite(best_us) else None)
    assert proof.timed + proof.impossible + proof.bounded + proof.open_count == len(space)
    if proof.proved:
        assert proof.gap == 1


@pytest.mark.parametrize(("outcome", "name"), OUTCOMES[1:], ids=lambda value: getattr(value, "kind", value))
def test_only_times_and_impossible_runs_close_a_row(outcome: Outcome, name: str | None) -> None:
    proof = certify(np.array([1.0]), np.array([config_status(outcome)]), 5.0)
    assert proof.proved is (name is None)
    assert list(proof.open) == ([name] if name else [])


def test_a_bound_at_the_best_time_is_open_one_above_it_is_closed() -> None:
    untried = np.array([ConfigStatus.UNTRIED])
    assert not certify(np.array([5.0]), untried, 5.0).proved
    assert certify(np.array([np.nextafter(5.0, 6.0)]), untried, 5.0).proved


def test_the_fastest_sample_violates_a_bound_not_the_median() -> None:
    assert violates(measured(9.0, 3.9, 8.0), 4.0)
    assert not violates(measured(9.0, 4.0, 8.0), 4.0)
    assert violates(Aborted(samples_us=(3.0, 9.0), above_us=1.0), 4.0)
    assert not violates(Predicted(predicted_us=1.0, verification=VERIFIED), 4.0)
    assert not violates(Crashed(reason="x"), 4.0)
