"""Contract of every Numba CPU variant: a valid default, costs that are floors, correct results on every path.

Kernels are compiled without their parallel loop, which halves the time and changes no result; tests of the
pipeline run them in parallel. All but the first of each variant are compiled without optimisation.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numba.core import config as numba_config
from numba.core.codegen import JITCPUCodegen
from numba.core.registry import cpu_target

from tests.kernels import kernel_checks as checks
from tests.support import package_variants
from tunebench.device import local_cpu
from tunebench.dtype import numpy_dtype
from tunebench.variant import NumbaCpuVariant
from tunebench.workload import Workload
from tunebench.workloads import parse, suite, suites

VARIANTS = package_variants(NumbaCpuVariant)
ARCHITECTURES = ("x86_64-v4", "x86_64-v3", "x86_64-v2", "aarch64")

# Odd sizes cut every tile; together they cover each type, transpose, layout, direction and epilogue. A path
# of `FURTHER` combines what other paths cover differently, and runs with --exhaustive.
_CONV2D = "conv2d:n=2,c=6,h=11,w=9,k=4"
_DEPTHWISE = "conv2d:n=2,c=40,h=11,w=9,k=40,groups=40,layout=nhwc"
_WINOGRAD = [
    "conv2d:n=2,c=40,h=11,w=9,k=37,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+residual,act=max(min(x,6),0)",
    "conv2d:n=2,c=16,h=8,w=13,k=70,r=3,s=3,stride=1,pad=0,dtype=bf16,layout=nhwc,direction=dgrad",
]
DEFAULT = [
    "gemm:m=37,n=41,k=67,dtype=f32,epilogue=bias+gelu",
    "gemm:m=37,n=41,k=67,dtype=f16,batch=3,trans=nt,epilogue=bias+silu+residual",
    "gemm:m=1,n=83,k=131,dtype=bf16,trans=tn,epilogue=bias+residual,act=0.5*x*(1+tanh(0.7978845608*(x+0.044715*x*x*x)))",
    "gemm:m=19,n=17,k=13,dtype=tf32,batch=2,trans=tt,out=f16,epilogue=bias+relu,pre=gelu(x*scale-shift)",
    f"{_CONV2D},r=3,s=2,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+residual+relu",
    f"{_CONV2D},r=3,s=3,stride=2,pad=2,pad_w=3,dtype=f16,layout=nchw,dilation=2,groups=2,epilogue=scale+bias,"
    "act=tanh(x),pre=max(x*scale+shift,0)",
    f"{_CONV2D},r=3,s=2,stride=2,pad=1,dtype=bf16,layout=nhwc,groups=2,direction=dgrad",
    f"{_CONV2D},r=2,s=3,stride=3,pad=1,pad_w=2,dtype=f32,layout=nchw,dilation=2,direction=dgrad",
    f"{_CONV2D},r=3,s=3,stride=1,pad=3,dtype=tf32,layout=nhwc,groups=2,direction=wgrad",
    f"{_CONV2D},r=2,s=3,stride=2,pad=1,pad_w=0,dtype=f16,layout=nchw,direction=wgrad",
    f"{_DEPTHWISE},r=3,s=3,stride=2,pad=1,pad_w=2,dtype=f16,epilogue=scale+bias,act=x*min(max(x+3,0),6)/6",
    f"{_DEPTHWISE},r=3,s=2,stride=2,pad=1,pad_w=0,dtype=f32,direction=dgrad",
    f"{_DEPTHWISE},r=3,s=5,stride=1,pad=1,pad_w=2,dtype=f32",
    f"{_DEPTHWISE},r=2,s=3,stride=1,pad=0,pad_w=2,dtype=bf16,direction=wgrad,dilation=2",
    *_WINOGRAD,
    "softmax:rows=11,cols=131,dtype=f16,prologue=scale+mask",
    "softmax:rows=11,cols=131,dtype=f32,prologue=scale,log=true",
    "softmax:rows=11,cols=131,dtype=f16,prologue=scale,direction=backward",
    "softmax:rows=11,cols=131,dtype=bf16,log=true,direction=backward",
    "cross_entropy:rows=3,cols=1031,dtype=bf16",
    "cross_entropy:rows=11,cols=613,dtype=f16,direction=backward",
    "layernorm:rows=11,cols=131,dtype=bf16,eps=1e-12",
    "layernorm:rows=11,cols=131,dtype=f32,prologue=bias+residual,stats=true",
    "layernorm:rows=11,cols=300,dtype=f16,direction=backward",
    "rmsnorm:rows=11,cols=131,dtype=f16,prologue=residual,stats=true,eps=0.25",
    "rmsnorm:rows=11,cols=300,dtype=f32,direction=backward",
    "gated_gemm:m=19,n=17,k=130,dtype=bf16,trans=nt,activation=gelu",
    "scaled_gemm:m=19,n=17,k=330,dtype=bf16,weight=i4,scales=group,shift=true,bias=true",
    "grouped_gemm:groups=5,m=37,n=41,k=67,dtype=f32",
    "grouped_gemm:groups=9,m=19,n=17,k=130,dtype=bf16,trans=nt,skew=zipf",
    "elementwise:rows=11,cols=131,dtype=f32,expression=alpha*gelu(x+bias)-tanh(x),vectors=bias,scalars=alpha",
    "elementwise:rows=12,cols=50,dtype=bf16,expression=silu(x)/max(exp(x),2)+x,out=f16",
    "elementwise:rows=11,cols=33,dtype=f16,expression=(x-mean)*rstd*g,vectors=g,columns=mean+rstd",
    "elementwise:rows=11,cols=40,dtype=bf16,expression=relu((x-m)*g)*r,vectors=g+m,columns=r,vector_dtype=f32",
    "reduction:rows=11,cols=300,dtype=f16,expression=square(x-m)*b,vectors=b,columns=m,reduce=mean,then=rsqrt(x+2)",
    "reduction:rows=303,cols=75,dtype=bf16,expression=gelu(x)*r+b,vectors=b,columns=r,axis=rows,reduce=sum,out=f32",
    "reduction:rows=140,cols=131,dtype=f32,expression=s*exp(x),scalars=s,reduce=min",
    "strided_elementwise:shape=37x131,dtype=f32,expression=x*y-z,operands=x.f32.131_1+y.f16.0_1+z.bf16.1_0",
    "strided_elementwise:shape=5x12x33,dtype=f16,expression=x*y,operands=x.f32.1_170_5+y.f16.-12_0_-1.at80",
    "strided_elementwise:shape=7x9x11,dtype=bf16,expression=x+y+z,operands=x.f16.44_11_1.if0_1_0_0_4+"
    "y.bf16.33_11_1.at-44.if0_1_0_-4_3+z.f32.22_11_1.at-77.if0_1_0_-7_2",
    "strided_elementwise:shape=2x7x9,dtype=bool,expression=lt(c,gelu(x)),operands=c.bool.0_-1_0.at6+"
    "x.f32.35_7_1.at-8.if0_1_0_-1_5.if0_0_1_-1_7",
    "strided_elementwise:shape=9x72,dtype=i8,expression=min(max(round(x*s)+z,-128),127),"
    "operands=x.bf16.72_1+s.f32.1_0+z.i8.0_1",
    "strided_elementwise:shape=9x9,dtype=f32,expression=x,operands=x.f32.9_1.if1_-1_0_9",
    # More sets of operands may exist than have a function each: one function tests its operands.
    "strided_elementwise:shape=5x6x7,dtype=f32,expression=a*b+c-d,operands=a.f32.42_7_1.if1_0_0_-1_3+"
    "b.f32.42_7_1.if0_1_0_-2_3+c.f16.42_7_1.if0_0_1_-1_4+d.f32.7_0_1.if1_1_0_-2_5",
    "strided_elementwise:shape=37x131,dtype=f32,expression=x*y,operands=x.f16.0_1.wraprow.i64.1_0_0_131_9+"
    "y.f32.0_0.byrow.i64.1_0_0_1_11.bycol.i32.0_1_2_11_5",
    "strided_elementwise:shape=9x12,dtype=bf16,expression=x+y,operands=x.bf16.0_1.if0_1_0_8.byi.i64.1_0_0_8_30+"
    "y.f32.0_1.at-8.if0_1_-8_4.byi.i64.1_0_9_4_30",
    "strided_reduction:shape=37x5x70,dtype=f32,expression=x,reduce=mean,operands=x.f16.0_1_0.byi.i64.70_0_1_0_5_9",
    "strided_reduction:shape=9x140x20,dtype=f32,expression=x*y,reduce=max,axes=2,"
    "operands=x.f32.0_0_1.byi.i64.140_1_0_0_20_9+y.f32.2800_20_1",
    "strided_reduction:shape=37x231,dtype=f32,expression=x*y-z,reduce=sum,operands=x.f32.231_1+y.f16.0_1+z.bf16.1_0",
    "strided_reduction:shape=2x5x5x3x3,dtype=f32,expression=x,reduce=mean,axes=2,"
    "operands=x.f32.81_18_2_9_1.at-10.if0_2_0_1_0_-1_9.if0_0_2_0_1_-1_9",
    "strided_reduction:shape=9x3x140,dtype=bool,expression=c,operands=c.bool.3_1_27,reduce=max,then=1-x",
    "strided_reduction:shape=5x7x30x11,dtype=bf16,expression=gelu(x)*y,reduce=sum,axes=2,then=x*0.5,"
    "operands=x.f16.1_5_35_1050.if0_0_1_0_-3_20+y.f32.0_0_-1_0.at29",
    "strided_reduction:shape=700x3,dtype=f32,expression=x,operands=x.bf16.3_1,reduce=min,axes=2",
    "scatter_add:rows=90,cols=40,bins=7,dtype=bf16,index=i32,base=true,wraps=true",
    "batchnorm_stats:rows=603,cols=75,dtype=f32",
    "batchnorm_stats:rows=301,cols=131,dtype=f16,eps=0.25,momentum=1",
    "batchnorm_stats:rows=303,cols=75,dtype=bf16,direction=backward,act=relu",
    "attention:batch=1,heads=4,seq_q=37,head_dim=20,dtype=f16,seq_k=45,heads_k=2,causal=true",
    "attention:batch=2,heads=2,seq_q=1,head_dim=97,dtype=bf16,seq_k=131,heads_k=1",
    "attention:batch=2,heads=2,seq_q=47,head_dim=16,dtype=f32,seq_k=41,causal=true,bias=bk,align=first,scale=1,window=9",
    "attention:batch=1,heads=4,seq_q=39,head_dim=40,dtype=f16,seq_k=83,heads_k=2,causal=true,direction=backward",
    "attention:batch=2,heads=2,seq_q=39,head_dim=17,dtype=bf16,seq_k=33,causal=true,direction=backward,bias=hqk,"
    "align=first,window=9",
]

FURTHER = [
    "gemm:m=37,n=41,k=67,dtype=bf16,epilogue=bias+residual,act=0.5*x*(1+tanh(0.7978845608*(x+0.044715*x*x*x)))",
    "gemm:m=1,n=83,k=131,dtype=bf16,trans=tn,epilogue=bias+relu",
    "gemm:m=37,n=41,k=67,dtype=f16,batch=2,trans=tn,epilogue=bias,pre=max(x*scale+shift,0)",
    "gemm:m=37,n=41,k=67,dtype=f32,act=tanh(x),pre=gelu(x-shift)",
    "gemm:m=19,n=17,k=13,dtype=tf32,batch=2,trans=tt,out=f16",
    f"{_CONV2D},r=3,s=3,stride=2,pad=2,pad_w=3,dtype=f16,layout=nchw,dilation=2,groups=2,epilogue=scale+bias+relu",
    f"{_CONV2D},r=3,s=3,stride=1,pad=2,dtype=f16,layout=nhwc,groups=2,epilogue=bias,pre=max(x*scale+shift,0)",
    f"{_CONV2D},r=3,s=2,stride=2,pad=1,dtype=f32,layout=nchw,groups=2,act=tanh(x),pre=sigmoid(x-shift)",
    f"{_DEPTHWISE},r=3,s=3,stride=1,pad=1,dtype=f32,pre=exp(min(x,0))*scale",
    "softmax:rows=11,cols=131,dtype=f32",
    "gated_gemm:m=7,n=33,k=13,dtype=f16,activation=sigmoid,out=f32",
    "scaled_gemm:m=7,n=150,k=300,dtype=e4m3,scales=block,bias=true",
    "scatter_add:rows=37,cols=21,bins=11,dtype=f32",
    "scatter_add:rows=50,cols=24,bins=60,dtype=f16,skipped=3",
    "scaled_gemm:m=19,n=35,k=45,dtype=i8,scales=tensor,out=f32",
    "scaled_gemm:m=3,n=48,k=160,dtype=f32,weight=e4m3,scales=group,group=32",
    "grouped_gemm:groups=3,m=7,n=33,k=13,dtype=f16,skew=one,out=f32",
    "batchnorm_stats:rows=303,cols=75,dtype=bf16,direction=backward",
    "attention:batch=1,heads=2,seq_q=41,head_dim=16,dtype=f32",
    "attention:batch=2,heads=4,seq_q=37,head_dim=20,dtype=f16,seq_k=45,heads_k=2,causal=true,bias=bhqk,scale=1,window=9",
    "attention:batch=2,heads=2,seq_q=77,head_dim=16,dtype=f32,seq_k=41,causal=true,bias=bk,align=first",
    "attention:batch=2,heads=4,seq_q=37,head_dim=20,dtype=f32,heads_k=2,direction=backward,bias=bqk,scale=1",
]
PATHS = [*DEFAULT, *FURTHER]


def _serving(text: str) -> list[Any]:
    """Return the variants that support a workload, each with it."""
    workload = parse(text)
    serving = [v for v in VARIANTS if v.refuses(workload, local_cpu()) is None]
    return [pytest.param(v, workload, id=f"{v.key}-{text}") for v in serving]


def _is_further(variant: NumbaCpuVariant[Any], text: str) -> bool:
    """Return whether a case runs with --exhaustive only."""
    return text in FURTHER or (text in _WINOGRAD and variant.name != "numba_cpu_winograd")


ON_PATHS = [
    pytest.param(*case.values, id=case.id, marks=[pytest.mark.exhaustive] * _is_further(case.values[0], text))
    for text in PATHS
    for case in _serving(text)
]
FIRST = {case.values[0]: case for case in reversed(ON_PATHS)}
"""The first path of each variant."""


def test_every_variant_has_a_path_and_every_path_a_variant() -> None:
    assert set(FIRST) == set(VARIANTS)
    assert all(map(_serving, PATHS))


@pytest.fixture(scope="module")
def without_optimisation() -> JITCPUCodegen:
    """A generator of machine code that does not optimise, which halves the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_config, "OPT", type(numba_config.OPT)(0))
        return JITCPUCodegen("tests")


@pytest.mark.parametrize(("variant", "workload"), ON_PATHS)
def test_results_are_right(
    variant: NumbaCpuVariant[Any],
    workload: Workload,
    without_optimisation: JITCPUCodegen,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first path with the default, each other one with its own configuration, the same in every run."""
    table = variant.configs(workload, local_cpu())
    config = table.config(random.Random(str(workload)).randrange(len(table)))
    if workload == FIRST[variant].values[1]:
        config = variant.default(workload, local_cpu())
    else:
        monkeypatch.setattr(numba_config, "OPT", type(numba_config.OPT)(0))
        monkeypatch.setattr(cpu_target.target_context, "_internal_codegen", without_optimisation)
    for inputs in (workload.draw(np.random.default_rng(1)), checks.with_extremes(workload)):
        outputs = checks.run_on_cpu(variant, workload, config, inputs)
        checks.assert_right(workload, inputs, outputs, f"{workload} with {config}")


@pytest.mark.parametrize(
    "text",
    [
        "strided_elementwise:shape=7x5,dtype=f32,expression=x,operands=x.f32.0_1.byi.i64.1_0_0_5_11",
        "strided_reduction:shape=7x3x5,dtype=f32,expression=x,reduce=sum,operands=x.f32.0_1_0.byi.i64.5_0_1_0_3_11",
        "scatter_add:rows=7,cols=5,bins=11,dtype=f32,skipped=2",
    ],
)
def test_kernels_raise_for_an_index_that_is_not_valid(text: str) -> None:
    import numba

    workload = parse(text)
    ((variant, _),) = (case.values for case in _serving(text))
    config = variant.default(workload, local_cpu())
    kernel = numba.njit(parallel=True, fastmath=set(variant.fastmath))(variant.kernel(workload, config))
    for index in (11, -1, 2**40):
        out = np.empty(workload.outputs()[0].shape, "f4")
        arrays = {**workload.draw(np.random.default_rng(0)), "out": out}
        scratch = variant.scratch(workload, config)
        arrays |= {tensor.name: np.empty(tensor.shape, numpy_dtype(tensor.dtype)) for tensor in scratch}
        (name,) = (tensor.name for tensor in workload.inputs() if tensor.dtype == "i64")
        arrays[name][4] = index
        with pytest.raises(IndexError, match=f"an index in {name} is out of range"):
            kernel(*(arrays[name] for name in variant.arguments(workload, config)))


SIZES = [
    *PATHS,
    "gemm:m=1,n=1,k=1,dtype=f32",
    "gemm:m=4096,n=4096,k=4096,dtype=f16",
    *(f"gated_gemm:m={m},n={n},k=9,dtype=f32" for m in (1, 40) for n in (1, 7, 16, 17, 48, 1000)),
    "gemm:m=1,n=50257,k=768,dtype=f16,trans=nt",
    "conv2d:n=1,c=1,h=1,w=1,k=1,r=1,s=1,stride=1,pad=0,dtype=f32,layout=nchw",
    "conv2d:n=8,c=64,h=8,w=8,k=64,r=3,s=3,stride=9,pad=1,dtype=f16,layout=nhwc,groups=64,direction=dgrad",
    "softmax:rows=1,cols=1,dtype=f32",
    "layernorm:rows=1,cols=1,dtype=f32",
    "layernorm:rows=65536,cols=8192,dtype=bf16",
    "attention:batch=1,heads=1,seq_q=1,head_dim=1,dtype=f32,direction=backward",
    "attention:batch=2,heads=32,seq_q=8192,head_dim=256,dtype=bf16,heads_k=8,causal=true,direction=backward",
    *(layer.text for name in suites() for layer in suite(name)),
]


def _each_size() -> Iterator[tuple[NumbaCpuVariant[Any], Workload]]:
    """Yield every size with each variant that supports it; there is at least one."""
    for text in SIZES:
        serving = _serving(text)
        assert serving, text
        yield from (case.values for case in serving)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_default_is_a_valid_point_of_any_space(architecture: str) -> None:
    device = dataclasses.replace(local_cpu(), architecture=architecture)
    for variant, workload in _each_size():
        default = variant.default(workload, device)
        assert variant.configs(workload, device).row(default) is not None, f"{workload}: {default}"


def test_spaces_are_worth_searching() -> None:
    conv2d = next(text for text in PATHS if text.startswith(_CONV2D))
    for text in ("gemm:m=512,n=512,k=512,dtype=f32", conv2d.replace("c=6", "c=64").replace("h=11", "h=56")):
        for variant, workload in (case.values for case in _serving(text)):
            # Fewer register tiles fit the 16 vector registers of AVX2 than the 32 of AVX-512.
            assert 300 < len(variant.configs(workload, local_cpu())) < 10_000
    for name in ("softmax", "layernorm"):
        for variant, workload in (c.values for c in _serving(f"{name}:rows=512,cols=1024,dtype=f32")):
            assert 100 < len(variant.configs(workload, local_cpu())) < 1_000


def test_costs_never_exceed_the_work() -> None:
    """Multiply-adds are at most those of the textbook (dgrad: those that meet a pixel), each in a lane."""
    for variant, workload in _each_size():
        if variant.name == "numba_cpu_winograd":
            continue  # tiles are whole, however small the image
        costs = variant.costs(workload, variant.configs(workload, local_cpu()), local_cpu())
        # Copies have no operation, and kernels may leave out those on elements that are 0. Which rows are
        # added to each other depends on indices.
        may_have_none = workload.operator.startswith(("strided", "scatter"))
        assert may_have_none or float(np.max(costs.fma)) > 0
        assert float(np.max(costs.fma)) <= workload.flops()
        if workload.operator in {"gemm", "gated_gemm", "grouped_gemm", "conv2d"}:
            assert float(np.max(costs.fma)) <= workload.flops() / 2


def test_executed_work_of_a_gradient_equals_counted_pairs() -> None:
    for changes in (
        "stride=1,pad=2",
        "stride=2,pad=1",
        "stride=3,pad=0",
        "stride=2,pad=2,dilation=2",
        "stride=2,pad=0,pad_w=3",
    ):
        text = f"conv2d:n=1,c=1,h=7,w=5,k=1,r=3,s=3,dtype=f32,layout=nhwc,direction=dgrad,{changes}"
        w = parse(text)
        pixels = {
            axis: sum((i + pad - tap * w.dilation) % w.stride == 0 for i in range(extent) for tap in range(3))
            for axis, extent, pad in (("h", w.h, w.pad), ("w", w.w, w.pad_w))
        }
        (variant,) = (v for v in VARIANTS if v.key == "conv2d/numba_cpu")
        costs = variant.costs(w, variant.configs(w, local_cpu()), local_cpu())
        assert costs.fma == min(pixels["h"] * pixels["w"], w.p * w.q * 9)
