"""Workloads of the acceptance steps `verify`, `sanitize`, `measure`, `compare` and `record`."""

from __future__ import annotations

from tunebench.workloads import parse

__all__ = ["MEASURED", "RECORDED", "SANITIZED", "VERIFIED", "measured"]

PRODUCT_TYPES = ("f32", "tf32", "f16", "bf16")
GEMM_TYPES = (*PRODUCT_TYPES, "e4m3")
ROW_TYPES = ("f32", "f16", "bf16")
CONV = "conv2d:n={n},c={c},h={h},w={w},k={k},r={r},s={s},stride={stride},pad={pad},dtype={{dtype}}"

VERIFIED = (
    (GEMM_TYPES, "gemm:m=1,n=1,k=1,dtype={dtype}"),
    (GEMM_TYPES, "gemm:m=127,n=131,k=67,dtype={dtype},epilogue=bias+gelu"),
    (GEMM_TYPES, "gemm:m=257,n=255,k=129,dtype={dtype},trans=tn,epilogue=bias+relu"),
    (GEMM_TYPES, "gemm:m=65,n=95,k=33,dtype={dtype},batch=3,trans=nt"),
    (GEMM_TYPES, "gemm:m=520,n=264,k=1000,dtype={dtype},trans=tt,epilogue=bias"),
    (GEMM_TYPES, "gemm:m=1024,n=1024,k=1024,dtype={dtype}"),
    (GEMM_TYPES, "gemm:m=4096,n=4104,k=4096,dtype={dtype}"),
    (GEMM_TYPES, "gemm:m=5,n=1000,k=8200,dtype={dtype},trans=nt,epilogue=bias"),
    (("i8",), "gemm:m=5,n=1000,k=8200,dtype={dtype},trans=nt"),
    (("i8",), "gemm:m=127,n=131,k=67,dtype={dtype},trans=tn"),
    (("i8",), "gemm:m=65,n=95,k=33,dtype={dtype},batch=3,trans=tt"),
    (("e4m3", "i8"), "gemm:m=200,n=136,k=1040,dtype={dtype},trans=nt"),
    (("e4m3", "i8"), "gemm:m=4096,n=4096,k=4096,dtype={dtype},trans=nt"),
    (PRODUCT_TYPES, "gemm:m=1,n=4100,k=2052,dtype={dtype},trans=nt"),
    (GEMM_TYPES, "gemm:m=5,n=1536,k=4096,dtype={dtype},trans=nt,epilogue=bias"),
    (PRODUCT_TYPES, "gemm:m=1000,n=1001,k=1003,dtype={dtype}"),
    (GEMM_TYPES, "gemm:m=127,n=130,k=66,dtype={dtype},batch=2,epilogue=bias+silu+residual"),
    (GEMM_TYPES, "gemm:m=260,n=264,k=1040,dtype={dtype},trans=nt,epilogue=residual"),
    (GEMM_TYPES, "gemm:m=5,n=1000,k=8192,dtype={dtype},trans=nt,epilogue=bias+relu+residual"),
    (
        GEMM_TYPES,
        "gemm:m=260,n=264,k=1040,dtype={dtype},trans=nt,epilogue=bias+residual,"
        "act=0.5*x*(1+tanh(0.7978845608*(x+0.044715*x*x*x)))",
    ),
    (
        PRODUCT_TYPES,
        "gemm:m=260,n=264,k=1040,dtype={dtype},trans=nt,epilogue=bias,pre=relu(x*scale+shift)",
    ),
    (PRODUCT_TYPES, "gemm:m=127,n=130,k=66,dtype={dtype},trans=tn,pre=silu(x*scale+shift)"),
    (PRODUCT_TYPES, "gated_gemm:m=1,n=1,k=1,dtype={dtype}"),
    (PRODUCT_TYPES, "gated_gemm:m=127,n=131,k=67,dtype={dtype},activation=gelu"),
    (PRODUCT_TYPES, "gated_gemm:m=260,n=264,k=1000,dtype={dtype},trans=nt,activation=sigmoid,out=f32"),
    (PRODUCT_TYPES, "gated_gemm:m=2048,n=2056,k=4096,dtype={dtype},trans=nt"),
    (GEMM_TYPES, "grouped_gemm:groups=3,m=1,n=1,k=1,dtype={dtype}"),
    (GEMM_TYPES, "grouped_gemm:groups=5,m=131,n=130,k=66,dtype={dtype}"),
    (GEMM_TYPES, "grouped_gemm:groups=64,m=40,n=264,k=1000,dtype={dtype},trans=nt"),
    (GEMM_TYPES, "grouped_gemm:groups=8,m=1000,n=520,k=264,dtype={dtype},trans=nt,skew=zipf"),
    (PRODUCT_TYPES, "grouped_gemm:groups=8,m=515,n=264,k=136,dtype={dtype},skew=one,out=f32"),
    (("bf16", "e4m3"), "grouped_gemm:groups=8,m=4096,n=4096,k=4096,dtype={dtype},trans=nt,skew=zipf"),
    (PRODUCT_TYPES, CONV.format(n=1, c=3, h=7, w=9, k=5, r=3, s=3, stride=1, pad=1) + ",layout=nhwc"),
    (PRODUCT_TYPES, CONV.format(n=2, c=8, h=15, w=13, k=24, r=3, s=3, stride=2, pad=1) + ",layout=nchw"),
    (PRODUCT_TYPES, CONV.format(n=2, c=16, h=14, w=14, k=8, r=1, s=1, stride=1, pad=0) + ",layout=nhwc"),
    (
        PRODUCT_TYPES,
        CONV.format(n=1, c=4, h=20, w=17, k=6, r=5, s=3, stride=2, pad=2) + ",layout=nhwc,dilation=2",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=3, c=12, h=9, w=11, k=18, r=3, s=3, stride=1, pad=1) + ",layout=nhwc,groups=3",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=2, c=16, h=14, w=14, k=24, r=3, s=3, stride=1, pad=1)
        + ",layout=nhwc,epilogue=scale+bias+residual,act=x*min(max(x+3,0),6)/6",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=2, c=24, h=14, w=15, k=16, r=3, s=3, stride=1, pad=1)
        + ",layout=nhwc,epilogue=bias+relu,pre=max(x*scale+shift,0.25)",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=2, c=10, h=13, w=9, k=12, r=3, s=2, stride=2, pad=1) + ",layout=nchw,pre=exp(min(x,0))",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=4, c=64, h=28, w=28, k=64, r=3, s=3, stride=1, pad=1)
        + ",layout=nhwc,epilogue=scale+bias+residual+relu",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=2, c=9, h=13, w=10, k=7, r=3, s=3, stride=2, pad=1) + ",layout=nhwc,direction=dgrad",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=2, c=9, h=13, w=10, k=7, r=3, s=3, stride=2, pad=1) + ",layout=nchw,direction=wgrad",
    ),
    (ROW_TYPES, "elementwise:rows=1,cols=1,dtype={dtype},expression=relu(x)"),
    (
        ROW_TYPES,
        "elementwise:rows=37,cols=1023,dtype={dtype},expression=s*gelu(x+b)*y-tanh(x),vectors=b,scalars=s",
    ),
    (
        ROW_TYPES,
        "elementwise:rows=1000,cols=776,dtype={dtype},expression=max(exp(x),log(abs(y)+0.1))/sqrt(1+square(y))"
        "+rsqrt(2+square(x))-sigmoid(x)*silu(y)+min(x,y),out=f32",
    ),
    (ROW_TYPES, "elementwise:rows=100000,cols=3,dtype={dtype},expression=x*gamma+beta,vectors=beta+gamma"),
    (ROW_TYPES, "elementwise:rows=37,cols=1023,dtype={dtype},expression=(x-mean)*rstd,columns=mean+rstd"),
    (ROW_TYPES, "reduction:rows=1000,cols=49,dtype={dtype},expression=x,reduce=mean"),
    (
        ROW_TYPES,
        "reduction:rows=3,cols=100000,dtype={dtype},expression=s*square(x-m)*b,vectors=b,columns=m,scalars=s,"
        "reduce=mean,then=rsqrt(x+1),out=f32",
    ),
    (ROW_TYPES, "reduction:rows=37,cols=1023,dtype={dtype},expression=gelu(x),reduce=max"),
    (ROW_TYPES, "reduction:rows=10000,cols=776,dtype={dtype},expression=x*r,columns=r,reduce=sum,axis=rows"),
    (ROW_TYPES, "reduction:rows=10001,cols=3,dtype={dtype},expression=x*b,vectors=b,reduce=min,axis=rows"),
    (ROW_TYPES, "batchnorm_stats:rows=2,cols=1,dtype={dtype}"),
    (ROW_TYPES, "batchnorm_stats:rows=100001,cols=3,dtype={dtype},eps=1e-12,momentum=1"),
    (ROW_TYPES, "batchnorm_stats:rows=10000,cols=776,dtype={dtype}"),
    (ROW_TYPES, "batchnorm_stats:rows=37,cols=4099,dtype={dtype},direction=backward"),
    (ROW_TYPES, "batchnorm_stats:rows=10000,cols=776,dtype={dtype},direction=backward"),
    (ROW_TYPES, "batchnorm_stats:rows=10001,cols=131,dtype={dtype},direction=backward,act=relu"),
    (
        PRODUCT_TYPES,
        CONV.format(n=3, c=40, h=23, w=19, k=40, r=3, s=3, stride=2, pad=1)
        + ",layout=nhwc,groups=40,epilogue=scale+bias",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=3, c=9, h=29, w=31, k=9, r=5, s=5, stride=2, pad=2)
        + ",layout=nchw,groups=9,direction=dgrad",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=5, c=72, h=28, w=28, k=72, r=7, s=7, stride=1, pad=3)
        + ",layout=nhwc,groups=72,direction=wgrad",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=3, c=136, h=17, w=15, k=72, r=1, s=1, stride=1, pad=0) + ",layout=nhwc,direction=wgrad",
    ),
    (
        PRODUCT_TYPES,
        CONV.format(n=2, c=33, h=19, w=18, k=70, r=3, s=3, stride=1, pad=1) + ",layout=nchw,direction=dgrad",
    ),
    (ROW_TYPES, "softmax:rows=1,cols=1,dtype={dtype}"),
    (ROW_TYPES, "softmax:rows=3,cols=1023,dtype={dtype}"),
    (ROW_TYPES, "softmax:rows=1000,cols=777,dtype={dtype},prologue=scale+mask"),
    (ROW_TYPES, "softmax:rows=17,cols=40001,dtype={dtype},prologue=scale"),
    (ROW_TYPES, "softmax:rows=4096,cols=1024,dtype={dtype},prologue=mask"),
    (ROW_TYPES, "softmax:rows=3,cols=1000003,dtype={dtype},prologue=scale+mask"),
    (ROW_TYPES, "softmax:rows=1000,cols=777,dtype={dtype},prologue=scale,log=true"),
    (ROW_TYPES, "softmax:rows=8,cols=131072,dtype={dtype},log=true"),
    (ROW_TYPES, "softmax:rows=1,cols=1,dtype={dtype},direction=backward"),
    (ROW_TYPES, "softmax:rows=1000,cols=777,dtype={dtype},prologue=scale,direction=backward"),
    (ROW_TYPES, "softmax:rows=8,cols=131072,dtype={dtype},direction=backward"),
    (ROW_TYPES, "softmax:rows=33,cols=1023,dtype={dtype},prologue=scale,log=true,direction=backward"),
    (ROW_TYPES, "softmax:rows=2,cols=1000003,dtype={dtype},log=true,direction=backward"),
    (ROW_TYPES, "cross_entropy:rows=1000,cols=3,dtype={dtype}"),
    (ROW_TYPES, "cross_entropy:rows=513,cols=1000,dtype={dtype}"),
    (ROW_TYPES, "cross_entropy:rows=33,cols=50257,dtype={dtype}"),
    (ROW_TYPES, "cross_entropy:rows=1001,cols=3,dtype={dtype},direction=backward"),
    (ROW_TYPES, "cross_entropy:rows=513,cols=1000,dtype={dtype},direction=backward"),
    (ROW_TYPES, "cross_entropy:rows=33,cols=50257,dtype={dtype},direction=backward"),
    (ROW_TYPES, "layernorm:rows=1,cols=1,dtype={dtype}"),
    (ROW_TYPES, "layernorm:rows=5,cols=1023,dtype={dtype},eps=1e-12"),
    (ROW_TYPES, "layernorm:rows=33,cols=40001,dtype={dtype}"),
    (ROW_TYPES, "layernorm:rows=4096,cols=1024,dtype={dtype}"),
    (ROW_TYPES, "layernorm:rows=1000,cols=777,dtype={dtype},prologue=bias+residual,stats=true"),
    (ROW_TYPES, "layernorm:rows=3,cols=300001,dtype={dtype},prologue=residual"),
    (ROW_TYPES, "layernorm:rows=1003,cols=1000,dtype={dtype},direction=backward"),
    (ROW_TYPES, "layernorm:rows=37,cols=40001,dtype={dtype},direction=backward"),
    (ROW_TYPES, "layernorm:rows=4096,cols=1024,dtype={dtype},direction=backward"),
    (ROW_TYPES, "rmsnorm:rows=1,cols=1,dtype={dtype}"),
    (ROW_TYPES, "rmsnorm:rows=33,cols=40001,dtype={dtype}"),
    (ROW_TYPES, "rmsnorm:rows=1000,cols=777,dtype={dtype},prologue=residual,stats=true"),
    (ROW_TYPES, "rmsnorm:rows=2,cols=1048576,dtype={dtype}"),
    (ROW_TYPES, "rmsnorm:rows=1003,cols=1000,dtype={dtype},direction=backward"),
    (ROW_TYPES, "attention:batch=1,heads=1,seq_q=1,head_dim=8,dtype={dtype}"),
    (
        ROW_TYPES,
        "attention:batch=2,heads=6,seq_q=131,head_dim=72,dtype={dtype},seq_k=259,heads_k=2,causal=true",
    ),
    (ROW_TYPES, "attention:batch=1,heads=4,seq_q=1000,head_dim=64,dtype={dtype}"),
    (ROW_TYPES, "attention:batch=1,heads=8,seq_q=515,head_dim=128,dtype={dtype},heads_k=2,causal=true"),
    (
        ROW_TYPES,
        "attention:batch=3,heads=8,seq_q=2,head_dim=128,dtype={dtype},seq_k=2049,heads_k=2,causal=true",
    ),
    (ROW_TYPES, "attention:batch=1,heads=2,seq_q=257,head_dim=256,dtype={dtype}"),
)
"""Dtypes and workloads; each runs with every variant that supports it."""

SANITIZED = tuple((types, text) for types, text in VERIFIED if "=1024" not in text and "=4096" not in text)
LAYER = CONV.format(n=32, c=64, h=56, w=56, k=64, r=3, s=3, stride=1, pad=1) + ",layout=nhwc"
DEEP = CONV.format(n=32, c=256, h=14, w=14, k=256, r=3, s=3, stride=1, pad=1) + ",layout=nhwc"
STRIDED = CONV.format(n=32, c=128, h=56, w=56, k=128, r=3, s=3, stride=2, pad=1) + ",layout=nhwc"
PROMPT = "attention:batch=1,heads=32,seq_q=2048,head_dim=128,dtype=bf16,heads_k=8,causal=true"
LONG = "attention:batch=2,heads=16,seq_q=8192,head_dim=128,dtype=f16"

MEASURED = (
    ("gemm:m=4096,n=4096,k=4096,dtype=f16", 80),
    (LAYER, 60),
    (f"{LAYER},direction=dgrad", 50),
    (f"{LAYER},direction=wgrad", 50),
    (f"{LAYER},epilogue=scale+bias+residual+relu", 50),
    (DEEP, 60),
    (f"{DEEP},direction=dgrad", 50),
    (f"{DEEP},direction=wgrad", 50),
    (f"{STRIDED},direction=dgrad", 50),
    (CONV.format(n=32, c=256, h=28, w=28, k=1024, r=1, s=1, stride=1, pad=0) + ",layout=nhwc", 60),
    (CONV.format(n=32, c=192, h=56, w=56, k=192, r=3, s=3, stride=1, pad=1) + ",layout=nhwc,groups=192", 60),
    # llama-3-8b: a prompt, and a decoding step of 16 sequences; also heads of 64 and long prompts
    (PROMPT, 60),
    (f"{PROMPT},direction=backward", 50),
    ("attention:batch=16,heads=32,seq_q=1,head_dim=128,dtype=bf16,seq_k=8192,heads_k=8", 60),
    (LONG, 60),
    (f"{LONG},direction=backward", 50),
    ("attention:batch=8,heads=12,seq_q=1024,head_dim=64,dtype=f16,causal=true", 60),
    ("softmax:rows=16384,cols=4096,dtype=f16", 50),
    ("softmax:rows=16384,cols=4096,dtype=f16,prologue=scale+mask", 50),
    ("softmax:rows=4096,cols=1024,dtype=f32", 50),
    ("softmax:rows=16384,cols=4096,dtype=f16,direction=backward", 50),
    ("softmax:rows=8,cols=131072,dtype=f16", 50),
    ("cross_entropy:rows=8192,cols=128256,dtype=bf16", 40),
    ("cross_entropy:rows=1024,cols=50257,dtype=f16,direction=backward", 40),
    ("layernorm:rows=16384,cols=4096,dtype=f16", 50),
    ("layernorm:rows=4096,cols=1024,dtype=f32", 50),
    ("layernorm:rows=16384,cols=4096,dtype=f16,prologue=bias+residual", 50),
    ("layernorm:rows=8192,cols=768,dtype=f16,prologue=residual,stats=true", 50),
    ("layernorm:rows=8192,cols=768,dtype=f16,direction=backward", 50),
    ("rmsnorm:rows=16384,cols=4096,dtype=bf16", 50),
    ("rmsnorm:rows=2048,cols=4096,dtype=bf16,prologue=residual", 50),
    ("rmsnorm:rows=16,cols=4096,dtype=bf16,prologue=residual", 50),
    ("rmsnorm:rows=8192,cols=4096,dtype=bf16,direction=backward", 50),
    ("rmsnorm:rows=1,cols=1048576,dtype=f32", 50),
    ("elementwise:rows=8192,cols=4096,dtype=f16,expression=gelu(x+bias)*y+z,vectors=bias", 50),
    ("elementwise:rows=8192,cols=4096,dtype=bf16,expression=silu(x)*y", 50),
    ("reduction:rows=65536,cols=49,dtype=f16,expression=x,reduce=mean", 50),
    ("reduction:rows=8192,cols=4096,dtype=bf16,expression=square(x),reduce=mean,then=rsqrt(x+1e-5)", 50),
    ("reduction:rows=65536,cols=1024,dtype=f16,expression=x,reduce=sum,axis=rows", 50),
    ("reduction:rows=1,cols=33554432,dtype=f32,expression=square(x-y),reduce=mean", 50),
    # resnet50: statistics of 32 images after the first convolution, and in the last stage
    ("batchnorm_stats:rows=401408,cols=64,dtype=f16", 50),
    ("batchnorm_stats:rows=401408,cols=64,dtype=f16,direction=backward,act=relu", 50),
    ("batchnorm_stats:rows=1568,cols=2048,dtype=f16", 50),
    # llama-3-8b: the gated half of the feed-forward layer, for a prompt and for 16 sequences
    ("gated_gemm:m=2048,n=14336,k=4096,dtype=bf16,trans=nt", 50),
    ("gated_gemm:m=16,n=14336,k=4096,dtype=bf16,trans=nt", 50),
    ("gemm:m=4096,n=3072,k=768,dtype=f16,epilogue=bias+gelu", 60),
    ("gemm:m=4096,n=4096,k=4096,dtype=f16,epilogue=bias+silu+residual", 50),
    ("gemm:m=8192,n=8192,k=8192,dtype=bf16", 60),
    ("gemm:m=2048,n=2048,k=2048,dtype=f32", 60),
    ("gemm:m=4096,n=4096,k=4096,dtype=tf32", 50),
    ("gemm:m=4096,n=4096,k=4096,dtype=e4m3,trans=nt", 50),
    ("gemm:m=4096,n=4096,k=4096,dtype=i8,trans=nt", 50),
    ("gemm:m=1000,n=1001,k=1003,dtype=f16,trans=nt", 50),
    ("gemm:m=64,n=4096,k=4096,dtype=f16", 60),
    # llama-3-8b: a prompt, and steps of decoding 1 and 16 sequences
    ("gemm:m=2048,n=4096,k=4096,dtype=bf16,trans=nt", 50),
    ("gemm:m=2048,n=14336,k=4096,dtype=bf16,trans=nt", 50),
    ("gemm:m=2048,n=4096,k=14336,dtype=bf16,trans=nt", 50),
    ("gemm:m=1,n=14336,k=4096,dtype=bf16,trans=nt", 50),
    ("gemm:m=1,n=4096,k=14336,dtype=bf16,trans=nt", 50),
    ("gemm:m=16,n=14336,k=4096,dtype=bf16,trans=nt", 50),
    ("gemm:m=16,n=1024,k=4096,dtype=bf16,trans=nt", 50),
    # mixtral-8x7b: the experts, for a prompt and for decoding 16 sequences
    ("grouped_gemm:groups=8,m=4096,n=14336,k=4096,dtype=bf16,trans=nt", 50),
    ("grouped_gemm:groups=8,m=4096,n=4096,k=14336,dtype=bf16,trans=nt,skew=zipf", 50),
    ("grouped_gemm:groups=8,m=32,n=14336,k=4096,dtype=bf16,trans=nt", 50),
)
"""Workloads to tune, with the number of trials; `{dtype}` is f16."""

PART_TRIALS = 30
"""Trials of each unfused part of a fused workload."""


def measured() -> list[tuple[str, int]]:
    """Return the workloads to tune and their trials, each fused workload followed by its unfused parts."""
    listed = {str(parse(text.format(dtype="f16"))): trials for text, trials in MEASURED}
    found: dict[str, int] = {}
    for text, trials in listed.items():
        found[text] = trials
        for part in map(str, parse(text).unfused()):
            found.setdefault(part, listed.get(part, PART_TRIALS))
    return list(found.items())


RECORDED = (
    ("softmax:rows=4096,cols=4096,dtype=f16", "softmax/cuda_block", 1000),
    ("layernorm:rows=4096,cols=4096,dtype=f16", "layernorm/cuda_block", 1000),
    ("gemm:m=2048,n=2048,k=2048,dtype=f16", "gemm/cuda_mma", 1500),
    ("gemm:m=1024,n=1024,k=1024,dtype=f32", "gemm/cuda_simt", 1000),
    ("gemm:m=16,n=4096,k=4096,dtype=bf16,trans=nt", "gemm/cuda_mma", 1000),
    ("grouped_gemm:groups=8,m=1024,n=2048,k=1024,dtype=bf16,trans=nt", "grouped_gemm/cuda_mma", 1000),
    (
        CONV.format(n=8, c=64, h=56, w=56, k=64, r=3, s=3, stride=1, pad=1) + ",layout=nhwc",
        "conv2d/cuda_implicit_gemm_mma",
        1000,
    ),
    (LAYER, "conv2d/cuda_wgmma", 1000),
    ("attention:batch=4,heads=16,seq_q=1024,head_dim=128,dtype=f16,causal=true", "attention/cuda_mma", 1000),
    ("rmsnorm:rows=8192,cols=4096,dtype=bf16,direction=backward", "rmsnorm/cuda_backward", 1000),
    ("elementwise:rows=8192,cols=4096,dtype=bf16,expression=silu(x)*y", "elementwise/cuda_vector", 1000),
)
"""Workload, variant and most configurations (at random) of each search space to record."""
