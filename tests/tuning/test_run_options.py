"""Which options a run must share with an interrupted one to resume it, and repetition of runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import InstantExecutor, measured
from tunebench import tuning
from tunebench.cli import run as command
from tunebench.cli.tune import OF_PLAN, OUTSIDE_PLAN, TuneOptions
from tunebench.db import RunStart, open_store, schema
from tunebench.device import described, local_cpu
from tunebench.errors import InputError
from tunebench.measure.timing import Protocol
from tunebench.outcome import Outcome
from tunebench.task import Task
from tunebench.tuning import Plan, Progress, repeat, run_options, tune
from tunebench.tuning.run_options import RUN_OPTIONS, changed_options, is_same_search, repeated_plan
from tunebench.tuning.tunable import TuningTarget

PLAN = Plan(trials=50, seed=3)


def stored(plan: Plan = PLAN, **changes: Any) -> dict[str, Any]:
    options = {"variants": ["softmax/numba_cpu"], "predicts": False, **changes}
    return json.loads(json.dumps(run_options.run_options(plan, **options)))  # as the database returns it


OTHER: dict[str, Any] = {
    "sampler": "random",
    "seed": 4,
    "variants": ("numba_cpu",),
    "variant_files": (__file__,),
    "audit": 0.5,
    "warm": False,
    "learned_pruner": True,
    "protocol": Protocol(cache="warm"),
    "offline": True,
    "timeout_s": 5.0,
    "trials": 60,
    "minutes": 2.0,
    "stop_at_gap": 1.5,
    "retry_failed": True,
    "finalists": 5,
    "baselines": False,
    "workers": 7,
    "cluster": "local",
    "objectives": ("energy_j",),
    "require": ("error<=0.001",),
    "observers": ("nvml",),
    "metrics": {"GFLOP/s": "flops/time_us/1e3"},
}
"""Another value of every option."""


def test_every_option_is_classified() -> None:
    assert {*RUN_OPTIONS} == {field.name for field in dataclasses.fields(Plan)} == {*OTHER}
    names = {field.name for field in dataclasses.fields(TuneOptions)}
    assert {*OF_PLAN, *OUTSIDE_PLAN} <= names
    for name in names:
        classes = [name in RUN_OPTIONS, name in OF_PLAN, name in OUTSIDE_PLAN]
        assert sum(classes) == 1, (
            f"--{name}: say in run_options.RUN_OPTIONS whether it may differ on resuming"
        )
    assert {*OF_PLAN.values()} <= {*RUN_OPTIONS}
    assert all(option.why for option in RUN_OPTIONS.values())


@pytest.mark.parametrize("name", OTHER)
def test_a_run_is_resumed_only_by_the_same_search(name: str) -> None:
    changed = dataclasses.replace(PLAN, **{name: OTHER[name]})
    options = stored(changed, predicts=changed.offline)
    restricted = name == "variant_files"  # restricts the variants, too
    assert is_same_search(options, stored()) == (RUN_OPTIONS[name].resumes and not restricted)
    assert is_same_search(options, options)
    assert changed_options(options, stored()) != ""
    assert repeated_plan(options, "run 1") == dataclasses.replace(
        changed, variants=tuple(options["variants"]), variant_files=tuple(options["variant_files"])
    )


def test_an_option_that_was_added_later_had_its_default() -> None:
    older = stored(Plan())
    del older["learned_pruner"], older["protocol"]["abort_factor"]
    assert is_same_search(older, stored(Plan()))
    assert not is_same_search(older, stored(Plan(learned_pruner=True)))


def test_options_are_written_as_a_user_writes_them() -> None:
    assert changed_options(stored(Plan())) == ""
    plan = Plan(protocol=Protocol(cache="warm"), warm=False, learned_pruner=True, seed=3, baselines=False)
    text = "--seed 3 --no-warm --learned-pruner --cache warm --no-baselines"
    assert changed_options(stored(plan)) == text
    without = "--seed 0 --warm (without --learned-pruner) --cache cold --baselines"
    assert changed_options(stored(Plan()), stored(plan)) == without


# -- runs on an executor that measures nothing ---------------------------------------------------------------

WORKLOAD = "softmax:rows=64,cols=64,dtype=f32"


def quick(**changes: Any) -> Plan:
    options: dict[str, Any] = {"trials": 6, "audit": 0, "baselines": False, "finalists": 1}
    return Plan(**{**options, **changes})


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every configuration take a time of its own at once, in the cache state of the plan."""

    def start(target: TuningTarget, plan: Plan) -> InstantExecutor[Task]:
        def answer(task: Task) -> Outcome:
            us = 1000.0 + sum(str(task.config).encode()) * 7919 % 1000
            return measured(us, cache=plan.protocol.cache)

        return InstantExecutor(answer)

    monkeypatch.setattr(tuning, "start_workers", start)


@pytest.fixture
def cut_off(tmp_path: Path) -> Callable[..., Path]:
    """Interrupt a run of six trials after the fourth."""

    def run(**changes: Any) -> Path:
        def stop(progress: Progress) -> None:
            if progress.phase == "search" and progress.done == 4:
                raise KeyboardInterrupt

        report = tune(WORKLOAD, device="cpu", db=tmp_path / "a.db", plan=quick(**changes), watcher=stop)
        assert report.interrupted
        assert sum(report.trials.values()) == 4
        return tmp_path / "a.db"

    return run


def test_trials_of_another_cache_state_are_not_charged(
    cut_off: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    db = cut_off()
    warm = quick(protocol=Protocol(cache="warm"))
    report = tune(WORKLOAD, device="cpu", db=db, plan=warm)
    assert sum(report.trials.values()) == 6  # all of its own
    (unresumed,) = report.unresumed
    assert (unresumed.trials, unresumed.options) == (4, "--cache cold")
    assert f"continue it by `tunebench tune --repeat {unresumed.id[:12]} --db {db}`" in str(report)
    same = repeat(unresumed.id[:12], db=db)
    assert (sum(same.trials.values()), same.cached, same.unresumed) == (2, 4, ())
    with open_store(db, read_only=True) as store:
        assert store.interrupted_runs(local_cpu().key, WORKLOAD, is_same_search) == []
    capsys.readouterr()
    assert command(["db", "runs", "--db", str(db), "--json"]) == 0
    states = [run["state"] for run in json.loads(capsys.readouterr().out)]
    assert states == ["finished"] * 3  # also the interrupted one, which has ended with its continuation


def test_trials_of_a_changed_source_are_not_charged(cut_off: Callable[..., Path]) -> None:
    db = cut_off()
    with open_store(db) as store, store.writing() as connection:
        connection.execute(schema.trial_table.update().values(stale=True))
    with open_store(db, read_only=True) as store:
        assert store.interrupted_runs(local_cpu().key, WORKLOAD, is_same_search) == []


def test_runs_are_listed_with_their_options(
    cut_off: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    db = cut_off(seed=5, warm=False)
    assert command(["tune", "--repeat", "none", "--db", str(db)]) == 2
    assert f"`tunebench db runs --db {db}` lists them" in capsys.readouterr().err
    assert command(["db", "runs", "--db", str(db), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["state"], listed["trials"], listed["workload"]) == ("interrupted", 4, WORKLOAD)
    assert listed["changed"].startswith("--seed 5 --audit 0 --no-warm")
    assert listed["options"]["seed"] == 5
    assert listed["best_us"] > 0
    assert command(["tune", "--repeat", listed["id"], "--seed", "1", "--db", str(db)]) == 2
    assert "leave --seed out" in capsys.readouterr().err
    assert command(["tune", "--repeat", listed["id"][:8], "--db", str(db), "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (sum(report["trials"].values()), report["cached"]) == (2, 4)
    assert command(["db", "runs", "--db", str(db), "--workload", WORKLOAD, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "interrupted" not in shown  # it was continued
    assert "finished" in shown
    assert shown.count("--seed 5 --audit 0 --no-warm") == 2


def test_defaults_of_a_project_do_not_change_a_repeated_run(
    cut_off: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    db = cut_off(seed=5)
    (tmp_path / "tunebench.toml").write_text('trials = 30\nseed = 9\ncache = "warm"\n')
    monkeypatch.setenv("TUNEBENCH_CONFIG", str(tmp_path / "tunebench.toml"))
    with open_store(db, read_only=True) as store:
        (run,) = store.interrupted_runs(local_cpu().key, WORKLOAD, is_same_search)
    assert command(["tune", "--repeat", run.id, "--db", str(db), "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["trials"].values()) == 2


def test_an_interrupted_run_of_an_earlier_version_is_named_and_not_charged(
    cut_off: Callable[..., Path],
) -> None:
    db = cut_off()
    with open_store(db) as store, store.writing() as connection:
        connection.execute(schema.run_table.update().values(options=None))
    report = tune(WORKLOAD, device="cpu", db=db, plan=quick())
    assert sum(report.trials.values()) == 6
    assert report.cached == 4
    (unresumed,) = report.unresumed
    assert (unresumed.trials, unresumed.options) == (4, None)
    assert "of an earlier version that stored no options" in str(report)
    assert tune(WORKLOAD, device="cpu", db=db, plan=quick()).unresumed == ()


@pytest.mark.parametrize("change", ["gone", "changed"])
def test_a_run_whose_variant_file_is_not_as_it_was_is_not_repeated(change: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("VARIANT = None\n")
    options = stored(Plan(variant_files=(str(file),)))
    _ = file.unlink() if change == "gone" else file.write_text("VARIANT = 1\n")
    with pytest.raises(InputError, match=r"its variant file .*mine.py (is gone|has changed)"):
        repeated_plan(options, "run 1")


def test_a_run_that_cannot_be_repeated_says_why(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    gpu = described()["h100-sxm"]
    starts = {
        "earlier version": None,
        "measured on sm_90:h100-sxm": stored(),
        "shared one budget with other workloads .suite mine": stored(shared_budget="suite mine"),
    }
    for reason, options in starts.items():
        start = RunStart(device=gpu, workload=WORKLOAD, sampler="surrogate", seed=3, options=options)
        with open_store(db) as store:
            run_id = store.begin_run(start)
        with pytest.raises(InputError, match=reason):
            repeat(run_id, db=db)
