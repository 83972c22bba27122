"""Optuna storages that follow a run, and Optuna's own plots of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import optuna
import pytest

from tests.report.test_baseline import other_config
from tests.report.test_report import WORKLOAD, database
from tests.support import InstantExecutor, measured
from tunebench import cli, device, tuning
from tunebench.db import open_store
from tunebench.errors import InputError
from tunebench.report import search_histories
from tunebench.report.optuna_export import StudyFollower, export_studies
from tunebench.task import Task
from tunebench.tuning import Progress


def progress(gpu: str) -> Progress:
    return Progress(
        phase="search",
        done=0,
        total=1,
        outcomes={},
        masked=0,
        cached=0,
        best_us=None,
        bound_us=0.0,
        seconds_left=None,
        workload=WORKLOAD,
        device=device.described()[gpu].key,
    )


def trials(url: str) -> list[optuna.trial.FrozenTrial]:
    (name,) = optuna.get_all_study_names(url)
    return optuna.load_study(study_name=name, storage=url).trials


@pytest.mark.slow
def test_follower_adds_what_is_missing_after_a_crash(tmp_path: Path) -> None:
    url, db = f"sqlite:///{tmp_path / 'studies.db'}", database(tmp_path / "a.db", {32: 8.0})
    with StudyFollower(url, str(db)) as follower:
        follower.watch(progress("rtx-3090"))
    assert follower.failure is None
    first, second = trials(url)
    study = optuna.load_study(study_name=optuna.get_all_study_names(url)[0], storage=url)
    optuna.delete_study(study_name=study.study_name, storage=url)
    optuna.create_study(study_name=study.study_name, storage=url).add_trial(first)
    with StudyFollower(url, str(db)) as follower:  # the next run of the workload
        follower.watch(progress("rtx-3090"))
    assert [trial.params for trial in trials(url)] == [first.params, second.params]


def test_failing_storage_does_not_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a URL"):
        StudyFollower("nonsense", None)
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    with StudyFollower(url, str(tmp_path / "absent.db")) as follower:
        follower.watch(progress("rtx-3090"))
    assert follower.failure is not None


@pytest.mark.slow
def test_tune_writes_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    energetic = dataclasses.replace(measured(5.0, 5.1, 5.2), metrics={"energy_j": 0.5})
    executor: InstantExecutor[Task] = InstantExecutor(lambda task: energetic)
    monkeypatch.setattr(tuning, "start_workers", lambda *start: executor)
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    words = ["tune", WORKLOAD, "--device", "cpu", "--trials", "4", "--no-baselines", "--quiet"]
    assert cli.run([*words, "--db", str(tmp_path / "a.db"), "--study-storage", url]) == 0
    written = trials(url)
    assert sum(trial.user_attrs["purpose"] == "search" for trial in written) == 4
    assert all(trial.user_attrs["bound_us"] > 0 for trial in written)
    assert all(trial.user_attrs["metric energy_j"] == 0.5 for trial in written)
    assert set(written[0].params) == set(other_config())
    assert cli.run([*words[:5], "9", *words[6:], "--db", str(tmp_path / "a.db"), "--study-storage", url]) == 0
    assert sum(trial.user_attrs["purpose"] == "search" for trial in trials(url)) == 13


def test_plots_of_optuna_accept_the_studies(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    url = f"sqlite:///{tmp_path / 'studies.db'}"
    db = database(tmp_path / "a.db", {32: 8.0, 64: 2.0, 128: 4.0, 256: 3.0})
    with open_store(db, read_only=True) as store:
        (name,) = export_studies(search_histories(store), url)
    study = optuna.load_study(study_name=name, storage=url)
    for plot in ("optimization_history", "slice", "parallel_coordinate", "contour", "edf", "timeline"):
        assert getattr(optuna.visualization, f"plot_{plot}")(study).data, plot
