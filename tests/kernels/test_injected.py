"""Expressions as activations of the epilogue: their meaning, refusals, tolerances, and kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import exact
from tests.support import needs_compiler, needs_numba_cuda
from tunebench import kernels
from tunebench.compile.numba_cuda import key_numba_cuda
from tunebench.device import representative
from tunebench.errors import InputError
from tunebench.variant import CudaVariant, NumbaCudaVariant
from tunebench.workload import Workload
from tunebench.workloads import parse
from tunebench.workloads.common.activation import reach

GELU_TANH = "0.5*x*(1+tanh(0.7978845608*(x+0.044715*x*x*x)))"
MEANINGS: dict[str, Callable[[Any], Any]] = {
    GELU_TANH: lambda x: 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x))),
    "max(min(x,6),0)": lambda x: np.clip(x, 0, 6),
    "x*min(max(x+3,0),6)/6": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "max(x,0)+log(1+exp(-abs(x)))": lambda x: np.logaddexp(x, 0),
    "step(x)": lambda x: (x > 0).astype(x.dtype),
}


RELU6 = "max(min(x,6),0)"
CONV = "conv2d:n=2,c=8,h=5,w=6,k=4,r=3,s=3,stride=1,pad=1,dtype=f32"


def gemm(text: str) -> Workload:
    return parse(f"gemm:m=9,n=11,k=64,{text}")


def product(workload: Any, t: Mapping[str, Any], act: Callable[[Any], Any]) -> Any:
    """Compute in the type of the tensors, one operation after the other."""
    sums = t["a"] @ t["b"] + t.get("bias", t["a"].dtype.type(0))
    c = act(sums)
    assert c.dtype == sums.dtype
    return c + t["residual"] if "residual" in t else c


@pytest.mark.parametrize("act", MEANINGS)
@pytest.mark.parametrize("epilogue", ["none", "bias+residual"])
def test_activation_is_applied_after_bias_and_before_residual(act: str, epilogue: str) -> None:
    workload = gemm(f"dtype=f32,batch=2,epilogue={epilogue},act={act}")
    inputs = exact(workload.draw(np.random.default_rng(0)))
    expected = product(workload, inputs, MEANINGS[act])
    np.testing.assert_allclose(workload.reference(inputs)["c"].value, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("act", MEANINGS)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_right_kernel_is_within_tolerance(act: str, dtype: str) -> None:
    workload = gemm(f"dtype={dtype},epilogue=bias+residual,act={act}")
    # A tolerance far above all errors would hide mistakes.
    assert 1e-2 < share(workload, MEANINGS[act]) < 1


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "another approximation": (
        GELU_TANH,
        lambda x: (0.5 * x * (1 + np.vectorize(math.erf)(x * math.sqrt(0.5)))).astype(x.dtype),
    ),
    "left out": ("max(x,0)+log(1+exp(-abs(x)))", lambda x: np.maximum(x, 0)),
    "another limit": ("max(min(x,6),0)", lambda x: np.clip(x, 0, np.float32(6.0001))),
    "another branch": ("step(x)", lambda x: (x > -1).astype(x.dtype)),
}


@pytest.mark.parametrize("name", WRONG)
def test_kernel_with_another_activation_exceeds_tolerance(name: str) -> None:
    act, wrong = WRONG[name]
    assert share(gemm(f"dtype=f32,act={act}"), wrong) > 1


def share(workload: Workload, act: Callable[[Any], Any]) -> float:
    """Return the largest error of an f32 kernel as a share of the tolerance."""
    inputs = workload.draw(np.random.default_rng(1))
    single = {name: value.astype(np.float32) for name, value in inputs.items()}
    (out,) = workload.outputs()
    output = product(workload, single, act).astype(inputs["a"].dtype)
    return checks.worst(workload, inputs, {out.name: output})


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("epilogue=bias,act=gelu(x)", "epilogue=bias+gelu"),
        ("epilogue=bias+residual,act=relu( x )", "epilogue=bias+relu+residual"),
        ("epilogue=none,act=relu(x)", "act=relu(x)"),
        ("epilogue=residual,act=silu(x)", "epilogue=residual,act=silu(x)"),
        ("epilogue=bias,act=tanh(x)", "epilogue=bias,act=tanh(x)"),
        ("act=(x)", ""),
    ],
)
def test_named_activation_replaces_its_expression(given: str, canonical: str) -> None:
    workload = gemm(f"dtype=f16,{given}")
    assert str(workload) == ",".join(filter(None, ("gemm:m=9,n=11,k=64,dtype=f16", canonical)))
    assert parse(str(workload)) == workload


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dtype=f32,act=x*y", "x its only name; it has x, y"),
        ("dtype=f32,act=1+2", "x its only name; it has none"),
        ("dtype=f32,act=exp(x)", "limit them (min, max)"),
        ("dtype=f32,act=log(x)", "leave the domain of log"),
        ("dtype=f16,act=square(x)", "or overflow f32 or f16, where x is within 256 of 0"),
        ("dtype=f32,act=swish(x)", "unknown function"),
        ("dtype=f32,epilogue=bias+gelu,act=tanh(x)", "epilogue=bias+gelu already has an activation"),
        ("dtype=i8,act=tanh(x)", "i8 has no epilogue"),
    ],
)
def test_invalid_expressions_are_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        gemm(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("terms", [1, 3, 64, 4096])
def test_sums_stay_within_reach(terms: int) -> None:
    """Chernoff's bound at the best exponent for this number of terms, from the moments."""
    exponents = np.linspace(1e-4, 0.999, 5000)
    limit = reach(terms) - 40.0  # range of bias and residual
    tails = -exponents * limit - terms / 2 * np.log1p(-np.square(exponents))
    assert tails.min() < -math.log(1e12)


def test_parts_do_what_the_whole_does() -> None:
    workload = gemm(f"dtype=f32,epilogue=bias+residual,act={GELU_TANH}")
    alone, after = workload.unfused()
    assert str(alone) == "gemm:m=9,n=11,k=64,dtype=f32"
    inputs = exact(workload.draw(np.random.default_rng(2)))
    c = alone.reference(inputs)["c"].value
    activated = after.reference({"c": c[0], "bias": inputs["bias"], "residual": inputs["residual"][0]})[
        "out"
    ].value
    np.testing.assert_allclose(activated, workload.reference(inputs)["c"].value[0], rtol=1e-12)


def test_a_chain_that_is_too_long_to_write_has_no_parts() -> None:
    long = "+".join(["x*x"] * 55)
    workload = gemm(f"dtype=f32,epilogue=bias,act=tanh({long})")
    assert workload.unfused() == ()


# -- convolutions --------------------------------------------------------------------------------------------


def test_a_convolution_is_activated_behind_its_residual() -> None:
    workload = parse(f"{CONV},layout=nhwc,epilogue=scale+bias+residual,act={GELU_TANH}")
    plain = parse(f"{CONV},layout=nhwc,epilogue=scale+bias+residual")
    inputs = exact(workload.draw(np.random.default_rng(3)))
    activated, sums = (convolution.reference(inputs)["y"].value for convolution in (workload, plain))
    np.testing.assert_allclose(activated, MEANINGS[GELU_TANH](sums), rtol=1e-12, atol=1e-13)
    alone, after = workload.unfused()
    y = alone.reference({"x": inputs["x"], "w": inputs["w"]})["y"].value.reshape(60, 4)
    operands = {
        "scale": inputs["scale"],
        "bias": inputs["bias"],
        "residual": inputs["residual"].reshape(60, 4),
    }
    parts = after.reference({"y": y, **operands})["out"].value
    np.testing.assert_allclose(parts.reshape(activated.shape), activated, rtol=1e-12, atol=1e-13)


def test_relu_of_conv2d_becomes_the_named_epilogue() -> None:
    for epilogue in ("bias", "bias+residual", "scale+bias", "scale+bias+residual"):
        workload = parse(f"{CONV},layout=nchw,epilogue={epilogue},act=relu(x)")
        assert str(workload) == f"{CONV},layout=nchw,epilogue={epilogue}+relu"
    assert str(parse(f"{CONV},layout=nchw,act=relu(x)")) == f"{CONV},layout=nchw,act=relu(x)"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("direction=dgrad,act=tanh(x)", "act=tanh(x) needs direction=fprop, not dgrad; leave it out"),
        ("epilogue=bias+relu,act=tanh(x)", "epilogue=bias+relu already has an activation"),
        ("act=tanh(y)", "x its only name; it has y"),
        ("act=exp(x)", "limit them (min, max)"),
    ],
)
def test_expressions_that_conv2d_cannot_have_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(f"{CONV},layout=nhwc,{text}")
    assert says in str(caught.value)


@pytest.mark.parametrize("key", ["conv2d/cuda_gemm_simt", "conv2d/cuda_gemm_mma", "conv2d/cuda_gemm_wgmma"])
def test_products_refuse_a_residual_before_the_activation(key: str) -> None:
    """Gemm adds the residual after the activation."""
    layer = "conv2d:n=2,c=64,h=8,w=8,k=64,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nhwc"
    variant, device = kernels.variant(key), representative("sm_90")
    refused = parse(f"{layer},epilogue=bias+residual,act={RELU6}")
    assert "adds a residual after act" in str(variant.refuses(refused, device))
    assert variant.refuses(parse(f"{layer},epilogue=bias,act={RELU6}"), device) is None
    assert variant.refuses(parse(f"{layer},epilogue=bias,act=gelu(x)"), device) is None


@needs_compiler
def test_parts_of_sums_are_activated_once_added_up() -> None:
    workload = parse(f"{CONV},layout=nhwc,epilogue=bias,act={RELU6}")
    variant, device = kernels.variant("conv2d/cuda_implicit_gemm"), representative("sm_90")
    assert isinstance(variant, CudaVariant)
    table = variant.configs(workload, device)
    config = table.config(int(np.flatnonzero(table["split"] == 2)[0]))
    checks.assert_emulates_right(variant, workload, config)


# -- kernels -------------------------------------------------------------------------------------------------

CUDA = [v for v in kernels.variants("gemm") if isinstance(v, CudaVariant)]


def small(variant: CudaVariant[Any], end: str) -> Workload:
    """A small product that the variant supports: of f16, or of e4m3 with sums in f32."""
    product = "gemm:m=64,n=64,k=64,dtype={},trans=nt,epilogue=bias" + end
    half = parse(product.format("f16"))
    if variant.refuses(half, representative("sm_90")) is None:
        return half
    return parse(product.format("e4m3") + ",accumulate=f32")


@pytest.mark.parametrize("variant", CUDA, ids=str)
def test_an_expression_is_text_of_the_source_and_a_name_is_not(variant: CudaVariant[Any]) -> None:
    device = representative("sm_90")
    named, injected = (small(variant, end) for end in ("+gelu", ",act=max(min(x,6),0)"))
    texts = [variant.source(w, variant.default(w, device)) for w in (named, injected)]
    assert ["Injected" in text for text in texts] == [False, True]
    assert "6.0f" in texts[1].partition("struct Injected")[2].partition("};")[0]


@needs_numba_cuda
@pytest.mark.parametrize(
    "texts",
    [
        ("gemm:m=9,n=7,k=5,dtype=f32,act=tanh(x)", "gemm:m=9,n=7,k=5,dtype=f32,act=erf(x)"),
        ("rmsnorm:rows=5,cols=37,dtype=f32,eps=0.25", "rmsnorm:rows=5,cols=37,dtype=f32,eps=0.5"),
    ],
)
def test_binaries_of_numba_cuda_are_kept_apart(texts: tuple[str, str]) -> None:
    """Values that the kernel closes over are part of the machine code, numbers included."""
    pytest.importorskip("numba.cuda")
    device, (first, second) = representative("sm_90"), map(parse, texts)
    variant = kernels.variant(f"{first.operator}/numba_cuda")
    assert isinstance(variant, NumbaCudaVariant)
    config = variant.default(first, device)
    assert key_numba_cuda(variant, first, config, device) != key_numba_cuda(variant, second, config, device)
