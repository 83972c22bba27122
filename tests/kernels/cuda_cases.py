"""Every CUDA C++ variant of the package with workloads of odd sizes that it supports."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.kernel_checks import H100
from tests.support import package_variants
from tunebench import workloads
from tunebench.variant import CudaVariant

# Odd and prime extents cut every tile, vector and row somewhere; one size with many factors uses the widest
# accesses. Each variant runs those that it supports.
WORKLOADS = {
    "attention": (
        "attention:batch=1,heads=2,seq_q=37,head_dim=24,dtype=f16,causal=true,seq_k=53",
        "attention:batch=1,heads=4,seq_q=3,head_dim=80,dtype=bf16,seq_k=150,heads_k=2",
        "attention:batch=1,heads=1,seq_q=5,head_dim=13,dtype=f32,seq_k=35",
        "attention:batch=1,heads=4,seq_q=37,head_dim=40,dtype=f16,seq_k=83,heads_k=2,causal=true,direction=backward",
        "attention:batch=1,heads=1,seq_q=70,head_dim=64,dtype=bf16,seq_k=37,direction=backward",
        "attention:batch=2,heads=4,seq_q=37,head_dim=24,dtype=f16,seq_k=54,heads_k=2,causal=true,bias=bhqk,scale=1,"
        "window=9",
        "attention:batch=2,heads=2,seq_q=53,head_dim=40,dtype=bf16,seq_k=37,causal=true,bias=hk,align=first",
        "attention:batch=1,heads=4,seq_q=37,head_dim=40,dtype=f16,seq_k=83,heads_k=2,causal=true,direction=backward,"
        "bias=hqk,window=21",
        "attention:batch=2,heads=1,seq_q=70,head_dim=16,dtype=bf16,seq_k=37,causal=true,direction=backward,bias=bk,"
        "align=first",
        "attention:batch=1,heads=3,seq_q=35,head_dim=13,dtype=f32,seq_k=45,heads_k=1,causal=true,direction=backward",
    ),
    "batchnorm_stats": (
        "batchnorm_stats:rows=150,cols=37,dtype=f32,eps=0.25,momentum=0.5",
        "batchnorm_stats:rows=301,cols=200,dtype=f16",
        "batchnorm_stats:rows=97,cols=131,dtype=f32,direction=backward",
        "batchnorm_stats:rows=301,cols=72,dtype=bf16,direction=backward",
        "batchnorm_stats:rows=301,cols=72,dtype=f16,direction=backward,act=relu",
    ),
    "cross_entropy": (
        "cross_entropy:rows=37,cols=131,dtype=f32",
        "cross_entropy:rows=5,cols=1000,dtype=f16",
        "cross_entropy:rows=24,cols=97,dtype=f16,direction=backward",
        "cross_entropy:rows=200,cols=3,dtype=bf16,direction=backward",
    ),
    "elementwise": (
        "elementwise:rows=37,cols=131,dtype=f32,expression=alpha*gelu(x+bias)*y-tanh(x),vectors=bias,scalars=alpha",
        "elementwise:rows=20,cols=50,dtype=bf16,expression=silu(x)/max(1+square(y),2),out=f32",
        "elementwise:rows=5,cols=1000,dtype=f16,expression=relu(x*gamma+beta),vectors=beta+gamma",
        "elementwise:rows=19,cols=33,dtype=f32,expression=(x-mean)*rstd*g,vectors=g,columns=mean+rstd",
        "elementwise:rows=19,cols=40,dtype=f16,expression=relu((x-m)*g)*r,vectors=g+m,columns=r,vector_dtype=f32",
    ),
    "reduction": (
        "reduction:rows=37,cols=131,dtype=f32,expression=alpha*x*r+b,vectors=b,columns=r,scalars=alpha,reduce=sum",
        "reduction:rows=3,cols=5000,dtype=f16,expression=square(x),reduce=mean,then=rsqrt(x+1e-5),out=f32",
        "reduction:rows=150,cols=37,dtype=f32,expression=(x-mean)*b,vectors=b,columns=mean,axis=rows,reduce=sum",
        "reduction:rows=301,cols=200,dtype=bf16,expression=silu(x)*y,reduce=max,axis=rows",
    ),
    "strided_elementwise": (
        "strided_elementwise:shape=37x131,dtype=f32,expression=gelu(x)*y-z,operands=x.f32.131_1+y.f16.0_1+z.bf16.1_0",
        "strided_elementwise:shape=6x72x40,dtype=f16,expression=x*y,operands=x.f16.3456_1_72+y.f16.0_0_1.at8",
        "strided_elementwise:shape=5x35x67,dtype=f32,expression=x*y+c,"
        "operands=x.f32.1_335_5+y.bf16.-35_0_-1.at300+c.bool.67_0_1",
        "strided_elementwise:shape=7x12x40,dtype=bf16,expression=x+y+z,operands=x.f16.160_40_1.if0_1_0_0_4+"
        "y.bf16.120_40_1.at-160.if0_1_0_-4_3+z.f32.160_40_1.at-280.if0_1_0_-7_4",
        "strided_elementwise:shape=2x27x48,dtype=bool,expression=lt(c,x),"
        "operands=c.bool.0_-1_0.at26+x.f32.1200_48_1.at-48.if0_1_0_-1_25.if0_0_1_-8_40",
        "strided_elementwise:shape=37x72,dtype=f16,expression=x*y+z,operands=x.f16.0_1.wraprow.i64.1_0_0_72_9+"
        "y.f32.0_0.byrow.i64.1_0_0_1_11.bycol.i32.0_1_2_11_5+z.bf16.1_37.byrow.i64.1_0_0_37_11",
        "strided_elementwise:shape=35x24,dtype=bf16,expression=x+y,operands=x.bf16.0_1.if0_1_0_16.byi.i64.1_0_0_16_30+"
        "y.bf16.0_1.at-16.if0_1_-16_8.byi.i64.1_0_35_8_30",
        "strided_elementwise:shape=9x72,dtype=i8,expression=min(max(round(x*s)+z,-128),127),"
        "operands=x.bf16.72_1+s.f32.1_0+z.i8.0_1",
        "strided_elementwise:shape=33x70,dtype=f32,expression=x-y,operands=x.f32.1_33.if0_1_-3_60+y.f32.70_1.if1_-1_0_9",
    ),
    "strided_reduction": (
        "strided_reduction:shape=37x131,dtype=f32,expression=x*y-z,reduce=sum,"
        "operands=x.f32.131_1+y.f16.0_1+z.bf16.1_0",
        "strided_reduction:shape=37x9x64,dtype=f32,expression=x*y,reduce=sum,axes=2,"
        "operands=x.f16.0_0_1.byi.i64.9_1_0_0_64_30+y.f16.9_1_0",
        "strided_reduction:shape=3x5000,dtype=f16,expression=square(x),reduce=mean,then=rsqrt(x+1e-5),"
        "operands=x.f16.5000_1",
        "strided_reduction:shape=2x9x9x3x3,dtype=f32,expression=x,reduce=max,axes=2,"
        "operands=x.f32.289_34_2_17_1.at-18.if0_2_0_1_0_-1_17.if0_0_2_0_1_-1_17",
        "strided_reduction:shape=9x3x140,dtype=bool,expression=c,reduce=max,then=1-x,operands=c.bool.3_1_27",
        "strided_reduction:shape=5x7x30x11,dtype=bf16,expression=silu(x)*y,reduce=sum,axes=2,then=x*0.5,"
        "operands=x.f16.1_5_35_1050.if0_0_1_0_-3_20+y.f32.0_0_-1_0.at29",
        "strided_reduction:shape=700x6,dtype=f32,expression=x,reduce=min,axes=2,operands=x.bf16.6_1",
    ),
    "softmax": (
        "softmax:rows=37,cols=131,dtype=f32,prologue=scale+mask",
        "softmax:rows=5,cols=1000,dtype=f16",
        "softmax:rows=7,cols=3,dtype=bf16,prologue=mask",
        "softmax:rows=5,cols=1000,dtype=bf16,prologue=scale,log=true",
        "softmax:rows=37,cols=131,dtype=f32,prologue=scale,direction=backward",
        "softmax:rows=5,cols=1000,dtype=f16,direction=backward",
        "softmax:rows=6,cols=520,dtype=bf16,prologue=scale,log=true,direction=backward",
    ),
    "layernorm": (
        "layernorm:rows=37,cols=131,dtype=f32,prologue=bias+residual,stats=true",
        "layernorm:rows=5,cols=1000,dtype=f16,eps=0.001",
        "layernorm:rows=7,cols=3,dtype=bf16,prologue=residual,eps=1e-12",
        "layernorm:rows=37,cols=131,dtype=f32,direction=backward",
        "layernorm:rows=19,cols=1000,dtype=f16,direction=backward",
        "layernorm:rows=7,cols=3,dtype=bf16,direction=backward",
        "layernorm:rows=3,cols=5000,dtype=f16,prologue=bias+residual,eps=0.25",
    ),
    "rmsnorm": (
        "rmsnorm:rows=37,cols=131,dtype=f32,prologue=residual,stats=true",
        "rmsnorm:rows=5,cols=1000,dtype=bf16,eps=1e-6",
        "rmsnorm:rows=19,cols=1000,dtype=bf16,direction=backward",
        "rmsnorm:rows=3,cols=5000,dtype=f16,prologue=residual,stats=true,eps=0.25",
    ),
    "gemm": (
        "gemm:m=67,n=53,k=43,dtype=f32,trans=tn,epilogue=bias+gelu",
        "gemm:m=40,n=72,k=104,dtype=f16,epilogue=bias+silu+residual",
        "gemm:m=37,n=29,k=31,dtype=bf16,trans=tt,batch=2,epilogue=residual",
        "gemm:m=96,n=64,k=64,dtype=bf16,trans=nt",
        "gemm:m=40,n=72,k=104,dtype=f16,trans=nt,epilogue=bias+residual,act=x*tanh(max(x,0)+log(1+exp(-abs(x))))",
        "gemm:m=67,n=53,k=43,dtype=f32,trans=tn,epilogue=bias,act=tanh(x),pre=silu(x*scale+shift)+exp(min(x,0))",
        "gemm:m=40,n=72,k=104,dtype=f16,trans=nt,batch=2,pre=relu(x*scale+shift)",
        "gemm:m=37,n=58,k=30,dtype=bf16,epilogue=bias+relu,pre=x*sigmoid(1.702*x)",
        "gemm:m=33,n=65,k=17,dtype=tf32",
        "gemm:m=33,n=68,k=76,dtype=tf32",
        "gemm:m=40,n=48,k=80,dtype=e4m3,trans=nt,epilogue=bias+relu",
        "gemm:m=35,n=27,k=45,dtype=e4m3,trans=tn,out=f16",
        "gemm:m=40,n=48,k=592,dtype=e4m3,trans=nt,epilogue=bias+relu,accumulate=f32",
        "gemm:m=33,n=48,k=96,dtype=i8,trans=nt,batch=2",
        "gemm:m=35,n=27,k=45,dtype=i8,trans=tn",
    ),
    "gated_gemm": (
        "gated_gemm:m=67,n=53,k=43,dtype=f32,trans=nt,activation=gelu",
        "gated_gemm:m=40,n=72,k=104,dtype=f16",
        "gated_gemm:m=37,n=66,k=34,dtype=bf16,trans=nt,activation=sigmoid,out=f32",
        "gated_gemm:m=33,n=65,k=17,dtype=tf32,activation=relu",
    ),
    "scaled_gemm": (
        "scaled_gemm:m=37,n=53,k=98,dtype=bf16",
        "scaled_gemm:m=5,n=40,k=330,dtype=f16,weight=i4,scales=group,shift=true,bias=true",
        "scaled_gemm:m=37,n=150,k=296,dtype=bf16,weight=e4m3,scales=block,bias=true",
        "scaled_gemm:m=33,n=48,k=96,dtype=i8,scales=tensor,out=f16",
        "scaled_gemm:m=19,n=35,k=44,dtype=e4m3,out=f32",
        "scaled_gemm:m=35,n=150,k=300,dtype=e4m3,scales=block,bias=true",
    ),
    "scatter_add": (
        "scatter_add:rows=37,cols=21,bins=11,dtype=f32,skipped=3",
        "scatter_add:rows=90,cols=40,bins=7,dtype=bf16,index=i32,base=true,wraps=true",
    ),
    "grouped_gemm": (
        "grouped_gemm:groups=5,m=67,n=53,k=43,dtype=f32",
        "grouped_gemm:groups=9,m=140,n=72,k=104,dtype=f16,trans=nt,skew=zipf",
        "grouped_gemm:groups=4,m=130,n=34,k=38,dtype=bf16,skew=one,out=f32",
        "grouped_gemm:groups=3,m=1,n=65,k=17,dtype=tf32,trans=nt",
        "grouped_gemm:groups=3,m=30,n=48,k=80,dtype=e4m3",
        "grouped_gemm:groups=5,m=70,n=44,k=84,dtype=e4m3,trans=nt",
        "grouped_gemm:groups=3,m=70,n=48,k=400,dtype=e4m3,trans=nt,accumulate=f32",
    ),
    "conv2d": (
        "conv2d:n=2,c=9,h=11,w=7,k=7,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nchw,epilogue=bias+residual,"
        "act=x*tanh(max(x,0)+log(1+exp(-abs(x))))",
        "conv2d:n=1,c=16,h=9,w=9,k=24,r=3,s=3,stride=2,pad=1,dtype=f16,layout=nhwc",
        "conv2d:n=2,c=6,h=8,w=5,k=9,r=2,s=3,stride=1,pad=2,dtype=bf16,layout=nhwc,groups=3,dilation=2,"
        "epilogue=scale+bias+residual+relu",
        "conv2d:n=2,c=40,h=5,w=7,k=24,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nhwc,epilogue=bias,"
        "act=x*min(max(x+3,0),6)/6",
        "conv2d:n=2,c=12,h=9,w=11,k=12,r=3,s=3,stride=2,pad=1,dtype=f16,layout=nhwc,groups=12,"
        "epilogue=scale+bias,act=max(min(x,6),0)",
        "conv2d:n=2,c=3,h=10,w=13,k=3,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nchw,groups=3,direction=wgrad",
        "conv2d:n=2,c=24,h=9,w=7,k=20,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,epilogue=bias+relu,"
        "pre=max(x*scale+shift,0)",
        "conv2d:n=2,c=10,h=8,w=5,k=9,r=3,s=2,stride=2,pad=2,dtype=tf32,layout=nchw,act=tanh(x),"
        "pre=sigmoid(x-shift)",
        "conv2d:n=2,c=12,h=6,w=9,k=8,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nchw,groups=2,pre=x*scale+shift",
        "conv2d:n=2,c=12,h=7,w=9,k=6,r=3,s=3,stride=1,pad=1,dtype=bf16,layout=nhwc,groups=3,dilation=2,"
        "epilogue=scale+bias,pre=silu(x)*scale",
        "conv2d:n=2,c=40,h=5,w=7,k=24,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nhwc,pre=relu(x*scale+shift)",
    ),
}


def half_of_cases(half: int) -> list[Any]:
    """Return every case; those beyond the first of a variant that are in the other half are `exhaustive`.

    Two tests that emulate kernels have half 0 and half 1, so that one of them at least checks results and
    accesses of each case.
    """
    covered: set[str] = set()
    chosen = []
    for index, case in enumerate(cases()):
        variant, workload = case.values
        is_chosen = index % 2 == half or variant.key not in covered
        covered.add(variant.key)
        marks = [] if is_chosen else [pytest.mark.exhaustive]
        chosen.append(pytest.param(variant, workload, id=case.id, marks=marks))
    return chosen


def cases() -> list[Any]:
    """Return every variant with every workload that it supports."""
    parameters = []
    for variant in package_variants(CudaVariant):
        for text in WORKLOADS[variant.operator.operator]:
            workload = workloads.parse(text)
            if variant.refuses(workload, H100) is None:
                parameters.append(pytest.param(variant, workload, id=f"{variant.key}-{text}"))
    return parameters
