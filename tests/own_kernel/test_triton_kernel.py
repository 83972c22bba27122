"""A user's kernel in Triton from a description: generated module, compiled, interpreted, tuned offline."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tunebench
from tests.support import needs_triton
from tunebench import InOut, Input, Output, Plan, Scratch, cli
from tunebench.binary.cubin import read_cubin
from tunebench.compile.triton import compile_triton
from tunebench.db import open_store
from tunebench.device import find
from tunebench.emulate.triton_interpreter import interpret
from tunebench.errors import InputError
from tunebench.kernels import variant_file_scope
from tunebench.outcome import Predicted
from tunebench.own_kernel import UNVERIFIED, KernelDescription
from tunebench.space import Config
from tunebench.variant import Scalar

triton = pytest.importorskip("triton", reason="the extra `triton` is not installed")
import triton.language as tl  # noqa: E402 - after the check that it is installed

pytestmark = needs_triton

ROWS, COLS = 6, 100
TWO = tl.constexpr(2)
KIND = tl.float32


@triton.jit
def _total(values):
    return tl.sum(values.to(KIND), 0) * TWO


@triton.jit
def soft(x, y, cols, scale, BLOCK: tl.constexpr, HALVE: tl.constexpr = True):
    """Softmax of a row."""
    row, offsets = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * cols + offsets, mask=offsets < cols, other=-float("inf")) * scale
    powers = tl.exp(values - tl.max(values, 0))
    result = powers / _total(powers) * (TWO if HALVE else 1)
    tl.store(y + row * cols + offsets, result, mask=offsets < cols)


def copies(h, b, e, i, f, ho, bo, eo, io, fo, n: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(ho + at, tl.load(h + at, mask=at < n), mask=at < n)
    tl.store(bo + at, tl.load(b + at, mask=at < n), mask=at < n)
    tl.store(eo + at, tl.load(e + at, mask=at < n), mask=at < n)
    tl.store(io + at, tl.load(i + at, mask=at < n) + n, mask=at < n)
    tl.store(fo + at, tl.load(f + at, mask=at < n), mask=at < n)


def softmax_of(x: Any, scale: float) -> Any:
    powers = np.exp((x - x.max(1, keepdims=True)) * scale)
    return powers / powers.sum(1, keepdims=True)


CALL: dict[str, Any] = {
    "args": {"x": Input((ROWS, COLS), "f32"), "y": Output((ROWS, COLS), "f32"), "cols": COLS, "scale": 0.5},
    "space": {"BLOCK": [64, 128, 256], "num_warps": [2, 4], "num_ctas": [1, 2], "maxnreg": [0, 128]},
    "grid": (ROWS, 1),
    "constraints": "BLOCK >= cols",
    "reference": softmax_of,
}
CONFIG = Config({"BLOCK": 128, "num_warps": 2, "num_ctas": 2, "maxnreg": 0})
QUICK = Plan(trials=2, finalists=1, audit=0.0, baselines=False, workers=1)


@pytest.fixture(autouse=True)
def scope() -> Iterator[None]:
    with variant_file_scope():
        yield


def load(source: Any, **described: Any) -> tuple[Any, Any]:
    return KernelDescription(source=source, **described).load()


def test_module_has_the_kernel_and_what_it_uses() -> None:
    workload, variant = load(soft, **CALL)
    assert variant.key == "soft/triton"
    source = variant.source(workload, CONFIG)
    assert "TWO = triton.language.constexpr(2)" in source
    assert "KIND = triton.language.dtype('fp32')" in source
    assert source.count("@triton.jit") == 2
    assert "Softmax of a row" not in source
    (launch,) = variant.launches(workload, CONFIG)
    assert (launch.entry, launch.grid, launch.block, launch.cluster) == ("soft", (12, 1, 1), (64, 1, 1), 2)
    assert launch.arguments == ("x", "y", Scalar("int", COLS), Scalar("float", 0.5))
    table = variant.configs(workload, find("sm_90"))
    assert len(table) == 16
    costs = variant.costs(workload, table, find("sm_90"))
    assert set(costs.threads) == {64.0, 128.0}
    assert set(costs.blocks) == {6.0, 12.0}
    assert "num_warps" not in variant.constants(workload, CONFIG)
    wrapped = triton.autotune(configs=[triton.Config({"BLOCK": 128})], key=["cols"])(soft)
    assert load(wrapped, **CALL)[1].source(workload, CONFIG) == source


def test_tunes_offline_with_the_same_call(tmp_path: Path) -> None:
    db = tmp_path / "t.db"
    result = tunebench.tune_kernel(soft, arch="sm_90", db=db, plan=QUICK, **CALL)
    assert result.how == "predicted"
    with open_store(db, read_only=True) as store:
        records = store.history(workload=result.workload)
    outcomes = [record.result.outcome for record in records]
    assert {o.verification.how for o in outcomes if isinstance(o, Predicted)} == {"simulated"}
    assert any(record.result.resources.registers for record in records)
    with pytest.warns(UserWarning, match="predicted for sm_90"):
        answer = tunebench.lookup_kernel(soft, arch="sm_90", db=db, **CALL)
    assert dict(answer.config) == result.best
    arguments = ["show", result.workload, "--variant-file", str(result.file), "--device", "sm_90"]
    assert cli.run([*arguments, "--db", str(db), "--ptx"]) == 0


def test_all_types_are_interpreted() -> None:
    types = {"h": "f16", "b": "bf16", "e": "e4m3", "i": "i64", "f": "bool"}
    inputs = {name: Input((COLS,), kind) for name, kind in types.items()}
    outputs = {f"{name}o": Output((COLS,), kind) for name, kind in types.items()}
    args = {**inputs, **outputs, "n": COLS}
    workload, variant = load(copies, args=args, space={"BLOCK": [128, 256]}, grid=1, reference="{}")
    assert variant.constants(workload, Config({"BLOCK": 128})) == {"n": COLS, "BLOCK": 128}
    drawn = workload.draw(np.random.default_rng(0))
    results = interpret(variant, workload, Config({"BLOCK": 128}), drawn)
    for name in types:
        expected = drawn[name] + COLS if name == "i" else drawn[name]
        np.testing.assert_array_equal(results[f"{name}o"], expected)


def test_default_configuration_is_the_reference_without_one() -> None:
    workload, _ = load(soft, **{**CALL, "reference": None, "default": CONFIG})
    drawn = workload.draw(np.random.default_rng(0))
    expected = workload.reference({name: np.asarray(a, dtype=np.float64) for name, a in drawn.items()})["y"]
    np.testing.assert_allclose(expected.value, softmax_of(drawn["x"].astype(np.float64), 0.5), rtol=1e-5)
    assert UNVERIFIED in workload.tolerance().reason


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (soft, {"block": 64}, "Triton decides threads"),
        (soft, {"grid": None}, "needs grid"),
        (soft, {"space": {"BLOCK": [64, 128], "scale": [1, 2]}}, "scale is an argument and a parameter"),
        (soft, {"space": {"BLOCKS": [64, 128]}}, "takes BLOCK, which is neither"),
        (soft, {"space": {"BLOCK": [64], "num_warp": [1, 2]}}, "unknown argument of soft 'num_warp'"),
        (soft, {"args": {**CALL["args"], "HALVE": Input((4,), "f32")}}, "HALVE cannot be a tl.constexpr"),
        (soft, {"args": {"x": Input((6, 100), "f32"), "cols": 100, "scale": 1.0}}, "takes y"),
    ],
)
def test_mistakes_are_named(source: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(source, **{**CALL, **changes})


def test_triton_needs_a_gpu_from_ampere_on() -> None:
    workload, variant = load(soft, **CALL)
    assert "sm_80 or later" in variant.refuses(workload, find("sm_75"))


@triton.jit
def _scaled_in_place(x, flags, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(x + at, tl.load(x + at, mask=inside) * factor, mask=inside)
    tl.store(flags + at, tl.load(flags + at, mask=inside) + 1, mask=inside)


IN_PLACE: dict[str, Any] = {
    "args": {"x": InOut(100, "f32"), "flags": InOut(np.arange(100, dtype=np.int8)), "n": 100, "factor": 0.5},
    "space": {"BLOCK": [32, 64], "num_warps": [1, 2]},
    "grid": "ceil_div(n, BLOCK)",
    "reference": lambda x, flags, factor: (x * factor, flags + 1),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_arrays_changed_in_place_are_copied_first(arch: str) -> None:
    workload, variant = load(_scaled_in_place, **IN_PLACE)
    device, config = find(arch), Config({"BLOCK": 64, "num_warps": 2})
    assert variant.refuses(workload, device) is None
    planned = variant.launches(workload, config)
    binary = compile_triton(variant, workload, config, device)
    launches = binary.launches(planned)
    names = ["tunebench_restore_4", "tunebench_restore_1", "_scaled_in_place"]
    assert [launch.entry for launch in launches] == list(binary.entries) == names
    assert launches[:2] == planned[:2]  # Triton's compiler decides nothing of the copies
    assert launches[0].arguments == ("x", "x_out", Scalar("long long", 100))
    assert (launches[2].block, launches[2].arguments[:2]) == ((64, 1, 1), ("x_out", "flags_out"))
    assert {*names} <= {*read_cubin(binary.payload)}
    assert variant.costs(workload, variant.configs(workload, device), device).serial_launches == 3


def test_arrays_changed_in_place_are_verified_and_restored() -> None:
    workload, variant = load(_scaled_in_place, **IN_PLACE)
    inputs = workload.draw(np.random.default_rng(0))
    originals = {name: array.copy() for name, array in inputs.items()}
    outputs = interpret(variant, workload, Config({"BLOCK": 64, "num_warps": 2}), inputs)
    np.testing.assert_array_equal(outputs["x_out"], originals["x"] * np.float32(0.5))
    np.testing.assert_array_equal(outputs["flags_out"], originals["flags"] + 1)
    for name, array in originals.items():
        np.testing.assert_array_equal(inputs[name], array)


def _narrowed(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at[:, None] * BLOCK + at[None, :]).to(tl.float16)
    tl.store(y + at[:, None] * BLOCK + at[None, :], tl.dot(values, values))


def _plain(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at[:, None] * BLOCK + at[None, :])
    tl.store(y + at[:, None] * BLOCK + at[None, :], tl.dot(values, values))


def _scaled(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at[:, None] * BLOCK + at[None, :])
    tl.store(y + at[:, None] * BLOCK + at[None, :], tl.dot_scaled(values, None, "e2m1", values, None, "e2m1"))


@pytest.mark.parametrize(
    ("kernel", "dtype", "scratch", "arch", "fastest"),
    [
        (_plain, "f32", "f32", "sm_90", "tf32"),
        (_narrowed, "f32", "f32", "sm_90", "f16"),
        (_plain, "f32", "e4m3", "sm_90", "e4m3"),  # values may take its type
        (_plain, "e4m3", "f32", "sm_80", None),  # without such products, values are widened without a word
        (_scaled, "i8", "f32", "sm_100", None),
    ],
)
def test_declared_operations_bound_by_the_fastest_type_that_a_kernel_can_multiply(
    kernel: Any, dtype: str, scratch: str, arch: str, fastest: str | None
) -> None:
    args = {"x": Input((64, 64), dtype), "y": Output((64, 64), "f32"), "z": Scratch(64, scratch), "n": 64}
    space = {"BLOCK": [64], "num_warps": [4, 8]}
    call = {"args": args, "space": space, "grid": 1, "flops": "2 * n**3", "reference": "x @ x"}
    workload, variant = load(kernel, **call)
    device = find(arch)
    costs = variant.costs(workload, variant.configs(workload, device), device)
    assert costs.mma_dtype == fastest
    if fastest is not None:
        rate = device.mma_flop_per_clock[fastest]
        # Both units of an SM together execute all operations in no less time.
        assert costs.mma_flop / rate * (rate + 4 * device.fma_per_clock) == pytest.approx(2 * 64**3)


@triton.jit
def _product(a, b, c, n, BM: tl.constexpr, BK: tl.constexpr):
    rows, columns, depth = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, 64), tl.arange(0, BK)
    total = tl.zeros((BM, 64), tl.float32)
    for start in range(0, n, BK):
        left = tl.load(a + rows[:, None] * n + start + depth[None, :])
        right = tl.load(b + (start + depth)[:, None] * 64 + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * 64 + columns[None, :], total.to(tl.float16))


@pytest.mark.slow
def test_configurations_of_equal_grids_have_different_predicted_times(tmp_path: Path) -> None:
    args = {
        "a": Input(("n", "n"), "f16"),
        "b": Input(("n", 64), "f16"),
        "c": Output(("n", 64), "f16"),
        "n": 256,
    }
    result = tunebench.tune_kernel(
        _product,
        args=args,
        space={"BM": [64], "BK": [32, 64], "num_warps": [4, 8], "num_stages": [2]},
        grid="n // BM",
        reference="a @ b",
        flops="2 * n * n * 64",
        arch="sm_80",
        db=tmp_path / "t.db",
        plan=Plan(trials=4, finalists=1, audit=0.0, baselines=False, workers=1),
    )
    with open_store(tmp_path / "t.db", read_only=True) as store:
        records = store.history(workload=result.workload)
    times = {
        r.key.config: r.result.outcome.predicted_us
        for r in records
        if isinstance(r.result.outcome, Predicted)
    }
    assert len(times) == len(set(times.values())) == 4
    best = min(times, key=times.__getitem__)
    default = Config({"BM": 64, "BK": 32, "num_warps": 4, "num_stages": 2})
    assert result.best in (dict(best), dict(default))
    assert result.time_us in (times[best], times[default])
