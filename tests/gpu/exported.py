"""Run exported kernels on a GPU of this machine, each with its exported C++ program.

    python -m tests.gpu.exported [--arch sm_90] [--out exported]

Exports the default configuration of every CUDA C++ and Numba-CUDA variant, builds `main.cpp` with g++ against
the driver and runs it. If nvcc is on the PATH, also exports and compiles the sources. Exit status: 0 if every
program succeeded, 1 if one failed, 5 if there is no such GPU, 6 without g++ or cuda.h.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tests.gpu.acceptance import find_device
from tunebench import _environment
from tunebench.compile import BinaryCache, compile_config
from tunebench.device import Device
from tunebench.export import Format, build_lines, write_export
from tunebench.kernels import variants
from tunebench.tuning.choice import ChosenConfig, choose_config
from tunebench.variant import CudaVariant, GpuVariant
from tunebench.workloads import parse

WORKLOADS = (
    "gemm:m=1024,n=1000,k=512,dtype=f16,trans=nt,epilogue=bias+gelu",
    "gemm:m=512,n=512,k=512,dtype=f32,epilogue=bias+residual",
    "gated_gemm:m=512,n=1024,k=512,dtype=bf16,trans=nt",
    "gated_gemm:m=300,n=500,k=200,dtype=f32",
    "scaled_gemm:m=16,n=1024,k=512,dtype=bf16,weight=i4,scales=group,bias=true",
    "conv2d:n=8,c=64,h=28,w=28,k=128,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc",
    "conv2d:n=8,c=64,h=28,w=28,k=128,r=3,s=3,stride=1,pad=1,dtype=bf16,layout=nhwc,direction=wgrad",
    "conv2d:n=8,c=64,h=28,w=28,k=128,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nhwc",
    "conv2d:n=8,c=64,h=28,w=28,k=128,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc",
    "conv2d:n=8,c=64,h=28,w=28,k=64,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,groups=64",
    "attention:batch=2,heads=8,seq_q=500,head_dim=64,dtype=f16,causal=true",
    "attention:batch=16,heads=32,seq_q=1,head_dim=128,dtype=bf16,seq_k=4000,heads_k=8",
    "attention:batch=2,heads=8,seq_q=500,head_dim=64,dtype=bf16,causal=true,direction=backward",
    "elementwise:rows=1000,cols=1000,dtype=f16,expression=s*gelu(x+b)*y,vectors=b,scalars=s",
    "reduction:rows=4,cols=100000,dtype=f16,expression=s*square(x-m)*b,vectors=b,columns=m,scalars=s,reduce=mean",
    "reduction:rows=10000,cols=1000,dtype=bf16,expression=x*r,columns=r,reduce=sum,axis=rows",
    "batchnorm_stats:rows=100000,cols=64,dtype=f16",
    "batchnorm_stats:rows=10000,cols=777,dtype=bf16,direction=backward",
    "grouped_gemm:groups=8,m=512,n=1024,k=512,dtype=f16,trans=nt",
    "grouped_gemm:groups=8,m=256,n=256,k=256,dtype=f32",
    "gemm:m=512,n=512,k=512,dtype=e4m3,trans=nt,accumulate=f32",
    "grouped_gemm:groups=8,m=512,n=1024,k=512,dtype=e4m3,trans=nt,accumulate=f32",
    "softmax:rows=4096,cols=1000,dtype=f32,prologue=scale+mask",
    "softmax:rows=8,cols=100000,dtype=f16,log=true",
    "softmax:rows=8,cols=100000,dtype=f32,prologue=scale,direction=backward",
    "scatter_add:rows=4096,cols=128,bins=1000,dtype=f16,base=true",
    "cross_entropy:rows=64,cols=50257,dtype=f16",
    "cross_entropy:rows=64,cols=50257,dtype=f16,direction=backward",
    "layernorm:rows=4096,cols=1024,dtype=bf16",
    "layernorm:rows=1000,cols=1000,dtype=f16",
    "layernorm:rows=1000,cols=1000,dtype=f16,direction=backward",
    "layernorm:rows=4,cols=100000,dtype=f32",
    "rmsnorm:rows=4,cols=100000,dtype=f16,prologue=residual,stats=true",
    "rmsnorm:rows=1000,cols=1000,dtype=f32,direction=backward",
)
"""Workloads with scalars, masks, scratch memory, and more than 48 KiB of dynamic shared memory."""

LIBRARY = "-l:libcuda.so.1"
"""The driver library; machines without the CUDA toolkit have no libcuda.so to link against."""
TIMEOUT_S = 300.0


def choices(device: Device) -> Iterator[ChosenConfig]:
    """Yield the default configuration of every GPU variant for each workload that it supports."""
    for workload in map(parse, WORKLOADS):
        for variant in variants(workload):
            if isinstance(variant, GpuVariant) and variant.refuses(workload, device) is None:
                config = str(variant.default(workload, device))
                yield choose_config(workload, device, variant=variant.key, config=config)


def header_folder() -> Path | None:
    """Return the folder of cuda.h, from the CUDA toolkit or the package nvidia-cuda-runtime."""
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home or "/usr/local/cuda", "include")]
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        files = []
    folders += [Path(str(file.locate())).parent for file in files if file.name == "cuda.h"]
    return next((folder for folder in folders if (folder / "cuda.h").is_file()), None)


def ran(choice: ChosenConfig, folder: Path, form: Format, include: Path) -> str | None:
    """Export, build and run one choice; print its output and return the failure, or None."""
    cache = BinaryCache(_environment.binary_folder())
    binary = compile_config(choice.variant, choice.workload, choice.config, choice.device, cache)
    write_export(choice, binary, folder, form)
    commands = [line.split() for line in build_lines(choice, form)[:-1]]
    commands += [["g++", "-std=c++17", "-O2", f"-I{include}", "-o", "run", "main.cpp", LIBRARY], ["./run"]]
    for command in commands:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            words = " ".join((done.stdout + done.stderr).split())
            return f"{command[0]} exited with {done.returncode}: {words[-500:]}"
    print(f"  {'; '.join(done.stdout.splitlines())}", flush=True)
    return None


def main(arguments: list[str] | None = None) -> int:
    """Run every exported kernel and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", help="architecture the GPU must have, such as sm_90")
    parser.add_argument(
        "--out", type=Path, default=Path("exported"), help="folder of the exported files (default: exported)"
    )
    options = parser.parse_args(arguments)
    device, include = find_device(options.arch), header_folder()
    if shutil.which("g++") is None or include is None:
        print("building exported kernels needs g++ and cuda.h; install both", file=sys.stderr)
        return 6
    wrong = 0
    for number, choice in enumerate(choices(device)):
        forms: list[Format] = ["cubin"]
        if shutil.which("nvcc") and isinstance(choice.variant, CudaVariant):
            forms.append("cu")
        for form in forms:
            print(f"{choice.variant.key} ({form}) {choice.workload}", flush=True)
            problem = ran(choice, options.out / f"{number}-{form}", form, include)
            if problem is not None:
                wrong += 1
                print(f"  WRONG: {problem}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
