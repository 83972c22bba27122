"""The installed nvmath-python accepts what this package passes to it, as far as no GPU is needed."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("nvmath.linalg.advanced", reason="nvmath-python is not installed")

from nvmath.bindings import cublas, cublasLt
from nvmath.linalg import advanced
from nvmath.linalg._internal import epilog_protocol
from nvmath.linalg.advanced import matmulmod

from tests.export import test_cpp_call
from tests.kernels import fake_nvmath
from tests.kernels import kernel_checks as checks
from tests.kernels.test_library_cublaslt import PRODUCTS
from tunebench.kernels.gemm import library_cublaslt
from tunebench.kernels.gemm._cpp_call import matrix_layout
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


@pytest.mark.parametrize(
    ("prefix", "enumeration"),
    [
        ("CUBLASLT_EPILOGUE_", "Epilogue"),
        ("CUBLASLT_MATMUL_DESC_", "MatmulDescAttribute"),
        ("CUBLASLT_MATMUL_PREF_", "MatmulPreferenceAttribute"),
        ("CUBLASLT_MATRIX_LAYOUT_", "MatrixLayoutAttribute"),
        ("CUBLASLT_ORDER_", "Order"),
        ("CUBLAS_COMPUTE_", "ComputeType"),
    ],
)
def test_header_for_exported_calls_has_numbers_of_the_package(prefix: str, enumeration: str) -> None:
    header = Path(test_cpp_call.STAND_IN, "cublasLt.h").read_text(encoding="utf-8")
    members = re.findall(rf"\b{prefix}(\w+) = (\d+)", header)
    numbers = getattr(cublas if enumeration == "ComputeType" else cublasLt, enumeration)
    assert members
    for name, number in members:
        assert numbers["COMPUTE_" * (enumeration == "ComputeType") + name] == int(number)


def test_attributes_of_exported_calls_have_the_sizes_of_the_package() -> None:
    layout = cublasLt.get_matrix_layout_attribute_dtype
    desc, preference = (
        cublasLt.get_matmul_desc_attribute_dtype,
        cublasLt.get_matmul_preference_attribute_dtype,
    )
    of_layout, of_desc = cublasLt.MatrixLayoutAttribute, cublasLt.MatmulDescAttribute
    of_preference = cublasLt.MatmulPreferenceAttribute
    assert np.dtype(layout(of_layout.ORDER)).itemsize == 4
    assert np.dtype(layout(of_layout.BATCH_COUNT)).itemsize == 4
    assert np.dtype(layout(of_layout.STRIDED_BATCH_OFFSET)).itemsize == 8
    assert np.dtype(desc(of_desc.EPILOGUE)).itemsize == 4
    assert np.dtype(desc(of_desc.BIAS_BATCH_STRIDE)).itemsize == 8
    assert np.dtype(preference(of_preference.MAX_WORKSPACE_BYTES)).itemsize == 8
    assert np.dtype(preference(of_preference.MIN_ALIGNMENT_A_BYTES)).itemsize == 4


@pytest.mark.parametrize("strides", ["first", "second"])
@pytest.mark.parametrize("shape", [(5, 7), (5, 1), (1, 7), (1, 1)])
def test_exported_layouts_are_those_of_the_package(shape: tuple[int, int], strides: str) -> None:
    rows, columns = shape
    pair = (1, rows) if strides == "first" else (columns, 1)
    order, leading, _ = matmulmod.get_matrix_layout_traits(shape, pair, (), col_bcast=False)
    assert matrix_layout(shape, pair) == (rows, columns, leading, order.name)
