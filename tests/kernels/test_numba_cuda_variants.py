"""Contract of every Numba-CUDA variant: correct results in the simulator, code for each architecture."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.kernels import kernel_checks as checks
from tests.support import needs_numba_cuda, package_variants
from tunebench import workloads
from tunebench.binary.cubin import launch_refusal
from tunebench.device import Device, find, representative
from tunebench.emulate.numba_simulator import run_simulated, simulate
from tunebench.variant import NumbaCudaVariant
from tunebench.workload import Workload

pytestmark = needs_numba_cuda

# The simulator does about 1e5 operations per second: sizes just cut a row, a tile and a block.
WORKLOADS = (
    "attention:batch=1,heads=2,seq_q=35,head_dim=5,dtype=f16,seq_k=41,heads_k=1,causal=true,bias=hqk,window=7",
    "attention:batch=2,heads=2,seq_q=9,head_dim=5,dtype=f32,seq_k=7,causal=true,bias=bk,align=first",
    "attention:batch=1,heads=1,seq_q=9,head_dim=5,dtype=f32,seq_k=37",
    "batchnorm_stats:rows=300,cols=37,dtype=f32,eps=0.25,momentum=0.5",
    "batchnorm_stats:rows=67,cols=5,dtype=f16",
    "batchnorm_stats:rows=37,cols=5,dtype=f16,direction=backward",
    "batchnorm_stats:rows=37,cols=5,dtype=f16,direction=backward,act=relu",
    "cross_entropy:rows=17,cols=37,dtype=f16",
    "cross_entropy:rows=3,cols=67,dtype=f32,direction=backward",
    "softmax:rows=5,cols=37,dtype=f32,prologue=scale+mask",
    "softmax:rows=5,cols=37,dtype=f16,log=true",
    "softmax:rows=5,cols=37,dtype=f32,prologue=scale,direction=backward",
    "softmax:rows=5,cols=37,dtype=f16,log=true,direction=backward",
    "elementwise:rows=5,cols=37,dtype=f16,expression=max(gelu(x+b),y)*s,vectors=b,scalars=s",
    "layernorm:rows=5,cols=37,dtype=f16,prologue=bias+residual,stats=true,eps=0.25",
    "rmsnorm:rows=5,cols=37,dtype=f16,prologue=residual,stats=true,eps=1e-12",
    "elementwise:rows=5,cols=37,dtype=f32,expression=x*r+m,columns=m+r",
    "elementwise:rows=5,cols=37,dtype=f16,expression=(x-m)*g,vectors=g+m,vector_dtype=f32",
    "reduction:rows=5,cols=37,dtype=f16,expression=square(x-m)*b,vectors=b,columns=m,reduce=mean,then=rsqrt(x+2)",
    "reduction:rows=37,cols=5,dtype=f32,expression=x*r*s,columns=r,scalars=s,axis=rows,reduce=max",
    "strided_elementwise:shape=3x5x37,dtype=f16,expression=x*y,operands=x.f32.1_111_3+y.f16.-5_-1_0.at14",
    "strided_elementwise:shape=5x9,dtype=bool,expression=x+c,operands=x.f32.6_1.if0_1_0_6+c.bool.-3_1.at6.if0_1_-6_3",
    "strided_elementwise:shape=5x9,dtype=i8,expression=min(max(round(x*s)+z,-128),127),"
    "operands=x.f16.9_1+s.f32.1_0+z.i8.0_1",
    "strided_elementwise:shape=7x37,dtype=f32,expression=x*y,operands=x.f16.0_1.wraprow.i64.1_0_0_37_9+"
    "y.f32.0_0.byrow.i64.1_0_0_1_11.bycol.i32.0_1_2_11_5",
    "strided_reduction:shape=3x5x7,dtype=f32,expression=x,reduce=mean,operands=x.f16.0_0_1.byi.i64.5_1_0_0_7_9",
    "strided_reduction:shape=2x4x4x3x3,dtype=f32,expression=x,reduce=mean,axes=2,"
    "operands=x.f32.49_14_2_7_1.at-8.if0_2_0_1_0_-1_7.if0_0_2_0_1_-1_7",
    "strided_reduction:shape=3x5x67,dtype=f16,expression=square(x)*c,reduce=sum,axes=2,then=sqrt(abs(x)+1),"
    "operands=x.f16.335_67_1+c.bool.0_0_1",
    "gemm:m=9,n=7,k=5,dtype=f32,epilogue=bias+silu+residual",
    "gemm:m=9,n=7,k=5,dtype=f32,epilogue=residual,act=x*min(max(x+3,0),6)/6+erf(x)*step(x)",
    "gemm:m=9,n=7,k=5,dtype=f32,trans=tn,epilogue=bias,act=tanh(x),pre=max(x*scale+shift,0)",
    "gemm:m=9,n=7,k=5,dtype=f32,pre=silu(x)",
    "gated_gemm:m=9,n=7,k=5,dtype=f32,trans=nt",
    "grouped_gemm:groups=3,m=21,n=7,k=5,dtype=f32,skew=zipf",
    "conv2d:n=1,c=3,h=5,w=4,k=3,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nchw,epilogue=scale+bias,act=tanh(x)",
    "conv2d:n=1,c=3,h=5,w=4,k=3,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,epilogue=bias,pre=tanh(x*scale+shift)",
    "conv2d:n=1,c=3,h=5,w=4,k=3,r=3,s=3,stride=2,pad=1,pad_w=2,dtype=f32,layout=nchw,pre=exp(min(x,0))-shift",
)
VARIANTS = package_variants(NumbaCudaVariant)
CASES = [
    pytest.param(variant, workload, id=f"{variant.key}-{workload}")
    for variant in VARIANTS
    for workload in map(workloads.parse, WORKLOADS)
    if variant.refuses(workload, representative("sm_90")) is None
]


def test_every_variant_has_a_case() -> None:
    assert {case.values[0] for case in CASES} == set(VARIANTS)


TIMEOUT_S = 120.0
Simulate = Callable[..., dict[str, Any]]


def _enable_simulator() -> None:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"


@pytest.fixture(scope="module")
def simulator() -> Iterator[ProcessPoolExecutor]:
    """A process that simulates all cases, since starting one takes longer than most of them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_enable_simulator) as process:
        yield process


def _assert_simulates_right(variant: NumbaCudaVariant[Any], workload: Workload, simulate: Simulate) -> None:
    config = variant.default(workload, representative("sm_90"))
    small = variant.emulation_workload(workload, config)
    inputs = checks.with_extremes(small)
    outputs = simulate(variant, small, config, inputs)
    checks.assert_right(small, inputs, outputs, f"{small} with {config}")


@pytest.mark.parametrize(("variant", "workload"), CASES)
def test_the_default_simulates_right(
    variant: NumbaCudaVariant[Any], workload: Workload, simulator: ProcessPoolExecutor
) -> None:
    _assert_simulates_right(
        variant, workload, lambda *job: simulator.submit(run_simulated, *job).result(timeout=TIMEOUT_S)
    )


def test_the_default_simulates_right_in_a_process_of_its_own() -> None:
    _assert_simulates_right(*CASES[0].values, simulate)


@pytest.mark.parametrize(("variant", "workload", "device"), checks.on_devices(CASES))
def test_the_default_compiles(variant: NumbaCudaVariant[Any], workload: Workload, device: Device) -> None:
    from tunebench.compile.numba_cuda import compile_numba_cuda

    config = variant.default(workload, device)
    assert variant.configs(workload, device).row(config) is not None, f"{config} is not valid"
    binary = compile_numba_cuda(variant, workload, config, device)
    assert launch_refusal(binary, variant.launches(workload, config), device) is None


@pytest.mark.parametrize(("variant", "workload"), CASES)
def test_gpu_of_another_vendor_is_refused(variant: NumbaCudaVariant[Any], workload: Workload) -> None:
    assert "NVIDIA" in str(variant.refuses(workload, find("mi210")))
