"""Baselines run under the conditions of finalists, so that their times are comparable."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.executor import conditions_worker
from tests.executor.conditions_worker import KERNEL, Conditions, recorded
from tests.measure import kernel_worker
from tunebench.device import find
from tunebench.executor.judged_call import JudgedStage
from tunebench.measure.baseline import Baseline, BaselineFailed
from tunebench.measure.timing import Protocol
from tunebench.outcome import Crashed, Measured, TimedOut
from tunebench.tuning.baseline_rounds import judged_stage, stage_for
from tunebench.workloads import parse

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LARGE = parse("softmax:rows=1024,cols=2048,dtype=f32")
SMALL = parse("softmax:rows=8,cols=8,dtype=f32")
QUICK = Protocol(min_samples=4, max_samples=4, max_s=0.02)


def finalist_conditions(folder: Path) -> list[Conditions]:
    path = folder / "finalist"
    with conditions_worker.executor(QUICK, path) as workers:
        outcome = kernel_worker.measure(workers, KERNEL, LARGE, thorough=True)
    assert isinstance(outcome, Measured), outcome
    return recorded(path)


def baseline_conditions(folder: Path) -> list[Conditions]:
    path = folder / "baseline"
    stage = stage_for(find("cpu"))()
    assert isinstance(stage, JudgedStage)
    recording = conditions_worker.library_stage(stage, conditions_worker.start_library, str(path))
    with recording.caller() as caller:
        (timed,) = caller.call(LARGE, find("cpu"), QUICK)
    assert isinstance(timed, Baseline), timed
    assert len(timed.samples_us) == 4
    return recorded(path)


def test_a_baseline_runs_under_the_conditions_of_a_finalist(tmp_path: Path) -> None:
    finalist, baseline = finalist_conditions(tmp_path), baseline_conditions(tmp_path)
    for launches in (finalist, baseline):
        assert {launch["file"] for launch in launches} == {"/memfd:tunebench (deleted)"}
        values = [launch["values"] for launch in launches]
        assert len(set(values)) == len(values), "a launch had the inputs of another"
    assert {launch["huge"] for launch in finalist} == {launch["huge"] for launch in baseline}


@pytest.mark.parametrize("fault", ["refuses", "crashes", "hangs"])
def test_a_faulty_library_is_an_answer(fault: str) -> None:
    stage = conditions_worker.library_stage(judged_stage(), conditions_worker.start_faulty_libraries, fault)
    stage = dataclasses.replace(stage, case_of=conditions_worker.short_case)
    with stage.caller() as caller:
        answer = caller.call(SMALL, find("cpu"), QUICK)
    if fault == "refuses":
        timed, failed = answer
        assert timed.name == "torch"
        assert failed == BaselineFailed(name="torch-other", reason="RuntimeError: No available kernel")
    else:
        assert isinstance(answer, Crashed if fault == "crashes" else TimedOut), answer
        assert ("SIGSEGV" if fault == "crashes" else "within 0.5 s") in answer.reason
