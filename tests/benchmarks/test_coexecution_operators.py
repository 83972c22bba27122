"""Every operator, module and optimizer of torch under eager and co-executed, on samples of torch.

Tests import the samples, which takes seconds, so that collection does not.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor

from benchmarks.programs import State, Step

pytestmark = pytest.mark.filterwarnings("ignore")  # samples call what torch warns of, in eager mode too


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the stacks that torch records with each seed and sample, which take most of the time in pytest."""
    monkeypatch.setattr(traceback, "format_stack", lambda *_: [])
    monkeypatch.setattr("torch.testing._internal.common_utils.extract_test_fn", lambda: None)


def test_a_share_of_operators_modules_and_optimizers_equals_eager(request: pytest.FixtureRequest) -> None:
    from benchmarks.coexecution_operators import cases, examine

    step = 4 if request.config.getoption("--every-sample") else 40
    records = [examine(case) for case in list(cases(1))[::step]]
    assert len(records) > 1200 / step
    assert [record for record in records if record["beyond tolerance"]] == []
    operators = [record for record in records if record["kind"] == "operator"]
    assert sum(record["coexecuted"] > 0 for record in operators) > 0.9 * len(operators)


@pytest.mark.parametrize("name", ["cov", "quantile", "nanquantile", "tensor_split"])
def test_operators_that_read_values_unseen_run_as_in_eager_mode(name: str) -> None:
    from benchmarks.coexecution_operators import cases, examine

    for case in cases(20, (name,)):
        record = examine(case)
        assert record["beyond tolerance"] == []
        assert record["coexecuted"] == 0 or case.kind == "operator that raises"


def test_a_difference_is_found() -> None:
    from benchmarks.coexecution_operators import cases, examine

    case = next(cases(2, ("add",)))
    programs = itertools.count()

    def make(seed: int) -> tuple[Step, State]:
        step, state = case.make(seed)
        if next(programs) == 0:
            return step, state

        def scaled(*leaves: object) -> Tensor:
            result = step(*leaves)
            for tensor in state.tensors.values():
                tensor.mul_(1.001)
            return result

        return scaled, state

    assert examine(case)["beyond tolerance"] == []
    assert examine(dataclasses.replace(case, make=make))["beyond tolerance"]
