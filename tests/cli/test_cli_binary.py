"""`show --sass`, `--ptx`, `--resources` and `export`, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support import VERIFIED, measured, needs_cuda, needs_disassembler, record_outcome
from tunebench import device, kernels
from tunebench.errors import install_command
from tunebench.outcome import Predicted
from tunebench.workloads import parse

SOFTMAX = ("--workload", "softmax:rows=64,cols=1000,dtype=f32", "--arch", "sm_90")
BLOCK = (*SOFTMAX, "--variant", "cuda_block")
CPU = ("--workload", "softmax:rows=64,cols=128,dtype=f32", "--device", "cpu")


def test_show_counts_predictions_apart_and_prints_whole_configurations(
    run_text: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db, workload = tmp_path / "some.db", parse(SOFTMAX[1])
    on, key = device.find("h100-sxm"), "softmax/cuda_block"
    table = kernels.variant(key).configs(workload, on)
    outcomes = [measured(5.0), *(Predicted(predicted_us=us, verification=VERIFIED) for us in (6.0, 7.0))]
    for row, outcome in enumerate(outcomes):
        record_outcome(db, workload, on, key, table.config(row), outcome)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_text("show", *SOFTMAX[:2], "--db", db).splitlines()
    assert lines[0] == f"{workload}: 1 measurement, 2 predictions"
    for row in range(3):  # on one line however narrow the terminal is: a fold could not be copied
        assert any(line.endswith(f"  {table.config(row)}") for line in lines), lines


def test_show_tells_times_in_warm_caches_from_those_that_lookup_returns(
    run_text: Run, tmp_path: Path
) -> None:
    db, workload = tmp_path / "some.db", parse(SOFTMAX[1])
    on, key = device.find("h100-sxm"), "softmax/cuda_block"
    config = kernels.variant(key).default(workload, on)
    record_outcome(db, workload, on, key, config, dataclasses.replace(measured(5.0), cache="warm"))
    assert "measured, warm caches" in run_text("show", *SOFTMAX[:2], "--db", db)


@needs_cuda
def test_show_resources(run_json: Run, run_text: Run) -> None:
    config = "cache=shared,row_threads=256,rows=1,vector=4,unroll=1"
    shown = run_json("show", *BLOCK, "--resources", "--config", config)
    assert (shown["variant"], shown["target"], shown["spill_bytes"]) == ("softmax/cuda_block", "sm_90", 0)
    assert (shown["why"], shown["how"]) == ("asked for", "predicted")
    (kernel,) = shown["kernels"]
    assert (kernel["grid"], kernel["block"], kernel["dynamic_smem_bytes"]) == ([64, 1, 1], [256, 1, 1], 4000)
    assert 16 <= kernel["registers"] <= 64
    assert kernel["static_smem_bytes"] == 64  # two reductions, with one float for each of 8 warps
    assert kernel["occupancy"] == kernel["warps_per_sm"] / 64 == kernel["blocks_per_sm"] / 8
    text = run_text("show", *BLOCK, "--resources", "--config", config)
    assert "64 static, 4000 dynamic bytes" in text
    assert kernel["kernel"] in text


@needs_cuda
@needs_disassembler
def test_show_sass(run_json: Run, run_text: Run) -> None:
    gemm = ("--workload", "gemm:m=128,n=128,k=128,dtype=f16", "--arch", "sm_80", "--variant", "cuda_mma")
    shown = run_json("show", *gemm, "--sass")
    assert set(shown["claims"]) == {"HMMA", "LDSM", "LDGSTS"}
    assert all(shown["claims"][name] == shown["instructions"][name] > 0 for name in shown["claims"])
    assert shown["code"].count(" HMMA.") == shown["instructions"]["HMMA"]
    text = run_text("show", *gemm, "--sass")
    assert shown["code"] in text
    first = text.splitlines()[0]
    assert first.startswith("// gemm:m=128,n=128,k=128,dtype=f16 on sm_80")
    assert ": gemm/cuda_mma bm=" in first
    assert f"HMMA {shown['instructions']['HMMA']}" in text.splitlines()[-1]


@needs_cuda
def test_show_ptx(run_json: Run, run_text: Run) -> None:
    assert ".target sm_90" in run_json("show", *BLOCK, "--ptx")["code"]
    assert ".target sm_90" in run_text("show", *SOFTMAX, "--variant", "softmax/numba_cuda", "--ptx")


def test_show_of_a_processor(run_json: Run, run_text: Run) -> None:
    assembly = run_text("show", *CPU, "--sass").splitlines()
    assert assembly[0].startswith("# softmax:rows=64,cols=128,dtype=f32 on ")
    assert ": softmax/numba_cpu " in assembly[0]
    assert re.match(r"# [0-9]+ instructions: [a-z]", assembly[-1])
    shown = run_json("show", *CPU, "--resources")
    assert shown["kernels"] == []
    assert shown["code_bytes"] > 0


@needs_cuda
def test_a_users_variant_is_shown_too(run_json: Run) -> None:
    file = Path(__file__).resolve().parents[2] / "docs" / "examples" / "my_cuda_kernel.py"
    with kernels.variant_file_scope():
        shown = run_json("show", *SOFTMAX, "--variant-file", str(file), "--resources")
    assert shown["variant"] == "softmax/my_block"


@needs_cuda
def test_export(run_json: Run, run_text: Run, tmp_path: Path) -> None:
    out = tmp_path / "there" / "kernel"
    text = run_text("export", *BLOCK, "--out", str(out))
    assert {path.name for path in out.iterdir()} == {"kernel.cubin", "manifest.json", "launch.h", "main.cpp"}
    assert all(str(path) in text for path in out.iterdir())
    assert "-lcuda" in text
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["variant"], manifest["architecture"]) == ("softmax/cuda_block", "sm_90")
    exported = run_json("export", *BLOCK, "--format", "cu", "--out", str(tmp_path / "source"))
    assert exported["files"][0] == str(tmp_path / "source" / "kernel.cu")
    assert exported["build"][0].startswith("nvcc ")


def test_export_of_a_lookup_table(run_json: Run, run_text: Run, run_refused: Run, tmp_path: Path) -> None:
    table = str(tmp_path / "kernels.table")
    both = ("--table", table, "--device", "h100-sxm,a100-80-sxm")
    text = run_text("export", *both, "softmax:rows=8,cols=8,dtype=f32", "softmax:rows=9,cols=8,dtype=f32")
    assert "4 answers written" in text
    assert "lookup_table.hpp" in text
    huge = "softmax:rows=2147483647,cols=2147483647,dtype=f32"
    exported = run_json("export", *both, "softmax:rows=8,cols=8,dtype=f32", huge)
    assert exported["files"] == [table, str(tmp_path / "lookup_table.hpp")]
    assert len(exported["missing"]) == 2
    assert {answer["how"] for answer in exported["answers"]} == {"predicted"}
    assert "one answer or more" in run_refused("export", *both, huge)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("export", *CPU), "expected one of --out FOLDER and --table FILE"),
        (("export", *CPU, "--out", "x", "--table", "y"), "expected one of --out FOLDER and --table FILE"),
        (("export", *CPU, "--table", "x", "--variant", "numba_cpu"), "leave --variant and --config out"),
        (("export", *CPU, "--device", "t4", "--out", "x"), "--table takes several of both"),
        (("show", *SOFTMAX, "--sass", "--ptx"), "exclude one another"),
        (("show", *SOFTMAX, "--variant", "cuda_block"), "need --sass, --ptx or --resources"),
        (("show", *SOFTMAX, "--device", "t4", "--sass"), "--device and --arch exclude each other"),
        (("show", *CPU, "--ptx"), "has no PTX"),
        (("export", *CPU, "--out", "x"), "only GPU kernels can be exported"),
        (("export", *CPU, "--out", "x", "--format", "elf"), "unknown format 'elf'"),
        (("show", *SOFTMAX[:2], "--arch", "sm_91", "--sass"), "unknown architecture 'sm_91'"),
    ],
)
def test_invalid_argument_is_one_line_of_error(
    arguments: tuple[str, ...], says: str, run_refused: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in run_refused(*arguments)
    assert not list(tmp_path.iterdir())


@needs_cuda
def test_without_a_disassembler_one_line_says_what_to_install(
    run_refused: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunebench.binary.disassembly.find_disassembler", lambda: None)
    error = run_refused("show", *BLOCK, "--sass", exit_code=6)
    assert error == f"error: nvdisasm is not installed; run: {install_command('cuda')}\n"
