"""The problems that stand for each operator in the compile matrix."""

from __future__ import annotations

__all__ = ["WORKLOADS"]

CONV = (
    "conv2d:n={n},c={c},h={h},w={w},k={k},r={r},s={s},stride={stride},pad={pad},dtype={dtype},layout={layout}"
)

WORKLOADS: dict[str, tuple[str, ...]] = {
    "attention": (
        "attention:batch=4,heads=32,seq_q=4096,head_dim=128,dtype=f16,causal=true",
        "attention:batch=8,heads=12,seq_q=512,head_dim=64,dtype=bf16",
        "attention:batch=2,heads=16,seq_q=1000,head_dim=80,dtype=f16,seq_k=1500,causal=true",
        "attention:batch=16,heads=32,seq_q=1,head_dim=128,dtype=bf16,seq_k=8192,heads_k=8",
        "attention:batch=2,heads=8,seq_q=700,head_dim=256,dtype=bf16,heads_k=2",
        "attention:batch=2,heads=8,seq_q=77,head_dim=40,dtype=f32",
        "attention:batch=1,heads=3,seq_q=50,head_dim=33,dtype=f16,seq_k=333,heads_k=1,causal=true",
        "attention:batch=4,heads=32,seq_q=4096,head_dim=128,dtype=bf16,heads_k=8,causal=true,direction=backward",
        "attention:batch=8,heads=12,seq_q=512,head_dim=64,dtype=f16,direction=backward",
        "attention:batch=2,heads=8,seq_q=1000,head_dim=80,dtype=f16,seq_k=1500,causal=true,direction=backward",
        "attention:batch=2,heads=8,seq_q=700,head_dim=256,dtype=bf16,direction=backward",
        "attention:batch=2,heads=8,seq_q=77,head_dim=40,dtype=f32,direction=backward",
        "attention:batch=1,heads=3,seq_q=50,head_dim=33,dtype=f16,seq_k=333,heads_k=1,causal=true,"
        "direction=backward",
    ),
    "conv2d": tuple(
        CONV.format(n=n, c=c, h=h, w=w, k=k, r=r, s=s, stride=stride, pad=pad, dtype=dtype, layout=layout)
        + more
        for n, c, h, w, k, r, s, stride, pad, dtype, layout, more in (
            (32, 64, 56, 56, 64, 3, 3, 1, 1, "f16", "nhwc", ",epilogue=scale+bias+relu"),
            (32, 256, 14, 14, 1024, 1, 1, 1, 0, "f16", "nhwc", ",epilogue=bias+residual+relu"),
            (8, 3, 224, 224, 64, 7, 7, 2, 3, "bf16", "nhwc", ""),
            (4, 64, 28, 28, 128, 3, 3, 2, 1, "f16", "nchw", ",epilogue=bias"),
            (4, 96, 27, 25, 96, 3, 3, 1, 2, "bf16", "nhwc", ",dilation=2,groups=3"),
            (8, 64, 28, 28, 64, 3, 3, 1, 1, "tf32", "nhwc", ""),
            (2, 5, 15, 13, 7, 3, 5, 1, 1, "f32", "nchw", ",epilogue=bias+relu"),
            (8, 64, 28, 28, 64, 3, 3, 1, 1, "f32", "nhwc", ""),
            (8, 64, 28, 28, 128, 3, 3, 2, 1, "f16", "nhwc", ",direction=dgrad"),
            (8, 64, 28, 28, 128, 3, 3, 1, 1, "bf16", "nhwc", ",direction=wgrad"),
            (32, 256, 28, 28, 512, 3, 3, 1, 1, "bf16", "nhwc", ",direction=dgrad,groups=2"),
            (2, 9, 13, 10, 7, 3, 3, 2, 1, "tf32", "nchw", ",direction=wgrad"),
            (2, 9, 13, 10, 7, 3, 3, 2, 1, "f32", "nchw", ",direction=dgrad"),
            (32, 512, 28, 28, 128, 1, 1, 1, 0, "f16", "nhwc", ",epilogue=bias+relu"),
            (8, 96, 27, 27, 72, 1, 1, 1, 0, "bf16", "nhwc", ",direction=wgrad"),
            (2, 70, 13, 11, 33, 1, 1, 1, 0, "f32", "nhwc", ",direction=dgrad"),
            (32, 96, 56, 56, 96, 3, 3, 1, 1, "f16", "nhwc", ",groups=96,epilogue=scale+bias+relu"),
            (8, 384, 28, 28, 384, 7, 7, 1, 3, "bf16", "nhwc", ",groups=384,direction=wgrad"),
            (4, 60, 27, 27, 60, 5, 5, 2, 2, "f32", "nchw", ",groups=60,direction=dgrad"),
        )
    ),
    "cross_entropy": (
        "cross_entropy:rows=8192,cols=128256,dtype=bf16",
        "cross_entropy:rows=1024,cols=50257,dtype=f16",
        "cross_entropy:rows=4096,cols=1000,dtype=f32",
        "cross_entropy:rows=64,cols=128256,dtype=bf16",
        "cross_entropy:rows=100000,cols=10,dtype=f32",
        "cross_entropy:rows=8192,cols=128256,dtype=bf16,direction=backward",
        "cross_entropy:rows=1001,cols=50257,dtype=f16,direction=backward",
        "cross_entropy:rows=100000,cols=10,dtype=f32,direction=backward",
    ),
    "elementwise": (
        "elementwise:rows=4096,cols=4096,dtype=f16,expression=gelu(x+bias)*y,vectors=bias",
        "elementwise:rows=8192,cols=1024,dtype=f32,expression=alpha*x+tanh(y)/(1+exp(z)),scalars=alpha",
        "elementwise:rows=1000,cols=777,dtype=bf16,expression=silu(x)*y,out=f32",
        "elementwise:rows=16,cols=50257,dtype=f16,expression=relu(max(x*gamma+beta,y)+z),vectors=beta+gamma",
        "elementwise:rows=100000,cols=3,dtype=f32,expression=sqrt(square(x)+b)*rsqrt(1+abs(x)),vectors=b",
    ),
    "gated_gemm": (
        "gated_gemm:m=2048,n=14336,k=4096,dtype=bf16,trans=nt",
        "gated_gemm:m=1,n=11008,k=4096,dtype=f16,trans=nt",
        "gated_gemm:m=512,n=2816,k=1024,dtype=f16,activation=gelu",
        "gated_gemm:m=1000,n=1004,k=1002,dtype=bf16,trans=nt,activation=sigmoid,out=f32",
        "gated_gemm:m=1024,n=1024,k=1024,dtype=tf32",
        "gated_gemm:m=515,n=129,k=77,dtype=tf32,trans=nt,activation=gelu",
        "gated_gemm:m=1024,n=1024,k=1024,dtype=f32",
        "gated_gemm:m=257,n=131,k=67,dtype=f32,trans=nt,activation=gelu",
        "gated_gemm:m=333,n=77,k=129,dtype=f16,trans=nt,activation=relu",
    ),
    "gemm": (
        "gemm:m=4096,n=4096,k=4096,dtype=f16,epilogue=residual",
        "gemm:m=512,n=3072,k=768,dtype=bf16,trans=nt,epilogue=bias+gelu+residual",
        "gemm:m=2048,n=2048,k=128,dtype=f16,batch=32,trans=tn,out=f32",
        "gemm:m=1000,n=1004,k=1002,dtype=bf16,trans=tt,epilogue=bias+silu",
        "gemm:m=1,n=11008,k=4096,dtype=f16,trans=nt",
        "gemm:m=1024,n=1024,k=1024,dtype=tf32",
        "gemm:m=515,n=129,k=77,dtype=tf32,trans=tn,epilogue=bias+relu",
        "gemm:m=1024,n=1024,k=1024,dtype=f32,epilogue=bias+relu+residual",
        "gemm:m=257,n=131,k=67,dtype=f32,trans=tt,epilogue=bias+gelu",
        "gemm:m=333,n=77,k=129,dtype=f16,trans=nt,epilogue=bias+silu+residual",
        "gemm:m=2048,n=2048,k=2048,dtype=e4m3,trans=nt,epilogue=bias+gelu",
        "gemm:m=16,n=4096,k=4096,dtype=e4m3,trans=nt,out=f32",
        "gemm:m=2048,n=2048,k=2048,dtype=i8,trans=nt",
        "gemm:m=1024,n=1024,k=1024,dtype=e4m3,trans=tn",
        "gemm:m=132,n=76,k=1000,dtype=i8",
        "gemm:m=129,n=77,k=1000,dtype=i8,trans=tn",
    ),
    "grouped_gemm": (
        "grouped_gemm:groups=8,m=4096,n=14336,k=4096,dtype=bf16,trans=nt",
        "grouped_gemm:groups=60,m=512,n=1408,k=2048,dtype=f16",
        "grouped_gemm:groups=8,m=16,n=14336,k=4096,dtype=bf16",
        "grouped_gemm:groups=8,m=1000,n=514,k=258,dtype=f16,trans=nt,out=f32",
        "grouped_gemm:groups=8,m=1024,n=1024,k=512,dtype=tf32",
        "grouped_gemm:groups=5,m=333,n=77,k=131,dtype=f32,trans=nt",
        "grouped_gemm:groups=8,m=1024,n=1024,k=1024,dtype=e4m3,trans=nt",
    ),
    "layernorm": (
        "layernorm:rows=4096,cols=1024,dtype=f32",
        "layernorm:rows=16384,cols=4096,dtype=f16",
        "layernorm:rows=1000,cols=777,dtype=bf16",
        "layernorm:rows=17,cols=40001,dtype=f32",
        "layernorm:rows=8192,cols=768,dtype=f16,prologue=bias+residual,stats=true",
        "layernorm:rows=17,cols=24576,dtype=f32,prologue=residual",
        "layernorm:rows=1,cols=1048576,dtype=bf16,prologue=residual",
        "layernorm:rows=8192,cols=768,dtype=f16,direction=backward",
        "layernorm:rows=2048,cols=12288,dtype=bf16,direction=backward",
        "layernorm:rows=37,cols=40001,dtype=f32,direction=backward",
    ),
    "rmsnorm": (
        "rmsnorm:rows=2048,cols=4096,dtype=bf16,prologue=residual",
        "rmsnorm:rows=1000,cols=777,dtype=f32,prologue=residual,stats=true",
        "rmsnorm:rows=17,cols=40002,dtype=f16",
        "rmsnorm:rows=4,cols=1048576,dtype=f32,stats=true",
        "rmsnorm:rows=2048,cols=4096,dtype=bf16,direction=backward",
        "rmsnorm:rows=37,cols=40001,dtype=f32,direction=backward",
    ),
    "softmax": (
        "softmax:rows=4096,cols=1024,dtype=f32",
        "softmax:rows=16384,cols=4096,dtype=f16,prologue=scale+mask",
        "softmax:rows=1000,cols=777,dtype=bf16,prologue=mask",
        "softmax:rows=17,cols=40001,dtype=f32,prologue=scale",
        "softmax:rows=12288,cols=50257,dtype=f16",
        "softmax:rows=8192,cols=4096,dtype=bf16,log=true",
        "softmax:rows=8,cols=131072,dtype=f16,prologue=scale+mask",
        "softmax:rows=1,cols=1000003,dtype=f32,log=true",
        "softmax:rows=16384,cols=4096,dtype=f16,prologue=scale,direction=backward",
        "softmax:rows=1000,cols=777,dtype=f32,log=true,direction=backward",
        "softmax:rows=64,cols=40960,dtype=f32,direction=backward",
        "softmax:rows=8,cols=131072,dtype=bf16,log=true,direction=backward",
    ),
}
"""Problems that stand for each operator: types, transpositions, epilogues, aligned sizes and odd ones."""
