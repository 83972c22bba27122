"""Random programs of benchmarks.random_programs, under eager and co-executed."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: install tunebench[torch]")

import torch
from torch import Tensor

from benchmarks import coexecution, coexecution_random
from benchmarks.programs import Step
from benchmarks.random_programs import (
    BLOCKS,
    EXPRESSIONS,
    OPTIMIZERS,
    SCHEDULES,
    STATEMENTS,
    VIEWS,
    random_source,
    source_program,
)
from tunebench.training import coexecute
from tunebench.training.coexecution._testing import forced

pytestmark = pytest.mark.filterwarnings("ignore")  # programs call what torch warns of, in eager mode too


def _same(step: Step) -> Step:
    return step


def _run(number: int, wrap: coexecution.Wrap = _same) -> coexecution.Run:
    make = source_program(random_source(random.Random(number)), f"<program {number}>")
    return coexecution.run_program(make, wrap, 4, raises=True)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_coexecution_of_a_random_program_equals_eager(chance: random.Random) -> None:
    make = source_program(random_source(chance), "<program>")
    expected = coexecution.run_program(make, _same, 8, raises=True)
    with forced():
        got = coexecution.run_program(make, coexecute, 8, raises=True)
    assert coexecution.differences(expected, got, coexecution.TOLERANCE) == []


@pytest.mark.parametrize("number", range(8))
def test_a_random_program_repeats_in_eager(number: int) -> None:
    first, second = _run(number), _run(number)
    assert coexecution.differences(first, second) == []
    assert coexecution.version_differences(first, second) == []


def test_random_programs_use_every_kind_of_operation() -> None:
    sources = [random_source(random.Random(number)) for number in range(1000)]
    for number, source in enumerate(sources):
        compile(source, f"<program {number}>", "exec")
    used = (*STATEMENTS, *EXPRESSIONS["rows"], *EXPRESSIONS["scalar"], *OPTIMIZERS, *SCHEDULES, *VIEWS)
    for template in (*used, *(header.split("|")[0] for header in BLOCKS)):
        fragment = max(template.replace(">", "<").split("<")[::2], key=len)
        assert any(fragment in source for source in sources), template


def test_an_exception_is_an_outcome_and_the_run_goes_on() -> None:
    def wrap(step: Step) -> Step:
        calls = iter(range(9))

        def changed(*batch: object) -> Tensor:
            if next(calls) == 1:
                raise ValueError("planted")
            return step(*batch)

        return changed

    quiet = next(number for number in range(99) if not _run(number).raised)
    run = _run(quiet, wrap)
    assert run.raised == {1: "ValueError: planted"}
    assert "loss 2" in run.tensors
    assert "exception 1: None, got ValueError: planted" in coexecution.differences(_run(quiet), run)


def test_an_in_place_operation_is_a_difference_of_versions_only() -> None:
    def wrap(step: Step) -> Step:
        def changed(*batch: object) -> Tensor:
            result = step(*batch)
            with torch.no_grad():
                result.mul_(1)
            return result

        return changed

    quiet = next(number for number in range(99) if len(_run(number).tensors) and not _run(number).raised)
    expected, got = _run(quiet), _run(quiet, wrap)
    assert coexecution.differences(expected, got) == []
    assert any("version of loss 0" in line for line in coexecution.version_differences(expected, got))


def test_results_are_saved_and_only_missing_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[int] = []

    def records(first: int, last: int, arguments: argparse.Namespace) -> list[coexecution.Record]:
        ran.extend(range(first, last))
        found = {"steps": arguments.steps, "differences": [], "beyond tolerance": [], "versions": []}
        found |= {"raised": 0, "traced": 2, "coexecuted": 5, "diverged": 1}
        found |= {"updates": 3, "differences of updates": [], "heads": 0}
        return [found | {"program": number} for number in range(first, last)]

    monkeypatch.setattr(coexecution_random, "_records", records)
    saved = tmp_path / "random.jsonl"
    command = ["--out", str(saved), "--programs"]
    assert coexecution_random.main([*command, "3"]) == 0
    assert coexecution_random.main([*command, "5"]) == 0
    assert ran == [0, 1, 2, 3, 4]
    line = json.loads(saved.read_text(encoding="utf-8").splitlines()[0])
    saved.write_text(
        json.dumps(line | {"error": "exit status -11: Segmentation fault"}) + "\n", encoding="utf-8"
    )
    assert coexecution_random.main([*command, "2"]) == 1
    assert "| crashed or beyond the time limit | 1 |" in capsys.readouterr().out
