"""`tune_from_profile` and `tune --recorded`: order of the workloads, exclusions and end of the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunebench import cli, tune_from_profile
from tunebench.db import Demand, open_store
from tunebench.device import described, local_cpu
from tunebench.errors import InputError
from tunebench.measure.timing import Protocol
from tunebench.space import Config
from tunebench.tuning import Plan, TuningSummary, profile_queue, tune
from tunebench.tuning.weighted_workload import WeightedWorkload
from tunebench.tuning.workload_report import Report

SMALL = "softmax:rows=16,cols=64,dtype=f32"
LARGE = "softmax:rows=4096,cols=4096,dtype=f32"
GEMM = "gemm:m=32,n=32,k=32,dtype=f32"
QUICK = Plan(
    trials=2,
    protocol=Protocol(min_samples=3, max_samples=5, max_s=0.05),
    baselines=False,
    finalists=1,
    workers=1,
)


def note(db: Path, *demands: tuple[str, int, float], device: Any = None) -> None:
    with open_store(db) as store:
        rows = [Demand(workload=text, calls=calls, time_us=us) for text, calls, us in demands]
        store.add_demand(device or local_cpu(), rows)


FOUND = Report(
    workload=SMALL,
    device="",
    how="measured",
    variant="softmax/numba_cpu",
    config=Config({"chunk": 8}),
    median_us=1.0,
    ci_us=None,
    is_default=True,
    default_us=None,
    baselines=(),
    bound_us=0.5,
    gap=None,
    optimality_proof=None,
    assumed=True,
    outside=(),
    versus={},
    ties=(),
    violations=(),
    audited=0,
    trials={},
    masked=0,
    cached=0,
    seconds={},
    database="",
    interrupted=False,
    skipped={},
)


class Tuner:
    """Replacement of `tune_one` that lists the workloads and returns given reports."""

    def __init__(self, **outcomes: Any) -> None:
        self.asked = list[tuple[str, float | None]]()
        self.outcomes = outcomes

    def __call__(
        self, setup: Any, weighted: WeightedWorkload, start: Any, on_progress: Any, until: float | None
    ) -> Report:
        self.asked.append((str(weighted.workload), until))
        changes = self.outcomes.get(weighted.workload.operator, {})
        if isinstance(changes, BaseException):
            raise changes
        return dataclasses.replace(FOUND, workload=str(weighted.workload), **changes)


def run(db: Path, tuner: Tuner, *, retune: bool = False, **plan: Any) -> TuningSummary:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_queue, "tune_one", tuner)
        return tune_from_profile(device="cpu", db=db, plan=dataclasses.replace(QUICK, **plan), retune=retune)


def states(report: TuningSummary) -> dict[str, str]:
    return {item.workload: item.state for item in report.results}


def test_workload_with_the_largest_possible_saving_comes_first(tmp_path: Path) -> None:
    db, tuner = tmp_path / "a.db", Tuner()
    # No machine can run the large workload a million times a second, so tuning it cannot gain anything.
    note(db, (LARGE, 10**6, 1e6), (GEMM, 10, 40.0), (SMALL, 10, 50.0))
    report = run(db, tuner)
    assert [text for text, _ in tuner.asked] == [SMALL, GEMM, LARGE]
    assert [item.workload for item in report.results] == [SMALL, GEMM, LARGE]
    assert {item.state for item in report.results} == {"tuned"}
    assert (report.covered, report.recorded_us) == (1.0, 1e6 + 90.0)


def test_untunable_workloads_are_reported_and_the_others_tuned(tmp_path: Path) -> None:
    db, tuner = tmp_path / "a.db", Tuner(gemm={"config": None, "median_us": None})
    alien, f8 = "fft:n=64", "gemm:m=16,n=16,k=16,dtype=e4m3"
    note(db, (alien, 1, 70.0), (f8, 1, 60.0), (GEMM, 1, 50.0), (SMALL, 1, 20.0))
    report = run(db, tuner)
    assert states(report) == {SMALL: "tuned", GEMM: "unsuited", alien: "unsuited", f8: "unsuited"}
    reasons = {item.workload: item.reason for item in report.results}
    assert "fft" in reasons[alien]
    assert "no variant can do" in reasons[f8]
    assert reasons[GEMM] == "no configuration succeeded"
    assert report.covered == pytest.approx(0.1)


def test_time_limit_covers_all_workloads_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db, tuner = tmp_path / "a.db", Tuner()
    note(db, (GEMM, 1, 90.0), (SMALL, 1, 50.0), (LARGE, 1, 1.0))
    moments = iter((0.0, 30.0, 60.0, 90.0, 110.0, 121.0, 130.0))
    monkeypatch.setattr(profile_queue, "deadline", lambda plan: 120.0)
    monkeypatch.setattr(profile_queue, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    report = run(db, tuner, minutes=2.0)
    assert tuner.asked == [(GEMM, 120.0), (SMALL, 120.0)]
    assert states(report) == {GEMM: "tuned", SMALL: "tuned", LARGE: "left"}
    assert report.covered == pytest.approx(140 / 141)
    assert not report.interrupted


@pytest.mark.parametrize("how", [KeyboardInterrupt(), {"interrupted": True}], ids=["between", "within"])
def test_ctrl_c_ends_it_with_a_report(tmp_path: Path, how: Any) -> None:
    db, tuner = tmp_path / "a.db", Tuner(softmax=how)
    note(db, (GEMM, 1, 90.0), (SMALL, 1, 50.0), ("softmax:rows=8,cols=8,dtype=f32", 1, 10.0))
    report = run(db, tuner)
    assert report.interrupted
    assert len(tuner.asked) == 2
    assert states(report)[GEMM] == "tuned"
    assert len(report.results) == 3
    assert report.recorded_us == 150.0


def test_run_stopped_by_its_time_limit_is_not_finished(tmp_path: Path) -> None:
    report = tune(SMALL, device="cpu", db=tmp_path / "a.db", plan=dataclasses.replace(QUICK, minutes=0.0))
    assert report.trials == {}
    with open_store(tmp_path / "a.db") as store:
        assert store.finished(local_cpu().key) == set()


def test_error_without_a_profile_explains_how_to_make_one(tmp_path: Path) -> None:
    note(tmp_path / "a.db", (SMALL, 1, 1.0), device=described()["h100-sxm"])
    with pytest.raises(InputError, match=r"tunebench\.torch\.profile"):
        tune_from_profile(device="cpu", db=tmp_path / "a.db")
    with pytest.raises(InputError, match="variants cannot be chosen"):
        tune_from_profile(device="cpu", db=tmp_path / "a.db", plan=Plan(variants=("numba_cpu",)))
    with pytest.raises(InputError, match="finite number"):
        Plan(minutes=-1.0)


# -- command line ------------------------------------------------------------------------------------

QUICKLY = ("--device", "cpu", "--trials", "1", "--finalists", "1", "--no-baselines", "--workers", "1")


def test_profiled_workload_is_tuned_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = tmp_path / "a.db"
    note(db, (SMALL, 4, 100.0), ("fft:n=64", 1, 25.0))
    assert cli.run(["tune", "--from-profile", "--db", str(db), *QUICKLY]) == 0
    out, err = capsys.readouterr()
    assert f"1/1 {SMALL} search 0/1" in err
    assert "covered  80.0 % of 125 us recorded" in out
    assert "unsuited fft:n=64: unknown operator" in out

    assert cli.run(["tune", "--from-profile", "--db", str(db), "--json", *QUICKLY]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["covered"] == 0.8
    became = {item["workload"]: item["state"] for item in printed["items"]}
    assert became == {SMALL: "known", "fft:n=64": "unsuited"}

    assert states(run(db, Tuner(), retune=True))[SMALL] == "tuned"
    assert states(run(db, Tuner()))[SMALL] == "known"
    with open_store(db) as store, store.writing() as connection:
        connection.exec_driver_sql("UPDATE trial SET revision = 'earlier'")
    assert states(run(db, Tuner()))[SMALL] == "tuned"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "are all missing"),
        (("--from-profile", "-w", SMALL), "exclude one another"),
        (("-w", SMALL, "--retune"), "--retune goes with --from-profile"),
        (("--from-profile", "--variant", "numba_cpu"), "variants cannot be chosen"),
        (("--from-profile", "--cluster", "local"), "leave --cluster out"),
        (("--suite", "gpt2", "-w", SMALL), "exclude one another"),
        (("-w", SMALL, "--batch", "2"), "--batch goes with --suite"),
        (("--suite", "no.toml"), "no.toml cannot be read"),
        (("--suite", "gpt2", "--cluster", "local", "--arch", "all"), "one device at a time"),
    ],
)
def test_incompatible_options_are_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["tune", *arguments]) == 2
    assert said in capsys.readouterr().err
