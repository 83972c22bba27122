"""Metrics, objectives and requirements: what their texts mean, and which outcomes are the best."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support import measured
from tunebench.errors import InputError, UnknownName
from tunebench.objective import (
    Goal,
    Metric,
    Objective,
    Requirement,
    is_dominated,
    quantities_of,
    resource_quantities,
    workload_quantities,
)
from tunebench.outcome import Crashed, Outcome, Resources, Verification
from tunebench.workloads import parse


def outcome(us: float = 2.0, *, relative: float | None = 1e-4, **metrics: float) -> Outcome:
    verification = Verification(how="reference", detail="", worst=0.25, absolute=0.5, relative=relative)
    return dataclasses.replace(measured(us), verification=verification, metrics=metrics)


def test_an_expression_computes_a_metric() -> None:
    goal = Goal.parse(metrics={"GFLOP/s": "flops/time_us/1e3", "twice": "2*half", "half": "time_us/2"})
    quantities = workload_quantities(parse("gemm:m=64,n=32,k=16,dtype=f32"))
    metrics = quantities_of(goal.completed(outcome(2.0), quantities))
    assert metrics["GFLOP/s"] == pytest.approx(2 * 64 * 32 * 16 / 2.0 / 1e3)
    assert metrics["half"] == 1.0
    assert "twice" not in metrics  # metrics are computed in their order


def test_a_function_computes_a_metric_of_parameters_and_resources() -> None:
    goal = Goal.parse(metrics={"per_thread": lambda registers, block, scale=4: scale * registers / block})
    quantities = resource_quantities({"block": 64, "layout": "row"}, Resources(registers=32))
    assert quantities == {"registers": 32.0, "block": 64.0}
    assert quantities_of(goal.completed(outcome(), quantities))["per_thread"] == 2.0
    text = goal.stored()["metrics"]["per_thread"]
    other = Metric("per_thread", lambda registers, block, scale=5: scale * registers + block).text()
    assert text.startswith("<function ")
    assert text != other


def test_errors_are_quantities() -> None:
    assert quantities_of(outcome()) == {
        "time_us": 2.0,
        "error": 1e-4,
        "absolute_error": 0.5,
        "tolerance_share": 0.25,
    }
    assert "error" not in quantities_of(outcome(relative=None))
    assert quantities_of(Crashed(reason="signal 11")) == {}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1/time_us", 0.5), ("1/(time_us-2)", None), ("log(0-time_us)", None), ("x", None)],
)
def test_a_metric_without_a_finite_value_is_left_out(value: str, expected: float | None) -> None:
    assert Metric("m", value).value({"time_us": 2.0}) == expected


@pytest.mark.parametrize(
    ("text", "name", "maximize"),
    [
        ("energy_j", "energy_j", False),
        ("GFLOP/s:max", "GFLOP/s", True),
        ("energy_j*time_us:min", "energy_j*time_us", False),
    ],
)
def test_objectives_are_parsed(text: str, name: str, maximize: bool) -> None:
    assert Objective.parse(text) == Objective(name=name, maximize=maximize)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"objectives": ["energy_j:most"]}, "NAME:min or NAME:max"),
        ({"objectives": [":max"]}, "NAME:min or NAME:max"),
        ({"objectives": ["a", "a:max"]}, "given twice"),
        ({"objectives": ["a b"]}, "position"),
        ({"require": ["error"]}, "compares a metric with a number"),
        ({"require": ["error<=nan"]}, "compares a metric with a number"),
        ({"require": ["1<=error"]}, "compares a metric with a number"),
        ({"metrics": {"m": "import os"}}, "position"),
        ({"metrics": {"m": "f(1)"}}, "function of an expression"),
        ({"metrics": {"": "1"}}, "the name of a metric"),
        ({"metrics": {"error": "1"}}, "is measured"),
        ({"metrics": {"m": 3}}, "an expression or a function"),
        ({"metrics": {"m": lambda *values: 1}}, "named as quantities"),
    ],
)
def test_invalid_goals_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Goal.parse(**arguments)


def test_unknown_quantities_are_named() -> None:
    Goal.parse(objectives=["energy_j"]).check(["energy_j"])
    Goal.parse(metrics={"J": "energy_j"}, objectives=["2*J"]).check(["energy_j"])
    Goal.parse(metrics={"GFLOP/s": "flops/time_us"}, objectives=["GFLOP/s:max"]).check(["flops"])
    with pytest.raises(UnknownName, match="energy_j"):
        Goal.parse(objectives=["energy"]).check(["energy_j"])


def test_a_failing_function_names_its_metric() -> None:
    goal = Goal.parse(metrics={"m": lambda time_us: [][int(time_us)]})
    with pytest.raises(InputError, match="metric m raised IndexError"):
        goal.completed(outcome(), {})


@pytest.mark.parametrize(
    ("text", "holds"),
    [("error<=1e-4", True), ("error<1e-4", False), ("error>=1e-4", True), ("error>1", False)],
)
def test_requirements_compare(text: str, holds: bool) -> None:
    goal = Goal.parse(require=[text])
    assert goal.allows(goal.completed(outcome(), {})) is holds
    assert Requirement.parse(str(Requirement.parse(text))) == Requirement.parse(text)


def test_an_outcome_without_what_is_required_does_not_satisfy_it() -> None:
    goal = Goal.parse(require=["registers<=64"])
    assert goal.values(goal.completed(outcome(), {})) is None
    assert goal.values(goal.completed(outcome(), {"registers": 64.0})) == (2.0,)
    assert goal.lacks(outcome())
    assert not goal.is_asked or goal.is_time


def test_one_objective_has_one_best_and_several_a_front() -> None:
    outcomes = [outcome(us, energy_j=joules) for us, joules in ((1, 5), (2, 3), (3, 4), (4, 1), (2, 3))]
    outcomes += [Crashed(reason="signal 11"), outcome(0.5)]
    assert Goal.parse(objectives=["energy_j"]).front(outcomes) == [3]
    assert Goal.parse(objectives=["energy_j:max"]).front(outcomes) == [0]
    assert Goal().front(outcomes) == [6]
    both = Goal.parse(objectives=["time_us", "energy_j"])
    assert both.front(outcomes) == [0, 1, 3]
    assert Goal.parse(objectives=["energy_j", "time_us"]).front(outcomes) == [3, 1, 0]
    assert both.directions == ("minimize", "minimize")
    assert not both.is_time
    assert Goal.parse(objectives=["time_us"], require=["error<=1"]).is_time


@given(
    arrays.arrays(np.float64, st.tuples(st.integers(1, 30), st.integers(1, 3)), elements=st.integers(0, 4))
)
def test_front_is_that_of_every_pair(costs: np.ndarray) -> None:
    expected = [
        any(
            (other <= point).all() and ((other < point).any() or number < index)
            for number, other in enumerate(costs)
            if number != index
        )
        for index, point in enumerate(costs)
    ]
    assert is_dominated(costs).tolist() == expected
