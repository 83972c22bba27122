"""Sources of a user's kernel: headers, flags, another kernel as the reference, and records without any."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

import tunebench
from tests.own_kernel.test_own_kernel import QUICK, VADD, VADD_CALL, N, load
from tests.support import needs_compiler, needs_numba_cuda, needs_nvrtc
from tunebench import InOut, Input, Output, ReferenceKernel, Scratch
from tunebench.compile import BinaryCache, CompileError, compile_config
from tunebench.compile.nvrtc import compile_cuda, compile_source
from tunebench.device import find
from tunebench.emulate.emulator import emulate
from tunebench.emulate.host_source import NotEmulated
from tunebench.emulate.numba_simulator import simulate
from tunebench.errors import InputError, LookupMiss
from tunebench.kernels import variant_file_scope
from tunebench.space import Config
from tunebench.variant import including_line

CONFIG = Config({"block": 64})


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with variant_file_scope():
        yield


# -- headers and flags --------------------------------------------------------------------------------------

TILE = """
#pragma once
#include <tile/shape.h>
namespace tile {
template <typename Element, typename Shape>
struct Adder {
  __device__ static void run(const Element* a, const Element* b, Element* c, int n) {
    const int i = blockIdx.x * Shape::threads + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i] + BIAS;
  }
};
}  // namespace tile
"""
SHAPE = """
#ifndef TILE_SHAPE_H
#define TILE_SHAPE_H
#ifdef NEVER
#include <no/such/file.h>
#endif
// #include "commented_out.h"
namespace tile {
template <int Threads>
struct Shape { static constexpr int threads = Threads; };
}  // namespace tile
#endif
"""
TEMPLATED = """
#include "adder.h"
#include "adder.h"
#include <tile/shape.h>
template <int block>
__global__ void vadd(const float* a, const float* b, float* c, int n) {
  tile::Adder<float, tile::Shape<block>>::run(a, b, c, n);
}
"""


def templated(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a source with headers in two folders, and return its description."""
    (folder / "include" / "tile").mkdir(parents=True, exist_ok=True)
    (folder / "include" / "tile" / "shape.h").write_text(SHAPE)
    (folder / "adder.h").write_text(TILE)
    (folder / "vadd.cu").write_text(TEMPLATED)
    call = {**VADD_CALL, "name": "vadd<block>", "reference": lambda a, b: a + b + 1.0}
    return {"includes": [folder / "include"], "flags": ["-DBIAS=1.0f"], **call, **changes}


@needs_compiler
def test_headers_become_a_part_of_the_source(tmp_path: Path) -> None:
    workload, variant = load(tmp_path / "vadd.cu", **templated(tmp_path))
    source = variant.source(workload, CONFIG)
    assert including_line(source) is None
    assert source.count("struct Adder") == 1  # by `#pragma once`
    inputs = workload.draw(np.random.default_rng(0))
    outputs = emulate(variant, workload, CONFIG, inputs)
    np.testing.assert_allclose(outputs["c"], inputs["a"] + inputs["b"] + 1.0, rtol=1e-6)


def test_every_byte_of_a_header_is_part_of_the_revision(tmp_path: Path) -> None:
    description = templated(tmp_path)
    workload, variant = load(tmp_path / "vadd.cu", **description)
    revision = variant.revision(workload, CONFIG)
    header = tmp_path / "include" / "tile" / "shape.h"
    header.write_text(header.read_text().replace("threads = Threads", "threads = (Threads)"))
    assert load(tmp_path / "vadd.cu", **description)[1].revision(workload, CONFIG) != revision


STANDARD = """
__global__ void vadd(const float* a, const float* b, float* c, int n) {
#if __cplusplus >= 202002L
  c[0] = BIAS;
#else
  c[0] = sinf(a[0]);
#endif
}
"""


@needs_nvrtc
def test_flags_reach_the_compiler() -> None:
    sizes = []
    for flags in ((), ("--use_fast_math",), ("--std=c++20", "-DBIAS=2")):
        workload, variant = load(STANDARD, **{**VADD_CALL, "flags": flags})
        sizes.append(len(compile_cuda(variant, workload, CONFIG, find("sm_90")).payload))
    assert sizes[0] > sizes[1] > sizes[2]
    workload, variant = load(STANDARD, **{**VADD_CALL, "flags": ("--std=c++20",)})
    with pytest.raises(CompileError, match="BIAS"):
        compile_cuda(variant, workload, CONFIG, find("sm_90"))


def test_flags_may_depend_on_parameters() -> None:
    call = {**VADD_CALL, "flags": lambda block: [f"--maxrregcount={block // 2}"]}
    workload, variant = load(VADD, **call)
    assert variant.flags(workload, CONFIG) == ("--maxrregcount=32",)
    assert variant.flags(workload, Config({"block": 128})) == ("--maxrregcount=64",)


def test_missing_header_is_an_error_of_the_compiled_branch_alone(tmp_path: Path) -> None:
    workload, variant = load(tmp_path / "vadd.cu", **templated(tmp_path))
    line = "#error no/such/file.h is not in the folders of includes=; those of CUDA are in /usr/local/cuda"
    assert line in variant.source(workload, CONFIG)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("-Isomewhere", "name folders of headers in includes="),
        ("-arch=sm_90", "the device decides the architecture"),
        ("fast", "expected one such as -DNAME=1"),
    ],
)
def test_flag_that_is_not_passed_on_is_named(flag: str, says: str) -> None:
    workload, variant = load(VADD, **{**VADD_CALL, "flags": [flag]})
    with pytest.raises(InputError, match=says):
        variant.source(workload, CONFIG)


def test_mistakes_with_headers_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        load(VADD, **VADD_CALL, includes=[tmp_path / "nowhere"])
    (tmp_path / "endless.h").write_text('#include "endless.h"\n')
    with pytest.raises(InputError, match="it needs `#pragma once`"):
        load(f'#include "endless.h"\n{VADD}', **VADD_CALL, includes=[tmp_path])
    (tmp_path / "binary.h").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"included file .*binary\.h"):
        load(f"#include <binary.h>\n{VADD}", **VADD_CALL, includes=[tmp_path])


@needs_nvrtc
def test_error_in_a_header_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "faulty.h").write_text("\n\nint broken = ;\n")
    workload, variant = load(f'#include "faulty.h"\n{VADD}', **VADD_CALL, includes=[tmp_path])
    with pytest.raises(CompileError, match=r"faulty.h\(3\): error"):
        compile_cuda(variant, workload, CONFIG, find("sm_90"))


# -- compiled kernels ---------------------------------------------------------------------------------------

EXPORTED = VADD.replace("__global__", 'extern "C" __global__').replace("* block", "* blockDim.x")


def as_fatbin(cubin: bytes, *flags: str) -> bytes:
    """Return a fatbin with a cubin for sm_90."""
    nvfatbin = pytest.importorskip("cuda.bindings.nvfatbin")
    handle = nvfatbin.create(flags, len(flags))
    nvfatbin.add_cubin(handle, cubin, len(cubin), "90", "vadd")
    data = bytearray(nvfatbin.size(handle))
    nvfatbin.get(handle, data)
    return bytes(data)


def write_compiled(folder: Path, form: str) -> tuple[Path, bytes]:
    """Write the sum of vectors as machine code for sm_90, alone or in a fatbin, or as PTX for sm_75."""
    compiled = compile_source(EXPORTED, ("vadd",), "sm_75" if form == "ptx" else "sm_90")
    data = compiled.ptx.encode() if form == "ptx" else compiled.cubin
    if form == "fatbin":
        data = as_fatbin(data)
    path = folder / f"vadd.{form}"
    path.write_bytes(data)
    return path, data


@needs_nvrtc
@pytest.mark.parametrize("form", ["cubin", "ptx", "fatbin"])
def test_compiled_kernel_is_launched_as_described(form: str, tmp_path: Path) -> None:
    path, data = write_compiled(tmp_path, form)
    workload, variant = load(path, name="vadd", **VADD_CALL)
    assert variant.key == "vadd/binary"
    (launch,) = variant.launches(workload, CONFIG)
    assert (launch.entry, launch.grid, launch.block) == ("vadd", (16, 1, 1), (64, 1, 1))
    binary = compile_config(variant, workload, CONFIG, find("sm_90"), BinaryCache(tmp_path))
    assert binary.entries == ("vadd",)
    assert binary.resources.registers
    if form == "cubin":
        assert binary.payload == data
    with pytest.raises(NotEmulated, match="has no source to emulate"):
        emulate(variant, workload, CONFIG, workload.draw(np.random.default_rng(0)))


@needs_nvrtc
def test_parameter_selects_one_of_several_files(tmp_path: Path) -> None:
    path, _ = write_compiled(tmp_path, "ptx")
    for block in (64, 128):
        (tmp_path / f"vadd_{block}.ptx").write_text(f"{path.read_text()}// {block}\n")
    workload, variant = load(f"{tmp_path}/vadd_{{block}}.ptx", name="vadd", **VADD_CALL)
    for block in (64, 128):
        assert variant.compiled(workload, Config({"block": block})).endswith(b"// %d\n" % block)
    revision = variant.revision(workload, CONFIG)
    (tmp_path / "vadd_128.ptx").write_text(path.read_text())
    assert (
        load(f"{tmp_path}/vadd_{{block}}.ptx", name="vadd", **VADD_CALL)[1].revision(workload, CONFIG)
        != revision
    )


@needs_nvrtc
def test_mistakes_with_compiled_kernels_are_named(tmp_path: Path) -> None:
    path, _ = write_compiled(tmp_path, "cubin")
    for name, architecture, says in (
        ("vadd", "sm_80", "is for sm_90, which does not run on sm_80"),
        ("sub", "sm_90", "has no symbol sub; it has vadd"),
    ):
        workload, variant = load(path, name=name, **VADD_CALL)
        with pytest.raises(CompileError, match=says):
            compile_config(variant, workload, CONFIG, find(architecture), BinaryCache(tmp_path / name))
    cubin = path.read_bytes()
    fatbins = (as_fatbin(cubin, "-compress-all"), as_fatbin(cubin)[:100], as_fatbin(cubin)[:3000])
    for number, data in enumerate((*fatbins, b"", b"\x7fELF", b"\x50\xed\x55\xba" + bytes(40), b"not PTX")):
        file = tmp_path / f"broken{number}.cubin"
        file.write_bytes(data)
        workload, variant = load(file, name="vadd", **VADD_CALL)
        with pytest.raises(CompileError, match=r"the compiled kernel|nvJitLink|fatbin is compressed"):
            compile_config(variant, workload, CONFIG, find("sm_90"), BinaryCache(tmp_path / str(number)))
    with pytest.raises(InputError, match="name the kernel"):
        load(path, **VADD_CALL)
    with pytest.raises(InputError, match=r"vadd_64\.cubin does not exist"):
        load(tmp_path / "vadd_{block}.cubin", name="vadd", **VADD_CALL)
    args = {**VADD_CALL["args"], "c": InOut((N,), "f32")}
    workload, variant = load(path, name="vadd", **{**VADD_CALL, "args": args})
    assert "InOut needs a source" in variant.refuses(workload, find("sm_90"))
    workload, _ = load(path, name="vadd", **{**VADD_CALL, "reference": None})
    with pytest.raises(InputError, match="needs a reference"):
        workload.reference({"a": np.ones(N), "b": np.ones(N)})


# -- references ---------------------------------------------------------------------------------------------

NAIVE = """
__global__ void slow(const float* a, const float* b, float* c, int n) {
  for (int i = threadIdx.x; i < n; i += STRIDE) c[i] = a[i] + b[i];
}
"""


@needs_compiler
def test_another_kernel_is_the_reference() -> None:
    reference = ReferenceKernel(source=NAIVE, grid=1, block="STRIDE", parameters={"STRIDE": 32})
    workload, variant = load(VADD, **{**VADD_CALL, "reference": reference})
    inputs = workload.draw(np.random.default_rng(0))
    exact = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    np.testing.assert_array_equal(workload.reference(exact)["c"].value, inputs["a"] + inputs["b"])
    assert workload.verified_by == "reference"
    wrong = ReferenceKernel(
        source=NAIVE.replace("a[i] +", "2 *"), grid=1, block=32, parameters={"STRIDE": 32}
    )
    workload, _ = load(VADD, **{**VADD_CALL, "reference": wrong})
    np.testing.assert_array_equal(workload.reference(exact)["c"].value, 2 * inputs["b"])
    assert variant.key == "vadd/cuda"


def test_a_reference_kernel_is_for_kernels_in_cuda() -> None:
    reference = ReferenceKernel(source=NAIVE, grid=1, block=32)
    args = {"x": Input((N,), "f32"), "y": Output((N,), "f32")}
    with pytest.raises(InputError, match="use a function otherwise"):
        load(increment, args=args, space={"chunk": [1, 2]}, reference=reference)
    with pytest.raises(InputError, match="needs block"):
        load(VADD, **{**VADD_CALL, "reference": ReferenceKernel(source=NAIVE, grid=1)})


def increment(x: Any, y: Any, chunk: int) -> None:
    for i in range(len(x)):
        y[i] = x[i] + 1


def increment_twice(x: Any, y: Any, chunk: int) -> None:
    for i in range(len(x)):
        y[i] = x[i] + 0.5 + 0.5


INCREMENT: dict[str, Any] = {
    "args": {"x": Input((N,), "f32"), "y": Output((N,), "f32")},
    "space": {"chunk": [1, 2]},
}


@pytest.mark.slow
def test_records_without_a_reference_do_not_claim_one(tmp_path: Path) -> None:
    db = str(tmp_path / "kernels.db")
    result = tunebench.tune_kernel(increment, **INCREMENT, db=db, plan=QUICK)
    assert result.verified == tunebench.own_kernel.UNVERIFIED
    with sqlite3.connect(db) as connection:
        rows = connection.execute("SELECT verification, detail, comparison FROM measurement").fetchall()
    assert {row[0] for row in rows} == {"compared"}
    # `reference_us` is the time of the machine's own yardstick.
    assert not any("reference" in str(row[1:]).replace("reference_us", "") for row in rows)
    answer = tunebench.lookup_kernel(increment, **INCREMENT, db=db)
    assert answer.verification == result.verified

    # A kernel of the same name has other results: its records must not be served, nor this one lost.
    other = {**INCREMENT, "label": "increment", "device": "cpu", "db": db}
    with pytest.raises(LookupMiss, match="the source of increment/numba_cpu has changed"):
        tunebench.lookup_kernel(increment_twice, **other, strict=True)
    assert tunebench.lookup_kernel(increment, **INCREMENT, db=db) == answer
    with pytest.raises(LookupMiss, match="nothing was measured for twice:x=1000"):
        tunebench.lookup_kernel(increment_twice, **{**other, "label": "twice"}, strict=True)


# -- Numba for GPUs -----------------------------------------------------------------------------------------


def scaled(x, y, factor, n, block):  # type: ignore[no-untyped-def]
    i = cuda.blockIdx.x * block + cuda.threadIdx.x
    if i < n:
        y[i] = factor * x[i]


SCALED: dict[str, Any] = {
    "args": {"x": Input((N,), "f32"), "y": Output((N,), "f32"), "factor": 1.5, "n": N},
    "grid": "ceil_div(n, block)",
    "space": {"block": [64, 128]},
    "reference": "factor * x",
}


@needs_numba_cuda
def test_function_for_a_gpu_is_simulated_with_its_constants() -> None:
    workload, variant = load(scaled, **SCALED)
    assert (variant.key, variant.language) == ("scaled/numba_cuda", "numba-cuda")
    (launch,) = variant.launches(workload, CONFIG)
    assert (launch.grid, launch.block) == ((16, 1, 1), (64, 1, 1))
    small = workload.changed(n=100)
    inputs = small.draw(np.random.default_rng(0))
    outputs = simulate(variant, small, CONFIG, inputs)
    np.testing.assert_allclose(outputs["y"], 1.5 * inputs["x"], rtol=1e-6)


def dequantize(q, zero, y, block):  # type: ignore[no-untyped-def]
    tile = cuda.shared.array(32, "int8")
    i = cuda.threadIdx.x
    tile[i] = q[i] + q[i]  # what is stored wraps around
    cuda.syncthreads()
    y[i] = (q[i] - zero[i]) * 100 + tile[i] * 2


@needs_numba_cuda
def test_simulator_computes_integers_of_arrays_in_64_bits() -> None:
    q, zero = np.array([-128, 100, 127, 5], np.int8), np.array([127, -100, 1, 5], np.int8)
    args = {"q": Input(q), "zero": Input(zero), "y": Output((4,), "f32")}
    described: dict[str, Any] = {"grid": 1, "space": {"block": [4, 8]}, "reference": "1.0 * q"}
    workload, variant = load(dequantize, args=args, **described)
    y = simulate(variant, workload, Config({"block": 4}), {"q": q, "zero": zero})["y"]
    np.testing.assert_array_equal(y, [-25500, 20000 - 112, 12600 - 4, 20])


@needs_numba_cuda
@pytest.mark.slow
def test_function_for_a_gpu_is_compiled(tmp_path: Path) -> None:
    workload, variant = load(scaled, **SCALED)
    binary = compile_config(variant, workload, CONFIG, find("sm_90"), BinaryCache(tmp_path))
    assert binary.language == "numba-cuda"
    assert "numba-cuda" in binary.compiler.lower()


@needs_numba_cuda
@pytest.mark.exhaustive
def test_function_for_a_gpu_is_tuned_without_one(tmp_path: Path) -> None:
    result = tunebench.tune_kernel(
        scaled, **SCALED, emulate={"n": 100}, arch="sm_90", db=str(tmp_path / "kernels.db"), plan=QUICK
    )
    assert result.how == "predicted"
    assert result.best is not None
    assert result.best["block"] in (64, 128)


def test_function_for_a_gpu_needs_a_reference_and_no_inout() -> None:
    workload, variant = load(scaled, **{**SCALED, "reference": None})
    with pytest.raises(InputError, match="scaled/numba_cuda needs a reference"):
        workload.reference({"x": np.ones(N)})
    args = {**SCALED["args"], "y": InOut((N,), "f32")}
    workload, variant = load(scaled, **{**SCALED, "args": args})
    assert "in place; kernels of Numba-CUDA and compiled kernels cannot" in variant.refuses(
        workload, find("sm_90")
    )


@needs_compiler
def test_numbers_wide_sizes_and_scratch_are_passed() -> None:
    source = """
    __global__ void mixed(const float* a, float* kept, float* c, float factor, long long offset, int n) {
      const int i = blockIdx.x * block + threadIdx.x;
      if (i < n) { kept[i] = a[i]; c[i] = factor * kept[i] + offset; }
    }"""
    args = {"a": Input(N, "f32"), "kept": Scratch(N, "f32"), "c": Output(N, "f32")}
    args |= {"factor": 0.5, "offset": np.int64(3), "n": N}
    call = {"grid": "ceil_div(n, block)", "reference": "factor * a + offset"}
    workload, variant = load(source, args=args, space={"block": [64, 128]}, **call)
    inputs = workload.draw(np.random.default_rng(0))
    outputs = emulate(variant, workload, Config({"block": 64}), inputs)
    np.testing.assert_allclose(outputs["c"], 0.5 * inputs["a"] + 3, rtol=1e-6)


@needs_compiler
def test_versions_of_a_kernel_are_configurations() -> None:
    source = """
    __global__ void twice(const float* a, float* c, int n) {
      const int i = blockIdx.x * block + threadIdx.x;
    #if version == 0
      if (i < n) c[i] = 2 * a[i];
    #else
      if (i < n) c[i] = a[i] + a[i];
    #endif
    }"""
    args = {"a": Input(N, "f32"), "c": Output(N, "f32"), "n": N}
    space = {"block": [64], "version": [0, 1]}
    workload, variant = load(source, args=args, space=space, grid="ceil_div(n, block)", reference="2 * a")
    inputs = workload.draw(np.random.default_rng(0))
    for version in (0, 1):
        outputs = emulate(variant, workload, Config({"block": 64, "version": version}), inputs)
        np.testing.assert_array_equal(outputs["c"], 2 * inputs["a"])
