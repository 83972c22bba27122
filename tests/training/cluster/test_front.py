"""Front of time and cost against every plan, and the plot of the fronts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.cluster.test_search import JOB
from tunebench.errors import InputError
from tunebench.training.cluster import ClusterSearch, TrainingCluster, cost_front, draw_fronts, plan_training

MACHINE = TrainingCluster.parse("8 x l4, 2 a node, net-100, $0.7")
FIXED = {"tensor": "1", "recompute": "none", "schedule": "1f1b|zb-h1"}


@pytest.mark.slow
def test_cost_front_is_that_of_all_plans() -> None:
    search = ClusterSearch(JOB, MACHINE, objective="cost", fixed=FIXED)
    fitting = [priced for priced in map(search.priced, search.plans) if priced.fits]
    expected = {
        (priced.step.time_us, priced.device_hours)
        for priced in fitting
        if not any(
            (cheaper.step.time_us, cheaper.device_hours) != (priced.step.time_us, priced.device_hours)
            and cheaper.step.time_us <= priced.step.time_us
            and cheaper.device_hours <= priced.device_hours
            for cheaper in fitting
        )
    }
    front = cost_front(JOB, MACHINE, fixed=FIXED, layers=search.layers)
    assert {(priced.step.time_us, priced.device_hours) for priced in front} == expected
    assert len({priced.plan.nodes for priced in front}) > 1
    on_two_nodes = cost_front(JOB, MACHINE, fixed={**FIXED, "nodes": "2"}, layers=search.layers)
    assert {priced.plan.nodes for priced in on_two_nodes} == {2}


@pytest.mark.slow
def test_fronts_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    answer = plan_training(JOB, MACHINE, fixed=FIXED)
    assert answer.cost_front[0].step.time_us == answer.result.best[0].step.time_us
    path = tmp_path / "front.svg"
    draw_fronts(answer, path)
    text = path.read_text()
    assert text.count("<!-- memory of the fullest device, GB -->") == 1
    assert text.count("price of a step") == 1
    nothing = plan_training(JOB, TrainingCluster.parse("1 x l4, 4GB"))
    with pytest.raises(InputError, match="no front"):
        draw_fronts(nothing, path)
