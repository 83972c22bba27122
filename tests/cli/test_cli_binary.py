"""`show --sass`, `--ptx`, `--resources` and `export`, as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tunebench import cli, kernels
from tunebench.binary.disassembly import find_disassembler
from tunebench.compile import unavailable

SOFTMAX = ("--workload", "softmax:rows=64,cols=1000,dtype=f32", "--arch", "sm_90")
BLOCK = (*SOFTMAX, "--variant", "cuda_block")
CPU = ("--workload", "softmax:rows=64,cols=128,dtype=f32", "--device", "cpu")
needs_nvrtc = pytest.mark.skipif(
    bool(unavailable("cuda") or unavailable("numba-cuda")), reason="the extra cuda is not installed"
)


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command that must succeed and return what it prints."""

    def run(*arguments: str) -> str:
        assert cli.run(arguments) == 0
        return capsys.readouterr().out

    return run


@needs_nvrtc
def test_show_resources(shown: Any) -> None:
    config = "cache=shared,row_threads=256,rows=1,vector=4,unroll=1"
    found = json.loads(shown("show", *BLOCK, "--resources", "--config", config, "--json"))
    assert (found["variant"], found["target"], found["spill_bytes"]) == ("softmax/cuda_block", "sm_90", 0)
    assert (found["why"], found["how"]) == ("asked for", "predicted")
    (kernel,) = found["kernels"]
    assert (kernel["grid"], kernel["block"], kernel["dynamic_smem_bytes"]) == ([64, 1, 1], [256, 1, 1], 4000)
    assert 16 <= kernel["registers"] <= 64
    assert kernel["static_smem_bytes"] == 64  # two reductions, with one float for each of 8 warps
    assert kernel["occupancy"] == kernel["warps_per_sm"] / 64 == kernel["blocks_per_sm"] / 8
    text = shown("show", *BLOCK, "--resources", "--config", config)
    assert "64 static, 4000 dynamic bytes" in text
    assert kernel["kernel"] in text


@needs_nvrtc
@pytest.mark.skipif(find_disassembler() is None, reason="no nvdisasm on this machine")
def test_show_sass(shown: Any) -> None:
    gemm = ("--workload", "gemm:m=128,n=128,k=128,dtype=f16", "--arch", "sm_80", "--variant", "cuda_mma")
    found = json.loads(shown("show", *gemm, "--sass", "--json"))
    assert set(found["claims"]) == {"HMMA", "LDSM", "LDGSTS"}
    assert all(found["claims"][name] == found["instructions"][name] > 0 for name in found["claims"])
    assert found["code"].count(" HMMA.") == found["instructions"]["HMMA"]
    text = shown("show", *gemm, "--sass")
    assert found["code"] in text
    assert text.splitlines()[0].startswith("// gemm/cuda_mma bm=")
    assert f"HMMA {found['instructions']['HMMA']}" in text.splitlines()[-1]


@needs_nvrtc
def test_show_ptx(shown: Any) -> None:
    assert ".target sm_90" in json.loads(shown("show", *BLOCK, "--ptx", "--json"))["code"]
    assert ".target sm_90" in shown("show", *SOFTMAX, "--variant", "softmax/numba_cuda", "--ptx")


def test_show_of_a_processor(shown: Any) -> None:
    assembly = shown("show", *CPU, "--sass").splitlines()
    assert assembly[0].startswith("# softmax/numba_cpu ")
    assert re.match(r"# [0-9]+ instructions: [a-z]", assembly[-1])
    found = json.loads(shown("show", *CPU, "--resources", "--json"))
    assert found["kernels"] == []
    assert found["code_bytes"] > 0


@needs_nvrtc
def test_a_users_variant_is_shown_too(shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels, "_loaded", dict(kernels._loaded)
    )  # restored after the test, so that other tests do not see the variant
    monkeypatch.setattr(kernels, "_files", list(kernels._files))
    file = Path(__file__).resolve().parents[2] / "docs" / "examples" / "my_cuda_kernel.py"
    found = json.loads(shown("show", *SOFTMAX, "--variant-file", str(file), "--resources", "--json"))
    assert found["variant"] == "softmax/my_block"


@needs_nvrtc
def test_export(shown: Any, tmp_path: Path) -> None:
    out = tmp_path / "there" / "kernel"
    text = shown("export", *BLOCK, "--out", str(out))
    assert {path.name for path in out.iterdir()} == {"kernel.cubin", "manifest.json", "launch.h", "main.cpp"}
    assert all(str(path) in text for path in out.iterdir())
    assert "-lcuda" in text
    manifest = json.loads((out / "manifest.json").read_text())
    assert (manifest["variant"], manifest["architecture"]) == ("softmax/cuda_block", "sm_90")
    found = json.loads(shown("export", *BLOCK, "--format", "cu", "--out", str(tmp_path / "source"), "--json"))
    assert found["files"][0] == str(tmp_path / "source" / "kernel.cu")
    assert found["build"][0].startswith("nvcc ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
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
    arguments: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@needs_nvrtc
def test_without_a_disassembler_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunebench.binary.disassembly.find_disassembler", lambda: None)
    assert cli.run(["show", *BLOCK, "--sass"]) == 6
    assert capsys.readouterr().err == (
        "error: nvdisasm is not installed; run: pip install 'tunebench[cuda]'\n"
    )
