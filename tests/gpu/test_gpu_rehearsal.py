"""Rehearsal of the acceptance runs with injected faults; `benchmarks/gpu_rehearsal.py` is the long form."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import (
    acceptance_run,
    acceptance_steps,
    acceptance_workloads,
    gpu_process,
    headline,
    rehearsal,
    wrapper_conformance,
)
from tests.gpu.acceptance_report import AcceptanceReport
from tests.gpu.acceptance_run import MOST_HANGS, AcceptanceRun
from tests.gpu.rehearsal import SECONDS, Fault, rehearse
from tests.support import measured, needs_torch
from tunebench import device
from tunebench.libraries import torch_tensor
from tunebench.measure.timing import Protocol
from tunebench.measure.verify import draw

GEMM = "gemm:m=4096,n=4096,k=4096,dtype=f16"
SOFTMAX = "softmax:rows=16384,cols=4096,dtype=f16"
LISTED = [GEMM, "gemm:m=4096,n=4096,k=4096,dtype=bf16", SOFTMAX]
SMALL = ["softmax:rows=64,cols=100,dtype=f16", "gemm:m=64,n=64,k=64,dtype=f16"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "HEADLINE", LISTED)
    monkeypatch.setattr(acceptance_workloads, "HEADLINE", LISTED)
    monkeypatch.setattr(headline, "WGMMA", ["gemm:m=1024,n=1024,k=1024,dtype=f16"])
    monkeypatch.setattr(headline, "measured", lambda: dict.fromkeys(LISTED, 50))
    monkeypatch.setattr(acceptance_steps, "VERIFIED", SMALL)
    monkeypatch.setattr(acceptance_workloads, "SANITIZED", SMALL)
    monkeypatch.setattr(acceptance_steps, "SANITIZED_FIRST", ["gemm/cuda_wgmma", "softmax/cuda_block"])
    monkeypatch.setattr(acceptance_steps, "RECORDED", [(SMALL[0], "softmax/cuda_block")])
    monkeypatch.setattr(
        acceptance_steps, "shuffled", lambda *arguments: acceptance_run.shuffled(*arguments)[:50]
    )
    smoke = dict.fromkeys(("softmax/cuda_block", "gemm/cuda_wgmma", "gemm/cuda_mma"), SMALL[1])
    for module in (rehearsal, acceptance_steps):
        monkeypatch.setattr(module, "smoke_workloads", lambda device: smoke)
    cases = [case for case in wrapper_conformance.CASES if case.name.startswith(("mbarrier", "wgmma_m64k32"))]
    monkeypatch.setattr(wrapper_conformance, "CASES", cases)
    monkeypatch.setattr(wrapper_conformance, "uncovered", list)


def test_everything_comes_out_without_a_fault(tmp_path: Path) -> None:
    runs = rehearse((), tmp_path)
    assert [run.figures for run in runs] == [3, 3]
    assert [run.problems for run in runs] == [0, 0]
    assert [run.status for run in runs] == [0, 0]
    assert runs[0].complete == ("facts", "wgmma", "headline", "tune")
    assert runs[1].complete == ("conformance", "sanitize", "record", "retry", "verify")
    assert (runs[0].replaced, runs[0].tuned) == (0, 3)
    assert all(run.wall_s <= SECONDS[run.run] for run in runs)


@pytest.mark.parametrize("kind", ["hang", "crash", "wrong", "slow"])
@pytest.mark.parametrize("step", ["wgmma", "headline", "tune", ""])
def test_every_headline_figure_comes_out_whatever_a_step_does(step: str, kind: str, tmp_path: Path) -> None:
    fault = Fault(step, kind, "wgmma")  # type: ignore[arg-type]
    (run,) = rehearse([fault], tmp_path, runs=["A"])
    assert run.missing == ()
    assert run.wall_s <= SECONDS["A"]
    late = step in ("wgmma", "")  # a slow program exceeds the time limit of the step `wgmma`
    assert run.replaced == (2 if late or (step == "headline" and kind != "slow") else 0)
    assert (run.problems > 0) == (kind != "slow" or late) or step == "tune"


@pytest.mark.parametrize("kind", ["hang", "crash", "wrong", "slow"])
@pytest.mark.parametrize("step", ["conformance", "record", "sanitize", "verify"])
def test_checks_end_in_time_and_report_each_fault(step: str, kind: str, tmp_path: Path) -> None:
    program = "" if step == "conformance" else "softmax/"
    runs = rehearse([Fault(step, kind, program)], tmp_path)  # type: ignore[arg-type]
    assert runs[1].wall_s <= SECONDS["B"]
    assert runs[1].problems > 0 or kind == "slow" or (step, kind) == ("sanitize", "hang")


@pytest.mark.parametrize(("carries", "replaced"), [(True, 0), (False, 2)])
def test_family_that_does_not_compile_there_costs_no_figure(
    carries: bool, replaced: int, tmp_path: Path
) -> None:
    (run,) = rehearse([Fault("", "refused", "gemm/cuda_wgmma")], tmp_path, runs=["A"], carries=carries)
    assert (run.missing, run.replaced, run.tuned) == ((), replaced, 3)
    assert run.status == 1
    steps = AcceptanceReport(tmp_path / "again A", say=lambda line: None).steps
    assert steps["facts"]["compiled"]["gemm/cuda_wgmma"] == "refused"
    tuned = {report["workload"]: report.get("carried") for report in steps["tune"]["reports"]}
    assert tuned[GEMM] == (8 if carries else None)


def test_nothing_runs_without_a_compiler_and_without_carried_code(tmp_path: Path) -> None:
    runs = rehearse([Fault("", "refused", "")], tmp_path, runs=["A"], carries=False)
    assert [(run.figures, run.status) for run in runs] == [(0, 4)]


@pytest.mark.parametrize("kind", ["hang", "crash", "wrong"])
def test_figures_are_compared_with_the_other_library_when_one_fails(kind: str, tmp_path: Path) -> None:
    (run,) = rehearse([Fault("headline", kind, "torch")], tmp_path, runs=["A"])  # type: ignore[arg-type]
    assert (run.figures, run.replaced) == (3, 0)
    assert run.problems > 0 or kind == "wrong"  # a library's own refusal is part of the row


def test_variant_that_hangs_costs_one_time_limit_and_no_figure_of_another_workload(tmp_path: Path) -> None:
    (run,) = rehearse([Fault("headline", "hang", "gemm/cuda_wgmma")], tmp_path, runs=["A"])
    assert (run.figures, run.replaced, run.problems) == (3, 2, 1)


def test_library_that_fails_twice_is_left_out(tmp_path: Path) -> None:
    (run,) = rehearse([Fault("headline", "crash", "torch")], tmp_path, runs=["A"])
    assert (run.figures, run.problems) == (3, 2)


def test_second_run_retries_what_the_first_one_missed(tmp_path: Path) -> None:
    faults = [Fault(step, "crash", "", run="A") for step in ("wgmma", "headline", "tune")]
    first, second = rehearse(faults, tmp_path)
    assert (first.figures, first.status, second.figures, second.status) == (0, 4, 3, 0)
    steps = AcceptanceReport(tmp_path / "again B", say=lambda line: None).steps
    assert steps["retry"]["retried"] == LISTED
    assert steps["wgmma"]["complete"]


def test_run_keeps_the_figures_of_an_earlier_run_that_it_cannot_repeat(tmp_path: Path) -> None:
    faults = [Fault("headline", "wrong", name, run="B") for name in ("torch", "triton")]
    first, second = rehearse(faults, tmp_path)
    assert (first.figures, second.figures) == (3, 3)


def test_three_hangs_stop_a_variant(tmp_path: Path) -> None:
    faults = [Fault("record", "hang", "softmax/cuda_block")]
    assert rehearse(faults, tmp_path)[1].stopped == ("softmax/cuda_block",)


@pytest.mark.parametrize(("kill_s", "figures"), [(30.0, 0), (200.0, 3)])
def test_killed_run_brings_back_what_it_found(kill_s: float, figures: int, tmp_path: Path) -> None:
    killed, after = rehearse((), tmp_path, kills_s={"A": kill_s})
    assert (killed.figures, killed.status) == (figures, None)
    assert after.figures == 3


def test_run_that_is_killed_keeps_the_figures_of_the_run_before(tmp_path: Path) -> None:
    first, second = rehearse((), tmp_path, kills_s={"B": 15.0})
    assert (first.figures, second.figures) == (3, 3)


def test_workload_whose_variants_all_hang_is_not_tuned(tmp_path: Path) -> None:
    report = AcceptanceReport(tmp_path, say=lambda line: None)
    started = lambda *_: iter([{"problem": "started"}])  # noqa: E731
    session = AcceptanceRun(rehearsal.H100, report, until=float("inf"), child=started)
    for key in headline.ranked(session, SOFTMAX) * MOST_HANGS:
        session.hangs.add(key)
    problems: list[str] = []
    assert headline._tuned(session, SOFTMAX, 50, 60.0, problems) is None
    assert problems == [f"{SOFTMAX}: every variant hung too often"]


class TorchOnCpu:
    """`TorchGpu` on a processor, timed by its clock."""

    def __init__(self, device: Any) -> None: ...

    def allow_for(self, workload: Any) -> None: ...

    def tensors(self, inputs: Any) -> dict[str, Any]:
        return {name: torch_tensor(value) for name, value in inputs.items()}

    def sampler(self, call: Any, protocol: Any) -> Any:
        def sample_us() -> float:
            begun = time.perf_counter()
            call()
            return (time.perf_counter() - begun) * 1e6

        return SimpleNamespace(sample_us=sample_us)


@needs_torch
def test_contest_times_a_variant_and_torch_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = device.find("cpu")
    monkeypatch.setattr(gpu_process, "find", lambda _: processor)
    monkeypatch.setattr(gpu_process, "TorchGpu", TorchOnCpu)
    drawn = SimpleNamespace(input_set=lambda workload, seed: draw(workload, seed))
    monkeypatch.setattr(gpu_process, "ContestRunner", lambda *_: drawn)
    monkeypatch.setattr(gpu_process, "run", lambda *_: measured(5.0, 5.0, 5.0))
    brief = Protocol(cache="warm", min_samples=3, max_samples=3)
    monkeypatch.setattr(gpu_process, "INTERLEAVED", brief)
    text = "softmax:rows=64,cols=64,dtype=f32"
    names = [{"workload": text, "variant": v, "baselines": ["torch"]} for v in ("softmax/numba_cpu", None)]
    answers = list(gpu_process.answers(["contest", json.dumps(names)]))
    running = [answer["running"] for answer in answers if "running" in answer]
    assert running[:3] == ["inputs", "torch", "softmax/numba_cpu"]
    both, alone = (answer["row"] for answer in answers if "row" in answer)
    timed = {row["name"]: row for row in both["rows"]}
    assert set(timed) == {"torch", "softmax/numba_cpu"}
    assert all(row["samples"] == 9 and row["speedup"] > 0 for row in timed.values())
    assert [(row["name"], "speedup" in row) for row in alone["rows"]] == [("torch", False)]
