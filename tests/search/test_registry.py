"""Samplers of other packages and programs: entry points, registration, the example of the documentation."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.search.test_samplers import TABLE, TIMES, search
from tests.support import measured
from tunebench.cli import doctor
from tunebench.errors import InputError, UnknownName
from tunebench.search import register_sampler, registry, samplers
from tunebench.search.sampler import RandomTableSampler
from tunebench.testing.sampler_contract import SamplerContract
from tunebench.tuning import Plan


def example() -> Any:
    """Return the class of the example in docs/search.md."""
    file = Path(__file__).parents[2] / "docs" / "examples" / "annealing.py"
    spec = importlib.util.spec_from_file_location("annealing", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for pickle
    spec.loader.exec_module(module)
    return module.AnnealingSampler


AnnealingSampler = example()


class TestAnnealingSampler(SamplerContract):
    sampler_class = AnnealingSampler


class EntryPoint:
    """An entry point of a package of others."""

    def __init__(self, name: str, offered: Any) -> None:
        self.name, self.value, self._offered = name, f"their_package:{name}", offered

    def load(self) -> Any:
        if isinstance(self._offered, BaseException):
            raise self._offered
        return self._offered


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that installs entry points."""

    def install(**offered: Any) -> None:
        points = [EntryPoint(name, value) for name, value in offered.items()]
        monkeypatch.setattr(
            metadata, "entry_points", lambda group: points if group == registry.ENTRY_POINTS else []
        )
        registry._plugins.cache_clear()

    yield install
    registry._plugins.cache_clear()
    registry._registered.clear()
    registry._broken.clear()


def test_sampler_of_an_entry_point_searches(offer: Any) -> None:
    offer(annealing=AnnealingSampler)
    assert samplers()[-1] == "annealing"
    assert Plan(sampler="annealing").sampler == "annealing"
    annealing = search("annealing", bounds=np.zeros(len(TABLE)))
    rows = []
    while (proposal := annealing.ask(float("inf"))) is not None:
        rows.append(proposal.row)
        annealing.tell(proposal, measured(float(TIMES[proposal.row])))
    assert sorted(rows) == list(range(len(TABLE)))


def test_registered_sampler_is_used_until_the_process_ends(offer: Any) -> None:
    offer()
    register_sampler("mine", RandomTableSampler)
    assert Plan(sampler="mine").sampler == "mine"
    with pytest.raises(InputError, match="choose another name"):
        register_sampler("random", RandomTableSampler)


@pytest.mark.parametrize(
    ("offered", "says"),
    [
        (lambda prospects, seed: np.ones(3), "is a ndarray, expected a sampler of Optuna"),
        (lambda prospects: None, "sampler broken: TypeError"),
    ],
)
def test_object_that_is_no_sampler_is_named(offered: Any, says: str, offer: Any) -> None:
    offer(broken=offered)
    with pytest.raises(InputError, match=says):
        search("broken")


def test_broken_package_is_skipped_and_named_by_doctor(offer: Any) -> None:
    offer(theirs=SystemExit(0), random=RandomTableSampler)
    with pytest.warns(UserWarning, match="it is skipped"):
        assert samplers() == tuple(registry.SAMPLERS)
    with pytest.raises(UnknownName, match="sampler 'theirs'"):
        Plan(sampler="theirs")
    check = doctor._plugins()
    assert check.status == "broken"
    assert "sampler theirs = their_package:theirs: SystemExit: 0" in check.found
    assert "tunebench has a sampler of this name" in check.found
