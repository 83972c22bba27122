"""Objectives, requirements and metrics of a run, on an executor that measures nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import InstantExecutor, measured
from tunebench import Output, lookup, tune_kernel, tuning
from tunebench.cli import run as command
from tunebench.db import open_store
from tunebench.errors import InputError, LookupMiss, UnknownName
from tunebench.outcome import Outcome, Verification
from tunebench.task import Task
from tunebench.tuning import Plan, tune
from tunebench.tuning import run as tuning_run
from tunebench.tuning.tunable import TuningTarget

WORKLOAD = "softmax:rows=64,cols=64,dtype=f32"
STEPS = 7


def times(config: Any) -> tuple[float, float, float]:
    """Return time, energy and relative error of a configuration: they contradict each other."""
    step = sum(str(config).encode()) * 7919 % STEPS
    return 1000.0 + 100 * step, 8.0 - step, 1e-6 * (STEPS - step)


@pytest.fixture(autouse=True)
def executors(monkeypatch: pytest.MonkeyPatch) -> list[InstantExecutor[Task]]:
    started: list[InstantExecutor[Task]] = []

    def start(target: TuningTarget, plan: Plan) -> InstantExecutor[Task]:
        def answer(task: Task) -> Outcome:
            us, joules, error = times(task.config)
            verification = Verification(how="reference", detail="", worst=0.5, relative=error)
            observed = {} if task.thorough else {"energy_j": joules}
            return dataclasses.replace(measured(us), verification=verification, metrics=observed)

        started.append(InstantExecutor(answer))
        return started[-1]

    monkeypatch.setattr(tuning, "start_workers", start)
    return started


def run(db: Path, **changes: Any) -> tuning.Report:
    options: dict[str, Any] = {"trials": 20, "audit": 0, "baselines": False, "finalists": 1}
    options["sampler"] = "random"
    return tune(WORKLOAD, device="cpu", db=db, plan=Plan(**{**options, **changes}))


@pytest.fixture(autouse=True)
def known_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the energy be a quantity that observers provide."""
    monkeypatch.setattr(tuning_run, "metric_names", lambda observers: {"energy_j"})


def test_lookup_answers_another_objective(tmp_path: Path, capsys: Any) -> None:
    db = tmp_path / "a.db"
    run(db, objectives=("energy_j",))
    answers = {
        objective: lookup(WORKLOAD, device="cpu", db=db, objective=objective)
        for objective in ("time_us", "energy_j", "energy_j:max", "energy_j*time_us")
    }
    with open_store(db) as store:
        configs = [record.key.config for record in store.history(WORKLOAD)]
    assert times(answers["energy_j"].config)[1] == min(times(config)[1] for config in configs)
    assert times(answers["energy_j:max"].config)[1] == max(times(config)[1] for config in configs)
    assert answers["time_us"].expected_us == min(times(config)[0] for config in configs)
    assert answers["energy_j"].metrics["energy_j"] == times(answers["energy_j"].config)[1]
    assert answers["energy_j"].how == "measured here"
    assert "least energy_j of the recorded configurations" in answers["energy_j"].because
    accurate = lookup("softmax", rows=64, cols=64, dtype="f32", device="cpu", db=db, require=["error<=4e-6"])
    assert times(accurate.config)[2] <= 4e-6
    with pytest.raises(LookupMiss, match=r"has time_us, error<=1e-09: `tunebench tune"):
        lookup(WORKLOAD, device="cpu", db=db, require=["error<=1e-9"])
    assert command(["lookup", WORKLOAD, "--device", "cpu", "--db", str(db), "--objective", "energy_j"]) == 0
    assert "metrics  energy_j" in capsys.readouterr().out
    with open_store(db) as store, store.writing() as connection:  # of another source
        connection.exec_driver_sql("UPDATE trial SET revision = 'other'")
    with pytest.raises(LookupMiss):
        lookup(WORKLOAD, device="cpu", db=db, objective="energy_j")


def test_several_objectives_have_a_front(tmp_path: Path, executors: Any) -> None:
    report = run(tmp_path / "a.db", objectives=("time_us", "energy_j"))
    values = [tuple(point.values.values()) for point in report.front]
    assert values == sorted(values)
    assert [joules for _, joules in values] == sorted((joules for _, joules in values), reverse=True)
    assert len(values) > 1
    assert report.median_us == values[0][0]
    assert report.metrics["energy_j"] == values[0][1]
    assert report.optimality_proof is None
    assert executors[0].abort_above_us is None
    assert report.trials == {"measured": 20}
    text = str(report)
    assert f"{len(values)} configurations that no other one dominates" in text
    assert "lower bounds are of times" in text
    assert report.to_json()["front"][0]["values"] == dict(report.front[0].values)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random"])
def test_samplers_of_several_objectives(sampler: str, tmp_path: Path) -> None:
    report = run(tmp_path / "a.db", objectives=("time_us", "energy_j"), sampler=sampler)
    assert sum(report.trials.values()) == 20
    assert report.front


@pytest.mark.parametrize(
    ("objective", "best"), [("energy_j", min), ("energy_j:max", max), ("energy_j*time_us", None)]
)
def test_one_objective_decides_the_best(
    objective: str, best: Callable[..., float] | None, tmp_path: Path
) -> None:
    report = run(tmp_path / "a.db", objectives=(objective,))
    with open_store(tmp_path / "a.db") as store:
        metrics = [record.result.outcome.metrics for record in store.history(WORKLOAD)]  # type: ignore[union-attr]
    name = objective.partition(":")[0]
    assert report.front[0].values[name] == (best or min)(row[name] for row in metrics)
    assert len(report.front) == 1


def test_the_fastest_with_a_small_error(tmp_path: Path) -> None:
    free, limited = run(tmp_path / "a.db"), run(tmp_path / "b.db", require=("error<=4e-6",))
    assert free.config is not None
    assert limited.config is not None
    assert free.median_us is not None
    assert limited.median_us is not None
    assert times(free.config)[2] > 4e-6 >= times(limited.config)[2]
    assert limited.median_us > free.median_us
    assert limited.optimality_proof is not None  # of those that satisfy it
    assert "required: error<=4e-06" in str(limited)
    assert (
        run(tmp_path / "a.db", require=("error<=4e-6",)).median_us == limited.median_us
    )  # of known outcomes
    none = run(tmp_path / "b.db", require=("error<=1e-9",))
    assert none.config is None
    assert "no configuration succeeded that satisfies error<=1e-09" in str(none)


def test_finalists_have_metrics_of_their_own_time_and_what_the_search_observed(tmp_path: Path) -> None:
    report = run(tmp_path / "a.db", metrics={"GB/s": "bytes/time_us/1e3"})
    assert report.median_us is not None
    assert report.metrics["GB/s"] == pytest.approx(2 * 4 * 64 * 64 / report.median_us / 1e3)
    with open_store(tmp_path / "a.db") as store:
        finals = [record for record in store.history(WORKLOAD) if record.purpose == "finalist"]
    assert finals
    for record in finals:
        assert record.result.outcome.metrics["energy_j"] == times(record.key.config)[1]  # type: ignore[union-attr]
    assert "metrics  energy_j " in str(report)


def test_what_was_measured_without_the_objective_is_measured_again(tmp_path: Path, monkeypatch: Any) -> None:
    run(tmp_path / "a.db")
    with open_store(tmp_path / "a.db") as store, store.writing() as connection:
        connection.exec_driver_sql("UPDATE measurement SET metrics = NULL")
    again = run(tmp_path / "a.db", objectives=("energy_j",))
    assert again.cached == 0
    assert again.front
    assert run(tmp_path / "a.db", objectives=("energy_j",)).cached >= 20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objectives": ("energy",)}, "unknown quantity of a metric"),
        ({"objectives": ("time_us", "energy_j"), "sampler": "surrogate"}, "optimises one objective"),
        ({"objectives": ("energy_j",), "stop_at_gap": 1.1}, "needs the time as the only objective"),
        ({"objectives": ("energy_j",), "learned_pruner": True}, "needs the time as the only objective"),
    ],
)
def test_contradictory_plans_are_refused(changes: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        run(tmp_path / "a.db", **changes)


def test_workloads_that_share_a_budget_have_the_time_as_objective(tmp_path: Path) -> None:
    plan = Plan(objectives=("energy_j",))
    with pytest.raises(InputError, match="share a budget"):
        tuning.tune_suite({WORKLOAD: 1}, device="cpu", db=tmp_path / "a.db", plan=plan)
    with pytest.raises(InputError, match="share a budget"):
        tuning.tune_from_profile(device="cpu", db=tmp_path / "a.db", plan=plan)


@pytest.mark.slow
def test_observers_watch_a_process_that_measures(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.undo()  # the real workers
    observer = tmp_path / "observer.py"
    observer.write_text(
        "class Rising:\n"
        "    metrics = ('serial', 'pid')\n"
        "    serial = 0\n"
        "    def before_samples(self):\n"
        "        self.serial += 1\n"
        "    def after_samples(self):\n"
        "        import os\n"
        "        return {'serial': self.serial, 'pid': os.getpid()}\n"
        "OBSERVER = Rising()\n"
    )
    result = tune_kernel(
        fill,
        args={"y": Output((64,), "f32")},
        space={"step": [16, 32, 64]},
        reference=lambda: np.ones(64),
        compiled=False,
        objectives=["serial:max"],
        observers=[str(observer)],
        plan=Plan(trials=3, audit=0, baselines=False),
        db=tmp_path / "a.db",
    )
    assert result.report.metrics["serial"] == 3.0
    assert result.report.metrics["pid"] != os.getpid()


def test_clocks_are_settings_of_gpus(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="sm_clock_mhz are settings of GPUs"):
        tune_kernel(
            locked,
            args={"y": Output((64,), "f32")},
            space={"sm_clock_mhz": [1200, 1400]},
            reference=lambda: np.ones(64),
            compiled=False,
            db=tmp_path / "a.db",
        )


def locked(y: Any, sm_clock_mhz: int) -> None:
    y[:] = 1


def fill(y: Any, step: int) -> None:
    for first in range(0, 64, step):
        y[first : first + step] = 1


def test_command_takes_metrics_objectives_and_requirements(tmp_path: Path, capsys: Any) -> None:
    arguments = ["tune", WORKLOAD, "--device", "cpu", "--trials", "6", "--db", str(tmp_path / "a.db")]
    goal = ["--metric", "GB/s=bytes/time_us/1e3", "--objective", "GB/s:max", "--objective", "error"]
    assert command([*arguments, *goal, "--require", "error<=1", "-q"]) == 0
    assert "goal     GB/s:max, error; required: error<=1.0" in capsys.readouterr().out
    assert command(["db", "runs", "--db", str(tmp_path / "a.db")]) == 0
    assert "--objective GB/s:max --objective error --require" in capsys.readouterr().out
    assert command([*arguments, "--metric", "GB/s"]) == 2
    assert "a metric is NAME=EXPRESSION" in capsys.readouterr().err
    with pytest.raises(UnknownName):
        run(tmp_path / "a.db", require=("nothing<1",))
