"""A user's kernel from a description: generated module, emulation, real tuning on the CPU, messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

import tunebench
from tests.support import needs_compiler
from tunebench import InOut, Input, Output, Plan, Scratch, ceil_div, cli, kernels
from tunebench.device import find
from tunebench.emulate.emulator import emulate
from tunebench.errors import InputError
from tunebench.kernels import variant_file_scope
from tunebench.own_kernel import UNVERIFIED, KernelDescription, description_file
from tunebench.space import Config
from tunebench.workloads import parse

N = 1000
VADD = """
__global__ void vadd(const float* a, const float* b, float* c, int n) {
  const int i = blockIdx.x * block + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}
"""
SCALE = """
template <int THREADS>
__global__ void scale(float* x, const int* index, float* sums, float* unused, float factor, int n) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < n) {
    x[i] *= factor;
    sums[i] = x[i] + index[i];
  }
}
"""
VADD_ARGS = {"a": Input((N,), "f32"), "b": Input((N,), "f32"), "c": Output((N,), "f32"), "n": N}
VADD_CALL: dict[str, Any] = {
    "args": VADD_ARGS,
    "grid": lambda block: ceil_div(N, block),
    "space": {"block": [64, 128]},
    "reference": lambda a, b: a + b,
}
QUICK = Plan(trials=2, finalists=1, audit=0.0, baselines=False, workers=1)


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with variant_file_scope():
        yield


def load(source: Any, **described: Any) -> tuple[Any, Any]:
    path, text = KernelDescription(source=source, **described).write()
    variant = kernels.replace_file(path, text.partition(":")[0])
    return parse(text), variant


def test_workload_is_named_by_kernel_and_sizes() -> None:
    workload, variant = load(VADD, **{**VADD_CALL, "grid": "ceil_div(n, block)"})
    assert str(workload) == "vadd:n=1000"
    assert variant.key == "vadd/cuda"
    smaller = parse("vadd:n=300")
    assert [tensor.shape for tensor in smaller.inputs()] == [(300,), (300,)]
    assert smaller.traffic().total_bytes == 3 * 4 * 300
    (launch,) = variant.launches(smaller, Config({"block": 64}))
    assert (launch.grid, launch.block) == ((5, 1, 1), (64, 1, 1))


def test_shapes_without_a_size_are_dimensions() -> None:
    args = {"x": Input((8, 6), "f32"), "y": Output((8, 6), "f32"), "z": Output((6,), "f32")}
    source = "__global__ void k(const float* x, float* y, float* z) {}"
    workload, _ = load(source, args=args, grid=1, space={"block": [32, 64]})
    assert str(workload) == "k:x=8x6,z=6"
    with pytest.raises(InputError, match="must have 2 extents"):
        parse("k:x=8,z=6")


def test_any_change_of_the_description_is_a_new_revision() -> None:
    workload, variant = load(VADD, **VADD_CALL)
    again = load(VADD, **VADD_CALL)[1]
    changed = [
        load(VADD.replace("a[i] +", "b[i] +"), **VADD_CALL)[1],
        load(VADD, **{**VADD_CALL, "reference": lambda a, b: b + a})[1],
        load(VADD, **{**VADD_CALL, "space": {"block": [64, 256]}})[1],
    ]
    config = Config({"block": 64})
    revisions = [v.revision(workload, config) for v in (variant, again, *changed)]
    assert revisions[0] == revisions[1]
    assert len(set(revisions)) == 4


def test_costs_and_constraints_are_evaluated_by_configuration() -> None:
    call = {**VADD_CALL, "space": {"block": [32, 64, 128], "work": [1, 2]}}
    call["grid"] = lambda block, work: (ceil_div(N, block * work), 1)
    call["constraints"] = ["block * work <= n", lambda block, work: block < 128 or work == 1]
    source = VADD.replace("a[i]", "work * a[i]")
    workload, variant = load(source, **call)
    device = find("sm_90")
    table = variant.configs(workload, device)
    assert [tuple(table.config(row).values()) for row in range(len(table))] == [
        (32, 1), (32, 2), (64, 1), (64, 2), (128, 1)
    ]  # fmt: skip
    costs = variant.costs(workload, table, device)
    np.testing.assert_array_equal(costs.blocks, [32, 16, 16, 8, 8])
    np.testing.assert_array_equal(costs.threads, [32, 32, 64, 64, 128])
    assert "#define work 2\n" in variant.source(workload, Config({"block": 32, "work": 2}))


@needs_compiler
def test_changed_array_is_restored_and_its_result_is_verified() -> None:
    index = np.arange(N, dtype=np.int32)
    args = {
        "x": InOut((N,), "f32"),
        "index": Input(index),
        "sums": Output((N,), "f32"),
        "unused": Scratch((4,), "f32"),
        "factor": 1.5,
        "n": N,
    }
    reference = lambda x, index, factor: {"x": x * factor, "sums": x * factor + index}  # noqa: E731
    call = {"args": args, "grid": "ceil_div(n, block)", "space": {"block": [64, 128]}, "reference": reference}
    workload, variant = load(SCALE, name="scale<block>", **call)
    inputs = workload.draw(np.random.default_rng(0))
    np.testing.assert_array_equal(inputs["index"], index)
    launches = variant.launches(workload, Config({"block": 64}))
    assert [launch.entry for launch in launches] == ["tunebench_restore_4", "scale<64>"]
    outputs = emulate(variant, workload, Config({"block": 64}), inputs)
    exact = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    for name, expected in workload.reference(exact).items():
        np.testing.assert_allclose(outputs[name], expected.value, rtol=1e-6)
    assert (
        variant.costs(workload, variant.configs(workload, find("sm_90")), find("sm_90")).serial_launches == 2
    )


@needs_compiler
def test_without_a_reference_the_default_configuration_is_compared() -> None:
    workload, _ = load(VADD, **{**VADD_CALL, "reference": None})
    inputs = workload.draw(np.random.default_rng(0))
    exact = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    np.testing.assert_array_equal(workload.reference(exact)["c"].value, inputs["a"] + inputs["b"])
    assert UNVERIFIED in workload.tolerance().reason


OFFSET = 2.0


def saxpy(a: Any, x: Any, y: Any, block: Any, unrolled: Any) -> None:
    """Add a scaled vector to another."""
    for start in numba.prange((len(x) + block - 1) // block):
        for i in range(start * block, min(len(x), (start + 1) * block)):
            y[i] += a * x[i] + OFFSET


@pytest.mark.slow
def test_numba_function_is_tuned_resumed_and_looked_up(tmp_path: Path) -> None:
    described: dict[str, Any] = {
        "args": {"a": 0.5, "x": Input((N,), "f32"), "y": InOut((N,), "f32")},
        "space": {"block": [64, 256], "unrolled": [0]},
        "reference": lambda a, x, y: y + a * x + OFFSET,
        "db": tmp_path / "results.db",
    }
    result = tunebench.tune_kernel(saxpy, plan=QUICK, **described)
    assert result.how == "measured"
    assert result.workload == "saxpy:x=1000"
    assert result.best is not None
    assert result.report.bound_us > 0
    again = tunebench.tune_kernel(saxpy, plan=QUICK, **described)
    assert again.report.cached == 2
    answer = tunebench.lookup_kernel(saxpy, **described)
    assert dict(answer.config) == again.best
    assert answer.how == "measured here"


def product(a: Any, total: Any, out: Any, n: int, rows: int) -> None:
    total += 1
    for first in range(0, n, rows):
        np.multiply(a[first : first + rows], FACTOR, out=out[first : first + rows])


FACTOR = 2.0


@pytest.mark.slow
def test_function_is_called_as_it_is(tmp_path: Path) -> None:
    args = {"a": Input((N,), "f32"), "total": InOut((3,), "f32"), "out": Output((N,), "f32"), "n": N}
    result = tunebench.tune_kernel(
        product,
        args=args,
        space={"rows": [10, 1000]},
        reference=lambda a, total: (total + 1, a * FACTOR),
        compiled=False,
        plan=QUICK,
        db=tmp_path / "results.db",
    )
    assert result.how == "measured"
    assert result.report.trials == {"measured": 2}
    assert result.best is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": lambda blok: 1}, "argument of grid 'blok'. Did you mean 'block'"),
        ({"name": "vad"}, "unknown kernel 'vad'. Did you mean 'vadd'"),
        ({"source": "int x;"}, "no __global__ function"),
        ({"source": "missing.cu"}, "missing.cu does not exist"),
        ({"space": {"block": 64}}, "parameter block must be a list"),
        ({"space": {"block": [64]}}, "single configuration"),
        ({"space": {"width": [64, 128]}, "grid": 1}, "needs block"),
        ({"grid": None}, "needs grid"),
        ({"reference": lambda a, d: a}, "argument of reference 'd'"),
        ({"reference": lambda a, b: (a + b)[:5]}, r"c of shape \(1000,\); got shape \(5,\)"),
        ({"reference": lambda a, b: a @ b[:3]}, "reference raised ValueError"),
        ({"args": {**VADD_ARGS, "a": Input((N,), "f64")}}, "type of argument a 'f64'"),
        ({"args": {**VADD_ARGS, "a": Input((N,))}}, "argument a needs a type"),
        ({"args": {**VADD_ARGS, "a": (N, "f32")}}, "argument a must be an Input, Output"),
        ({"args": {**VADD_ARGS, "c": Input((N,), "f32")}}, "no Output or InOut"),
        ({"args": {**VADD_ARGS, "a": Input((0,), "f32")}}, "argument a has extent 0"),
        ({"args": {**VADD_ARGS, "block": 4}}, "block is an argument and a parameter"),
        ({"args": {**VADD_ARGS, "n": "many"}}, "argument n must be Input, Output"),
        ({"constraints": "n > 4"}, "constraint 1 uses no parameter"),
        ({"default": {"blok": 64}}, "parameter in default 'blok'"),
        ({"emulate": {"m": 64}}, "size in emulate 'm'.*whole-number arguments of the kernel"),
        ({"referense": None}, "Did you mean 'reference'"),
    ],
)
def test_mistake_is_named(change: dict[str, Any], message: str) -> None:
    call = {"source": VADD, **VADD_CALL, **change}
    with pytest.raises(InputError, match=message):
        tunebench.tune_kernel(**call, arch="sm_90")


@pytest.mark.parametrize(
    "head",
    [
        "__global__ void __launch_bounds__(block) vadd(",
        "__global__ __launch_bounds__((block + 31) / 32 * 32, 2) void vadd(",
        "static __global__ void __launch_bounds__(max(block, (32))) __maxnreg__(64)\nvadd (",
        "/* a __global__ function by name( */ __global__ void  // sums( two\n vadd(",
    ],
)
def test_name_of_a_kernel_with_attributes_and_comments(head: str) -> None:
    workload, _ = load(VADD.replace("__global__ void vadd(", head), **VADD_CALL)
    assert str(workload) == "vadd:n=1000"


def test_counters_are_drawn_from_a_range() -> None:
    def counting(x: Any, counts: Any, chunk: int) -> None:
        for i in range(len(x)):
            counts[x[i]] += 1

    args = {"x": Input(N, "i32", low=0, high=4), "counts": InOut(4, "i32", low=0, high=10)}
    workload, _ = load(counting, args=args, space={"chunk": [1, 2]})
    counts = workload.draw(np.random.default_rng(0))["counts"]
    assert counts.min() >= 0
    assert counts.max() < 10


def test_function_must_take_all_parameters() -> None:
    with pytest.raises(InputError, match="takes unrolled, which is neither in args"):
        load(
            saxpy, args={"a": 0.5, "x": Input((N,), "f32"), "y": InOut((N,), "f32")}, space={"block": [1, 2]}
        )


TOML = """
source = "vadd.cu"
grid = "ceil_div(n, block)"
reference = "a + b"
emulate = {n = 300}

[args]
a = {input = ["n"], dtype = "f32"}
b = {input = ["n"], dtype = "f32"}
c = {output = ["n"], dtype = "f32"}
n = 1000

[space]
block = [64, 128]
"""


def test_file_describes_the_same_kernel(tmp_path: Path) -> None:
    (tmp_path / "vadd.cu").write_text(VADD)
    file = tmp_path / "vadd.toml"
    file.write_text(TOML)
    variant: Any
    workload, variant = description_file.read(file).load()
    assert str(workload) == "vadd:n=1000"
    assert VADD in variant.source(workload, Config({"block": 64}))
    assert str(variant.emulation_workload(workload, Config({"block": 64}))) == "vadd:n=300"


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ("grid =", "gird =", "key of .*vadd.toml 'gird'"),
        ('source = "vadd.cu"', "", "lacks source"),
        ("{output =", "{put =", "argument c needs one of input, output"),
        ('c = {output = ["n"], dtype', 'c = {output = ["n"], type', "key of argument c 'type'"),
        ("[space]", "[space", "description of a kernel"),
        ('["n"]', '["m"]', "name in shape of a 'm'"),
    ],
)
def test_mistake_in_a_file_is_named(tmp_path: Path, line: str, changed: str, message: str) -> None:
    (tmp_path / "vadd.cu").write_text(VADD)
    file = tmp_path / "vadd.toml"
    file.write_text(TOML.replace(line, changed))
    with pytest.raises(InputError, match=message):
        description_file.read(file).load()


def test_description_replaces_one_of_the_same_name() -> None:
    load(VADD, **VADD_CALL)
    second = load(VADD, **{**VADD_CALL, "space": {"block": [32, 64]}})[1]
    assert kernels.variants("vadd") == (second,)
    assert kernels.loaded_files() == (kernels.file_of(second),)


@pytest.mark.slow
def test_command_tunes_a_described_kernel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "saxpy.py").write_text(
        "import numba\n\n\ndef saxpy(x, y, block):\n"
        "    for i in numba.prange(len(x)):\n        y[i] = 2 * x[i] + block * 0\n"
    )
    file = tmp_path / "saxpy.toml"
    file.write_text(
        'source = "saxpy.py"\nname = "saxpy"\nreference = "2 * x"\nspace = {block = [1, 2]}\n'
        '[args]\nx = {input = 500, dtype = "f32"}\ny = {output = 500, dtype = "f32"}\n'
    )
    line = ["tune", str(file), "--device", "cpu", "--trials", "1", "--workers", "1", "--no-baselines"]
    assert cli.run(line) == 0
    assert "saxpy:x=500" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "e4m3", "i8", "i32", "i64"])
def test_values_are_drawn_within_a_range(dtype: str) -> None:
    args = {**VADD_ARGS, "a": Input((N,), dtype, low=2, high=5)}
    workload, _ = load(VADD, **{**VADD_CALL, "args": args})
    values = workload.draw(np.random.default_rng(0))["a"].astype(np.float64)
    assert values.min() >= 2
    assert values.max() <= (5 if "i" not in dtype else 4)
    assert len(set(values)) > 2


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (Input((N,), "f16", low=0), "needs both low and high"),
        (Input((N,), "f16", low=0, high=1e6), "<= low < high <= 65504"),
        (Input((N,), "f32", low=1, high=1), "got low=1 and high=1"),
        (Input((N,), "i8", low=0, high=300), "<= low < high <= 128"),
        (Input((N,), "i32", low=0.5), "needs whole low and high"),
        (Input((N,), "bool", low=0), "takes neither low nor high"),
    ],
)
def test_wrong_ranges_are_named(described: Input, message: str) -> None:
    with pytest.raises(InputError, match=rf"argument a .*{message}"):
        load(VADD, **{**VADD_CALL, "args": {**VADD_ARGS, "a": described}})
