"""Kernel Tuner's functions: results in its format, roles of arguments, arguments without a counterpart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import needs_compiler, needs_nvrtc
from tunebench.compat.kernel_tuner import (
    CompilationFailedConfig,
    ErrorConfig,
    _is_assigned_only,
    _Request,
    run_kernel,
    tune_kernel,
)
from tunebench.errors import InputError
from tunebench.kernels import variant_file_scope
from tunebench.own_kernel import InOut, Input, Output
from tunebench.space import Config

N = 1000
VADD = """
// __global__ void vadd(float* wrong) {}
__global__ void vadd(float* c, const float *a, float const* b, int n) {
#if block_size_x == 512
#error too large
#endif
  int i = blockIdx.x * block_size_x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}"""
RNG = np.random.default_rng(0)
A, B = (RNG.standard_normal(N, dtype=np.float32) for _ in range(2))
ARGUMENTS = [np.zeros(N, np.float32), A, B, np.int32(N)]
CALL: dict[str, Any] = {
    "kernel_name": "vadd",
    "kernel_source": VADD,
    "problem_size": N,
    "arguments": ARGUMENTS,
    "tune_params": {"block_size_x": [32, 64, 512]},
}


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with variant_file_scope():
        yield


def described(answer: Any = None, **changes: Any) -> Any:
    """Return the description of a kernel."""
    call = {**CALL, **changes}
    names = ("kernel_name", "kernel_source", "problem_size", "arguments", "tune_params")
    name, source, size, arguments, space = (call.pop(name) for name in names)
    return _Request(name, source, size, arguments, space, call).description(answer, 1e-6)


def launch(config: dict[str, Any], **changes: Any) -> Any:
    workload, variant = described(**changes).load()
    return variant.launches(workload, Config(config))[-1]


@needs_nvrtc
@needs_compiler
@pytest.mark.slow
def test_results_have_the_format_of_kernel_tuner(tmp_path: Path) -> None:
    results, env = tune_kernel(
        **CALL,
        answer=[A + B, None, None, None],
        metrics={"ms2": lambda p: 2 * p["time"], "us": "ms2 * 500"},
        arch="sm_90",
        cache=tmp_path / "cache.json",
        verbose=True,
    )
    by_block = {result["block_size_x"]: result for result in results}
    assert sorted(by_block) == [32, 64, 512]
    assert by_block[512]["time"] == "CompilationFailedConfig"
    assert isinstance(by_block[512]["time"], CompilationFailedConfig)
    assert isinstance(by_block[512]["time"], ErrorConfig)
    assert "ms2" not in by_block[512]
    timed = by_block[64]
    assert timed["us"] == pytest.approx(1000 * timed["time"])
    assert {"times", "compile_time", "verification_time", "benchmark_time", "timestamp"} <= set(timed)
    assert env["best_config"] in results
    assert (tmp_path / "cache.db").exists()


@needs_compiler
def test_kernel_runs_by_emulation() -> None:
    call = {name: value for name, value in CALL.items() if name != "tune_params"}
    outputs = run_kernel(**call, params={"block_size_x": 64})
    np.testing.assert_array_equal(outputs[0], A + B)
    assert outputs[1] is A
    assert outputs[3] == N


@needs_compiler
def test_constant_memory_has_the_given_values() -> None:
    source = """
    __constant__ float weights[4];
    __global__ void weigh(unsigned int* y) { y[threadIdx.x] += weights[threadIdx.x]; }"""
    weights = np.array([1, 2, 3, 4], np.float32)
    (y,) = run_kernel(
        "weigh",
        source,
        1,
        [np.full(4, 10, np.uint32)],
        {"block_size_x": 4},
        cmem_args={"weights": weights},
        grid_div_x=[],
    )
    assert y.dtype == np.uint32
    np.testing.assert_array_equal(y, [11, 12, 13, 14])


def test_roles_follow_from_the_source() -> None:
    args = described().args
    assert [type(args[name]) for name in "cab"] == [Output, Input, Input]
    args = described(arguments=[A, A, B, np.int32(N)]).args
    assert type(args["c"]) is InOut  # its contents may matter


@pytest.mark.parametrize(
    ("body", "only"),
    [
        ("c[i] = 1;", True),
        ("c[i + d[2]] = 1; c[0]= 2;", True),
        ("c[i] += 1;", False),
        ("c[i] == 1;", False),
        ("c[c[0]] = 1;", False),
        ("x = c[i];", False),
        ("atomicAdd(c, 1);", False),
        ("c[i] = c[i] + 1;", False),
        ("*c = 1;", False),
        ("other(c);", False),
        ("cc[i] = 1;", False),
    ],
)
def test_array_that_is_assigned_only_is_an_output(body: str, only: bool) -> None:
    assert _is_assigned_only(body, "c") is only


@pytest.mark.parametrize(
    ("changes", "grid"),
    [
        ({}, (16, 1, 1)),
        ({"problem_size": (N, 7)}, (16, 7, 1)),
        ({"problem_size": lambda p: (N, p["block_size_x"])}, (16, 64, 1)),
        ({"problem_size": lambda p: p["block_size_x"]}, (1, 1, 1)),
        ({"problem_size": "block_size_x * 3"}, (3, 1, 1)),
        ({"grid_div_x": []}, (N, 1, 1)),
        ({"grid_div_x": ["block_size_x", "2"]}, (8, 1, 1)),
        ({"grid_div_x": ["block_size_x / 32"], "grid_div_y": ["2"], "problem_size": (N, 9)}, (500, 5, 1)),
        ({"grid_div_x": lambda p: p["block_size_x"] / 2}, (32, 1, 1)),
    ],
)
def test_grid_follows_from_problem_size_and_divisors(changes: dict[str, Any], grid: tuple[int, ...]) -> None:
    assert launch({"block_size_x": 64}, **changes).grid == grid


def test_other_names_of_blocks_and_shared_memory() -> None:
    source = VADD.replace("block_size_x", "threads")
    space = {"threads": [32, 64], "rows": [1, 2]}
    changes = {"kernel_source": source, "tune_params": space, "block_size_names": ["threads", "rows"]}
    changed = launch({"threads": 64, "rows": 2}, **changes, smem_args={"size": lambda p: 4 * p["threads"]})
    assert (changed.block, changed.smem_bytes, changed.grid) == ((64, 2, 1), 256, (16, 1, 1))


def test_restrictions_as_functions_and_expressions() -> None:
    for restrictions in (
        lambda p: p["block_size_x"] > 32,
        ["block_size_x > 32"],
        [lambda p: p["block_size_x"] > 32],
    ):
        workload, variant = described(restrictions=restrictions).load()
        table = variant.space.enumerate(workload=workload, device=None)
        assert [table.config(row)["block_size_x"] for row in range(len(table))] == [64, 512]


def test_template_is_instantiated_by_parameters() -> None:
    source = "template <int block_size_x>\n" + VADD[VADD.index("__global__ void vadd(float* c") :]
    assert launch({"block_size_x": 64}, kernel_source=source).entry == "vadd<64>"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"verify": np.allclose}, "verify= has no counterpart"),
        ({"observers": [1]}, "observers= has no counterpart"),
        ({"lang": "OpenCL"}, "lang='OpenCL' is not supported"),
        ({"arguments": ARGUMENTS[:3]}, "has 4 parameters"),
        ({"kernel_name": "sub"}, "definition of kernel sub"),
        ({"kernel_source": "missing.cu"}, "does not exist"),
        ({"kernel_source": lambda p: ""}, "function as kernel_source"),
        ({"arguments": [np.zeros(N), A, B, np.int32(N)]}, "64-bit floats"),
        ({"answer": [None, A, None, None]}, "which the kernel does not write"),
        ({"answer": [A[:3], None, None, None]}, "has 3 elements, expected 1000"),
        ({"answer": [None] * 4}, "answer lacks c"),
        ({"answer": [A]}, "answer must have 4 items"),
        ({"cmem_args": {"weights": A}}, "declares no array"),
        ({"problem_size": (1, 2, 3, 4)}, "one to three dimensions"),
    ],
)
def test_argument_without_a_counterpart_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        described(**changes)
