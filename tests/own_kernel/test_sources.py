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
from tunebench import InOut, Input, Output, ReferenceKernel
from tunebench.compile import BinaryCache, CompileError, compile_config
from tunebench.compile.nvrtc import compile_cuda
from tunebench.device import find
from tunebench.emulate.emulator import emulate
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
    line = "#error no/such/file.h is not in the folders of includes="
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
    assert "InOut is supported for CUDA C++" in variant.refuses(workload, find("sm_90"))
