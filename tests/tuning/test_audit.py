"""Audit of stored runs: a run violates the current bound only if it ran under the same conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunebench.db.record import FastestSample
from tunebench.device import find
from tunebench.kernels import load_file
from tunebench.outcome import Resources
from tunebench.search.variant_search import VariantSearch
from tunebench.tuning.audit import BoundAudit
from tunebench.tuning.tunable import TunableVariant, find_variants
from tunebench.workloads import parse

BOUNDED = Path(__file__).parents[1] / "data" / "bounded_variant.py"
WORKLOAD = parse("softmax:rows=33,cols=65,dtype=f32")
CPU = find("cpu")


@pytest.fixture
def tunable() -> TunableVariant:
    load_file(BOUNDED)
    return find_variants(WORKLOAD, CPU, ("bounded",))[0][0]


def accused(tunable: TunableVariant, **changes: Any) -> bool:
    """Return whether a stored run of copy=5, whose bound is 15 us, is a violation."""
    search = VariantSearch("v", tunable.prospects(), sampler="random", seed=0)
    audit = BoundAudit(WORKLOAD, "cold")
    config = tunable.table.config(5)
    facts = {"cache": "cold", "fastest_us": 14.0, "bound_us": 15.0} | changes
    audit.check_stored(
        tunable, search, 5, FastestSample(config=config, revision="r", resources=Resources(), **facts)
    )
    assert search.trusted is not bool(audit.violations)
    return bool(audit.violations)


@pytest.mark.parametrize(
    ("facts", "violation"),
    [
        ({}, True),
        ({"fastest_us": 15.5}, False),
        ({"fastest_us": 15.5, "bound_us": 16.0}, False),  # the run violated a bound that was corrected later
        ({"bound_us": None}, True),
        ({"cache": "warm"}, False),  # the bound of a cold cache does not apply to a warm one
        ({"cache": None}, True),
        ({"cache": None, "bound_us": 13.0}, False),  # its bound shows that the aborted run had a warm cache
        ({"cache": None, "bound_us": None}, False),
    ],
)
def test_only_a_run_under_the_same_conditions_violates_the_current_bound(
    tunable: TunableVariant, facts: dict[str, Any], violation: bool
) -> None:
    assert accused(tunable, **facts) is violation
