"""Fields that plans, runs and divisions of a step share."""

from __future__ import annotations

import dataclasses
import random

import pytest

from tunebench.training.cluster.layer_time import LayerRun
from tunebench.training.cluster.machine import TrainingCluster
from tunebench.training.cluster.space import ClusterPlan, TrainingJob, enumerated, plan_space
from tunebench.training.steps.parallelism import Parallelism, StepDivision
from tunebench.workloads.networks import NetworkRun, network
from tunebench.workloads.networks.layer_division import LayerDivision, LayerExecution, shared_fields

JOB = TrainingJob(network=network("mixtral-8x7b"), batch=32, seq=2048)
PLANS = random.Random(7).sample(enumerated(plan_space(JOB, TrainingCluster.parse("16 x h100-sxm"))), 20)


@pytest.mark.parametrize("cls", [NetworkRun, LayerRun, Parallelism, ClusterPlan])
def test_classes_of_many_objects_have_slots_for_all_fields(cls: type) -> None:
    slots = {name for base in cls.__mro__ for name in getattr(base, "__slots__", ())}
    assert {field.name for field in dataclasses.fields(cls)} <= slots


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_run_and_division_of_a_plan_have_its_shared_fields(plan: ClusterPlan) -> None:
    run, parallelism = plan.run(JOB), plan.parallelism(JOB)
    assert shared_fields(run, LayerExecution) == shared_fields(plan, LayerExecution)
    expected = {**shared_fields(plan, StepDivision), "schedule": plan.schedule_name}
    assert shared_fields(parallelism, StepDivision) == expected
    assert shared_fields(LayerRun.of(plan), LayerDivision) == shared_fields(plan, LayerDivision)
    for name in ("width", "devices", "copies", "expert_copies", "stages_per_device", "splits_backward"):
        assert getattr(parallelism, name) == getattr(plan, name), name


def test_parameters_are_divided_by_tensor_and_expert_parallelism_only() -> None:
    run = NetworkRun(stack="megatron", flash=True, seq=4, tensor=2, context=2, expert=4, expert_tensor=1)
    division = LayerDivision(tensor=2, expert=4, expert_tensor=1)
    assert run.division == division
    assert JOB.network.held_parameters(run) == JOB.network.held_parameters(division)
