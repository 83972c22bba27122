"""Baseline files, and `tunebench check`, which fails on a regression."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, run_json, run_refused, run_text  # noqa: F401 (fixtures)
from tests.report.test_report import WORKLOAD, database
from tests.support import InstantExecutor, measured
from tunebench import cli, device, kernels, tuning
from tunebench.db import RunStart, TrialKey, open_store
from tunebench.db.record import MeasurementBatch, NewMeasurement
from tunebench.outcome import Outcome, Result
from tunebench.space import Config
from tunebench.task import Task
from tunebench.workloads import parse

VARIANT = "softmax/numba_cpu"


def check(*arguments: object) -> int:
    return cli.run(["check", *map(str, arguments)])


def real(path: Path, config: Config, us: float, revision: str | None = None) -> Path:
    """Write a database with one time of an installed variant on this processor."""
    cpu, workload = device.find("cpu"), parse(WORKLOAD)
    key = TrialKey(
        device=cpu.key,
        workload=WORKLOAD,
        variant=VARIANT,
        revision=revision or kernels.variant(VARIANT).revision(workload, config),
        config=config,
    )
    new = NewMeasurement(key=key, result=Result(outcome=measured(us)))
    start = RunStart(device=cpu, workload=WORKLOAD, sampler="random", seed=0)
    with open_store(path) as store:
        store.add([MeasurementBatch(start=start, measurements=(new,))])
    return path


def other_config() -> Config:
    """Return a configuration that is not the default."""
    variant, workload, cpu = kernels.variant(VARIANT), parse(WORKLOAD), device.find("cpu")
    table = variant.space.enumerate(workload=workload, device=cpu)
    return next(config for config in map(table.config, range(2)) if config != variant.default(workload, cpu))


def test_baseline_has_the_best_record_and_check_compares_with_it(
    tmp_path: Path,
    run_json: Run,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "baseline.jsonl"
    base = database(tmp_path / "a.db", {32: 9.0, 64: 2.0})
    slower = database(tmp_path / "b.db", {32: 9.0, 64: 3.0})
    options = ("check", "--baseline", str(file))
    assert run_json(*options, "--db", str(base), "--update") == {"file": str(file), "written": 1}
    assert [json.loads(line)["what"] for line in file.read_text().splitlines()] == ["device", "measurement"]
    same = run_json(*options, "--db", str(base))
    assert (same["regressions"], same["missing"], same["times"][0]["verdict"]) == (0, [], "same")
    assert run_json(*options, "--db", str(slower), "--tolerance", "60%")["regressions"] == 0
    assert check("--baseline", file, "--db", slower, "--tolerance", "0.05", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["times"][0]["verdict"] == "regression"
    assert shown["times"][0]["slowdown"] == pytest.approx(1.5)
    assert check("--baseline", file, "--db", slower) == 1
    assert "+50.0%" in capsys.readouterr().out
    assert check("--baseline", base, "--db", slower) == 1  # a database is a baseline, too
    assert check("--baseline", file, "--db", slower, "--update") == 0
    assert check("--baseline", file, "--db", slower) == 0


def test_results_of_earlier_sources_are_missing(
    tmp_path: Path,
    run_json: Run,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = real(tmp_path / "a.db", other_config(), 5.0)
    old = real(tmp_path / "b.db", other_config(), 5.0, revision="0" * 16)
    assert check("--baseline", base, "--db", old) == 1
    assert f"missing: {WORKLOAD}" in capsys.readouterr().out
    accepted = run_json("check", "--baseline", str(base), "--db", str(old), "--allow-missing")
    assert accepted["missing"] == [WORKLOAD]
    assert run_json("check", "--baseline", str(old), "--db", str(base))["times"][0]["verdict"] == "same"


@pytest.mark.parametrize(("now_us", "status"), [(5.0, 0), (8.0, 1)])
def test_tune_measures_the_configurations_of_the_baseline_again(
    now_us: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = other_config()
    base = real(tmp_path / "a.db", best, 5.0)

    def answer(task: Task) -> Outcome:
        us = now_us if task.config == best else 20.0
        return measured(us, us * 1.001, us * 1.002)

    executor: InstantExecutor[Task] = InstantExecutor(answer)
    monkeypatch.setattr(tuning, "start_workers", lambda *start: executor)
    assert check("--baseline", base, "--tune", "--trials", 3, "--device", "cpu") == status
    assert best in [task.config for task in executor.tasks]


def test_errors_say_what_to_do(tmp_path: Path, run_refused: Run) -> None:  # noqa: F811
    base = str(database(tmp_path / "a.db", {32: 9.0}))
    other_device = str(database(tmp_path / "b.db", {32: 9.0}, gpu="a100-80-sxm"))
    file = tmp_path / "baseline.jsonl"
    assert "write it by --update" in run_refused("check", "--baseline", str(file), "--db", base)
    assert "no device in common" in run_refused("check", "--baseline", base, "--db", other_device)
    assert "such as 5%" in run_refused("check", "--baseline", base, "--db", base, "--tolerance", "-1")
    assert "--tune measures" in run_refused("check", "--baseline", base, "--db", base, "--tune")
    file.write_text('{"what": "measurement"}\n')
    assert "1 lines cannot be used" in run_refused("check", "--baseline", str(file), "--db", base)
    file.write_text("hello\n")
    assert "expected JSON Lines" in run_refused("check", "--baseline", str(file), "--db", base)
    missing = run_refused("check", "--baseline", base, "--db", base, "--workload", "gemm:m=1,n=1,k=1")
    assert "no record of these workloads" in missing or "dtype" in missing
