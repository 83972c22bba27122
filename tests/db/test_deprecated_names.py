"""Old names of databases, lookups, dispatch and cache files keep working for this version, with a warning."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tunebench.answer import Answer
from tunebench.cli.db import app
from tunebench.db import open_store
from tunebench.errors import InputError
from tunebench.space import Config

OLD_NAMES = {
    "tunebench.answer": {"Versus": "BaselineComparison"},
    "tunebench.cache_file": {"Recording": "RecordedSpace", "Log": "TuningLog", "head": "read_header"},
    "tunebench.db": {"Addition": "NewMeasurement", "Entry": "Record", "Place": "MeasuredSpace"},
    "tunebench.db.bundled": {"ship": "export_bundled"},
    "tunebench.db.merge": {"Merged": "MergeResult"},
    "tunebench.db.recorded_space": {"Naming": "ImportOverrides", "log_of": "recorded_space_log"},
    "tunebench.dispatch": {"Choice": "KernelChoice", "Problem": "Dispatcher", "problem": "dispatcher"},
}


@pytest.mark.parametrize(
    ("module", "old", "new"), [(m, *names) for m, found in OLD_NAMES.items() for names in found.items()]
)
def test_old_name_returns_the_renamed_object(module: str, old: str, new: str) -> None:
    loaded = importlib.import_module(module)
    with pytest.warns(FutureWarning, match=f"{old} is deprecated.*use {module}.{new}"):
        assert getattr(loaded, old) is getattr(loaded, new)


def test_old_store_method_calls_the_renamed_one(tmp_path: Path) -> None:
    with open_store(tmp_path / "a.db") as store:
        with pytest.warns(FutureWarning, match=r"use Store\.trial_outcomes"):
            assert store.known("device", "workload", "variant") == []
        with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
            store.unheard_of()


def test_old_command_runs_export_bundled(tmp_path: Path) -> None:
    open_store(tmp_path / "a.db").close()
    with pytest.warns(FutureWarning, match="use tunebench db export-bundled"):
        result = CliRunner().invoke(app, ["ship", "--db", str(tmp_path / "a.db"), "--out", str(tmp_path)])
    assert isinstance(result.exception, InputError)


def test_old_field_of_an_answer_returns_baselines() -> None:
    answer = Answer(
        **dict.fromkeys(("workload", "device", "variant", "revision", "database", "because"), "text"),
        **dict.fromkeys(("ci_us", "bound_us", "cache", "recorded_at"), None),
        how="predicted",
        config=Config({"tile": 1}),
        expected_us=1.0,
        verification="not verified",
    )
    with pytest.warns(FutureWarning, match=r"use Answer\.baselines"):
        assert answer.libraries == answer.baselines
    assert answer.to_json()["libraries"] == {}
