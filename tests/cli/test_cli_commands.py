"""Commands that list and inspect, as text and as JSON."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tunebench import cli, device, kernels, workloads
from tunebench.cli import doctor
from tunebench.workloads.networks import networks


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command that must succeed and return what it prints."""

    def run(*arguments: str) -> str:
        assert cli.run(arguments) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def told(shown: Any) -> Any:
    """Run a command with `--json` and return its value."""
    return lambda *arguments: json.loads(shown(*arguments, "--json"))


def test_devices(shown: Any, told: Any) -> None:
    found = {entry["name"]: entry for entry in told("devices")}
    cpu = device.local_cpu()
    assert found[cpu.name]["known"] == "here"
    assert found[cpu.name]["key"] == cpu.key
    assert {name for name, entry in found.items() if entry["known"] == "described"} >= set(device.described())
    # 132 SMs at 1980 MHz, 2 x 128 FLOP per clock. Source: NVIDIA H100 datasheet, 67 TFLOP/s.
    assert found["h100-sxm"]["peak_gflop_s"]["f32"] == pytest.approx(66_908, abs=1)
    text = shown("devices")
    assert all(name in text for name in found)


def test_workloads_lists_operators_and_suites(shown: Any, told: Any) -> None:
    found = told("workloads")
    assert {entry["operator"] for entry in found["operators"]} == set(workloads.all_operators())
    suites = {entry["suite"]: entry for entry in found["suites"]}
    assert set(suites) == set(workloads.suites())
    assert found["models"] == list(networks())
    assert suites["resnet50"]["layers"] == len(workloads.suite("resnet50"))
    # ResNet-50 v1.5 needs 4.1 G multiply-adds per image. Source: torchvision's table of models.
    assert suites["resnet50"]["gflop"] == pytest.approx(2 * 4.09, rel=0.01)
    text = shown("workloads")
    assert all(cls.usage() in text for cls in workloads.all_operators().values())
    assert "gpt2-large" in text


def test_workloads_shows_one_operator(shown: Any, told: Any) -> None:
    found = told("workloads", "softmax")
    assert found["dimensions"] == ["rows", "cols", "dtype", "prologue", "log", "direction"]
    assert found["usage"] in shown("workloads", "softmax")


def test_workloads_shows_one_suite_at_a_batch(shown: Any, told: Any) -> None:
    one, eight = told("workloads", "gpt2"), told("workloads", "gpt2", "--batch", "8")
    assert [entry["layer"] for entry in one] == [f"gpt2/{layer.name}" for layer in workloads.suite("gpt2")]
    assert sum(e["gflop"] for e in eight) == pytest.approx(8 * sum(e["gflop"] for e in one))
    text = shown("workloads", "gpt2")
    assert all(entry["workload"] in text for entry in one)


def test_workloads_shows_one_workload(shown: Any, told: Any) -> None:
    found = told("workloads", "gemm:k=4,n=3,m=2,dtype=f16")
    assert found["workload"] == "gemm:m=2,n=3,k=4,dtype=f16"
    assert found["gflop"] == 2 * 2 * 3 * 4 / 1e9
    assert (found["read_bytes"], found["write_bytes"]) == (2 * (8 + 12), 2 * 6)
    assert "writes c (1, 2, 3) f16" in shown("workloads", "gemm:k=4,n=3,m=2,dtype=f16")
    layer = workloads.suite("resnet50")[0]
    changed = told("workloads", f"resnet50/{layer.name},n=2")
    assert changed["gflop"] == 2 * layer.workload.flops() / 1e9


def test_kernels(shown: Any, told: Any) -> None:
    everything = told("kernels")
    assert [entry["variant"] for entry in everything] == [variant.key for variant in kernels.variants()]
    (one,) = told("kernels", "softmax/numba_cpu")
    variant = kernels.variant("softmax/numba_cpu")
    assert one["space_size"] == variant.space.size
    assert [p["name"] for p in one["parameters"]] == list(variant.space.names)
    assert {entry["variant"] for entry in told("kernels", "softmax")} == {
        variant.key for variant in kernels.variants("softmax")
    }
    text = shown("kernels", "softmax/numba_cpu")
    assert all(parameter.about in text for parameter in variant.space.parameters)


def test_db_upgrade_makes_a_database_and_stats_reads_it(shown: Any, told: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "new.db")
    made = told("db", "upgrade", "--db", path)
    assert (made["database"], made["before"]) == (path, None)
    assert "already" in shown("db", "upgrade", "--db", path)
    found = told("db", "stats", "--db", path)
    assert (found["revision"], found["trials"], found["outcomes"]) == (made["after"], 0, {})
    assert "measurements" in shown("db", "stats", "--db", path)


def test_db_uses_the_variable_where_no_option_is_given(
    told: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNEBENCH_DB", str(tmp_path / "named.db"))
    assert told("db", "upgrade")["database"] == str(tmp_path / "named.db")
    assert (tmp_path / "named.db").is_file()


def not_a_database(folder: Path) -> Path:
    path = folder / "notes.txt"
    path.write_text("these are notes, and longer than the header of a database, which is 100 bytes\n" * 3)
    return path


def of_another_program(folder: Path) -> Path:
    path = folder / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE invoice (id INTEGER)")
    connection.close()
    return path


def of_a_later_version(folder: Path) -> Path:
    path = folder / "later.db"
    assert cli.run(["db", "upgrade", "--db", str(path)]) == 0
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    return path


def nowhere(folder: Path) -> Path:
    return folder / "missing" / "x.db"


@pytest.mark.parametrize("make", [not_a_database, of_another_program, of_a_later_version, nowhere])
@pytest.mark.parametrize("command", ["upgrade", "stats"])
def test_unusable_database_is_one_line_of_error_and_unchanged(
    make: Any, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path)
    capsys.readouterr()
    before = path.read_bytes() if path.exists() else None
    assert cli.run(["db", command, "--db", str(path)]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert path.name in err
    assert (path.read_bytes() if path.exists() else None) == before


def test_doctor_reports_installed_components(shown: Any, told: Any) -> None:
    found = {check["subject"]: check for check in told("doctor")}
    assert (
        found["Python"]["status"] == found["core packages"]["status"] == found["database"]["status"] == "ok"
    )
    assert "numpy" in found["core packages"]["found"]
    assert found["database"]["found"].endswith("does not exist yet; the first `tunebench tune` creates it")
    assert {"GPU", "C++ compiler", "extra cuda", "extra torch", "extra postgres"} <= set(found)
    for check in found.values():
        assert check["status"] == "ok" or check["remedy"]
    text = shown("doctor")
    assert all(subject in text for subject in found)


def test_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor, "_driver_version", lambda: None)
    found = {check["subject"]: check for check in told("doctor")}
    assert found["extra cuda"]["remedy"] == "pip install 'tunebench[cuda]'"
    assert "g++" in found["C++ compiler"]["remedy"]
    assert "--device offline" in found["GPU"]["remedy"]
    assert {found[name]["status"] for name in ("extra cuda", "C++ compiler", "GPU")} == {"absent"}


def test_doctor_reports_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (check,) = (c for c in told("doctor") if c["subject"] == "C++ compiler")
    assert check["status"] == "absent"
    assert "no-such-compiler" in check["found"]


def test_doctor_fails_if_a_core_package_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: {"": ["numpy", "no-such-package"]})
    assert cli.run(["doctor"]) == 1
    assert "no-such-package: No module named 'no_such_package'" in capsys.readouterr().out


def test_doctor_inspects_the_database(told: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["db", "upgrade", "--db", str(tmp_path / "x.db")]) == 0
    capsys.readouterr()
    (check,) = (c for c in told("doctor", "--db", str(tmp_path / "x.db")) if c["subject"] == "database")
    assert "0 trials" in check["found"]
    assert cli.run(["doctor", "--db", str(not_a_database(tmp_path))]) == 1


def test_doctor_reports_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    monkeypatch.setattr(doctor, "_driver_version", lambda: "13.0")
    monkeypatch.setattr(doctor.device, "local_gpus", lambda: ())
    (check,) = (c for c in told("doctor") if c["subject"] == "GPU")
    assert check["status"] == "absent"
    assert "CUDA 13.0" in check["found"]
