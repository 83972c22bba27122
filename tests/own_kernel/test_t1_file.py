"""Descriptions in T1 format: what they become, and malformed files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import needs_compiler
from tunebench import cli
from tunebench.emulate.emulator import emulate
from tunebench.errors import InputError
from tunebench.kernels import variant_file_scope
from tunebench.own_kernel import t1_file

SOURCE = """
__constant__ float weights[WIDTH];
__global__ void smooth(float* y, const float* x, int* count, int n) {
  const int i = (blockIdx.x * tile + threadIdx.y) * block_size_x + threadIdx.x;
  if (i >= n) return;
  y[i] = 0;
  for (int j = 0; j < WIDTH; j++) y[i] += weights[j] * x[i + j];
  count[i] += 1;
}"""
VECTOR = {"Type": "float", "MemoryType": "Vector", "FillType": "Random"}
FOURS = {"Type": "int32", "FillType": "Constant", "FillValue": 4}
T1: dict[str, Any] = {
    "General": {"BenchmarkName": "smooth"},
    "ConfigurationSpace": {
        "TuningParameters": [
            {"Name": "block_size_x", "Type": "int", "Values": "[32, 64, 128]", "Default": 64},
            {"Name": "tile", "Type": "int", "Values": "[1, 2]", "Default": 2},
            {"Name": "WIDTH", "Type": "int", "Values": "[3]", "Default": 3},
        ],
        "Conditions": [{"Parameters": ["tile"], "Expression": "block_size_x < 65 || tile == 1 && WIDTH"}],
    },
    "KernelSpecification": {
        "Language": "CUDA",
        "CompilerOptions": ["-std=c++11", "--use_fast_math"],
        "KernelName": "smooth",
        "KernelFile": "smooth.cu",
        "GlobalSizeType": "CUDA",
        "GlobalSize": {"X": "1"},
        "LocalSize": {"X": "block_size_x", "Y": "tile"},
        "ProblemSize": [1000],
        "GridDivX": ["block_size_x", "tile"],
        "Arguments": [
            {"Name": "y", "AccessType": "WriteOnly", "Size": "ProblemSize[0]", **VECTOR},
            {"Name": "x", "AccessType": "ReadOnly", "Size": "ProblemSize[0] + max(WIDTH) - 1", **VECTOR},
            {"Name": "weights", "MemType": "Constant", "Size": "max(WIDTH)", **VECTOR},
            {"Name": "count", "AccessType": "ReadWrite", "Size": 1000, **VECTOR, **FOURS},
            {"Name": "n", "Type": "int32", "MemoryType": "Scalar", "FillValue": 1000},
        ],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with variant_file_scope():
        yield


def written(folder: Path, change: Callable[[Any], None] = lambda content: None) -> Path:
    content = copy.deepcopy(T1)
    change(content)
    (folder / "smooth.cu").write_text(SOURCE)
    file = folder / "smooth.json"
    file.write_text(json.dumps(content))
    return file


@needs_compiler
def test_file_describes_a_kernel(tmp_path: Path) -> None:
    variant: Any
    workload: Any
    workload, variant = t1_file.read(written(tmp_path)).load()
    assert str(workload) == "smooth:x=1002,n=1000"
    table = variant.space.enumerate(workload=workload, device=None)
    assert len(table) == 5  # 128 and 2 violate the condition
    default = variant.default(workload, None)
    assert dict(default) == {"block_size_x": 64, "tile": 2, "WIDTH": 3}
    *_, launch = variant.launches(workload, default)
    assert (launch.grid, launch.block) == ((8, 1, 1), (64, 2, 1))
    assert variant.flags(workload, default) == ("--use_fast_math",)
    inputs = workload.draw(np.random.default_rng(0))
    outputs = emulate(variant, workload, default, inputs)
    weights = np.random.default_rng(0).standard_normal(3).astype(np.float32)
    np.testing.assert_allclose(
        outputs["y"], np.convolve(inputs["x"], weights[::-1], "valid"), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(outputs["count_out"], np.full(1000, 5))


def test_grid_by_global_size(tmp_path: Path) -> None:
    def by_size(content: Any, kind: str) -> None:
        kernel = content["KernelSpecification"]
        del kernel["ProblemSize"]
        kernel |= {"GlobalSize": {"X": "1000 * WIDTH", "Y": "4"}, "GlobalSizeType": kind}
        for argument in kernel["Arguments"][:3]:
            argument["Size"] = 1002

    for kind, grid in (("CUDA", (3000, 4, 1)), ("OpenCL", (47, 2, 1))):
        variant: Any
        file = written(tmp_path, lambda content, kind=kind: by_size(content, kind))  # type: ignore[misc]
        workload, variant = t1_file.read(file).load()
        *_, launch = variant.launches(workload, variant.default(workload, None))
        assert launch.grid == grid


def changed(*path: Any, to: Any) -> Callable[[Any], None]:
    """Return a function that sets a member of the content; `...` as the value deletes it."""

    def change(content: Any) -> None:
        for part in path[:-1]:
            content = content[part]
        if to is ...:
            del content[path[-1]]
        else:
            content[path[-1]] = to

    return change


ARITHMETIC = "arithmetic and comparisons only"
KERNEL = "KernelSpecification"
SPACE = "ConfigurationSpace"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (changed(KERNEL, to=...), "needs KernelSpecification"),
        (changed(KERNEL, "Arguments", to=...), "needs Arguments"),
        (changed(KERNEL, "Language", to="OpenCL"), "language OpenCL"),
        (changed(KERNEL, "KernelFile", to="none.cu"), "does not exist"),
        (changed(KERNEL, "Arguments", 0, "Type", to="double"), "type of argument y 'double'"),
        (changed(KERNEL, "Arguments", 0, "MemoryType", to="Local"), "in Local memory"),
        (changed(KERNEL, "Arguments", 1, "FillType", to="Script"), "filled by Script"),
        (changed(KERNEL, "Arguments", 0, "AccessType", to="None"), "has access None"),
        (changed(KERNEL, "Arguments", 0, "Size", to="missing"), "name in 'missing'"),
        (changed(KERNEL, "Arguments", 0, "Size", to="__import__('os').getpid()"), ARITHMETIC),
        (changed(KERNEL, "ProblemSize", to=["exit()"]), ARITHMETIC),
        (changed(KERNEL, "LocalSize", "X", to="(lambda: 1)()"), ARITHMETIC),
        (changed(SPACE, "Conditions", 0, "Expression", to="tile.real > 0"), ARITHMETIC),
        (changed(SPACE, "Conditions", 0, "Expression", to="tile >"), "is no expression"),
        (changed(SPACE, "TuningParameters", 0, "Values", to="range(3)"), "must be a list such as"),
        (changed(SPACE, "TuningParameters", 0, "Name", to=...), "not in T1 format: KeyError"),
        (changed(SPACE, "TuningParameters", to=3), "not in T1 format: TypeError"),
    ],
)  # fmt: skip
def test_mistake_is_named(change: Callable[[Any], None], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        t1_file.read(written(tmp_path, change))


@pytest.mark.parametrize("text", ["", "[", "[1]", "3", "[" * 100_000])
def test_file_that_is_no_description_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    assert cli.run(["tune", str(file), "--arch", "sm_90"]) == 2
    assert str(file) in capsys.readouterr().err
