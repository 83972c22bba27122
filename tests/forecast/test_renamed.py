"""Old names that keep working for one version."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("tunebench.forecast.parallel.cluster", "Group", "ProcessGroup"),
        ("tunebench.forecast.parallel.collective", "ways", "collective_methods"),
        ("tunebench.forecast.parallel.step", "Division", "Parallelism"),
        ("tunebench.workloads.networks", "AllReduce", "TensorCollective"),
        ("tunebench.workloads.networks", "Exchange", "TensorCollective"),
        ("tunebench.workloads.networks", "Run", "NetworkRun"),
    ],
)
def test_old_name_warns_and_returns_the_renamed_object(module: str, old: str, new: str) -> None:
    found = importlib.import_module(module)
    with pytest.warns(FutureWarning, match=f"use {module}.{new}"):
        assert getattr(found, old) is getattr(found, new)
    assert not hasattr(found, "no_such_name")
