"""Commands on a configuration that calls a library."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.support import measured, record_outcome
from tunebench import kernels
from tunebench.device import local_cpu
from tunebench.space import Config

pytest.importorskip("torch")

GEMM = "gemm:m=32,n=48,k=64,dtype=f32"


@pytest.fixture
def db(tmp_path: Path) -> str:
    path = tmp_path / "a.db"
    library = kernels.variant("gemm/library_cpu").key
    record_outcome(path, GEMM, local_cpu(), library, Config({"program": "onednn"}), measured(1.0))
    return str(path)


def test_commands_say_what_is_called(db: str, run_text: Run, run_refused: Run) -> None:
    answer = run_text("lookup", GEMM, "--db", db)
    assert "calls    torch.ops.mkldnn._linear_pointwise (torch 2" in answer
    options = (GEMM, "--db", db, "--device", "cpu")
    assert "a library, nothing is compiled" in run_text("show", *options, "--resources")
    assert "it calls torch.ops.mkldnn._linear_pointwise" in run_refused("show", *options, "--sass")
    assert "gemm/library_cpu program=onednn (best known" in run_text("explain", *options)


def test_export_writes_the_call(db: str, run_text: Run, run_json: Run, tmp_path: Path) -> None:
    out = tmp_path / "call"
    options = ("--workload", GEMM, "--db", db, "--device", "cpu", "--out", str(out))
    text = run_text("export", *options)
    assert "gemm/library_cpu program=onednn (best known" in text
    assert f"To call it in {out}: from library_call import run" in text
    assert {path.name for path in out.iterdir()} == {"library_call.py", "manifest.json"}
    assert run_json("export", *options, "--format", "py")["build"] == []


def test_export_writes_cpp_and_the_command_that_builds_it(run_text: Run, tmp_path: Path) -> None:
    out, product = tmp_path / "call", "gemm:m=8,n=9,k=10,dtype=f32"
    options = ("--device", "cpu", "--variant", "library_cpu", "--config", "program=numpy")
    text = run_text("export", "--workload", product, "--out", str(out), *options)
    assert f"To build in {out}, with the library:\n  g++ -std=c++17" in text
    assert "./run" not in text
    assert {path.name for path in out.iterdir()} == {"library_call.cpp", "manifest.json"}


def test_export_names_the_best_kernel_in_place_of_a_call_it_cannot_write(
    db: str, run_refused: Run, tmp_path: Path
) -> None:
    options = ("--workload", GEMM, "--db", db, "--device", "cpu", "--out", str(tmp_path / "call"))
    said = run_refused("export", *options, "--format", "cu")
    assert "gemm/library_cpu has no form 'cu'; use --format py" in said
    assert "The best kernel that is compiled is gemm/numba_cpu mr=" in said
    asked = ("--variant", "library_cpu", "--config", "program=numpy", "--format", "py")
    said = run_refused("export", *options, *asked)
    assert "gemm/library_cpu program=numpy calls no functions of torch" in said
    assert not (tmp_path / "call").exists()


def test_other_commands_name_the_call(db: str, run_text: Run, run_json: Run, tmp_path: Path) -> None:
    assert "program=onednn" in run_text("show", GEMM, "--db", db)
    assert run_json("lookup", GEMM, "--db", db)["config"] == {"program": "onednn"}
    table = tmp_path / "answers.txt"
    run_text("export", "--workload", GEMM, "--device", "cpu", "--db", db, "--table", str(table))
    assert "gemm/library_cpu" in table.read_text()
    page = tmp_path / "report.html"
    run_text("report", "--db", db, "--out", str(page))
    assert "gemm/library_cpu" in page.read_text()
