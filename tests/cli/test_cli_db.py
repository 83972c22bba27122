"""Commands of `tunebench db`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tunebench import cli, device, kernels
from tunebench.cache_file import read
from tunebench.db import RunStart, TrialKey, open_store
from tunebench.db.store import Store
from tunebench.outcome import CompileFailed, Measured, Result
from tunebench.workloads import parse

WORKLOAD = "softmax:rows=16,cols=16,dtype=f32"


def cache(folder: Path, name: str, *entries: dict[str, Any], kernel: str = "k") -> str:
    keys = ["b", "m"]
    data = {
        "kernel_name": kernel,
        "device_name": "NVIDIA GeForce RTX 3090",
        "problem_size": 64,
        "tune_params_keys": keys,
        "cache": {str(number): entry for number, entry in enumerate(entries)},
    }
    path = folder / name
    path.write_text(json.dumps(data))
    return str(path)


GOOD = [{"b": b, "m": "x", "time": 1.0 + b, "times": [1.0 + b]} for b in range(4)]
BAD = {"b": 9, "m": "x", "time": -1}


def test_import_prints_what_was_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_text: Run
) -> None:
    first = cache(tmp_path, "first.json", *GOOD[:3])
    second = cache(tmp_path, "second.json", *GOOD)
    assert cli.run(["db", "import", first, second, "--json"]) == 0
    out, err = capsys.readouterr()
    space = {
        "device": device.described()["rtx-3090"].key,
        "workload": "recorded:kernel=k,problem=64",
        "variant": "recorded/k",
    }
    assert json.loads(out) == [
        {"file": first, "spaces": [space], "added": 3, "known": 0, "faults": [], "refused": 0},
        {"file": second, "spaces": [space], "added": 1, "known": 3, "faults": [], "refused": 0},
    ]
    assert err == ""
    assert "recorded/k for recorded:kernel=k,problem=64" in run_text("db", "import", first)
    shown = run_text("show", "--workload", "recorded:kernel=k,problem=64", "--device", "rtx-3090")
    assert "4 measured" in shown
    assert "of recorded tuning spaces" in run_text("db", "stats")


def test_import_reports_rejected_rows_and_keeps_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cache(tmp_path, "some.json", *GOOD, *[BAD] * 12)
    assert cli.run(["db", "import", path]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[1].split()[:3] == ["4", "0", "12"]
    assert err.count(f"{path}: cache entry ") == 10
    assert "cache entry 5 ('4'): a time must be positive, got -1" in err
    assert "and 2 more" in err
    assert err.endswith("error: 12 rows cannot be used; the others were imported\n")
    assert cli.run(["db", "import", path, "--json"]) == 2
    (printed,) = json.loads(capsys.readouterr().out)
    assert (printed["known"], len(printed["faults"])) == (4, 12)


def test_import_stops_at_an_unusable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = cache(tmp_path, "first.json", *GOOD), cache(tmp_path, "last.json", *GOOD, kernel="last")
    (tmp_path / "bad.json").write_text("[]")
    bad = str(tmp_path / "bad.json")
    assert cli.run(["db", "import", first, bad, last]) == 2
    out, err = capsys.readouterr()
    assert "first.json" in out
    assert err.splitlines()[0] == f"not imported: {bad}, {last}"
    assert "error: " + bad in err
    with open_store() as store:
        assert [space.variant for space in store.spaces()] == ["recorded/k"]


def test_interrupted_import_keeps_earlier_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = cache(tmp_path, "first.json", *GOOD), cache(tmp_path, "last.json", *GOOD, kernel="last")
    add, rows = Store._add, []

    def interrupted(*arguments: Any) -> None:
        add(*arguments)
        rows.append(len(arguments[4]))
        if len(rows) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Store, "_add", interrupted)
    assert cli.run(["db", "import", first, last]) == 130
    out, err = capsys.readouterr()
    assert rows == [4, 4]
    assert "first.json" in out
    assert err.split() == f"not imported: {last} error: interrupted".split()
    with open_store() as store:
        assert {space.variant: count for space, count in store.spaces().items()} == {"recorded/k": 4}
        assert store.stats().runs == 1


HELD = """
import sys, time
from tunebench import cli
from tunebench.db.store import Store

add = Store._add

def add_and_wait(*arguments):
    add(*arguments)
    print("rows are in", flush=True)
    time.sleep(60)

Store._add = add_and_wait
sys.exit(cli.run(sys.argv[1:]))
"""
"""Script that runs the command and stops it between the insertion of rows and the commit."""


def test_ctrl_c_during_an_import_rolls_back_the_file(tmp_path: Path) -> None:
    """Send a real signal to a real process during an import."""
    path, database = cache(tmp_path, "large.json", *GOOD), tmp_path / "store.db"
    command = [sys.executable, "-c", HELD, "db", "import", path, "--db", str(database)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "rows are in\n"
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert f"not imported: {path}" in err
    with open_store(database) as store:
        assert (store.stats().trials, store.stats().runs) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--problem", "64 by 32"], "must be sizes such as 4096x4096"),
        (["--device", "abacus"], "unknown device 'abacus'"),
        (["--kernel", "a b"], "give --kernel"),
    ],
)
def test_import_errors(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["db", "import", cache(tmp_path, "a.json", *GOOD), *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_export_errors(tmp_path: Path, run_text: Run, run_refused: Run) -> None:
    out = str(tmp_path / "out.json")
    assert "tune a workload first" in run_refused("db", "export", "--out", out, exit_code=4)
    run_text("db", "import", cache(tmp_path, "a.json", *GOOD))
    for arguments, error in (
        (["--format", "csv"], "unknown format 'csv'"),
        (["--cache", "hot"], "unknown cache state 'hot'"),
        (["--cache", "cold"], "has no measurement"),
        (["--device", "h100-sxm"], "unknown device 'h100-sxm'"),
        (["--format", "jsonl", "--cache", "warm"], "--cache applies to"),
    ):
        assert error in run_refused("db", "export", "--out", out, *arguments)
    assert not Path(out).exists()


def test_tuned_space_is_exported_read_and_replayed(tmp_path: Path, run_json: Run) -> None:
    variant = str(Path(__file__).parent.parent / "data" / "forty_variant.py")
    tune = ["tune", "--workload", WORKLOAD, "--device", "cpu", "--trials", "2", "--finalists", "1"]
    report = run_json(*tune, "--variant-file", variant, "--no-baselines")
    path = tmp_path / "t4.json.gz"
    arguments = ["--workload", "softmax:dtype=f32,cols=16,rows=16", "--device", "cpu", "--out", str(path)]
    printed = run_json("db", "export", *arguments)
    recording = read(path)
    assert printed == {"file": str(path), "format": "t4", "rows": len(recording.table)}
    with open_store() as store:
        entries = store.history(WORKLOAD)
    # The newest measurement of each configuration; for finalists, that of the finalist comparison.
    newest = {entry.key.config: entry.result.outcome for entry in entries}
    times = {recording.table.config(row): us for row, us in enumerate(recording.times_us.tolist())}
    assert set(times) == set(newest)
    for config, outcome in newest.items():
        assert isinstance(outcome, Measured) == (times[config] == times[config])
        if isinstance(outcome, Measured):
            assert times[config] == pytest.approx(outcome.median_us, rel=1e-15)
    assert recording.kernel == report["variant"]
    replayed = run_json("replay", str(path), "--trials", "3")
    assert (replayed["space"], replayed["runs"][0]["measured"]) == (report["variant"], len(times))
    assert list(replayed["runs"][0]["efficiency"]) == ["3"]  # fewer trials than the first checkpoint
    assert replayed["optimum_ms"] == pytest.approx(recording.optimum_us / 1e3)


# -- verification and downgrade ----------------------------------------------------------------------


def test_merge_prints_what_was_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_json: Run, run_text: Run
) -> None:
    first, second, into = (str(tmp_path / name) for name in ("one.db", "other.db", "into.db"))
    run_text("db", "import", cache(tmp_path, "a.json", *GOOD[:3]), "--db", first)
    run_text("db", "import", cache(tmp_path, "b.json", *GOOD), "--db", second)
    printed = run_json("db", "merge", first, second, "--into", into)
    # A file imported into both databases counts as known, although the import times differ.
    assert [(result["added"], result["known"], result["runs"]) for result in printed] == [
        (3, 0, 1),
        (1, 3, 1),
    ]
    assert cli.run(["db", "merge", first, str(tmp_path / "none.db"), "--into", into]) == 4
    assert "not merged: " + first in capsys.readouterr().err
    assert run_text("db", "merge", first, "--into", into).splitlines()[1].split()[:2] == ["0", "3"]


def test_verify_reports_findings_by_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run_text: Run
) -> None:
    database = str(tmp_path / "a.db")
    run_text("db", "import", cache(tmp_path, "a.json", *GOOD), "--db", database)
    assert "passes the integrity check" in run_text("db", "verify", "--db", database)
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE measurement SET fastest_us = 1e9 WHERE id = 2")
    assert cli.run(["db", "verify", "--db", database, "--json"]) == 4
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert (printed["clean"], printed["counts"], printed["fixed"]) == (False, {"figure": 1}, 0)
    assert printed["first"]["figure"] == ["measurement 2: its fastest sample is stored as 1000000000.0"]
    assert err.endswith("fails the integrity check: 1 findings\n")
    assert cli.run(["db", "verify", "--db", database, "--fix"]) == 4
    assert "1 figure: measurements with contradictory values" in capsys.readouterr().out


def test_verify_fix_marks_trials_as_stale(
    capsys: pytest.CaptureFixture[str], run_json: Run, run_text: Run
) -> None:
    h100, variant, workload = (
        device.described()["h100-sxm"],
        kernels.variant("softmax/cuda_block"),
        parse(WORKLOAD),
    )
    trial = TrialKey(
        device=h100.key,
        workload=WORKLOAD,
        variant=variant.key,
        revision="before",
        config=variant.default(workload, h100),
    )
    with open_store() as store:
        store.begin_run(RunStart(device=h100, workload=WORKLOAD, sampler="random", seed=0))
        store.record(trial, Result(outcome=CompileFailed(reason="no")))
    assert cli.run(["db", "verify"]) == 4
    assert "the source of softmax/cuda_block has changed" in capsys.readouterr().out
    assert run_json("db", "verify", "--fix")["fixed"] == 1
    run_text("db", "verify")


def test_downgrade_reports_data_that_would_be_lost(tmp_path: Path, run_json: Run, run_text: Run) -> None:
    database = str(tmp_path / "a.db")
    assert cli.run(["db", "downgrade", "--to", "0001", "--db", database]) == 4
    run_text("db", "upgrade", "--db", database)
    run_text("db", "downgrade", "--to", "0002", "--db", database, "--json")
    printed = run_json("db", "downgrade", "--to", "0001", "--db", database)
    assert printed == {"database": database, "before": "0002", "after": "0001"}
    assert cli.run(["db", "stats", "--db", database]) == 4
    assert cli.run(["db", "downgrade", "--to", "7", "--db", database]) == 2


def test_forget_lists_first_and_deletes_with_yes(run_json: Run, run_text: Run, run_refused: Run) -> None:
    h100, variant, workload = (
        device.described()["h100-sxm"],
        kernels.variant("softmax/cuda_block"),
        parse(WORKLOAD),
    )
    default = variant.default(workload, h100)
    with open_store() as store:
        store.begin_run(RunStart(device=h100, workload=WORKLOAD, sampler="random", seed=0))
        trial = TrialKey(
            device=h100.key, workload=WORKLOAD, variant=variant.key, revision="r1", config=default
        )
        store.record(trial, Result(outcome=CompileFailed(reason="no")))
    config = str(default).split(",")[0]
    arguments = ("db", "forget", WORKLOAD, "--variant", "cuda_block", "--config", config)
    shown = run_text(*arguments, "--arch", "sm_90")
    assert "1 compile_failed" in shown
    assert "1 configuration of softmax:rows=16,cols=16,dtype=f32 would be forgotten; --yes forgets" in shown
    listed = run_json(*arguments)
    assert (listed["forgotten"], listed["trials"]) == (False, 1)
    assert listed["spaces"][0]["outcomes"] == {"compile_failed": 1}
    assert "exclude each other" in run_refused(*arguments, "--arch", "sm_90", "--device", "cpu")
    assert "--config must be values such as" in run_refused(*arguments[:-1], "block")
    assert run_json(*arguments, "--yes") == {**listed, "forgotten": True}
    assert "there is nothing to forget" in run_refused(*arguments, "--yes")
    assert "does not exist" in run_refused(*arguments, "--yes", "--db", "none.db", exit_code=4)
    assert not Path("none.db").exists()
