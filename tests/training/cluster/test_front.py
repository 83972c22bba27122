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
    fitting = [each for each in map(search.priced, search.plans) if each.fits]
    expected = {
        (each.step.time_us, each.device_hours)
        for each in fitting
        if not any(
            (other.step.time_us, other.device_hours) != (each.step.time_us, each.device_hours)
            and other.step.time_us <= each.step.time_us
            and other.device_hours <= each.device_hours
            for other in fitting
        )
    }
    found = cost_front(JOB, MACHINE, fixed=FIXED, layers=search.layers)
    assert {(each.step.time_us, each.device_hours) for each in found} == expected
    assert len({each.plan.nodes for each in found}) > 1
    one = cost_front(JOB, MACHINE, fixed={**FIXED, "nodes": "2"}, layers=search.layers)
    assert {each.plan.nodes for each in one} == {2}


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
