"""Export of a library's call as a module, which computes the workload without this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.kernels import kernel_checks as checks
from tests.support import package_variants
from tunebench.device import local_cpu
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError
from tunebench.export import build_lines, default_format, write_export
from tunebench.export.library_call import library_module
from tunebench.kernels.common.library_cpu import LibraryCpu
from tunebench.libraries import torch_tensor
from tunebench.torch._tensor import bits_of
from tunebench.tuning.choice import ChosenConfig, compiled_alternative
from tunebench.workload import Workload
from tunebench.workloads import parse

pytestmark = pytest.mark.torch

CPU = local_cpu()
WORKLOADS = [
    "gemm:m=7,n=9,k=11,dtype=f32,trans=tn,epilogue=bias+gelu",
    "gemm:m=7,n=9,k=11,dtype=f32,epilogue=residual",
    "gemm:m=7,n=9,k=11,dtype=bf16,batch=2",
    "gated_gemm:m=7,n=9,k=11,dtype=f32",
    "conv2d:n=2,c=6,h=7,w=9,k=4,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+residual+relu",
    "conv2d:n=2,c=6,h=7,w=9,k=4,r=3,s=3,stride=2,pad=1,dtype=f32,layout=nchw,direction=wgrad",
    "softmax:rows=5,cols=13,dtype=f32,prologue=scale,log=true",
    "layernorm:rows=5,cols=13,dtype=f32,prologue=bias+residual,stats=true",
    "attention:batch=2,heads=3,seq_q=9,head_dim=8,dtype=f32",
    "elementwise:rows=5,cols=13,dtype=f32,expression=alpha*gelu(x+bias),vectors=bias,scalars=alpha",
    "scaled_gemm:m=7,n=9,k=256,dtype=f32,weight=i4,scales=group,shift=true,bias=true",
]


def choice_of(workload: Workload, program: str) -> ChosenConfig:
    (variant,) = (v for v in package_variants(LibraryCpu) if isinstance(workload, v.operator))
    config = variant.space.check({"program": program}, workload=workload, device=CPU)
    return ChosenConfig(
        workload=workload,
        device=CPU,
        variant=variant,
        config=config,
        why="best known",
        expected_us=1.5,
        how="measured here",
    )


def _programs() -> list[Any]:
    cases = []
    for text in WORKLOADS:
        workload = parse(text)
        (variant,) = (v for v in package_variants(LibraryCpu) if isinstance(workload, v.operator))
        programs = [name for name in variant.supported(workload) if name != "numpy"]
        cases += [pytest.param(workload, program, id=f"{program}-{text}") for program in programs]
    return cases


@pytest.mark.parametrize(("workload", "program"), _programs())
def test_exported_module_computes_the_workload(workload: Workload, program: str) -> None:
    module: dict[str, Any] = {}
    source = library_module(choice_of(workload, program))
    exec(source, module)
    assert "tunebench." not in source
    inputs = workload.draw(np.random.default_rng(3))
    results = module["run"](*map(torch_tensor, inputs.values()))
    listed = results if isinstance(results, tuple) else (results,)
    outputs = {
        spec.name: bits_of(result).numpy().view(numpy_dtype(spec.dtype))
        for spec, result in zip(workload.outputs(), listed, strict=True)
    }
    assert [array.shape for array in outputs.values()] == [spec.shape for spec in workload.outputs()]
    checks.assert_right(workload, inputs, outputs, source)


@pytest.mark.slow
def test_exported_module_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    choice = choice_of(parse(WORKLOADS[0]), "onednn")
    assert (default_format(choice), build_lines(choice, "py")) == ("py", ())
    binary: Any = None
    files = write_export(choice, binary, tmp_path, "py")
    assert [path.name for path in files] == ["library_call.py", "manifest.json"]
    manifest = json.loads(files[1].read_text())
    assert manifest["library"].startswith("torch 2")
    assert manifest["calls"] == "torch.ops.mkldnn._linear_pointwise"
    assert [tensor["name"] for tensor in manifest["tensors"]] == ["a", "b", "bias", "c"]
    program = (
        "import sys, torch; from library_call import run\n"
        "c = run(torch.ones(1, 11, 7), torch.ones(1, 11, 9), torch.zeros(9))\n"
        "assert not any(name.startswith('tunebench') for name in sys.modules)\n"
        "print(tuple(c.shape), float(c.sum()))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout == "(1, 7, 9) 693.0\n", ran.stderr


@pytest.mark.parametrize(
    ("text", "program", "says"),
    [
        ("grouped_gemm:groups=2,m=7,n=9,k=11,dtype=f32", "torch", "depends on values of its inputs"),
        (WORKLOADS[0].replace("+gelu", ""), "numpy", "calls no functions of torch"),
        (WORKLOADS[8] + ",seq_k=12,causal=true", "torch_flash", "a tensor of 108 constants, such as a mask"),
    ],
)
def test_program_that_is_no_sequence_of_calls_is_refused(
    text: str, program: str, says: str, tmp_path: Path
) -> None:
    choice = choice_of(parse(text), program)
    binary: Any = None
    with pytest.raises(InputError, match=says):
        write_export(choice, binary, tmp_path, "py")
    assert not list(tmp_path.iterdir())


def test_form_must_be_that_of_the_variant(tmp_path: Path) -> None:
    choice = choice_of(parse(WORKLOADS[0]), "onednn")
    binary: Any = None
    with pytest.raises(InputError, match="has no form 'cu'; use --format py"):
        write_export(choice, binary, tmp_path, "cu")
    kernel = compiled_alternative(choice, db=tmp_path / "a.db")
    assert kernel is not None
    assert kernel.variant.key == "gemm/numba_cpu"
    with pytest.raises(InputError, match="only GPU kernels can be exported, and calls of libraries"):
        write_export(kernel, binary, tmp_path, "py")
