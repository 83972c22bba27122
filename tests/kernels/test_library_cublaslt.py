"""cuBLASLt by its binding: operands, epilogues, plans and refusals, with a product of the processor."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from tests.kernels import fake_nvmath
from tests.kernels import kernel_checks as checks
from tests.support import measured, record_outcome
from tunebench import dispatch, variant
from tunebench.answer import lookup_workload
from tunebench.device import find
from tunebench.dispatch import LibraryKernel, bind
from tunebench.dtype import numpy_dtype
from tunebench.errors import InputError, LookupMiss
from tunebench.kernels.common import library_gpu
from tunebench.kernels.gemm import library_cublaslt
from tunebench.kernels.gemm.library_cublaslt import RANKS
from tunebench.libraries import torch_tensor
from tunebench.measure.verify import poisoned
from tunebench.space import Config
from tunebench.torch._tensor import bits_of
from tunebench.tuning.tunable import find_variants
from tunebench.workloads.operators.gemm import Gemm

pytestmark = pytest.mark.torch

parse_gemm = checks.parser(Gemm)


def parse(text: str) -> Gemm:
    return parse_gemm(text.removeprefix("gemm:"))


GPU = find("h200-sxm")
LIBRARY = library_cublaslt.VARIANT
PRESENT = {"torch": "9.9.9+cu130", "nvmath-python": "1.0.0", "nvidia-cublas": "13.1"}
RANK = Config({"rank": 3})
PRODUCTS = {
    "gemm:m=37,n=41,k=67,dtype=f32": "",
    "gemm:m=37,n=41,k=67,dtype=tf32,trans=tt": "",
    "gemm:m=37,n=41,k=67,dtype=bf16,batch=3,trans=tn": "",
    "gemm:m=1,n=41,k=67,dtype=f16,trans=nt": "",
    "gemm:m=37,n=1,k=67,dtype=f32,trans=tn,epilogue=bias": "BIAS",
    "gemm:m=37,n=41,k=67,dtype=bf16,batch=2,trans=nt,epilogue=bias": "BIAS",
    "gemm:m=37,n=41,k=67,dtype=f16,epilogue=residual": "",
    "gemm:m=37,n=41,k=67,dtype=f32,batch=2,epilogue=bias+residual": "BIAS",
    "gemm:m=37,n=41,k=67,dtype=f32,trans=nt,epilogue=bias+relu": "RELU_BIAS",
    "gemm:m=37,n=41,k=67,dtype=bf16,act=relu(x)": "RELU",
    "gemm:m=37,n=41,k=67,dtype=bf16,act=gelu_tanh(x)": "GELU",
    "gemm:m=37,n=41,k=67,dtype=f32,epilogue=bias,act=gelu_tanh(x)": "GELU_BIAS",
}
REFUSED = [
    "gemm:m=32,n=48,k=64,dtype=i8,trans=nt",
    "gemm:m=32,n=48,k=64,dtype=e4m3,trans=nt",
    "gemm:m=32,n=48,k=64,dtype=bf16,out=f32",
    "gemm:m=32,n=48,k=64,dtype=f32,epilogue=bias+gelu",
    "gemm:m=32,n=48,k=64,dtype=f32,epilogue=bias+relu+residual",
    "gemm:m=32,n=48,k=64,dtype=f32,pre=relu(x)",
]


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvmath.install(monkeypatch)
    pretend(monkeypatch, PRESENT)


def pretend(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Let these distributions be installed, and no others."""
    for module in (library_gpu, variant):
        monkeypatch.setattr(module, "installed_version", versions.get)


def tensors_of(text: str, seed: int = 1) -> dict[str, Any]:
    arrays = parse(text).draw(np.random.default_rng(seed))
    return {name: np.array(array, order="C") for name, array in arrays.items()}


@pytest.mark.parametrize("text", PRODUCTS)
def test_plan_writes_the_right_results_with_the_epilogue_of_the_call(text: str) -> None:
    workload, arrays = parse(text), tensors_of(text)
    outputs = poisoned(workload)
    tensors = {name: torch_tensor(array) for name, array in (arrays | outputs).items()}
    run = LIBRARY.call(workload, RANK, tensors)
    assert not fake_nvmath.Matmul.log, "the plan is made before the first call, and runs nothing"
    for _ in range(2):
        run()
    checks.assert_right(workload, arrays, outputs, text)
    assert fake_nvmath.Matmul.log == [(3, PRODUCTS[text])] * 2


@pytest.mark.parametrize("text", PRODUCTS)
def test_users_of_torch_receive_new_results_of_one_plan(text: str) -> None:
    kernel = bind(parse(text), LIBRARY, RANK, GPU)
    assert isinstance(kernel, LibraryKernel)
    results = kernel.results
    assert results is not None
    for seed in (2, 3):
        arrays = tensors_of(text, seed)
        inputs = {name: torch_tensor(array) for name, array in arrays.items()}
        if parse(text).batch == 1:
            inputs["a"] = inputs["a"][0]
        product = results(inputs).contiguous()
        (output,) = parse(text).outputs()
        outputs = {"c": bits_of(product).numpy().view(numpy_dtype(output.dtype))}
        checks.assert_right(parse(text), arrays, outputs, text)
    assert len(fake_nvmath.Matmul.alive) <= 2, "one plan, or one for each alignment"


@pytest.mark.parametrize("text", REFUSED)
def test_workload_that_no_call_computes_is_refused(text: str) -> None:
    assert LIBRARY.refuses(parse(text), GPU) == "gemm/library_cublaslt has no plans for such a workload"


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({}, "needs torch, which is not installed"),
        (PRESENT | {"torch": "2.9.0+cpu"}, "needs torch, which is installed without CUDA"),
        ({"torch": "9.9.9"}, "needs nvmath-python, which is not installed"),
        (
            {"torch": "9.9.9", "nvmath-python": "1.0.0"},
            "needs nvidia-cublas or nvidia-cublas-cu12, whose version is part of its records",
        ),
    ],
)
def test_absent_package_is_named(
    versions: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, versions)
    with pytest.raises(InputError, match=reason):
        find_variants(parse("gemm:m=32,n=48,k=64,dtype=bf16"), GPU, ["library_cublaslt"])


def test_rank_beyond_the_list_fails_alone() -> None:
    text = "gemm:m=8,n=8,k=8,dtype=f32"
    tensors = {name: torch_tensor(array) for name, array in tensors_of(text).items()}
    tensors["c"] = torch.empty(1, 8, 8)
    LIBRARY.call(parse(text), Config({"rank": fake_nvmath.ALGORITHMS - 1}), tensors)
    with pytest.raises(InputError, match="lists 5 algorithms, none of rank 5"):
        LIBRARY.call(parse(text), Config({"rank": fake_nvmath.ALGORITHMS}), tensors)
    assert len(LIBRARY.configs(parse(text), GPU)) == RANKS


def test_plans_are_freed_and_not_shared_between_threads() -> None:
    text = "gemm:m=8,n=8,k=8,dtype=f32"
    run = LIBRARY.results(parse(text), RANK)
    inputs = {name: torch_tensor(array) for name, array in tensors_of(text).items()}
    for _ in range(2):
        run(inputs)
    first = set(fake_nvmath.Matmul.alive)
    thread = threading.Thread(target=run, args=(inputs,))
    thread.start()
    thread.join()
    assert len(fake_nvmath.Matmul.log) == 3
    del run
    gc.collect()
    assert first
    assert not fake_nvmath.Matmul.alive


def test_messages_of_each_call_are_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    text = "gemm:m=8,n=8,k=8,dtype=f32"
    LIBRARY.results(parse(text), RANK)({n: torch_tensor(a) for n, a in tensors_of(text).items()})
    assert not caplog.records


def test_record_depends_on_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload, db = parse("gemm:m=32,n=48,k=64,dtype=bf16"), tmp_path / "a.db"
    assert LIBRARY.version(RANK) == "1.0.0 (nvidia-cublas 13.1)"
    record_outcome(db, workload, GPU, LIBRARY.key, RANK, measured(1.0))
    answer = lookup_workload(workload, device=GPU, db=db)
    assert (answer.variant, answer.config) == (LIBRARY.key, RANK)
    for package in ("nvidia-cublas", "nvmath-python"):
        pretend(monkeypatch, PRESENT | {package: "99"})
        dispatch.forget()
        with pytest.raises(LookupMiss):
            lookup_workload(workload, device=GPU, db=db, strict=True)
    dispatch.forget()
