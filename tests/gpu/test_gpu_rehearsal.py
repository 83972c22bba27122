"""Rehearsal of the acceptance runs with injected faults; `benchmarks/gpu_rehearsal.py` is the long form."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import acceptance_steps, gpu_process, headline, rehearsal, wrapper_conformance
from tests.gpu.acceptance_report import AcceptanceReport
from tests.gpu.acceptance_run import MOST_HANGS, AcceptanceRun
from tests.gpu.rehearsal import SECONDS, Fault, rehearse
from tests.support import measured, needs_torch
from tunebench import device
from tunebench.measure.baselines import torch_tensor
from tunebench.measure.timing import Protocol

GEMM = "gemm:m=4096,n=4096,k=4096,dtype=f16"
SOFTMAX = "softmax:rows=16384,cols=4096,dtype=f16"
LISTED = [GEMM, "gemm:m=4096,n=4096,k=4096,dtype=bf16", SOFTMAX]
SMALL = ["softmax:rows=64,cols=100,dtype=f16", "gemm:m=64,n=64,k=64,dtype=f16"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headline, "HEADLINE", LISTED)
    monkeypatch.setattr(headline, "WGMMA", ["gemm:m=1024,n=1024,k=1024,dtype=f16"])
    monkeypatch.setattr(headline, "measured", lambda: dict.fromkeys(LISTED, 50))
    monkeypatch.setattr(acceptance_steps, "VERIFIED", SMALL)
    monkeypatch.setattr(acceptance_steps, "SANITIZED", SMALL)
    monkeypatch.setattr(acceptance_steps, "RECORDED", [(SMALL[0], "softmax/cuda_block", 50)])
    cases = [case for case in wrapper_conformance.CASES if case.name.startswith(("mbarrier", "wgmma_m64k32"))]
    monkeypatch.setattr(wrapper_conformance, "CASES", cases)
    monkeypatch.setattr(wrapper_conformance, "uncovered", list)


def test_everything_comes_out_without_a_fault(tmp_path: Path) -> None:
    runs = rehearse((), tmp_path)
    assert [run.figures for run in runs] == [3, 3, 3]
    assert [run.problems for run in runs] == [0, 0, 0]
    assert runs[0].complete == ("conformance", "wgmma", "headline", "facts")
    assert runs[1].complete == ("conformance", "wgmma", "headline", "tune")
    assert runs[2].complete == ("verify", "record", "sanitize")
    assert (runs[0].replaced, runs[1].tuned) == (0, 3)


@pytest.mark.parametrize("kind", ["hang", "crash", "wrong", "slow"])
@pytest.mark.parametrize("step", ["conformance", "wgmma", "headline", "tune", ""])
def test_every_headline_figure_comes_out_whatever_a_step_does(step: str, kind: str, tmp_path: Path) -> None:
    fault = Fault(step, kind, "wgmma")  # type: ignore[arg-type]
    run = rehearse([fault], tmp_path, runs=(1, 2) if step == "tune" else (1,))[-1]
    assert run.missing == ()
    assert run.wall_s <= SECONDS
    late = step in ("wgmma", "")  # a slow program exceeds the time limit of the step `wgmma`
    assert run.replaced == (2 if late or (step == "headline" and kind != "slow") else 0)
    assert (run.problems > 0) == (kind != "slow" or late or step == "conformance")


@pytest.mark.parametrize("kind", ["hang", "crash", "wrong", "slow"])
@pytest.mark.parametrize("step", ["verify", "record", "sanitize"])
def test_checks_end_in_time_and_report_each_fault(step: str, kind: str, tmp_path: Path) -> None:
    (run,) = rehearse([Fault(step, kind, "softmax/")], tmp_path, runs=[3])  # type: ignore[arg-type]
    assert run.wall_s <= SECONDS
    assert run.problems > 0 or kind == "slow" or (step, kind) == ("sanitize", "hang")
    assert (step in run.complete) == (kind in ("crash", "wrong") or (kind == "slow" and step != "record"))


@pytest.mark.parametrize("kind", ["hang", "crash", "wrong"])
def test_figures_are_compared_with_the_other_library_when_one_fails(kind: str, tmp_path: Path) -> None:
    (run,) = rehearse([Fault("headline", kind, "torch")], tmp_path, runs=[1])  # type: ignore[arg-type]
    assert (run.figures, run.replaced) == (3, 0)
    assert run.problems > 0 or kind == "wrong"  # a library's own refusal is part of the row


def test_variant_that_hangs_costs_one_time_limit_and_no_figure_of_another_workload(tmp_path: Path) -> None:
    (run,) = rehearse([Fault("headline", "hang", "gemm/cuda_wgmma")], tmp_path, runs=[1])
    assert (run.figures, run.replaced, run.problems) == (3, 2, 1)


def test_library_that_fails_twice_is_left_out(tmp_path: Path) -> None:
    (run,) = rehearse([Fault("headline", "crash", "torch")], tmp_path, runs=[1])
    assert (run.figures, run.problems) == (3, 4)  # torch twice, and torch.compile twice


def test_run_keeps_the_figures_of_an_earlier_run_that_it_cannot_repeat(tmp_path: Path) -> None:
    faults = [Fault("headline", "wrong", name, run=2) for name in ("torch", "triton")]
    first, second = rehearse(faults, tmp_path, runs=(1, 2))
    assert (first.figures, second.figures) == (3, 3)


def test_three_hangs_stop_a_variant(tmp_path: Path) -> None:
    runs = rehearse([Fault("", "hang", "gemm/cuda_wgmma")], tmp_path)
    assert runs[0].figures == 3
    assert runs[2].stopped == ("gemm/cuda_wgmma",)


@pytest.mark.parametrize(("kill_s", "figures"), [(30.0, 0), (300.0, 3)])
def test_killed_run_brings_back_what_it_found(kill_s: float, figures: int, tmp_path: Path) -> None:
    killed, after = rehearse((), tmp_path, runs=(1, 2), kills_s={1: kill_s})
    assert killed.figures == figures
    assert after.figures == 3


def test_run_that_is_killed_keeps_the_figures_of_the_run_before(tmp_path: Path) -> None:
    first, second = rehearse((), tmp_path, runs=(1, 2), kills_s={2: 5.0})
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
    monkeypatch.setattr(gpu_process, "CudaRunner", lambda *_: None)
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
