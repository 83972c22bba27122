"""Prologues of gemm and conv2d: their meaning, refusals, tolerances, and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.kernels.kernel_checks import exact, worst
from tests.support import needs_compiler
from tunebench import kernels
from tunebench.device import local_cpu, representative
from tunebench.dtype import numpy_dtype, storage
from tunebench.emulate.emulator import watch
from tunebench.errors import InputError
from tunebench.forecast.library.kernel import library_kernels
from tunebench.measure.verify import draw
from tunebench.variant import CudaVariant, NumbaCpuVariant, strip_comments
from tunebench.workload import Workload
from tunebench.workloads import parse

Function = Callable[..., Any]

MEANINGS: dict[str, Function] = {
    "max(x*scale+shift,0)": lambda x, scale, shift: np.maximum(x * scale + shift, 0),
    "x/(1+exp(-x))*scale": lambda x, scale, shift: x / (1 + np.exp(-x)) * scale,
    "step(x-shift)": lambda x, scale, shift: (x > shift).astype(x.dtype),
    "tanh(x)": lambda x, scale, shift: np.tanh(x),
}


def gemm(text: str) -> Workload:
    return parse(f"gemm:m=9,n=11,k=64,{text}")


def product(workload: Any, t: Mapping[str, Any], function: Function, dtype: Any = None) -> Any:
    """Compute in the type of the tensors; round the operand to `dtype` if it is given."""
    a = t["a"] if workload.trans[0] == "n" else t["a"].swapaxes(1, 2)
    a = function(a, t.get("pre_scale"), t.get("pre_shift"))
    assert a.dtype == t["a"].dtype
    if dtype is not None:
        a = a.astype(dtype).astype(a.dtype)
    b = t["b"] if workload.trans[1] == "n" else t["b"].swapaxes(1, 2)
    return a @ b + t.get("bias", t["a"].dtype.type(0))


@pytest.mark.parametrize("trans", ["nn", "tn"])
@pytest.mark.parametrize("pre", MEANINGS)
def test_reference_multiplies_the_prologue_of_the_operand(pre: str, trans: str) -> None:
    workload = gemm(f"dtype=f32,batch=2,trans={trans},epilogue=bias,pre={pre}")
    inputs = exact(workload.draw(np.random.default_rng(0)))
    expected = product(workload, inputs, MEANINGS[pre])
    np.testing.assert_allclose(workload.reference(inputs)["c"].value, expected, rtol=1e-12, atol=1e-13)


def share(workload: Workload, function: Function) -> float:
    """Return the largest error of an f32 kernel that rounds the operand, as a share of the tolerance."""
    inputs = workload.draw(np.random.default_rng(1))
    single = {name: value.astype(np.float32) for name, value in inputs.items()}
    stored = numpy_dtype(storage(workload.dtype))
    output = product(workload, single, function, stored).astype(stored)
    return worst(workload, inputs, {"c": output})


@pytest.mark.parametrize("pre", MEANINGS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_right_kernel_is_within_tolerance(pre: str, dtype: str) -> None:
    # A tolerance far above all errors would hide mistakes.
    assert 1e-2 < share(gemm(f"dtype={dtype},pre={pre}"), MEANINGS[pre]) < 1


WRONG: dict[str, tuple[str, Function]] = {
    "left out": ("max(x*scale+shift,0)", lambda x, scale, shift: x),
    "without a shift": ("max(x*scale+shift,0)", lambda x, scale, shift: np.maximum(x * scale, 0)),
    "of another k": (
        "max(x*scale+shift,0)",
        lambda x, scale, shift: np.maximum(x * np.roll(scale, 1) + shift, 0),
    ),
    "another branch": ("step(x-shift)", lambda x, scale, shift: (x >= 0).astype(x.dtype)),
    "another approximation": ("tanh(x)", lambda x, scale, shift: x / (1 + np.abs(x))),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_kernel_with_another_function_exceeds_tolerance(name: str, dtype: str) -> None:
    pre, wrong = WRONG[name]
    assert share(gemm(f"dtype={dtype},pre={pre}"), wrong) > 1


def test_kernel_that_does_not_round_the_operand_exceeds_tolerance() -> None:
    workload = parse("gemm:m=9,n=11,k=64,dtype=bf16,out=f32,pre=x*scale")
    inputs = workload.draw(np.random.default_rng(1))
    single = {name: value.astype(np.float32) for name, value in inputs.items()}
    for dtype, is_right in ((numpy_dtype("bf16"), True), (None, False)):
        output = product(workload, single, lambda x, scale, shift: x * scale, dtype)
        assert (worst(workload, inputs, {"c": output}) <= 1) is is_right


def test_the_function_has_one_text_and_its_vectors_come_last() -> None:
    workload = gemm("dtype=f16,epilogue=bias+residual,pre=relu( x*(scale) + shift )")
    assert str(workload) == "gemm:m=9,n=11,k=64,dtype=f16,epilogue=bias+residual,pre=relu(x*scale+shift)"
    assert parse(str(workload)) == workload
    names = [tensor.name for tensor in workload.inputs()]
    assert names == ["a", "b", "bias", "residual", "pre_scale", "pre_shift"]
    assert [tensor.shape for tensor in workload.inputs()[-2:]] == [(64,), (64,)]
    assert [t.name for t in gemm("dtype=f16,pre=x-shift").inputs()] == ["a", "b", "pre_shift"]
    assert str(gemm("dtype=f16,pre=(x)")) == "gemm:m=9,n=11,k=64,dtype=f16"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dtype=f32,pre=x*y", "must be an expression in x, and in scale and shift if need be; it has x, y"),
        ("dtype=f32,pre=scale", "it has scale"),
        ("dtype=f32,pre=log(x)", "leave the domain of log"),
        ("dtype=f16,pre=exp(2*x)", "overflow f32 or f16"),
        ("dtype=f16,pre=exp(x)*20", "sums of pre=exp(x)*20 may be up to 3820000, more than the largest f16"),
        ("dtype=f32,pre=x,act=exp(x)", "limit them (min, max)"),
        ("dtype=i8,pre=relu(x)", "i8 is multiplied as it is"),
        ("dtype=e4m3,pre=relu(x)", "e4m3 is multiplied as it is"),
    ],
)
def test_invalid_expressions_are_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        gemm(text)
    assert says in str(caught.value)


def test_a_function_that_divides_by_its_scale_is_not_padded_along_k() -> None:
    assert "k" in gemm("dtype=f32,pre=x*scale").may_change().padding
    assert "k" not in gemm("dtype=f32,pre=x/scale").may_change().padding


def test_signed_sums_see_the_function() -> None:
    workload: Any = parse("gemm:m=9,n=300,k=40,dtype=bf16,trans=tn,out=f32,pre=max(x*scale+shift,0)")
    inputs = draw(workload, 3)
    signs = np.random.default_rng(4).choice([-1.0, 1.0], workload.n)
    sums = workload.reference_sums(inputs.exact(), 0, signs, 128)
    whole = workload.reference(inputs.exact())["c"]
    for run, start in enumerate(range(0, workload.n, 128)):
        part = slice(start, start + 128)
        expected = (whole.value[0, :, part] * signs[part]).sum(axis=1)
        np.testing.assert_allclose(sums.value[:, run], expected, rtol=1e-9, atol=1e-9)
        assert (sums.scale[:, run] >= np.sqrt(np.square(whole.scale[0, :, part]).sum(axis=1))).all()


def test_parts_are_a_chain_the_product_and_a_chain() -> None:
    workload = gemm("dtype=f16,trans=tn,epilogue=bias,act=tanh(x),pre=max(x*scale+shift,0)")
    assert list(map(str, workload.unfused())) == [
        "elementwise:rows=64,cols=9,dtype=f16,expression=max(a*pre_scale+pre_shift,0),"
        "columns=pre_scale+pre_shift",
        "gemm:m=9,n=11,k=64,dtype=f16,trans=tn",
        "elementwise:rows=9,cols=11,dtype=f16,expression=tanh(c+bias),vectors=bias",
    ]
    # A row of the batched a would need its own number.
    assert gemm("dtype=f16,batch=2,trans=tn,pre=x*scale").unfused() == ()
    assert len(gemm("dtype=f16,batch=2,trans=tn,pre=relu(x)").unfused()) == 2


def test_library_forecast_launches_the_prologue_first() -> None:
    device = representative("sm_90")
    plain, with_prologue = (
        list(library_kernels(gemm(f"dtype=f16{end}"), device)) for end in ("", ",pre=relu(x)")
    )
    assert [kernel.family for kernel in with_prologue] == [
        "elementwise",
        *(kernel.family for kernel in plain),
    ]


# -- kernels -------------------------------------------------------------------------------------------------

LARGE = "gemm:m=64,n=64,k=64,dtype=f16,trans=nt"
CUDA = [
    variant
    for variant in kernels.variants("gemm")
    if isinstance(variant, CudaVariant) and variant.refuses(parse(LARGE), representative("sm_90")) is None
]
"""Variants of a type that can have a prologue at all: those of e4m3 alone cannot."""


@pytest.mark.parametrize("variant", CUDA, ids=str)
def test_variant_computes_a_prologue_or_refuses_it(variant: CudaVariant[Any]) -> None:
    device = representative("sm_90")
    plain, with_prologue = (parse(f"{LARGE}{end}") for end in ("", ",pre=relu(x*scale+shift)"))
    assert "Prologue" not in strip_comments(variant.source(plain, variant.default(plain, device)))
    reason = variant.refuses(with_prologue, device)
    if reason is not None:
        assert "does not support a prologue" in reason
        return
    text = variant.source(with_prologue, variant.default(with_prologue, device))
    assert "Relu()" in text.partition("struct Prologue {")[2].partition("};")[0]


@needs_compiler
def test_special_functions_are_counted_once_for_each_element_of_a_tile() -> None:
    workload = parse("gemm:m=32,n=32,k=24,dtype=f32,pre=exp(x)+sigmoid(x)")
    variant, device = kernels.variant("gemm/cuda_simt"), representative("sm_90")
    assert isinstance(variant, CudaVariant)
    table = variant.configs(workload, device)
    chosen = (table["bm"] == 16) & (table["bn"] == 16) & (table["split_k"] == 1) & (table["bk"] == 8)
    (row,) = np.flatnonzero(chosen)[:1]
    counts = watch(variant, workload, table.config(row), workload.draw(np.random.default_rng(0)))
    costs = variant.costs(workload, table.take(np.array([row])), device)
    assert costs.sfu == 16 * 24 * 3
    assert [block.sfu for block in counts.counts.blocks] == [16 * 24 * 3] * 4


def test_numba_cpu_supports_the_prologue() -> None:
    variant = kernels.variant("gemm/numba_cpu")
    assert isinstance(variant, NumbaCpuVariant)
    assert variant.refuses(gemm("dtype=bf16,pre=relu(x)"), local_cpu()) is None


# -- convolutions --------------------------------------------------------------------------------------------

CONV = "conv2d:n=2,c=8,h=5,w=6,k=4,r=3,s=3,stride=1,pad=1,dtype=f32"


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("pre", ["exp(min(x,0))*scale+shift", "tanh(x)+1"])
def test_the_padding_is_zero_behind_the_function(layout: str, pre: str) -> None:
    workload = parse(f"{CONV},layout={layout},epilogue=bias,pre={pre}")
    plain = parse(f"{CONV},layout={layout},epilogue=bias")
    inputs = exact(workload.draw(np.random.default_rng(3)))
    scale, shift = (inputs.get(f"pre_{name}", np.zeros(8)) for name in ("scale", "shift"))
    if layout == "nchw":
        scale, shift = scale[:, None, None], shift[:, None, None]
    x = np.tanh(inputs["x"]) + 1 if "tanh" in pre else np.exp(np.minimum(inputs["x"], 0)) * scale + shift
    expected = plain.reference({**inputs, "x": x})["y"].value
    np.testing.assert_allclose(workload.reference(inputs)["y"].value, expected, rtol=1e-12, atol=1e-13)
    # Padding would hold the function of zero in place of zero.
    around = [(0, 0)] * 4
    for axis in (1, 2) if layout == "nhwc" else (2, 3):
        around[axis] = (1, 1)
    padded = workload.changed(h=7, w=8, pad=0)
    wrong = padded.reference({**inputs, "x": np.pad(inputs["x"], around)})["y"].value
    assert not np.allclose(wrong, expected)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_convolution_of_a_rounded_operand_is_within_tolerance(dtype: str) -> None:
    text = CONV.replace("f32", dtype)
    workload = parse(f"{text},layout=nhwc,pre=max(x*scale+shift,0)")
    inputs = workload.draw(np.random.default_rng(5))
    single = {name: value.astype(np.float32) for name, value in inputs.items()}
    stored = numpy_dtype(dtype)  # type: ignore[arg-type]
    for shift, is_right in ((single["pre_shift"], True), (np.roll(single["pre_shift"], 1), False)):
        x = np.maximum(single["x"] * single["pre_scale"] + shift, 0).astype(stored).astype(np.float64)
        y = parse(f"{text},layout=nhwc").reference({"x": x, "w": exact(inputs)["w"]})["y"].value
        assert (worst(workload, inputs, {"y": y.astype(stored)}) <= 1) is is_right


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("direction=wgrad,pre=relu(x)", "pre=relu(x) needs direction=fprop, not wgrad; leave it out"),
        ("pre=x*bias", "it has x, bias"),
        ("pre=rsqrt(x)", "leave the domain of log, sqrt or rsqrt"),
    ],
)
def test_expressions_that_conv2d_cannot_have_are_refused(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(f"{CONV},layout=nhwc,{text}")
    assert says in str(caught.value)


def test_parts_of_a_convolution_are_a_chain_itself_and_a_chain() -> None:
    workload = parse(f"{CONV},layout=nhwc,epilogue=bias+relu,pre=relu(x*scale)")
    assert list(map(str, workload.unfused())) == [
        "elementwise:rows=60,cols=8,dtype=f32,expression=relu(x*pre_scale),vectors=pre_scale",
        f"{CONV},layout=nhwc",
        "elementwise:rows=60,cols=4,dtype=f32,expression=relu(y+bias),vectors=bias",
    ]
    assert parse(f"{CONV},layout=nchw,pre=x*scale").unfused() == ()
    assert "c" in workload.may_change().padding
    assert "c" not in parse(f"{CONV},layout=nhwc,pre=x/scale").may_change().padding


def test_some_variant_computes_each_convolution_and_others_refuse() -> None:
    layer = "conv2d:n=2,c=64,h=8,w=8,k=64,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc"
    for text in (
        layer,
        layer.replace("r=3,s=3,stride=1,pad=1", "r=1,s=1,stride=1,pad=0"),
        f"{layer},groups=64",
    ):
        plain, with_prologue = parse(text), parse(f"{text},pre=relu(x*scale+shift)")
        for device in (representative("sm_90"), local_cpu()):
            reasons = {v: v.refuses(with_prologue, device) for v in kernels.variants("conv2d")}
            assert None in reasons.values()
            for variant, reason in reasons.items():
                if reason is not None and variant.refuses(plain, device) is None:
                    assert "does not support a prologue" in reason
