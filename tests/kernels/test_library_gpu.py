"""Variants that call a library of a GPU: their programs without a GPU, and where such a variant is an answer.

Programs run on tensors of the processor where torch has their functions there, and on tensors without memory,
which have shapes and types only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tests.support import measured, package_variants, record_outcome
from tunebench import dispatch, kernels, variant
from tunebench.answer import lookup_workload
from tunebench.bound import bound
from tunebench.device import find
from tunebench.dispatch import LibraryKernel, bind
from tunebench.dtype import numpy_dtype, storage
from tunebench.errors import InputError, LookupMiss
from tunebench.export import default_format, write_export
from tunebench.kernels.common import library, library_gpu
from tunebench.kernels.common.library_gpu import LibraryGpu
from tunebench.libraries import torch_tensor, torch_type
from tunebench.space import Config
from tunebench.tuning.choice import choose_config, compiled_alternative
from tunebench.tuning.plan import Plan
from tunebench.tuning.tunable import TuningTarget, find_variants
from tunebench.tuning.weighted_workload import WeightedWorkload, find_any
from tunebench.workload import Workload
from tunebench.workloads import parse

pytest.importorskip("torch")
import torch

from tunebench.torch._tensor import bits_of, library_results

pytestmark = pytest.mark.torch

GPU = find("h200-sxm")
VERSION = "9.9.9+cu130"
ATTENTION = "attention:batch=2,heads=4,seq_q=37,head_dim=32"
PATHS = [
    "gemm:m=37,n=41,k=67,dtype=f32",
    "gemm:m=37,n=41,k=67,dtype=tf32,trans=tt",
    "gemm:m=37,n=41,k=67,dtype=bf16,batch=2,trans=tn",
    "gemm:m=37,n=41,k=67,dtype=bf16,trans=nt,epilogue=bias",
    "gemm:m=37,n=41,k=67,dtype=f16,epilogue=residual",
    "gemm:m=37,n=41,k=67,dtype=f32,batch=2,epilogue=residual",
    "gemm:m=37,n=41,k=67,dtype=f32,trans=nt,epilogue=bias+relu",
    "gemm:m=37,n=41,k=67,dtype=f32,trans=nt,epilogue=bias+relu+residual",
    "gemm:m=32,n=48,k=64,dtype=i8,trans=nt",
    "gemm:m=32,n=48,k=64,dtype=e4m3,trans=nt,out=bf16",
    "conv2d:n=2,c=6,h=11,w=9,k=4,r=3,s=3,stride=2,pad=1,dtype=f32,layout=nchw,epilogue=scale+bias+residual+relu",
    "conv2d:n=2,c=6,h=11,w=9,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+relu",
    "conv2d:n=2,c=6,h=11,w=9,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+residual+relu",
    "conv2d:n=2,c=6,h=11,w=9,k=4,r=3,s=3,stride=1,pad=1,dtype=bf16,layout=nchw,direction=wgrad",
    f"{ATTENTION},dtype=bf16,causal=true",
    f"{ATTENTION},dtype=f16,seq_k=45,heads_k=2,causal=true",
    f"{ATTENTION},dtype=f32,seq_k=45,heads_k=2",
    f"{ATTENTION},dtype=bf16,causal=true,direction=backward",
    "softmax:rows=11,cols=131,dtype=bf16",
    "softmax:rows=11,cols=131,dtype=f32,log=true,direction=backward",
    "softmax:rows=11,cols=131,dtype=f32,prologue=scale+mask",
    "layernorm:rows=5,cols=13,dtype=f32,prologue=bias+residual,stats=true",
    "rmsnorm:rows=5,cols=13,dtype=f32",
    "cross_entropy:rows=5,cols=13,dtype=f32",
    "gated_gemm:m=7,n=33,k=13,dtype=f32,activation=silu",
    "grouped_gemm:groups=2,m=16,n=16,k=16,dtype=bf16",
    "scaled_gemm:m=19,n=32,k=48,dtype=i8",
    "scatter_add:rows=90,cols=40,bins=7,dtype=bf16,index=i32,base=true,wraps=true",
    "scaled_gemm:m=7,n=9,k=256,dtype=f32,weight=i4,scales=group,shift=true,bias=true",
    "batchnorm_stats:rows=16,cols=8,dtype=f32",
    "elementwise:rows=5,cols=13,dtype=f32,expression=alpha*gelu(x+bias),vectors=bias,scalars=alpha",
    "reduction:rows=5,cols=13,dtype=f32,expression=square(x),reduce=sum",
]
ON_GPU_ONLY = {"flash", "flash_backward", "efficient", "cudnn", "torch_sync", "torch_grouped_mm"}
"""Programs of functions that torch has for GPUs only."""
GEMM = parse("gemm:m=32,n=48,k=64,dtype=bf16")
LIBRARY = kernels.variant("gemm/library_gpu")
MM = Config({"program": "torch_mm"})
NO_BINARY: Any = None


@pytest.fixture(autouse=True)
def _cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's version be that of a build with CUDA."""
    pretend_version(monkeypatch, VERSION)


@pytest.fixture(autouse=True)
def _cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the functions of cuDNN, which exist on GPUs only, be sequences of torch's."""

    def convolution_relu(x: Any, w: Any, bias: Any, *geometry: Any) -> Any:
        return torch.conv2d(x, w, bias, *geometry).relu()

    def add_relu(x: Any, w: Any, z: Any, alpha: float, bias: Any, *geometry: Any) -> Any:
        return (torch.conv2d(x, w, bias, *geometry) + alpha * z).relu()

    monkeypatch.setattr(torch, "cudnn_convolution_relu", convolution_relu)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)


def pretend_version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    """Let torch have another version, and cuBLAS be a distribution of its own."""
    versions = {"torch": version, "numpy": np.__version__, "nvidia-cublas": "13.1"}
    for module in (library, library_gpu, variant):
        monkeypatch.setattr(module, "installed_version", versions.get)


def _programs() -> Iterator[Any]:
    for text in PATHS:
        workload = parse(text)
        (chosen,) = (v for v in package_variants(LibraryGpu) if isinstance(workload, v.operator))
        for name, program in chosen.programs.items():
            if program.supports(workload):
                yield pytest.param(chosen, workload, Config({"program": name}), id=f"{name}-{text}")


PROGRAMS = list(_programs())
WITH_SHAPES = [case for case in PROGRAMS if case.values[1].operator != "batchnorm_stats"]
ON_HOST = [case for case in PROGRAMS if case.values[2]["program"] not in ON_GPU_ONLY]


@pytest.mark.parametrize(("chosen", "workload", "config"), ON_HOST)
def test_program_writes_the_right_results(
    chosen: LibraryGpu[Any], workload: Workload, config: Config
) -> None:
    arrays = {name: np.array(a, order="C") for name, a in workload.draw(np.random.default_rng(1)).items()}
    outputs = checks.poisoned(workload)
    tensors = {name: torch_tensor(array) for name, array in (arrays | outputs).items()}
    run = chosen.call(workload, config, tensors)
    run()
    checks.assert_right(workload, arrays, outputs, f"{workload} with {config}")


@pytest.mark.parametrize(("chosen", "workload", "config"), ON_HOST)
def test_program_returns_the_right_results(
    chosen: LibraryGpu[Any], workload: Workload, config: Config
) -> None:
    arrays = workload.draw(np.random.default_rng(2))
    results = chosen.results(workload, config)({name: torch_tensor(a) for name, a in arrays.items()})
    listed = results if isinstance(results, tuple) else (results,)
    outputs = {
        spec.name: bits_of(result.contiguous()).numpy().view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        for spec, result in zip(workload.outputs(), listed, strict=True)
    }
    checks.assert_right(workload, arrays, outputs, f"{workload} with {config}")


@pytest.mark.parametrize(("chosen", "workload", "config"), WITH_SHAPES)
def test_program_accepts_tensors_without_memory(
    chosen: LibraryGpu[Any], workload: Workload, config: Config
) -> None:
    """torch checks arguments, and infers shapes and types, of functions for GPUs, too."""
    inputs: dict[str, Any] = {
        spec.name: torch.empty(spec.shape, dtype=torch_type(storage(spec.dtype)), device="meta")
        if spec.shape
        else 0.5
        for spec in workload.inputs()
    }
    results = chosen.results(workload, config)(inputs)
    listed = results if isinstance(results, tuple) else (results,)
    for spec, result in zip(workload.outputs(), listed, strict=True):
        assert result.device.type == "meta"
        assert result.numel() == np.prod(spec.shape)
        assert result.dtype == torch_type(storage(spec.dtype)) or workload.operator == "gemm"


@pytest.mark.parametrize("frozen", [False, True], ids=["free", "frozen"])
def test_settings_of_precision_are_those_of_the_workload(
    monkeypatch: pytest.MonkeyPatch, *, frozen: bool
) -> None:
    # `torch.backends.disable_global_flags()`, which torch.testing calls when it is imported
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", not frozen)
    seen = []

    def multiply(a: Any, b: Any, **out: Any) -> Any:
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
        return a @ b

    monkeypatch.setattr(torch, "mm", multiply)
    a = torch.ones(1, 4, 4)
    for before in ("highest", "medium"):
        torch.set_float32_matmul_precision(before)
        try:
            for dtype in ("f32", "tf32", "bf16"):
                LIBRARY.results(parse(f"gemm:m=4,n=4,k=4,dtype={dtype}"), MM)({"a": a, "b": a})
            after = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        finally:
            torch.set_float32_matmul_precision("highest")
        assert after == (before, True)
    process = [(before, True) for before in (False, True)]
    assert seen == [(False, False), (True, True), process[0], (False, False), (True, True), process[1]]


def test_every_operator_has_a_library_of_gpus() -> None:
    operators = {kernel.operator for kernel in package_variants(variant.CudaVariant)}
    assert {chosen.operator for chosen in package_variants(LibraryGpu)} == operators


def test_bound_of_a_library_is_that_of_the_traffic() -> None:
    for text in PATHS:
        workload = parse(text)
        (chosen,) = (v for v in package_variants(LibraryGpu) if isinstance(workload, v.operator))
        table = chosen.configs(workload, GPU)
        floor = bound(chosen.costs(workload, table, GPU), workload.traffic(), GPU, rows=len(table)).us
        for kernel in package_variants(variant.CudaVariant):
            if kernel.refuses(workload, GPU) is None:
                rows = kernel.configs(workload, GPU)
                costs = kernel.costs(workload, rows, GPU)
                assert floor.max() <= bound(costs, workload.traffic(), GPU, rows=len(rows)).us.min(), kernel


def test_libraries_are_searched_last_where_the_gpu_is_present() -> None:
    searched, skipped = find_variants(GEMM, GPU, compilable=False)
    assert searched[-1].variant is LIBRARY
    assert searched[-1].prospects().predicted_us is None
    assert searched[0].prospects().predicted_us is not None
    searched, skipped = find_variants(GEMM, GPU, compilable=False, present=False)
    assert LIBRARY not in [tunable.variant for tunable in searched]
    reason = "gemm/library_gpu calls a library, which is timed on its GPU or not at all"
    assert skipped[LIBRARY.key] == reason
    with pytest.raises(InputError, match=reason):
        find_variants(GEMM, GPU, ["library_gpu"], present=False)


def test_suite_expects_the_time_of_a_kernel() -> None:
    weighted = WeightedWorkload(workload=GEMM)
    find_any("one", [weighted], TuningTarget(device=GPU, runner="cuda"), Plan(), (), compilable=False)
    assert weighted.variants[-1].variant is LIBRARY
    assert weighted.expected_us == min(v.predicted_us(v.fastest()) for v in weighted.variants[:-1])


@pytest.mark.parametrize(
    ("version", "reason"),
    [(None, "needs torch, which is not installed"), ("2.9.0+cpu", "is installed without CUDA .2.9.0.cpu.")],
)
def test_library_without_cuda_is_refused(
    version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_version(monkeypatch, version)
    with pytest.raises(InputError, match=reason):
        find_variants(GEMM, GPU, ["library_gpu"])


def test_library_is_an_answer_only_where_it_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "a.db"
    assert lookup_workload(GEMM, device=GPU, db=db, quiet=True).variant != LIBRARY.key
    record_outcome(db, GEMM, GPU, LIBRARY.key, MM, measured(1.0))
    answer = lookup_workload(GEMM, device=GPU, db=db)
    assert (answer.variant, answer.config, answer.how) == (LIBRARY.key, MM, "measured here")
    for version in ("2.0+cu118", None):  # the marker of a valid record depends on the versions, too
        pretend_version(monkeypatch, version)
        dispatch.forget()
        with pytest.raises(LookupMiss):
            lookup_workload(GEMM, device=GPU, db=db, strict=True)
    dispatch.forget()


def test_revision_depends_on_the_versions_of_nvidias_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY.version(MM) == "9.9.9+cu130 (nvidia-cublas 13.1)"
    before = LIBRARY.revision(GEMM, MM)
    monkeypatch.setattr(variant, "installed_version", {"torch": VERSION, "nvidia-cublas": "13.2"}.get)
    assert LIBRARY.revision(GEMM, MM) != before


def test_library_of_a_gpu_takes_tensors() -> None:
    kernel = bind(GEMM, LIBRARY, MM, GPU)
    assert isinstance(kernel, LibraryKernel)
    a, b = torch.randn(32, 64).bfloat16(), torch.randn(64, 48).bfloat16()
    (product,) = library_results(kernel, [a, b]) or ()
    torch.testing.assert_close(product, a @ b)
    arrays = GEMM.draw(np.random.default_rng(0)).values()
    with pytest.raises(InputError, match="takes tensors of torch on a GPU"):
        kernel(*arrays, *checks.poisoned(GEMM).values())


def test_lookup_names_the_call_and_export_writes_it(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    workload = parse("gemm:m=7,n=9,k=11,dtype=bf16,trans=nt,epilogue=bias")
    record_outcome(db, workload, GPU, LIBRARY.key, "program=torch_addmm", measured(1.0))
    choice = choose_config(workload, GPU, db=db)
    assert (choice.variant, choice.why, default_format(choice)) == (LIBRARY, "best known", "py")
    assert LIBRARY.calls(choice.config) == "torch.addmm or torch.baddbmm"
    files = write_export(choice, NO_BINARY, tmp_path / "call", "py")
    assert json.loads(files[1].read_text())["library"] == f"torch {VERSION} (nvidia-cublas 13.1)"
    module: dict[str, Any] = {}
    exec(files[0].read_text(), module)
    arrays = workload.draw(np.random.default_rng(3))
    product = module["run"](*map(torch_tensor, arrays.values()))
    outputs = {"c": bits_of(product).numpy().view(numpy_dtype("bf16"))}
    checks.assert_right(workload, arrays, outputs, files[0].read_text())
    kernel = compiled_alternative(choice, db=db)
    assert kernel is not None
    assert kernel.variant.language == "cuda"
