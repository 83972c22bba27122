"""Steps that run by plans of many kinds need the memory that the plan states, and give the same gradients."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from benchmarks.planned_peaks import MODELS, traced  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*as long as eager torch")]


SAMPLED_MODELS = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name == "lstm")) for name in MODELS]
"""The LSTM, which test_fit.py trains, is `exhaustive`."""


@pytest.mark.parametrize("name", SAMPLED_MODELS)
def test_peaks_of_random_plans_are_those_of_the_plans(name: str) -> None:
    step = traced(name)
    (traced_step,) = step.tracer.steps
    peak_bytes, expected = step.run(traced_step.plan)
    assert peak_bytes <= 1.005 * traced_step.plan.simulation.peak_bytes
    chance = random.Random(1)
    for _ in range(5):
        plan = step.plan(chance)
        peak_bytes, results = step.run(plan)
        # Below: states of random numbers, of which a plan counts one for each random operation.
        assert 0.85 * plan.simulation.peak_bytes <= peak_bytes <= 1.005 * plan.simulation.peak_bytes
        assert all(map(torch.equal, expected, results))
