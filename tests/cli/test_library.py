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
