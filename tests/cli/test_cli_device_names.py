"""A device's name in any spelling, in every command and file that takes one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.db.support import filled
from tunebench import cli, device
from tunebench.training.cluster import TrainingCluster

SOFTMAX = "softmax:rows=64,cols=64,dtype=f32"
H100, LIKE = "h100-sxm", ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3", "H100 SXM5", "h100_sxm")
CACHE = {
    "device_name": "",
    "kernel_name": "mine",
    "problem_size": [64],
    "tune_params_keys": ["a"],
    "tune_params": {"a": [1]},
    "cache": {"1": {"a": 1, "time": 1.0, "times": [1.0]}},
}


@pytest.mark.parametrize("name", LIKE)
def test_spelling_is_the_same_device_in_every_command(name: str, run_json: Run) -> None:
    commands = (("predict", SOFTMAX), ("lookup", SOFTMAX), ("explain", SOFTMAX), ("compare", SOFTMAX))
    for command in commands:
        assert run_json(*command, "--device", name) == run_json(*command, "--device", H100)
    assert TrainingCluster.of(f"16 x {name}, 8 a node") == TrainingCluster.of(f"16 x {H100}, 8 a node")


def test_prices_and_defaults_take_any_spelling(
    run_json: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("compare", SOFTMAX, "--device", "RTX 4090,NVIDIA L4", "--price", "GeForce RTX 4090=2,l4=1")
    assert [row["price_per_hour"] for row in run_json(*words)] == [2, 1]
    (tmp_path / "tunebench.toml").write_text(f'device = "{LIKE[0]}"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TUNEBENCH_CONFIG")
    assert run_json("predict", SOFTMAX)[0]["device"] == device.find(H100).key


def test_device_files_take_any_spelling(run_json: Run, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nlike = "NVIDIA H100 80GB HBM3"\nmemory_gb_s = 3000\n')
    assert run_json("predict", SOFTMAX, "--device", str(file))[0]["device"] == "sm_90:mine,sm=132"
    file.write_text('name = "mine"\nlike = "H100"\nmemory_gb_s = 3000\n')
    assert cli.run(["predict", SOFTMAX, "--device", str(file)]) == 2


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA_A100-SXM4-80GB", "A100 80GB SXM"])
def test_importer_and_replay_take_any_spelling(
    name: str, tmp_path: Path, run_json: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    file, db = str(tmp_path / "space.json"), ("--db", str(tmp_path / "a.db"))
    key = device.find("a100-80-sxm").key
    Path(file).write_text(json.dumps({**CACHE, "device_name": name}))
    assert run_json("db", "import", file, *db)[0]["spaces"][0]["device"] == key
    assert run_json("bound", file)["device"] == "a100-80-sxm"
    for spelling in ("A100-SXM-80GB", "a100-80-sxm"):
        assert run_json("replay", file, "--trials", "1", "--device", spelling)["device"] == "a100-80-sxm"
    assert cli.run(["replay", file, "--device", "A100 PCIe 40GB"]) == 2
    Path(file).write_text(json.dumps({**CACHE, "device_name": "A100"}))
    capsys.readouterr()
    assert cli.run(["db", "import", file, *db]) == 2
    assert "a100-80-sxm or a100-80-pcie: name one of them; give --device" in capsys.readouterr().err
    assert run_json("db", "import", file, "--device", name, *db)[0]["spaces"][0]["device"] == key
    assert run_json("replay", file, "--trials", "1", "--device", name)["device"] == "a100-80-sxm"


def test_records_are_selected_by_any_spelling(tmp_path: Path, run_json: Run) -> None:
    db = str(tmp_path / "a.db")
    filled(db)  # records of an H100
    export = ("db", "export", "--out", str(tmp_path / "out.jsonl"), "--format", "jsonl", "--db", db)
    for name in (*LIKE, "H100", "SM90", "sm_90", device.find(H100).key):
        assert run_json(*export, "--device", name)["rows"] == 3
    assert cli.run([*export, "--device", "A100"]) == 2
