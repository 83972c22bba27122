"""Old names of tuning keep working for this version, with a warning that names the new one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tunebench
from tunebench import cli, tuning
from tunebench.errors import InputError
from tunebench.tuning import Plan, Progress, Report, TuningSummary

WORKLOAD = "softmax:rows=4,cols=4,dtype=f32"
NAMES = [
    ("tunebench", "DemandReport", "TuningSummary"),
    ("tunebench", "SuiteReport", "TuningSummary"),
    ("tunebench", "family", "parse_size_range"),
    ("tunebench.search", "CalibratedPruner", "LearnedPruner"),
    ("tunebench.tuning", "DemandReport", "TuningSummary"),
    ("tunebench.tuning", "SuiteProgress", "Progress"),
    ("tunebench.tuning", "SuiteReport", "TuningSummary"),
    ("tunebench.tuning", "family", "parse_size_range"),
    ("tunebench.tuning", "is_family", "is_size_range"),
]
SUMMARY = {"kind": "suite", "device": "cpu", "database": "a.db", "interrupted": False, "wall_s": 1.0}
PROGRESS = {
    **dict.fromkeys(("done", "total", "masked", "cached", "bound_us"), 1),
    **dict.fromkeys(("best_us", "seconds_left")),
    "phase": "search",
    "outcomes": {},
}
FIELDS: list[tuple[type, dict[str, Any], str, str, Any]] = [
    (Plan, {}, "calibrated", "learned_pruner", True),
    (Progress, PROGRESS, "fleet", "pool", None),
    (TuningSummary, SUMMARY, "items", "results", ()),
    (TuningSummary, SUMMARY, "parts", "results", ()),
    (TuningSummary, {**SUMMARY, "results": ()}, "suite", "name", "gpt2"),
]


@pytest.mark.parametrize(("module", "old", "new"), NAMES)
def test_old_name_returns_the_renamed_object(module: str, old: str, new: str) -> None:
    loaded = importlib.import_module(module)
    with pytest.warns(FutureWarning, match=f"{module}.{old} is deprecated.*use {module}.{new}"):
        assert getattr(loaded, old) is getattr(loaded, new)


@pytest.mark.parametrize(("cls", "required", "old", "new", "value"), FIELDS)
def test_old_field_is_accepted_and_returned(
    cls: type, required: dict[str, Any], old: str, new: str, value: Any
) -> None:
    with pytest.warns(FutureWarning, match=rf"{old}=\.\.\.\) is deprecated.*{cls.__name__}\({new}="):
        made = cls(**required, **{old: value})
    with pytest.warns(FutureWarning, match=rf"{old} is deprecated.*use {cls.__name__}\.{new}"):
        assert getattr(made, old) == getattr(made, new) == value


def test_old_field_of_totals_returns_the_renamed_one() -> None:
    summary = TuningSummary(**SUMMARY, results=())
    with pytest.warns(FutureWarning, match=r"use TuningSummary\.recorded_us"):
        assert summary.time_us == summary.recorded_us == 0


def test_old_field_of_a_report_is_accepted() -> None:
    warned = pytest.warns(FutureWarning, match=r"Report\(fleet=\.\.\.\) is deprecated.*Report\(pool=")
    with warned, pytest.raises(TypeError, match="workload"):  # no other field is set
        Report(fleet=None)


def test_tune_recorded_calls_tune_from_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []

    def tune_from_profile(*, watcher: Any, **arguments: Any) -> str:
        watcher(Progress(**PROGRESS, workload="w", index=1, count=3))
        calls.append(arguments)
        return "summary"

    monkeypatch.setattr(tuning, "tune_from_profile", tune_from_profile)
    with pytest.warns(FutureWarning, match=r"tune_recorded is deprecated.*use tunebench\.tune_from_profile"):
        summary = tunebench.tune_recorded(
            db=tmp_path / "a.db",
            again=True,
            watcher=lambda turn, progress: calls.append((turn.place, turn.total, turn.workload)),
        )
    assert summary == "summary"
    assert calls == [(1, 3, "w"), {"db": tmp_path / "a.db", "retune": True}]


@pytest.mark.parametrize(
    ("words", "old", "new", "error"),
    [
        # Each command is refused after its flags are read, with a message that names the new flag's rule.
        (("tune", "--recorded", "--cluster=local"), "--recorded", "--from-profile", "--from-profile tunes"),
        (("tune", "-w", WORKLOAD, "--again"), "--again", "--retune", "--retune goes"),
        (
            ("tune", "-w", WORKLOAD, "--device", "h100-sxm", "--calibrated"),
            *("--calibrated", "--learned-pruner", "the learned pruner needs measurements"),
        ),
    ],
)
def test_old_flag_of_tune_means_the_new_one(
    words: tuple[str, ...], old: str, new: str, error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.run([*words, "--db", str(tmp_path / "a.db")]) == 2
    err = capsys.readouterr().err
    assert f"{old} is deprecated; use {new}" in err
    assert error in err


def test_old_flag_of_replay_means_the_new_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def replay(_space: object, *, learned_pruner: bool, **_arguments: object) -> None:
        raise InputError(f"learned_pruner is {learned_pruner}")

    space = SimpleNamespace(recording=SimpleNamespace(optimum_us=1.0))
    monkeypatch.setattr("tunebench.cli.replay.space_of", lambda *_: space)
    monkeypatch.setattr("tunebench.tuning.replay.replay", replay)
    (tmp_path / "t4.json").touch()
    assert cli.run(["replay", str(tmp_path / "t4.json"), "--calibrated"]) == 2
    err = capsys.readouterr().err
    assert "--calibrated is deprecated; use --learned-pruner" in err
    assert "learned_pruner is True" in err
