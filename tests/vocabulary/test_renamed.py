"""Old names that keep working for one version."""

from __future__ import annotations

import importlib
import sys
import warnings

import pytest

from tests.support import needs_torch


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("tunebench.training.cluster.storage", "Placement", "StorageLayout"),
        ("tunebench.training.interconnect.cluster", "Group", "ProcessGroup"),
        ("tunebench.training.interconnect.collective", "ways", "collective_methods"),
        ("tunebench.training.steps.step", "Division", "Parallelism"),
        ("tunebench.workloads.networks", "AllReduce", "TensorCollective"),
        ("tunebench.workloads.networks", "Exchange", "TensorCollective"),
        ("tunebench.workloads.networks", "Run", "NetworkRun"),
    ],
)
def test_old_name_warns_and_returns_the_renamed_object(module: str, old: str, new: str) -> None:
    imported = importlib.import_module(module)
    with pytest.warns(FutureWarning, match=f"use {module}.{new}"):
        assert getattr(imported, old) is getattr(imported, new)
    assert not hasattr(imported, "no_such_name")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tunebench.plan.memory", "tunebench.training.memory"),
        ("tunebench.plan.pipeline.balance", "tunebench.training.pipeline.balance"),
        ("tunebench.forecast.parallel.step", "tunebench.training.steps.step"),
        ("tunebench.forecast.parallel.cluster", "tunebench.training.interconnect.cluster"),
        ("tunebench.forecast.parallel.pipeline", "tunebench.training.schedules"),
        ("tunebench.forecast.footprint", "tunebench.training.steps.footprint"),
        pytest.param(
            "tunebench.torch.operators.linear", "tunebench.torch.functional.linear", marks=needs_torch
        ),
        pytest.param(
            "tunebench.torch.operators.report", "tunebench.torch.functional.dispatch_log", marks=needs_torch
        ),
        pytest.param(
            "tunebench.training.coexecution.report",
            "tunebench.training.coexecution.coexecution_report",
            marks=needs_torch,
        ),
        ("tunebench.tuning.report", "tunebench.tuning.workload_report"),
    ],
)
def test_moved_module_warns_and_has_the_same_names(old: str, new: str) -> None:
    moved = importlib.import_module(new)
    sys.modules.pop(old, None)
    package = ".".join(new.split(".")[:2])  # an old package warns, too
    with pytest.warns(FutureWarning, match=f"use {package}"):
        alias = importlib.import_module(old)
    assert all(getattr(alias, name) is getattr(moved, name) for name in moved.__all__)
    with warnings.catch_warnings(action="ignore"), pytest.raises(ModuleNotFoundError, match="no_such"):
        importlib.import_module("tunebench.plan.no_such_module")


def test_moved_module_is_called_as_the_function_of_its_name() -> None:
    graph = importlib.import_module("tunebench.graph")
    with pytest.warns(FutureWarning, match=r"use tunebench\.graph\.plan_partition"):
        assert graph.plan is graph.plan_partition
    with pytest.warns(FutureWarning, match=r"use tunebench\.graph\.partition_plan"):
        old = importlib.import_module("tunebench.graph.plan")
    assert old.PartitionPlan is graph.PartitionPlan
    try:
        with pytest.warns(FutureWarning, match="plan_partition"), pytest.raises(TypeError, match="graph"):
            graph.plan()
    finally:
        del graph.plan, sys.modules["tunebench.graph.plan"]


@needs_torch
def test_training_functions_are_served_by_their_old_names_in_torch() -> None:
    served, training = (importlib.import_module(f"tunebench.{name}") for name in ("torch", "training"))
    for old in served._MOVED:
        getattr(training, served._MOVED[old])  # may warn of torch's own deprecations
        with pytest.warns(FutureWarning, match="use tunebench.training"):
            assert getattr(served, old) is getattr(training, served._MOVED[old])


def test_parameters_of_a_division_have_their_old_names() -> None:
    from tunebench.training.steps.parallelism import Parallelism
    from tunebench.workloads.networks import network

    gpt2, parallelism = network("gpt2"), Parallelism(tensor=2)
    with pytest.warns(FutureWarning, match="use Parallelism.division"):
        assert parallelism.parameter_sizes == {"tensor": 2, "expert": 1, "expert_tensor": None}
    with pytest.warns(FutureWarning, match="use network.held_parameters"):
        assert parallelism.division.held(gpt2) == gpt2.held_parameters(parallelism)
