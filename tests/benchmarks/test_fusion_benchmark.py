"""`python -m benchmarks.fusion`: workloads that it tunes, and the gain that it computes from their times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import fusion
from tunebench.db import RunStart, TrialKey, open_store
from tunebench.device import local_cpu
from tunebench.errors import InputError
from tunebench.kernels import variant
from tunebench.measure.timing import Protocol
from tunebench.outcome import Crashed, Result
from tunebench.tuning import Plan
from tunebench.workload import Workload
from tunebench.workloads import parse

CHAIN = "elementwise:rows=4,cols=8,dtype=f32,expression=gelu(x+b)*y,vectors=b"
GEMM = "gemm:m=4,n=8,k=2,dtype=f32,epilogue=bias+gelu"


def as_reported(reports: Any) -> list[float]:
    return [fusion._us(tuning_report) for tuning_report in reports]


def report(us: float | None, torch: float | None = None) -> Any:
    baselines = () if torch is None else (SimpleNamespace(name="torch", median_us=torch),)
    facts = {"ci_us": None, "how": "measured", "variant": "v", "config": "c", "workload": "w", "device": "d"}
    return SimpleNamespace(median_us=us, baselines=baselines, **facts)


def test_fused_time_is_compared_with_sum_of_parts_and_torch() -> None:
    asked: list[str] = []

    def tuned(workload: Workload) -> Any:
        asked.append(str(workload))
        return report(10.0, 35.0) if str(workload) == GEMM else report(7.0)

    row = fusion.row(parse(GEMM), False, tuned, as_reported)
    assert asked == [
        GEMM,
        "gemm:m=4,n=8,k=2,dtype=f32",
        "elementwise:rows=4,cols=8,dtype=f32,expression=gelu(c+bias),vectors=bias",
    ]
    assert (row["parts_us"], row["gain"], row["gain_over_torch"]) == (14.0, 1.4, 3.5)
    assert (
        list(fusion.lines(row))[1] == "  10 us fused, 14 us in parts: speedup 1.40x, speedup over torch 3.50x"
    )


def test_finest_parts_are_single_operations_and_equal_parts_are_tuned_once() -> None:
    expressions = [part.expression for part in fusion.parts_of(parse(GEMM), True)[1:]]
    assert expressions == ["c+bias", "gelu(step0)"]
    twice = parse("elementwise:rows=4,cols=8,dtype=f32,expression=relu(x+y)*relu(x+z)")
    asked: list[Workload] = []

    def tuned(workload: Workload) -> Any:
        asked.append(workload)
        return report(1.0)

    row = fusion.row(twice, False, tuned, as_reported)
    assert len(asked) == len(set(asked))
    assert row["parts_us"] == 5.0
    assert row["gain_over_torch"] is None


def test_skipped_workloads_are_listed_with_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tuned(workload: Workload) -> Any:
        if workload.operator == "gemm":
            raise InputError("no variant")
        return report(3.0)

    monkeypatch.setattr(fusion, "tuner", lambda _options: tuned)
    monkeypatch.setattr(fusion, "in_turn", lambda device, protocol: as_reported)
    out = tmp_path / "folder" / "out.json"
    plain = "gemm:m=4,n=8,k=2,dtype=f32"
    texts = (CHAIN, GEMM, plain, "nothing:m=1")
    fusion.main([*(word for text in texts for word in ("--workload", text)), "--out", str(out)])
    saved = json.loads(out.read_text())
    assert [row["workload"] for row in saved["rows"]] == [CHAIN]
    assert set(saved["skipped"]) == {GEMM, plain, "nothing:m=1"}
    printed = capsys.readouterr().out
    assert "3 us fused, 9 us in parts: speedup 3.00x" in printed
    assert "skipped: nothing:m=1: unknown operator 'nothing'" in printed


def test_workload_without_successful_configuration_raises() -> None:
    with pytest.raises(InputError, match="no configuration of w succeeded"):
        fusion.row(parse(CHAIN), False, lambda workload: report(None), as_reported)


def found_by_tuning(text: str) -> Any:
    workload = parse(text)
    config = str(variant("elementwise/numba_cpu").default(workload, local_cpu()))
    facts = {"how": "measured", "variant": "elementwise/numba_cpu", "config": config, "workload": text}
    return SimpleNamespace(**facts, median_us=1e9)


def test_best_configurations_alternate_each_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "ROUNDS", 2)
    taken: list[tuple[str, Any]] = []
    inner = fusion._samples_us

    def noted(task: Any, answer: Any) -> Any:
        taken.append((str(task.workload), answer.conditions["pid"]))
        return inner(task, answer)

    monkeypatch.setattr(fusion, "_samples_us", noted)
    common = "elementwise:rows=64,cols=64,dtype=f32,expression="
    measured = [found_by_tuning(f"{common}x+y"), found_by_tuning(f"{common}x*y")]
    timed = fusion.in_turn(local_cpu(), Protocol(min_samples=3, max_samples=3))
    assert all(0 < us < 1e6 for us in timed(measured))
    assert taken[:2] == taken[2:]
    assert len(set(taken)) == len({process for _, process in taken}) == 2
    predicted: Any = SimpleNamespace(how="predicted", median_us=7.0)
    assert timed([measured[0], predicted]) == [1e9, 7.0]


def test_recorded_trials_are_subtracted_from_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, device, db = parse(CHAIN), local_cpu(), tmp_path / "f.db"
    tried = variant("elementwise/numba_cpu")
    table = tried.configs(workload, device)
    first, second, third = map(table.config, range(3))
    with open_store(db) as store:
        store.begin_run(RunStart(device=device, workload=str(workload), sampler="bound", seed=0))
        for config, revision in ((first, None), (second, None), (third, "earlier revision")):
            key = TrialKey(
                device=device.key,
                workload=str(workload),
                variant=tried.key,
                revision=revision or tried.revision(workload, config),
                config=config,
            )
            store.record(key, Result(outcome=Crashed(reason="signal 11")))
    asked: list[int] = []

    def tune(workload: Workload, *, device: str, db: Path, plan: Plan) -> SimpleNamespace:
        asked.append(plan.trials)
        return SimpleNamespace(interrupted=False)

    monkeypatch.setattr(fusion, "tune", tune)
    for trials in (12, 2):
        options = argparse.Namespace(device="cpu", trials=trials, cache="cold", db=db)
        fusion.tuner(options)(workload)
    assert asked == [10, 1]
    assert "10 of 12 trials" in capsys.readouterr().err


def test_timeout_raises_input_error() -> None:
    measured = found_by_tuning("elementwise:rows=64,cols=64,dtype=f32,expression=x+y")
    endless = Protocol(min_samples=10**9, max_samples=10**9)
    with pytest.raises(InputError, match=r"elementwise:rows=64.*no answer within 0\.5 s"):
        fusion.in_turn(local_cpu(), endless, timeout_s=0.5)([measured])


def test_default_workloads_are_fused() -> None:
    skipped: dict[str, str] = {}
    assert list(fusion.parsed(fusion.WORKLOADS, skipped))
    assert not [reason for reason in skipped.values() if reason.startswith("nothing is fused")]
