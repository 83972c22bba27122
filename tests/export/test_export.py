"""Export of kernels: the written files, and the C++ example run against a fake CUDA driver."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_driver.build import build_driver
from tests.fake_driver.variants import Calls, Mapped, fake_binary
from tests.support import needs_numba_cuda, needs_nvrtc, package_variants
from tests.toy_variants import CONFIG, NumbaToy, Toy, folder_of_header, parameter_sizes
from tunebench import __version__, _environment, export, kernels
from tunebench.binary.cubin import read_cubin
from tunebench.compile import Binary, BinaryCache, compile_config
from tunebench.device import local_cpu, local_gpus, representative
from tunebench.dtype import DTYPES, itemsize, numpy_dtype
from tunebench.errors import InputError, UnknownName
from tunebench.export import FORMATS, build_lines, stand_alone_source, write_export
from tunebench.export.manifest import manifest
from tunebench.export.table import ENCODING, tables
from tunebench.tuning.choice import ChosenConfig, choose_config
from tunebench.variant import CudaVariant, GpuVariant, Scalar, TensorMap
from tunebench.workload import Tensor
from tunebench.workloads import parse

HERE = Path(__file__).parent

# -- example program with the fake driver --------------------------------------------------------------------


def scaling(variant: Any) -> ChosenConfig:
    return ChosenConfig(
        workload=Toy(n=1000),
        device=representative("sm_90"),
        variant=variant,
        config=CONFIG,
        why="default",
        expected_us=12.5,
        how="predicted",
    )


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the fake driver, built from fake_driver.cpp as libcuda.so."""
    return build_driver(tmp_path_factory.mktemp("driver"), "libcuda.so")


FAKE = fake_binary(Calls("right"))
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror")


class Program:
    """Compiled C++ example of an export, with additional compiler flags."""

    def __init__(self, folder: Path, driver: Path, *flags: str) -> None:
        self.folder, self._driver = folder, driver
        compile_it = ["g++", *FLAGS, *flags, f"-I{folder_of_header('cuda.h')}", "-o", "run", "main.cpp"]
        subprocess.run([*compile_it, f"-L{driver}", "-lcuda"], cwd=folder, check=True)

    def run(self, *arguments: str, given: str = "") -> tuple[int, str, str]:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(self._driver)}
        command = ["./run", *arguments]
        ran = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ran.returncode, ran.stdout, ran.stderr


def written(variant: Any, folder: Path) -> None:
    choice = scaling(variant)
    write_export(choice, fake_binary(variant), folder, "cubin")


def built(variant: Any, folder: Path, driver: Path) -> Program:
    written(variant, folder)
    return Program(folder, driver)


def random_f32(count: int) -> list[float]:
    """Return the first values with which main.cpp fills f32 tensors."""
    state, made = 0x9E3779B97F4A7C15, []
    for _ in range(count):
        state ^= state << 13 & (2**64 - 1)
        state ^= state >> 7
        state ^= state << 17 & (2**64 - 1)
        bits = (state >> 63) << 31 | 0x3F000000 | (state >> 8 & 0x7FFFFF)
        made.append(struct.unpack("<f", struct.pack("<I", bits))[0])
    return made


def expected_sums() -> tuple[float, float]:
    *x, factor = random_f32(1001)
    y = [struct.unpack("<f", struct.pack("<f", value * factor))[0] for value in x]
    return sum(y), sum(map(abs, y))


def test_example_runs_and_times_the_kernel(tmp_path: Path, driver: Path) -> None:
    program = built(Calls("right"), tmp_path, driver)
    code, out, err = program.run()
    assert (code, err) == (0, "")
    name, checksum, timing = out.splitlines()
    assert name == "on NVIDIA H200"
    words = checksum.replace(",", "").split()
    assert words[:3] == ["y:", "1000", "elements"]
    assert (float(words[4]), float(words[7])) == pytest.approx(expected_sums(), rel=1e-8)
    assert timing.startswith("time: 50.000 us, the median of 21 runs")
    assert timing.endswith("expected: 12.500 us, predicted")
    assert program.run("nowhere.cubin") == (2, "", "cannot read nowhere.cubin\n")
    (tmp_path / "other.cubin").write_bytes(b"of another kind")
    code, _, err = program.run("other.cubin")
    assert (code, err[:20]) == (1, "loading the kernels:")
    assert "(the kernels are for sm_90a)" in err


@pytest.mark.parametrize("variant", [NumbaToy(), Mapped()], ids=["Numba array descriptors", "tensor map"])
def test_example_passes_numba_arrays_and_tensor_maps(variant: Any, tmp_path: Path, driver: Path) -> None:
    code, out, _ = built(variant, tmp_path, driver).run()
    assert code == 0
    words = out.splitlines()[1].replace(",", "").split()
    assert float(words[4]) == pytest.approx(expected_sums()[0], rel=1e-8)


def test_example_launches_all_kernels_with_scratch_and_shared_memory(tmp_path: Path, driver: Path) -> None:
    code, out, _ = built(Calls("large", smem_bytes=100_000, scratch=True), tmp_path, driver).run()
    assert code == 0
    assert "time: 100.000 us" in out
    assert "half:" not in out  # scratch is not printed as output


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("unwritten", "y: 1 elements are no numbers"),
        ("no_such_kernel", "no_such_kernel: CUDA_ERROR_NOT_FOUND"),
    ],
)
def test_example_fails_if_the_kernel_fails(tmp_path: Path, driver: Path, entry: str, says: str) -> None:
    code, out, err = built(Calls(entry), tmp_path, driver).run()
    assert code == 1
    assert says in out + err


# -- every variant, launched by the example program ----------------------------------------------------------

DEPTHWISE = "conv2d:n=9,c=64,h=9,w=9,k=64,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,groups=64"
ONE_TAP = "conv2d:n=2,c=16,h=9,w=9,k=24,r=1,s=1,stride=1,pad=0,layout=nhwc"
BACKWARD = "attention:direction=backward,batch=1,heads=2"
WORKLOADS = {
    "attention": "attention:batch=1,heads=2,seq_q=70,head_dim=64,dtype=f16",
    "attention/cuda_mma_backward": f"{BACKWARD},seq_q=70,head_dim=40,dtype=f16",
    "attention/cuda_simt_backward": f"{BACKWARD},seq_q=70,head_dim=13,dtype=f32",
    "attention/cuda_wgmma_backward": f"{BACKWARD},seq_q=71,head_dim=64,dtype=bf16",
    "elementwise": "elementwise:rows=50,cols=77,dtype=f16,expression=s*gelu(x+b)*y,vectors=b,scalars=s",
    "reduction": "reduction:rows=3,cols=3001,dtype=f16,expression=s*x*r,columns=r,scalars=s,reduce=mean",
    "reduction/cuda_column": "reduction:rows=300,cols=3,dtype=bf16,expression=x*b,vectors=b,reduce=max,"
    "axis=rows",
    "gemm": "gemm:m=4096,n=1096,k=64,dtype=f16,epilogue=bias+residual",
    "gemm/cuda_wgmma_promoted": "gemm:m=300,n=72,k=400,dtype=e4m3,trans=nt,accumulate=f32",
    "scaled_gemm": "scaled_gemm:m=300,n=328,k=64,dtype=bf16,bias=true",
    "scatter_add": "scatter_add:rows=300,cols=40,bins=77,dtype=bf16,base=true",
    "gated_gemm": "gated_gemm:m=300,n=328,k=64,dtype=bf16",
    "grouped_gemm": "grouped_gemm:groups=7,m=100,n=72,k=64,dtype=bf16,skew=zipf",
    "grouped_gemm/cuda_wgmma_promoted": "grouped_gemm:groups=7,m=100,n=72,k=400,dtype=e4m3,trans=nt,"
    "accumulate=f32",
    "conv2d": "conv2d:n=2,c=16,h=9,w=9,k=24,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,direction=wgrad",
    "batchnorm_stats": "batchnorm_stats:rows=300,cols=77,dtype=f16",
    "cross_entropy": "cross_entropy:rows=50,cols=300,dtype=bf16",
    "cross_entropy/cuda_flat_backward": "cross_entropy:rows=50,cols=77,dtype=f16,direction=backward",
    "conv2d/cuda_depthwise": f"{DEPTHWISE},direction=wgrad",
    "conv2d/cuda_gemm_mma": f"{ONE_TAP},dtype=f16,direction=wgrad",
    "conv2d/cuda_gemm_simt": f"{ONE_TAP},dtype=f32,epilogue=bias",
    "conv2d/cuda_gemm_wgmma": f"{ONE_TAP},dtype=f16,direction=dgrad",
    "conv2d/cuda_winograd": "conv2d:n=2,c=40,h=9,w=9,k=24,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc",
    "softmax": "softmax:rows=50,cols=77,dtype=bf16,prologue=scale+mask",
    "softmax/cuda_block_backward": "softmax:rows=50,cols=77,dtype=bf16,prologue=scale,direction=backward",
    "softmax/cuda_split": "softmax:rows=3,cols=3001,dtype=f16,prologue=scale+mask",
    "softmax/cuda_split_backward": "softmax:rows=3,cols=3001,dtype=f32,log=true,direction=backward",
    "layernorm": "layernorm:rows=50,cols=77,dtype=f32",
    "layernorm/cuda_backward": "layernorm:rows=50,cols=77,dtype=f16,direction=backward",
    "layernorm/cuda_split": "layernorm:rows=3,cols=3001,dtype=bf16,stats=true",
    "strided_elementwise": "strided_elementwise:shape=40x50,dtype=f16,expression=x+y,"
    "operands=x.f16.1_40+y.f32.0_1",
    "strided_reduction": "strided_reduction:shape=6x70x50,dtype=bf16,expression=x*y,reduce=max,axes=1,"
    "operands=x.bf16.3500_1_70+y.f32.0_0_1",
    "rmsnorm": "rmsnorm:rows=50,cols=77,dtype=bf16,prologue=residual",
    "rmsnorm/cuda_backward": "rmsnorm:rows=50,cols=77,dtype=f32,direction=backward",
    "rmsnorm/cuda_split": "rmsnorm:rows=3,cols=3001,dtype=f32",
}
"""Workloads for CUDA C++ variants on Hopper, by operator, or by variant key where that one does not fit."""


def workload_of(variant: CudaVariant[Any]) -> str:
    return WORKLOADS.get(variant.key) or WORKLOADS[variant.operator.operator]


EVERY = package_variants(CudaVariant)

RUNS = 1 + 5 + 21
"""Number of times the example runs all launches of a kernel."""

TYPES = {"f16": 6, "f32": 7, "bf16": 9, "e4m3": 0, "i8": 0, "i32": 3}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
AS_THE_RUNNER = [2, 0]
"""L2 promotion of 128 bytes and zero fill, as constants of the CUDA driver API like those above."""


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a precompiled header of the example's system headers, which take most of the build time."""
    path = tmp_path_factory.mktemp("headers") / "system.h"
    main = Path(export.__file__).with_name("main.cpp").read_text(encoding="utf-8")
    path.write_text("".join(f"{line}\n" for line in main.splitlines() if line.startswith("#include <")))
    include = f"-I{folder_of_header('cuda.h')}"
    subprocess.run(["g++", *FLAGS, include, "-x", "c++-header", str(path)], check=True)
    return path


def fake_code(binary: Binary) -> Binary:
    """Replace the payload of a binary by parameter sizes, which the fake driver reads instead of code."""
    lines = [" ".join([name, *map(str, parameter_sizes(binary.payload, name))]) for name in binary.entries]
    return dataclasses.replace(binary, payload="\n".join(["echo", *lines]).encode() + b"\0")


def passed(argument: Any, memory: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Return the fake driver's expected description of an argument, without memory contents.

    Args:
        argument: Argument of a launch.
        memory: Expected description of each tensor in memory, by name.
    """
    if isinstance(argument, TensorMap):
        return {
            "map": memory[argument.tensor],
            "facts": [TYPES[argument.dtype], SWIZZLES[argument.swizzle_bytes], *AS_THE_RUNNER],
            "extents": list(argument.extents),
            "strides": list(argument.strides_bytes),
            "box": list(argument.box),
            **pixels_passed(argument),
        }
    if isinstance(argument, Scalar):
        return {"bits": argument.number().tobytes().hex()}
    return dict(memory[argument])


def pixels_passed(argument: TensorMap) -> dict[str, Any]:
    """Return the additional expected facts of a tensor map with a pixel box."""
    if (box := argument.pixel_box) is None:
        return {}
    return {"lower": list(box.lower), "upper": list(box.upper), "steps": list(box.strides)}


def without_contents(facts: Any) -> Any:
    if not isinstance(facts, dict):
        return facts
    return {name: without_contents(fact) for name, fact in facts.items() if name != "holds"}


def is_by_value(argument: Any, tensors: dict[str, Tensor]) -> bool:
    return isinstance(argument, str) and not tensors[argument].shape


def launch_kinds(variant: CudaVariant[Any]) -> set[str]:
    """Return the operator of a variant, and what the example must do differently to launch its kernels."""
    device, workload = representative("sm_90"), parse(workload_of(variant))
    config = variant.default(workload, device)
    launches = variant.launches(workload, config)
    kinds = {variant.operator.operator}
    kinds |= {"several launches"} if len(launches) > 1 else set()
    kinds |= {"scratch"} if variant.scratch(workload, config) else set()
    for launch in launches:
        kinds |= {type(argument).__name__ for argument in launch.arguments}
        maps = [argument for argument in launch.arguments if isinstance(argument, TensorMap)]
        kinds |= {"pixels"} if any(tensor_map.pixel_box for tensor_map in maps) else set()
        kinds |= {"cluster"} if launch.cluster > 1 else set()
        kinds |= {"persistent blocks"} if launch.grid_on(device.sm_count) != launch.grid else set()
        kinds |= {"much shared memory"} if launch.smem_bytes > 48 * 1024 else set()
    return kinds


@functools.cache
def launch_cases() -> list[Any]:
    """Return every variant, marked `exhaustive` if earlier ones have its operator and its kinds of launch."""
    covered: set[str] = set()
    cases = []
    for variant in EVERY:
        kinds = launch_kinds(variant)
        marks = [pytest.mark.exhaustive] if kinds <= covered else []
        covered |= kinds
        cases.append(pytest.param(variant, id=variant.key, marks=marks))
    return cases


@needs_nvrtc
@pytest.mark.parametrize("variant", launch_cases())
def test_example_passes_every_kernel_its_parameters(
    variant: CudaVariant[Any], tmp_path: Path, driver: Path, headers: Path
) -> None:
    choice, binary = exported(workload_of(variant), variant.key)
    write_export(choice, fake_code(binary), tmp_path, "cubin")
    code, out, err = Program(tmp_path, driver, "-Winvalid-pch", "-include", str(headers)).run()
    assert code == 0, err
    workload, config = choice.workload, choice.config
    tensors = variant.tensors(workload, config)
    stored = [tensor for tensor in tensors.values() if tensor.shape]
    memory = {tensor.name: {"memory": i, "bytes": tensor.nbytes} for i, tensor in enumerate(stored)}
    launches = variant.launches(workload, config)
    lines = [json.loads(line) for line in err.splitlines()]
    assert len(lines) == RUNS * len(launches)
    for line, launch, symbol in zip(lines, launches, binary.entries, strict=False):
        grid = launch.grid_on(choice.device.sm_count)
        assert line["kernel"] == symbol
        assert line["shape"] == [*grid, *launch.block, launch.smem_bytes, launch.cluster]
        for argument, parameter in zip(launch.arguments, line["parameters"], strict=True):
            if is_by_value(argument, tensors):
                (value,) = np.frombuffer(
                    bytes.fromhex(parameter["bits"]), numpy_dtype(tensors[argument].dtype)
                )
                assert 0.5 <= abs(float(value)) < 1
            else:
                assert without_contents(parameter) == passed(argument, memory)
    for tensor in workload.outputs():
        assert f"{tensor.name}: {tensor.size} elements, sum 0," in out


def test_exported_variants_cover_all_kinds_of_launch() -> None:
    kinds = {kind for case in launch_cases() if not case.marks for kind in launch_kinds(*case.values)}
    operators = {variant.operator.operator for variant in EVERY}
    hard = {"several launches", "cluster", "persistent blocks", "much shared memory", "pixels", "scratch"}
    assert kinds - operators == {"str", "Scalar", "TensorMap", *hard}
    assert operators < kinds


@needs_nvrtc
def test_example_passes_group_offsets_of_the_manifest(tmp_path: Path, driver: Path, headers: Path) -> None:
    choice, binary = exported(WORKLOADS["grouped_gemm"], "grouped_gemm/cuda_simt")
    write_export(choice, fake_code(binary), tmp_path, "cubin")
    facts = json.loads((tmp_path / "manifest.json").read_text())
    (values,) = [tensor["example"] for tensor in facts["tensors"] if "example" in tensor]
    assert (values[0], values[-1], len(values)) == (0, 100, 8)
    assert values == sorted(values)
    assert len(set(values)) > 2  # rows are spread over several groups
    _, _, err = Program(tmp_path, driver, "-Winvalid-pch", "-include", str(headers)).run()
    offsets = json.loads(err.splitlines()[0])["parameters"][2]
    assert struct.unpack("<8i", bytes.fromhex(offsets["holds"])) == tuple(values)


# -- written files -------------------------------------------------------------------------------------------


def exported(text: str, key: str, architecture: str = "sm_90") -> tuple[ChosenConfig, Binary]:
    choice = choose_config(parse(text), representative(architecture), variant=key)
    cache = BinaryCache(_environment.binary_folder())
    return choice, compile_config(choice.variant, choice.workload, choice.config, choice.device, cache)


SIZES = {"tensor": 8, "long long": 8, "int": 4, "float": 4, "tensor_map": 128}

CUDA = (
    ("gemm/cuda_mma", "gemm:m=72,n=72,k=64,dtype=f16,epilogue=bias+gelu"),
    ("gemm/cuda_wgmma", "gemm:m=256,n=256,k=256,dtype=bf16,trans=nt"),
    (
        "conv2d/cuda_implicit_gemm_mma",
        "conv2d:n=8,c=64,h=28,w=28,k=128,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,direction=wgrad",
    ),
    ("grouped_gemm/cuda_mma", "grouped_gemm:groups=5,m=131,n=136,k=64,dtype=bf16"),
    ("softmax/cuda_block", "softmax:rows=5,cols=77,dtype=bf16,prologue=scale+mask"),
    ("layernorm/cuda_block", "layernorm:rows=5,cols=77,dtype=f32"),
)


@needs_nvrtc
@needs_numba_cuda
@pytest.mark.parametrize(
    ("key", "text"), [*CUDA, ("softmax/numba_cuda", "softmax:rows=5,cols=77,dtype=f16,prologue=scale")]
)
def test_manifest_matches_parameters_of_the_binary(key: str, text: str) -> None:
    choice, binary = exported(text, key)
    facts = manifest(choice, binary)
    sizes = {t["name"]: t["bytes"] for t in facts["tensors"]}
    assert [launch["symbol"] for launch in facts["launches"]] == list(binary.entries)
    for launch in facts["launches"]:
        passed = [
            sizes[argument["name"]] if argument["kind"] == "value" else SIZES[argument["kind"]]
            for argument in launch["arguments"]
        ]
        assert passed == parameter_sizes(binary.payload, launch["symbol"])
    launches = choice.variant.launches(choice.workload, choice.config)  # type: ignore[attr-defined]
    shapes = [
        (tuple(launch_facts["grid"]), tuple(launch_facts["block"]), launch_facts["smem_bytes"])
        for launch_facts in facts["launches"]
    ]
    sms = choice.device.sm_count
    assert shapes == [(launch.grid_on(sms), launch.block, launch.smem_bytes) for launch in launches]
    assert json.loads(json.dumps(facts)) == facts


@dataclass(frozen=True, kw_only=True)
class Counted(Toy):
    """Toy workload whose input x is drawn by a rule: the integers 3, 4, 5, …"""

    def inputs(self) -> tuple[Tensor, ...]:
        return (Tensor(name="x", shape=(self.n,), dtype="i32"), Tensor(name="factor", shape=(), dtype="f32"))

    def draw_by_rule(self, tensor: Tensor, rng: Any) -> Any:
        return np.arange(3, 3 + self.n, dtype=np.int32) if tensor.name == "x" else None


def test_inputs_with_a_rule_are_drawn_by_the_rule(tmp_path: Path, driver: Path) -> None:
    choice = dataclasses.replace(scaling(Calls("right")), workload=Counted(n=1000))
    write_export(choice, FAKE, tmp_path, "cubin")
    facts = json.loads((tmp_path / "manifest.json").read_text())
    assert facts["tensors"][0]["example"] == list(range(3, 1003))
    # The fake driver's kernel reads the integers as subnormal floats, multiples of 2^-149.
    _, out, _ = Program(tmp_path, driver).run()
    (factor,) = random_f32(1)
    drawn = np.arange(3, 1003, dtype=np.int32).view(np.float32) * np.float32(factor)
    assert float(out.splitlines()[1].replace(",", "").split()[4]) == pytest.approx(
        float(drawn.astype(np.float64).sum()), rel=1e-6, abs=0
    )


@needs_nvrtc
def test_export_folder_has_all_files_and_facts(tmp_path: Path) -> None:
    choice, binary = exported(
        "softmax:rows=5,cols=77,dtype=f32,prologue=scale", "softmax/cuda_block", "sm_80"
    )
    files = write_export(choice, binary, tmp_path / "new", "cubin")
    assert sorted(path.name for path in files) == sorted(path.name for path in (tmp_path / "new").iterdir())
    assert (tmp_path / "new" / "kernel.cubin").read_bytes() == binary.payload
    facts = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert facts["kernels"] == "kernel.cubin"
    assert facts["tunebench"] == __version__
    assert (facts["architecture"], facts["why"], facts["how"]) == ("sm_80", "predicted best", "predicted")
    assert facts["expected_us"] > 0
    assert {t["name"]: (t["role"], t["shape"]) for t in facts["tensors"]} == {
        "x": ("input", [5, 77]),
        "scale": ("input", []),
        "y": ("output", [5, 77]),
    }


@needs_nvrtc
@pytest.mark.parametrize(("key", "text"), CUDA)
def test_stand_alone_source_compiles_to_the_same_kernels(key: str, text: str) -> None:
    from tunebench.compile.nvrtc import compile_source

    choice, binary = exported(text, key)
    source = stand_alone_source(choice)
    assert "#include" not in source
    alone = read_cubin(compile_source(source, (), binary.target).cubin)
    assert alone == {symbol: read_cubin(binary.payload)[symbol] for symbol in binary.entries}


@needs_nvrtc
def test_build_lines_name_the_architecture(tmp_path: Path) -> None:
    choice, binary = exported("layernorm:rows=5,cols=77,dtype=f32", "layernorm/cuda_block", "sm_86")
    files = write_export(choice, binary, tmp_path, "cu")
    assert {path.name for path in files} == {"kernel.cu", "manifest.json", "launch.h", "main.cpp"}
    nvcc, gxx = build_lines(choice, "cu")
    assert nvcc == "nvcc -std=c++17 -arch=sm_86 -cubin -o kernel.cubin kernel.cu"
    assert (gxx,) == build_lines(choice, "cubin")
    main = (tmp_path / "main.cpp").read_text()
    assert gxx in main
    assert nvcc.replace("sm_86", "sm_90") in main


def test_unsupported_exports_raise(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown format 'ptx'.* Known: cpp, cu, cubin, py"):
        write_export(scaling(Calls("right")), FAKE, tmp_path, "ptx")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no CUDA C\\+\\+ source; use --format cubin"):
        write_export(scaling(NumbaToy()), FAKE, tmp_path, "cu")
    choice = choose_config(parse("softmax:rows=5,cols=77,dtype=f32"), local_cpu())
    for form in FORMATS:
        with pytest.raises(InputError, match="only GPU kernels can be exported"):
            write_export(choice, FAKE, tmp_path, form)
    too_many = dataclasses.replace(scaling(Calls("right")), workload=Counted(n=2**20 + 1))
    with pytest.raises(
        InputError,
        match=r"x of toy:n=1048577 .* at most 1048576 to list, got 1048577",
    ):
        write_export(too_many, FAKE, tmp_path, "cubin")
    facts = manifest(scaling(Calls("right")), FAKE)
    facts["tensors"][0]["dtype"] = "int3"
    with pytest.raises(InputError, match="x is int3; the C\\+\\+ example supports"):
        tables(facts)
    assert list(tmp_path.iterdir()) == []


def test_every_dtype_has_an_encoding() -> None:
    assert set(ENCODING) >= set(DTYPES)


READER = """
#define main example
#include "main.cpp"
#undef main
int main() {
  int bytes, exponent, significand;
  unsigned long long bits;
  uint64_t state = 1;
  while (std::scanf("%d %d %d %llu", &bytes, &exponent, &significand, &bits) == 4) {
    const Tensor tensor = {"", Role::Input, 1, bytes, exponent, significand, nullptr};
    const uint64_t made = random_element(tensor, state) & ((uint64_t(1) << 8 * bytes) - 1);
    std::printf("%.17g %.17g\\n", decoded(tensor, bits), decoded(tensor, made));
  }
}
"""


def test_example_decodes_every_dtype_as_numpy(tmp_path: Path, driver: Path) -> None:
    written(Calls("right"), tmp_path)
    (tmp_path / "main.cpp").rename(tmp_path / "example.cpp")
    (tmp_path / "main.cpp").write_text(READER.replace("main.cpp", "example.cpp"))
    program = Program(tmp_path, driver)
    asked, expected = [], []
    for dtype in DTYPES:
        size = itemsize(dtype)
        # All bit patterns of small types, a sample of large ones.
        step = {4: 65_521 * 7, 8: 65_521 * 7 * 2**32}.get(size, 1)
        last = 1 if dtype == "bool" else 2 ** (8 * size) - 1
        patterns = np.arange(last // step + 1, dtype=np.uint64) * np.uint64(step)
        with np.errstate(invalid="ignore"):  # some patterns are NaN
            values = patterns.astype(f"u{size}").view(numpy_dtype(dtype)).astype(np.float64)
        encoding = " ".join(map(str, ENCODING[dtype]))
        asked += [f"{encoding} {pattern}" for pattern in patterns]
        expected += [(dtype, float(value)) for value in values]
    _, out, _ = program.run(given="\n".join(asked))
    for (dtype, value), line in zip(expected, out.splitlines(), strict=True):
        read, made = map(float, line.split())
        assert read == value or (math.isnan(read) and math.isnan(value)), (dtype, value, read)
        if dtype == "i64":
            assert made == 0
        elif dtype in ("i8", "i32", "bool"):
            assert -128 <= made <= 127
        else:
            assert 0.5 <= abs(made) < 1, (dtype, made)


# -- script that runs exported kernels on a GPU --------------------------------------------------------------

ROOT = HERE.parents[1]


@needs_nvrtc
@needs_numba_cuda
def test_gpu_script_builds_and_runs_every_variant(
    driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.gpu import exported

    device = representative("sm_90")
    chosen = {choice.variant.key for choice in exported.choices(device)}
    operators = {parse(text).operator for text in exported.WORKLOADS}
    all_variants = (variant for operator in operators for variant in kernels.variants(operator))
    assert chosen == {variant.key for variant in all_variants if isinstance(variant, GpuVariant)}
    assert operators >= {"conv2d", "gemm", "layernorm", "softmax"}
    # Two variants are enough. The fake driver runs no real cubin and fails with a message.
    some = (
        choose_config(parse("softmax:rows=64,cols=100,dtype=f32"), device, variant="cuda_block"),
        choose_config(parse("layernorm:rows=64,cols=100,dtype=f16"), device, variant="numba_cuda"),
    )
    (driver / "libcuda.so.1").symlink_to("libcuda.so")
    monkeypatch.setattr(exported.shutil, "which", lambda name: name if name == "g++" else None)
    monkeypatch.setattr(exported, "find_device", lambda arch: device)
    monkeypatch.setattr(exported, "choices", lambda device: some)
    monkeypatch.setattr(exported, "header_folder", lambda: folder_of_header("cuda.h"))
    monkeypatch.setenv("LIBRARY_PATH", str(driver))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    assert exported.main(["--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG: ./run exited with 1: loading the kernels:") == 2
    monkeypatch.setattr(exported, "compile_config", lambda *_: FAKE)
    monkeypatch.setattr(exported, "choices", lambda device: [scaling(Calls("right"))])
    assert exported.main(["--out", str(tmp_path)]) == 0
    assert "time: 50.000 us" in capsys.readouterr().out


@pytest.mark.skipif(bool(local_gpus()), reason="this machine has a GPU")
def test_gpu_script_without_gpu_exits_with_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.exported", "--arch", "sm_90"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (5, "")
    assert ran.stderr.endswith("needs a GPU of sm_90; this machine has no NVIDIA GPU\n")
    assert list(tmp_path.iterdir()) == []


@needs_nvrtc
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
def test_nvcc_compiles_the_kernels_of_the_manifest(tmp_path: Path) -> None:
    choice, binary = exported(
        "softmax:rows=64,cols=100,dtype=bf16,prologue=mask", "softmax/cuda_block", "sm_80"
    )
    write_export(choice, binary, tmp_path, "cu")
    subprocess.run(build_lines(choice, "cu")[0].split(), cwd=tmp_path, check=True)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    entries = read_cubin((tmp_path / "kernel.cubin").read_bytes())
    assert [launch["symbol"] for launch in manifest["launches"]] == list(entries)
