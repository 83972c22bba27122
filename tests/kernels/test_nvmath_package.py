"""The installed nvmath-python accepts what this package passes to it, as far as no GPU is needed."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("nvmath.linalg.advanced", reason="nvmath-python is not installed")

from nvmath.bindings import cublasLt
from nvmath.linalg import advanced
from nvmath.linalg._internal import epilog_protocol
from nvmath.linalg.advanced import matmulmod

from tests.kernels import fake_nvmath
from tests.kernels import kernel_checks as checks
from tests.kernels.test_library_cublaslt import PRODUCTS
from tunebench.kernels.gemm import library_cublaslt
from tunebench.libraries import torch_tensor
from tunebench.workloads.operators.gemm import Gemm

gemm = checks.parser(Gemm)

pytestmark = pytest.mark.torch


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(
    "method", ["__init__", "plan", "reset_operands_unchecked", "execute", "release_operands", "free"]
)
def test_stand_in_has_the_parameters_of_the_package(method: str) -> None:
    fake, real = getattr(fake_nvmath.Matmul, method), getattr(advanced.Matmul, method)
    assert parameters_of(fake) == parameters_of(real)


@pytest.mark.parametrize("kind", ["MatmulEpilog", "MatmulComputeType"])
def test_stand_in_has_numbers_of_the_package(kind: str) -> None:
    for member in getattr(fake_nvmath, kind):
        assert getattr(advanced, kind)[member.name] == member.value


@pytest.mark.parametrize("dtype", ["f32", "tf32", "bf16"])
def test_options_exist(dtype: str) -> None:
    options = library_cublaslt._options(gemm(f"m=8,n=8,k=8,dtype={dtype}"))
    accepted = advanced.MatmulOptions(**options)
    assert accepted.blocking == "auto", "an execution returns before the GPU has finished"
    assert dataclasses.asdict(advanced.MatmulPlanPreferences(limit=library_cublaslt.RANKS))["limit"] == 16


@pytest.mark.parametrize("text", PRODUCTS)
def test_operands_are_accepted_and_the_result_is_column_major(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cublasLt, "get_version", lambda: 130000)
    workload = gemm(text.removeprefix("gemm:"))
    arrays = workload.draw(np.random.default_rng(0))
    tensors = {name: torch_tensor(np.array(array, order="C")) for name, array in arrays.items()}
    tensors["c"] = torch_tensor(np.zeros((workload.batch, workload.m, workload.n), np.float32))
    layouts = [
        matmulmod.MatrixLayout(tuple(operand.shape), tuple(operand.stride()))
        for operand in library_cublaslt._operands(workload, tensors)
    ]
    logger = logging.getLogger("test")
    traits = matmulmod.get_mm_traits(*layouts, True, logger)
    assert (workload.n, workload.m, workload.k) == (traits.M, traits.N, traits.K)
    assert traits.batch_count == workload.batch
    result = matmulmod.get_result_traits(traits, cublasLt.Order.COL, logger).d_layout_traits
    assert (result.order, result.ld) == (cublasLt.Order.COL, workload.n)
    if workload.has_bias:
        bias = dataclasses.make_dataclass("Bias", ["shape", "strides"])((workload.n,), (1,))
        handler = epilog_protocol.BiasHandler(logger, traits, cublasLt.Epilogue.BIAS, "f", "f", None)
        handler.validate(bias)
