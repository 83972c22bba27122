"""Variants that call a library: results of every program, and where such a variant is an answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tests.kernels.test_numba_cpu_variants import DEFAULT
from tests.support import measured, package_variants, record_outcome
from tunebench import dispatch, kernels, libraries, variant
from tunebench.answer import lookup_workload
from tunebench.bound import bound
from tunebench.compile import compile_config
from tunebench.compile.cache import BinaryCache
from tunebench.device import local_cpu
from tunebench.dispatch import LibraryKernel, bind
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError, LookupMiss
from tunebench.kernels.common.library_cpu import LibraryCpu
from tunebench.libraries import torch_tensor
from tunebench.measure.cpu import CpuRunner
from tunebench.measure.timing import Protocol
from tunebench.outcome import Measured
from tunebench.space import Config
from tunebench.task import Task
from tunebench.tuning.tunable import find_variants
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.operators.reduction import Reduction

pytest.importorskip("torch")
from tunebench.torch._tensor import bits_of, launch, library_results

pytestmark = pytest.mark.torch

CPU = local_cpu()
PATHS = [
    *DEFAULT,
    "gemm:m=37,n=41,k=67,dtype=f32",
    "gemm:m=37,n=41,k=67,dtype=f16,batch=2,trans=tn",
    "gemm:m=37,n=41,k=67,dtype=bf16,trans=nt,epilogue=bias+residual,act=tanh(x)",
    "gemm:m=37,n=41,k=67,dtype=f32,trans=tt,epilogue=bias+silu",
    "gemm:m=37,n=41,k=67,dtype=f32,trans=nt,epilogue=bias+relu+residual",
    "gemm:m=37,n=41,k=67,dtype=f32,epilogue=residual",
    "conv2d:n=2,c=6,h=11,w=9,k=4,r=3,s=3,stride=2,pad=1,dtype=f32,layout=nchw,epilogue=scale+bias+residual+relu",
    "conv2d:n=2,c=6,h=11,w=9,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,act=gelu(x),epilogue=bias",
    "softmax:rows=11,cols=131,dtype=bf16",
    "softmax:rows=11,cols=131,dtype=f32,log=true,direction=backward",
    "gated_gemm:m=7,n=33,k=13,dtype=f32,activation=silu",
    "attention:batch=2,heads=4,seq_q=37,head_dim=20,dtype=f32,seq_k=45,heads_k=2,causal=true",
    "attention:batch=2,heads=2,seq_q=9,head_dim=16,dtype=f32,direction=backward",
    "scaled_gemm:m=19,n=32,k=48,dtype=i8",
    "scatter_add:rows=50,cols=24,bins=60,dtype=f16,skipped=3",
    "scaled_gemm:m=7,n=9,k=256,dtype=f32,weight=i4,scales=group,shift=true,bias=true",
]
GEMM = parse("gemm:m=32,n=48,k=64,dtype=f32")
LIBRARY = kernels.variant("gemm/library_cpu")
ONEDNN = Config({"program": "onednn"})


def _programs(text: str) -> Iterator[Any]:
    workload = parse(text)
    for candidate in package_variants(LibraryCpu):
        if candidate.refuses(workload, CPU) is None:
            table = candidate.configs(workload, CPU)
            for row in range(len(table)):
                config = table.config(row)
                yield pytest.param(candidate, workload, config, id=f"{config}-{text}")


@pytest.mark.parametrize(
    ("library", "workload", "config"), [case for text in PATHS for case in _programs(text)]
)
def test_every_run_of_a_program_reads_its_inputs(
    library: LibraryCpu[Any], workload: Workload, config: Config
) -> None:
    first = {
        name: np.array(array, order="C") for name, array in workload.draw(np.random.default_rng(1)).items()
    }
    outputs = checks.poisoned(workload)
    run = library.call(workload, config, {**first, **outputs})
    run()
    checks.assert_right(workload, first, outputs, f"{workload} with {config}")
    second = checks.with_extremes(workload)
    if any(not array.shape for array in second.values()):
        return  # a scalar is read as the call is made
    for name, array in second.items():
        first[name][...] = array
    run()
    checks.assert_right(workload, second, outputs, f"{workload} with {config} on other inputs")


@pytest.mark.parametrize(
    ("library", "workload", "config"), [case for text in PATHS for case in _programs(text)]
)
def test_results_of_a_program_are_in_new_memory(
    library: LibraryCpu[Any], workload: Workload, config: Config
) -> None:
    kernel = bind(workload, library, config, CPU)
    inputs = {
        name: torch_tensor(np.array(array, order="C"))
        for name, array in workload.draw(np.random.default_rng(2)).items()
    }
    results = library_results(kernel, list(inputs.values()))
    assert results is not None
    memory = [
        t.untyped_storage().data_ptr() for t in (*inputs.values(), *results) if not isinstance(t, float)
    ]
    assert len(set(memory)) == len(memory)
    outputs = {
        spec.name: bits_of(result).numpy().view(numpy_dtype(spec.dtype)).reshape(spec.shape)
        for spec, result in zip(workload.outputs(), results, strict=True)
    }
    assert not any(result.is_inference() or result.requires_grad for result in results)
    arrays = workload.draw(np.random.default_rng(2))
    checks.assert_right(workload, arrays, outputs, f"{workload} with {config}")


@pytest.mark.parametrize("text", [str(GEMM), "gated_gemm:m=7,n=33,k=13,dtype=f32,activation=silu"])
def test_numpy_multiplies_into_the_memory_of_the_caller(text: str) -> None:
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(1))
    (output,) = checks.poisoned(workload).values()
    call = libraries.numpy_call(workload, inputs, output)
    assert call is not None
    assert call() is output


def test_torch_reduces_into_the_memory_of_the_caller() -> None:
    import torch

    from tunebench.libraries.reduction import torch_call_into

    tensors, output = {"x": torch.randn(5, 7)}, torch.empty(5)
    plain = Reduction(rows=5, cols=7, dtype="f32", expression="x", reduce="sum")
    call = torch_call_into(plain, tensors, output)
    assert call is not None
    assert call() is output
    torch.testing.assert_close(output, tensors["x"].sum(dim=1))
    assert torch_call_into(dataclasses.replace(plain, then="sqrt(x)"), tensors, output) is None


@pytest.mark.parametrize(
    ("text", "program", "made"),
    [
        ("conv2d:n=1,c=3,h=5,w=6,k=4,r=1,s=1,stride=1,pad=0,dtype=f32,layout=nhwc", "torch", 1),
        ("layernorm:rows=5,cols=7,dtype=f32", "torch", 1),
        ("gemm:m=4,n=5,k=6,dtype=f32", "numpy", 1),
        ("cross_entropy:rows=5,cols=7,dtype=f32", "torch", 3),
    ],
)
def test_programs_of_f32_are_made_once_for_their_tensors(
    text: str, program: str, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making a program takes 200 us with cold caches; one that reads indices is made in each run."""
    workload = parse(text)
    name = f"{program}_call" if program == "numpy" else f"{program}_calls"
    make, calls = getattr(libraries, name), []

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(libraries, name, counted)
    tensors = {**workload.draw(np.random.default_rng(1)), **checks.poisoned(workload)}
    library = kernels.variant(f"{workload.operator}/library_cpu")
    assert isinstance(library, LibraryCpu)
    run = library.call(workload, Config({"program": program}), tensors)
    for _ in range(3):
        run()
    assert len(calls) == made


def test_every_operator_with_a_kernel_of_processors_has_one_with_a_library() -> None:
    operators = {kernel.operator for kernel in package_variants(variant.NumbaCpuVariant)}
    assert {library.operator for library in package_variants(LibraryCpu)} == operators


@pytest.mark.parametrize("text", PATHS)
def test_work_counted_for_a_library_is_at_most_that_of_kernels(text: str) -> None:
    """A bound above the time of a library would be wrong, and one below it says nothing about kernels."""
    workload = parse(text)
    floors = {False: 0.0, True: 0.0}
    for candidate in kernels.variants(workload):
        if candidate.refuses(workload, CPU) is None:
            table = candidate.configs(workload, CPU)
            costs = candidate.costs(workload, table, CPU)
            us = bound(costs, workload.traffic(), CPU, rows=len(table)).us.min()
            is_library = isinstance(candidate, LibraryCpu)
            floors[is_library] = max(floors[is_library], float(us))
    assert floors[True] <= floors[False]


def test_a_program_is_measured_like_a_kernel(tmp_path: Path) -> None:
    task = Task(variant=LIBRARY, workload=GEMM, config=ONEDNN, device=CPU)
    binary = compile_config(LIBRARY, GEMM, ONEDNN, CPU, BinaryCache(tmp_path))
    protocol = Protocol(cache="warm", warmups=0, min_samples=2, max_samples=2)
    outcome, _ = CpuRunner(protocol, CPU).run(task, binary, None)
    assert isinstance(outcome, Measured)
    assert outcome.verification.how == "reference"
    assert binary.target.startswith("torch 2")


def test_libraries_are_searched_last_and_only_with_baselines() -> None:
    searched, _ = find_variants(GEMM, CPU)
    assert [tunable.variant.key for tunable in searched] == ["gemm/numba_cpu", "gemm/library_cpu"]
    searched, _ = find_variants(GEMM, CPU, libraries=False)
    assert [tunable.variant.key for tunable in searched] == ["gemm/numba_cpu"]
    searched, _ = find_variants(GEMM, CPU, ["library_cpu"], libraries=False)
    assert [tunable.variant.key for tunable in searched] == ["gemm/library_cpu"]


def test_a_library_is_an_answer_only_where_it_was_measured(tmp_path: Path) -> None:
    db = tmp_path / "a.db"
    assert lookup_workload(GEMM, device=CPU, db=db, quiet=True).variant == "gemm/numba_cpu"
    record_outcome(db, GEMM, CPU, LIBRARY.key, ONEDNN, measured(1.0))
    answer = lookup_workload(GEMM, device=CPU, db=db)
    assert (answer.variant, answer.config, answer.how) == (LIBRARY.key, ONEDNN, "measured here")


def test_a_record_of_another_version_of_the_library_is_not_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "a.db"
    record_outcome(db, GEMM, CPU, LIBRARY.key, ONEDNN, measured(1.0))
    assert lookup_workload(GEMM, device=CPU, db=db).config == ONEDNN  # marks the record as valid
    for version in ("99.1", None):
        monkeypatch.setattr(variant, "installed_version", lambda package, version=version: version)
        dispatch.forget()
        with pytest.raises(LookupMiss):
            lookup_workload(GEMM, device=CPU, db=tmp_path / "a.db", strict=True)
    dispatch.forget()


def test_an_absent_library_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tunebench.kernels.common import library

    monkeypatch.setattr(library, "installed_version", lambda package: None)
    assert LIBRARY.refuses(GEMM, CPU) == "gemm/library_cpu needs numpy or torch, which is not installed"
    half = parse("softmax:rows=4,cols=8,dtype=f16,prologue=mask")
    reason = kernels.variant("softmax/library_cpu").refuses(half, CPU)
    assert reason == "softmax/library_cpu has no program that computes such a workload as exactly as required"
    monkeypatch.setattr(variant, "installed_version", lambda package: None)
    with pytest.raises(InputError, match="needs torch, which is not installed"):
        compile_config(LIBRARY, GEMM, ONEDNN, CPU, BinaryCache(tmp_path))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_library_is_called_on_arrays(dtype: str) -> None:
    workload = parse(f"softmax:rows=5,cols=7,dtype={dtype}")
    kernel = bind(workload, kernels.variant("softmax/library_cpu"), Config({"program": "torch_out"}), CPU)
    assert isinstance(kernel, LibraryKernel)
    inputs, outputs = workload.draw(np.random.default_rng(0)), checks.poisoned(workload)
    kernel(*inputs.values(), *outputs.values())
    checks.assert_right(workload, inputs, outputs, "arrays")
    bits = checks.poisoned(workload)
    view = np.uint16 if dtype == "bf16" else np.float32
    kernel(*(array.view(view) for array in inputs.values()), *(array.view(view) for array in bits.values()))
    checks.assert_right(workload, inputs, bits, "bits")
    with pytest.raises(InputError, match="x must be C-contiguous"):
        kernel(np.zeros((7, 5), np.float32), outputs["y"])


def test_a_library_is_called_on_tensors_in_the_order_of_their_memory() -> None:
    import torch

    workload = parse("conv2d:n=1,c=3,h=5,w=6,k=4,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc")
    kernel = bind(workload, kernels.variant("conv2d/library_cpu"), Config({"program": "onednn"}), CPU)
    last = torch.channels_last
    x, w = torch.randn(1, 3, 5, 6).to(memory_format=last), torch.randn(4, 3, 3, 3).to(memory_format=last)
    y = torch.empty(1, 4, 5, 6).to(memory_format=last)
    launch(kernel, [x, w.requires_grad_(), y])
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w.detach(), padding=1))


def test_numpy_users_get_the_library_that_was_fastest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunebench.numba import matmul

    db = tmp_path / "a.db"
    record_outcome(db, GEMM, CPU, LIBRARY.key, ONEDNN, measured(1.0))
    monkeypatch.setenv("TUNEBENCH_DB", str(db))
    dispatch.forget()
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((32, 64), np.float32), rng.standard_normal((64, 48), np.float32)
    calls: list[dispatch.DispatchedCall] = []
    with dispatch.watching(calls.append):
        product = matmul(a, b)
    dispatch.forget()
    assert [call.variant for call in calls] == [LIBRARY.key]
    np.testing.assert_allclose(product, a @ b, rtol=1e-4, atol=1e-4)
