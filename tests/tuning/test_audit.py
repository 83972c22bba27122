"""Stored runs held against today's bound: only what speaks of the same conditions may accuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebench.db.record import FastestSample
from tunebench.device import find
from tunebench.kernels import load_file
from tunebench.outcome import Resources
from tunebench.search.variant_search import VariantSearch
from tunebench.tuning.audit import Audit
from tunebench.tuning.candidate import Candidate
from tunebench.tuning.candidate import find as find_candidates
from tunebench.workloads import parse

VARIANT = load_file(Path(__file__).parents[1] / "data" / "bounded_variant.py")
PROBLEM = parse("softmax:rows=33,cols=65,dtype=f32")
CPU = find("cpu")


@pytest.fixture
def candidate() -> Candidate:
    return find_candidates(PROBLEM, CPU, ("bounded",))[0][0]


def accused(candidate: Candidate, **told: Any) -> bool:
    """Return whether a stored run of copy=5, whose bound is 15 us, ends the trust in it."""
    search = VariantSearch("v", candidate.prospects(), sampler="random", seed=0)
    audit = Audit(PROBLEM, CPU, "cold")
    config = candidate.table.config(5)
    facts = {"cache": "cold", "fastest_us": 14.0, "bound_us": 15.0} | told
    audit.recall(
        candidate, search, 5, FastestSample(config=config, revision="r", resources=Resources(), **facts)
    )
    assert search.trusted is not bool(audit.violations)
    return bool(audit.violations)


@pytest.mark.parametrize(
    ("told", "violation"),
    [
        ({}, True),
        ({"fastest_us": 15.5}, False),
        ({"fastest_us": 15.5, "bound_us": 16.0}, False),  # it violated a bound that is corrected since
        ({"bound_us": None}, True),
        ({"cache": "warm"}, False),  # what a warm cache allows says nothing of a cold one
        ({"cache": None}, True),
        ({"cache": None, "bound_us": 13.0}, False),  # an aborted run of a warm cache, by its bound
        ({"cache": None, "bound_us": None}, False),
    ],
)
def test_only_a_run_under_the_same_conditions_violates_todays_bound(
    candidate: Candidate, told: dict[str, Any], violation: bool
) -> None:
    assert accused(candidate, **told) is violation
