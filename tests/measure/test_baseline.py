"""Results of baselines compared with the operator's reference."""

from __future__ import annotations

import weakref
from typing import Any, Literal

import numpy as np
import pytest

from tests.toy_variants import Toy
from tunebench import libraries
from tunebench.device import local_cpu
from tunebench.measure import baseline
from tunebench.measure.arena import SlotArena
from tunebench.measure.timing import Protocol
from tunebench.measure.verify import InputSet, worst_error
from tunebench.workload import Workload
from tunebench.workloads import parse

EIGHT_BITS = (
    "dtype=i8",
    "dtype=i8,trans=nt",
    "dtype=i8,trans=tt",
    "dtype=e4m3,trans=nt",
    "dtype=e4m3,trans=nt,out=f32",
    "dtype=e4m3,trans=nt,accumulate=f32",
)


PROBLEMS = (
    *(f"gemm:m=35,n=45,k=200,{text}" for text in EIGHT_BITS),
    *(f"gemm:m=32,n=48,k=64,{text}" for text in EIGHT_BITS),
    "gemm:m=7,n=9,k=33,dtype=f32,trans=tt,batch=2,epilogue=bias+relu",
    "gemm:m=7,n=9,k=33,dtype=bf16,trans=nt,epilogue=bias",
    "gemm:m=7,n=9,k=33,dtype=f32,trans=nt,epilogue=bias+silu+residual",
    "gemm:m=7,n=9,k=33,dtype=f32,trans=tn,epilogue=residual",
    "gemm:m=7,n=9,k=33,dtype=f32,batch=2,epilogue=bias+relu+residual",
    "gemm:m=7,n=9,k=33,dtype=f32,batch=2,epilogue=residual",
    "gemm:m=7,n=9,k=33,dtype=f32,batch=2,epilogue=residual,act=x*min(max(x+3,0),6)/6",
    "gemm:m=7,n=9,k=33,dtype=f32,epilogue=bias,act=max(min(x,6),0)",
    "gemm:m=7,n=9,k=33,dtype=f32,act=tanh(gelu(x))",
    "gemm:m=7,n=9,k=33,dtype=f32,trans=tn,batch=2,epilogue=bias+relu+residual,pre=silu(x*scale+shift)",
    "gemm:m=7,n=9,k=33,dtype=bf16,pre=relu(x)",
    "gemm:m=7,n=9,k=33,dtype=bf16,trans=tt,pre=x*scale",
    "gated_gemm:m=7,n=9,k=33,dtype=f32,trans=nt",
    "scaled_gemm:m=7,n=9,k=330,dtype=bf16,weight=i4,scales=group,shift=true,bias=true",
    "scaled_gemm:m=7,n=150,k=300,dtype=f32,weight=e4m3,scales=block",
    "scaled_gemm:m=7,n=9,k=33,dtype=f16,scales=tensor",
    "scaled_gemm:m=32,n=48,k=64,dtype=e4m3,bias=true",
    "scaled_gemm:m=32,n=48,k=64,dtype=e4m3,scales=tensor",
    "scaled_gemm:m=32,n=48,k=64,dtype=i8",
    "scatter_add:rows=37,cols=21,bins=11,dtype=f32,skipped=3",
    "scatter_add:rows=90,cols=40,bins=7,dtype=bf16,index=i32,base=true,wraps=true",
    "gated_gemm:m=7,n=9,k=33,dtype=f32,activation=sigmoid",
    "gated_gemm:m=7,n=9,k=33,dtype=f32,activation=relu",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=2,pad=1,dtype=f32,layout=nhwc,groups=2,epilogue=bias+residual+relu",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=2,pad=1,dtype=f32,layout=nchw,dilation=2,epilogue=bias",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=2,pad=1,dtype=f32,layout=nhwc,direction=dgrad",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nchw,direction=wgrad",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=scale+bias+residual+relu",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nchw,epilogue=scale+bias,act=max(min(x,6),0)",
    "batchnorm_stats:rows=50,cols=33,dtype=f32,eps=0.25,momentum=0.5",
    "batchnorm_stats:rows=50,cols=33,dtype=f16",
    "batchnorm_stats:rows=50,cols=33,dtype=bf16",
    "batchnorm_stats:rows=50,cols=33,dtype=f32,direction=backward",
    "batchnorm_stats:rows=50,cols=33,dtype=f16,direction=backward",
    "batchnorm_stats:rows=50,cols=33,dtype=bf16,direction=backward",
    "batchnorm_stats:rows=50,cols=33,dtype=f32,direction=backward,act=relu",
    "batchnorm_stats:rows=50,cols=33,dtype=bf16,direction=backward,act=relu",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+relu,pre=silu(x*scale+shift)",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nchw,groups=2,pre=exp(min(x,0))*scale",
    "conv2d:n=2,c=4,h=7,w=6,k=6,r=3,s=2,stride=1,pad=1,dtype=bf16,layout=nchw,pre=relu(x)",
    "cross_entropy:rows=5,cols=33,dtype=f16",
    "cross_entropy:rows=5,cols=33,dtype=bf16,direction=backward",
    "attention:batch=2,heads=4,seq_q=9,head_dim=8,dtype=f32,seq_k=13,heads_k=2,causal=true,direction=backward",
    "attention:batch=1,heads=2,seq_q=33,head_dim=16,dtype=f32,causal=true,direction=backward",
    "attention:batch=1,heads=2,seq_q=33,head_dim=16,dtype=bf16,direction=backward",
    "softmax:rows=5,cols=33,dtype=f32,prologue=scale+mask",
    "softmax:rows=5,cols=33,dtype=f32,prologue=scale+mask,log=true",
    "softmax:rows=5,cols=33,dtype=f32,direction=backward",
    "softmax:rows=5,cols=33,dtype=f32,prologue=scale,log=true,direction=backward",
    "layernorm:rows=5,cols=33,dtype=f32",
    "elementwise:rows=5,cols=33,dtype=f32,expression=max(exp(x),log(abs(y)+0.1))/sqrt(1+square(y))+sigmoid(x)*relu(-y)*step(x)"
    ",out=f16",
    "elementwise:rows=5,cols=33,dtype=f32,expression=min(tanh(x),2)*silu(x-b)*s+rsqrt(2+square(x)),vectors=b,scalars=s",
    "elementwise:rows=5,cols=33,dtype=f32,expression=gelu(x)*max(2,min(1,3))+erf(x)*step(x)",
    "elementwise:rows=5,cols=33,dtype=f32,expression=x",
    "elementwise:rows=5,cols=33,dtype=f32,expression=(x-m)*r,columns=m+r",
    "reduction:rows=5,cols=33,dtype=f32,expression=square(x-m)*b,vectors=b,columns=m,reduce=mean,then=rsqrt(x+2)",
    "reduction:rows=5,cols=33,dtype=f32,expression=x*r,columns=r,reduce=sum,axis=rows,out=f16",
    "reduction:rows=5,cols=33,dtype=f16,expression=x,reduce=max",
    "reduction:rows=5,cols=33,dtype=f32,expression=gelu(x)*s,scalars=s,reduce=min,axis=rows",
    "strided_elementwise:shape=5x12x33,dtype=f32,expression=x*y-exp(z),"
    "operands=x.f32.1_170_5+y.f16.-12_0_-1.at80+z.f32.0_0_1",
    "strided_elementwise:shape=7x9x11,dtype=bf16,expression=x+y+z,operands=x.bf16.44_11_1.if0_1_0_0_4+"
    "y.bf16.33_11_1.at-44.if0_1_0_-4_3+z.bf16.22_11_1.at-77.if0_-1_0_8_2",
    "strided_elementwise:shape=7x5x9,dtype=f32,expression=x*y+z,operands=x.f32.9_0_1.bya.i64.0_1_0_2_63_11+"
    "y.f16.0_0_1.if1_0_0_0_3.bya.i64.0_1_0_0_9_11+z.f32.0_0_0.wrapb.i64.9_0_1_0_1_11.bya.i64.0_1_0_0_11_11",
    "strided_elementwise:shape=9x9,dtype=f32,expression=x-c,operands=x.f32.9_1.if1_-1_0_9+c.bool.1_9",
    "strided_elementwise:shape=2x7x9,dtype=bool,expression=lt(y,x),"
    "operands=y.f32.0_-1_0.at6+x.f32.35_7_1.at-8.if0_1_0_-1_5.if0_0_1_-1_7",
    "strided_reduction:shape=2x5x5x3x3,dtype=f32,expression=x,reduce=mean,axes=2,then=sqrt(abs(x)+1),"
    "operands=x.f32.81_18_2_9_1.at-10.if0_2_0_1_0_-1_9.if0_0_2_0_1_-1_9",
    "strided_reduction:shape=9x3x14,dtype=bool,expression=c,reduce=max,operands=c.bool.3_1_27",
    "layernorm:rows=5,cols=33,dtype=f32,prologue=residual",
    "layernorm:rows=5,cols=33,dtype=f32,prologue=bias+residual,stats=true",
    "layernorm:rows=5,cols=33,dtype=f32,direction=backward",
    "rmsnorm:rows=5,cols=33,dtype=f32",
    "rmsnorm:rows=5,cols=33,dtype=f32,prologue=residual,stats=true",
    "rmsnorm:rows=5,cols=33,dtype=f32,direction=backward",
    "attention:batch=2,heads=2,seq_q=5,head_dim=8,dtype=f32,causal=true",
    "attention:batch=1,heads=4,seq_q=7,head_dim=16,dtype=f32,seq_k=13,heads_k=2,causal=true",
    "attention:batch=1,heads=6,seq_q=1,head_dim=8,dtype=bf16,seq_k=9,heads_k=2,causal=true",
)


def worst(workload: Workload, inputs: Any, got: Any) -> float:
    """Return the largest error of a baseline's result as a fraction of the tolerance."""
    names = [tensor.name for tensor in workload.outputs()]
    parts = got if isinstance(got, tuple) else (got,)
    if workload.operator == "attention" and len(parts) == 1:
        names = names[:1]  # torch does not return lse
    by_name = dict(zip(names, parts, strict=True))
    references = InputSet(workload=workload, seed=0, inputs=inputs).references
    references = {name: references[name] for name in names}
    outputs = {
        name: np.asarray(by_name[name], np.float64).reshape(r.value.shape) for name, r in references.items()
    }
    return worst_error(workload, outputs, references)


@pytest.mark.parametrize("text", PROBLEMS)
def test_numpy_baselines_match_operator_reference(text: str) -> None:
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(0))
    call = libraries.numpy_call(workload, inputs)
    if call is not None:
        assert worst(workload, inputs, call()) <= 1


@pytest.mark.parametrize("text", PROBLEMS)
def test_torch_baselines_match_operator_reference(text: str) -> None:
    torch = pytest.importorskip("torch")
    workload = parse(text)
    inputs = workload.draw(np.random.default_rng(0))
    for call in baseline.torch_cpu(workload, inputs).values():
        result: Any = call()
        parts = result if isinstance(result, tuple) else (result,)
        plain = tuple(_as_stored(torch, workload, part) for part in parts)
        assert worst(workload, inputs, plain) <= 1


def _as_stored(torch: Any, workload: Any, part: Any) -> Any:
    """Return an output in memory order: torch exposes nhwc tensors with channels second."""
    nhwc = part.dim() == 4 and getattr(workload, "layout", "nchw") == "nhwc"
    return (part.permute(0, 2, 3, 1) if nhwc else part).to(torch.float64).numpy()


def test_operator_without_baseline_module_has_no_baselines() -> None:
    toy = Toy(n=3)
    assert libraries.numpy_call(toy, {}) is None
    assert libraries.torch_calls(toy, {}) == {}


@pytest.mark.parametrize(
    "text", ["m=32,n=48,k=64,dtype=e4m3", "m=32,n=48,k=63,dtype=i8", "m=16,n=48,k=64,dtype=i8"]
)
def test_torch_is_no_baseline_for_unsupported_workloads(text: str) -> None:
    pytest.importorskip("torch")
    workload = parse(f"gemm:{text}")
    assert baseline.torch_cpu(workload, workload.draw(np.random.default_rng(0))) == {}


@pytest.mark.parametrize(("cache", "kept"), [("cold", [0, 1]), ("warm", [])])
def test_runs_of_a_batch_have_results_in_memory_of_their_own(
    cache: Literal["cold", "warm"], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that an earlier run of the batch wrote is in the caches, unlike that of finalists."""
    workload = parse("gemm:m=8,n=8,k=8,dtype=f32")
    results: list[weakref.ref[Any]] = []

    def program() -> Any:
        result = np.ones((8, 8), np.float32)
        results.append(weakref.ref(result))
        return result

    def kept_results() -> list[int]:
        return [run for run, result in enumerate(results) if result() is not None]

    monkeypatch.setattr(baseline, "numpy_cpu", lambda *_: {"numpy": program})
    monkeypatch.setattr(baseline, "torch_cpu", lambda *_: {})
    launches = baseline.LibraryLaunches(workload, local_cpu(), Protocol(cache=cache))
    launches.attach(SlotArena(workload, 2))
    launches.choose("numpy")
    assert all(launches.time_us(slot) > 0 for slot in (0, 1))
    assert kept_results() == kept
    launches.time_us(0)
    assert kept_results() == [1, 2][: len(kept)]
    launches.choose("numpy")
    assert kept_results() == []
