"""Convolutions of one tap by variants of gemm: the product they become, and its costs and launches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.convolutions import conv, training
from tests.kernels.kernel_checks import A100, H100, assert_emulates_right, exact
from tests.support import needs_compiler
from tunebench import kernels
from tunebench.kernels.conv2d._pointwise import Pointwise, gemm_of
from tunebench.variant import TensorMap
from tunebench.workloads.operators.conv2d import Conv2d

VARIANTS = [variant for variant in kernels.variants("conv2d") if isinstance(variant, Pointwise)]
LAYER = conv("n=3,c=24,h=8,w=7,k=40,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nhwc")
TRAINING = training(replace(LAYER, epilogue="bias+relu"))


@pytest.mark.parametrize("workload", TRAINING, ids=lambda workload: workload.direction)
def test_gemm_of_a_convolution_computes_it(workload: Conv2d) -> None:
    product = gemm_of(workload)
    assert product.flops() == workload.flops()
    inputs = exact(workload.draw(np.random.default_rng(0)))
    (reference,) = workload.reference(inputs).values()
    first, second = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}[workload.direction]
    shapes = {tensor.name: tensor.shape for tensor in product.inputs()}
    renamed = {"a": inputs[first].reshape(shapes["a"]), "b": inputs[second].reshape(shapes["b"])}
    renamed |= {"bias": inputs["bias"]} if workload.has_bias else {}
    value = product.reference(renamed)["c"].value
    np.testing.assert_allclose(value.reshape(reference.value.shape), reference.value, rtol=1e-12, atol=1e-12)


@needs_compiler
@pytest.mark.parametrize(
    ("variant", "workload"),
    list(zip(VARIANTS, (TRAINING[1], TRAINING[2], TRAINING[2]), strict=True)),
    ids=str,
)
def test_gradients_are_right(variant: Any, workload: Conv2d) -> None:
    table = variant.configs(workload, H100)
    config = table.config(random.Random(workload.direction).randrange(len(table)))
    assert_emulates_right(variant, workload, config, sanitize=True)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_space_costs_and_launches_are_those_of_gemm(variant: Any) -> None:
    for workload in TRAINING:
        product = gemm_of(workload)
        table, theirs = variant.configs(workload, H100), variant.product.configs(product, H100)
        np.testing.assert_array_equal(table.ordinals, theirs.ordinals)
        assert variant.default(workload, H100) == variant.product.default(product, H100)
        config = table.config(0)
        assert variant.revision(workload, config) == variant.product.revision(product, config)
        tensor_names = {tensor.name for tensor in (*workload.inputs(), *workload.outputs())}
        tensor_names |= {tensor.name for tensor in variant.scratch(workload, config)}
        for launch in variant.launches(workload, config):
            named = {a.tensor if isinstance(a, TensorMap) else a for a in launch.arguments}
            assert {name for name in named if isinstance(name, str)} <= tensor_names


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_emulation_workloads_run_the_same_binary(variant: Any) -> None:
    workload = replace(LAYER, n=32, c=256, h=57, w=57, k=72)
    for case in (workload, replace(workload, direction="wgrad")):
        config = variant.default(case, H100)
        small = variant.emulation_workload(case, config)
        assert small.flops() < case.flops() / 10
        assert variant.source(small, config) == variant.source(case, config)


def test_convolutions_that_are_no_gemm_are_refused() -> None:
    for variant in VARIANTS:
        assert variant.refuses(LAYER, H100) is None
        for change in ({"stride": 2}, {"pad": 1}, {"r": 3}, {"groups": 2}, {"layout": "nchw"}):
            assert "1 x 1" in str(variant.refuses(replace(LAYER, **change), H100))
        scaled = replace(LAYER, epilogue="scale+bias+relu")
        assert "not scale+bias+relu" in str(variant.refuses(scaled, H100))
    narrow = kernels.variant("conv2d/cuda_gemm_mma").refuses(replace(LAYER, c=23), A100)
    assert str(narrow).startswith("conv2d/cuda_gemm_mma copies 4 bytes")
