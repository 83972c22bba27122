from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import A100, GPUS, H100, parser
from tests.support import needs_compiler, needs_nvrtc
from tunebench.bound import bound
from tunebench.device import representative
from tunebench.dtype import itemsize
from tunebench.kernels.common import gemm as _gemm
from tunebench.kernels.gemm.cuda_mma import VARIANT as MMA
from tunebench.kernels.gemm.cuda_simt import VARIANT as SIMT
from tunebench.kernels.gemm.numba_cuda import VARIANT as NUMBA
from tunebench.space import Config
from tunebench.workloads.operators.gemm import Gemm

VARIANTS = (SIMT, MMA, NUMBA)
gemm = parser(Gemm)

extents = st.sampled_from([1, 2, 3, 5, 8, 15, 16, 17, 31, 64, 100, 127, 128, 1000, 1024, 4096, 50257])
shapes: dict[str, Any] = {
    "m": extents,
    "n": extents,
    "k": extents,
    "batch": st.sampled_from([1, 2, 96]),
    "trans": st.sampled_from(["nn", "nt", "tn", "tt"]),
}
drawn_workloads = st.builds(
    Gemm,
    dtype=st.sampled_from(["f32", "tf32", "f16", "bf16", "e4m3"]),
    epilogue=st.sampled_from(Gemm.choices("epilogue")),
    out=st.sampled_from(["f32", "f16", "bf16"]),
    **shapes,
) | st.builds(Gemm, dtype=st.just("i8"), **shapes)


# ---------------------------------------------------------------------------------------------- spaces


@given(workload=drawn_workloads, device=st.sampled_from(GPUS))
def test_the_default_is_a_valid_configuration(workload: Gemm, device: Any) -> None:
    checks.assert_default_is_valid(VARIANTS, workload, device)


@given(workload=drawn_workloads)
def test_cuda_simt_supports_every_type_on_every_gpu(workload: Gemm) -> None:
    for device in GPUS:
        if device.compute_capability >= SIMT.minimum_cc:
            assert SIMT.refuses(workload, device) is None


@pytest.mark.parametrize(("variant", "least"), [(SIMT, 5000), (MMA, 2000), (NUMBA, 1000)], ids=str)
def test_a_large_workload_has_thousands_of_configurations(variant: Any, least: int) -> None:
    workload = gemm(f"m=4096,n=4096,k=4096,dtype={'f16' if variant is MMA else 'f32'}")
    assert least <= len(variant.configs(workload, A100)) <= 20_000


def test_no_launch_exceeds_what_the_device_has() -> None:
    for variant in (SIMT, MMA):
        for device in (representative("sm_80"), representative("sm_86")):
            workload = gemm("m=1000,n=1000,k=1000,dtype=tf32,trans=nt")
            table = variant.configs(workload, device)
            costs = variant.costs(workload, table, device)
            assert np.max(costs.threads) <= 1024
            assert np.max(costs.smem_bytes) <= device.smem_per_block_bytes
            assert np.all(costs.threads * costs.registers <= device.registers_per_sm)


def test_cuda_mma_refuses_unsupported_workloads_with_a_reason() -> None:
    assert MMA.refuses(gemm("m=64,n=64,k=64,dtype=e4m3,trans=nt,accumulate=f32"), A100) is None
    assert "sums are shorter" in str(
        MMA.refuses(gemm("m=64,n=64,k=64,dtype=e4m3,trans=nt,accumulate=f32"), representative("sm_89"))
    )
    assert "4 bytes" in str(MMA.refuses(gemm("m=66,n=64,k=64,dtype=i8,trans=tt"), A100))
    assert "4 bytes" in str(MMA.refuses(gemm("m=64,n=64,k=66,dtype=i8,trans=nt"), A100))
    assert MMA.refuses(gemm("m=63,n=61,k=68,dtype=i8,trans=nt"), A100) is None
    assert "f32" in str(MMA.refuses(gemm("m=64,n=64,k=64,dtype=f32"), A100))
    assert "sm_80" in str(MMA.refuses(gemm("m=64,n=64,k=64,dtype=f16"), representative("sm_75")))
    # Lines of a have k elements, or m where a is transposed; those of b have n or k.
    for odd, trans in (("k", "nn"), ("n", "nn"), ("m", "tn"), ("k", "nt"), ("k", "tt"), ("m", "tt")):
        sizes = {"m": 64, "n": 64, "k": 64, odd: 63}
        text = ",".join(f"{name}={size}" for name, size in sizes.items()) + f",trans={trans}"
        assert "4 bytes" in str(MMA.refuses(gemm(f"{text},dtype=f16"), A100))
        assert MMA.refuses(gemm(f"{text},dtype=tf32"), A100) is None
    assert MMA.refuses(gemm("m=63,n=64,k=64,dtype=f16"), A100) is None


def test_numba_cuda_takes_f32_only() -> None:
    assert NUMBA.refuses(gemm("m=8,n=8,k=8,dtype=f32"), A100) is None
    assert NUMBA.refuses(gemm("m=8,n=8,k=8,dtype=tf32"), A100) is None
    assert "f16" in str(NUMBA.refuses(gemm("m=8,n=8,k=8,dtype=f16"), A100))
    assert "bf16" in str(NUMBA.refuses(gemm("m=8,n=8,k=8,dtype=f32,out=bf16"), A100))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_more_blocks_than_a_grid_has_are_refused(variant: Any) -> None:
    huge = gemm("m=1,n=4000,k=2,dtype=tf32,batch=2147483647")
    assert "blocks" in str(variant.refuses(huge, A100))
    assert variant.refuses(dataclasses.replace(huge, n=1), A100) is None


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_small_workloads_get_small_tiles(variant: Any) -> None:
    def tile(text: str) -> int:
        config = variant.default(gemm(f"{text},dtype=tf32"), A100)
        return int(config["bm"] * config["bn"])

    sizes = [tile(f"m={size},n={size},k=256") for size in (64, 256, 1024, 8192)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    assert tile("m=1,n=1000,k=256") <= tile("m=1000,n=1000,k=256")


# -------------------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize(
    ("extent", "dtype", "elements"),
    [
        (1, "f16", 1),
        (6, "f16", 2),
        (8, "f16", 8),
        (64, "f16", 8),
        (64, "f32", 4),
        (20, "bf16", 4),
        (2, "tf32", 2),
        (48, "e4m3", 16),
        (24, "i8", 8),
    ],
)
def test_accesses_are_as_wide_as_lines_allow(extent: int, dtype: Any, elements: int) -> None:
    assert _gemm.alignment(extent, dtype) == elements


@given(workload=drawn_workloads)
def test_every_access_is_aligned(workload: Gemm) -> None:
    tensors = {tensor.name: tensor for tensor in (*workload.inputs(), *workload.outputs())}
    for name, width in zip("abc", _gemm.widths(workload), strict=True):
        line, size = tensors[name].shape[-1], itemsize(tensors[name].dtype)
        assert line % width == 0
        assert width * size <= 16
        assert width * size == 16 or line % (2 * width) != 0


def test_workloads_of_equal_alignment_share_source_and_entry() -> None:
    for variant in (SIMT, MMA):
        first, second = gemm("m=512,n=512,k=512,dtype=f16"), gemm("m=1024,n=776,k=4000,dtype=f16,batch=7")
        config = variant.default(first, A100)
        assert variant.revision(first, config) == variant.revision(second, config)
        unaligned = dataclasses.replace(second, k=4002)
        assert variant.revision(first, config) != variant.revision(unaligned, config)


# --------------------------------------------------------------------------------- launches, emulation


@given(workload=drawn_workloads, choice=st.integers(0, 10**6))
def test_launch_has_one_block_per_tile_or_split_k_blocks(workload: Gemm, choice: int) -> None:
    for variant in VARIANTS:
        if variant.refuses(workload, A100) is not None:
            continue
        table = variant.configs(workload, A100)
        config = table.config(choice % len(table))
        product, *finish = variant.launches(workload, config)
        tiles = workload.batch * -(-workload.n // config["bn"]) * -(-workload.m // config["bm"])
        stream, split = config.get("stream_k", 0), config.get("split_k", 1)
        assert product.grid == (stream or tiles * split, 1, 1)
        assert len(finish) == (stream > 0 or split > 1)
        assert [launch.grid for launch in finish] == [(tiles * config["bm"] // 16, 1, 1)] * len(finish)
        slots = [tensor.shape[0] for tensor in variant.scratch(workload, config)]
        assert slots == [2 * stream or tiles * split] * len(finish)


@given(workload=drawn_workloads, choice=st.integers(0, 10**6))
def test_emulation_workload_has_the_same_edges_and_alignment(workload: Gemm, choice: int) -> None:
    for variant in (SIMT, MMA):
        if variant.refuses(workload, A100) is not None:
            continue
        table = variant.configs(workload, A100)
        config = table.config(choice % len(table))
        small = variant.emulation_workload(workload, config)
        assert _gemm.widths(small) == _gemm.widths(workload)
        for name in ("m", "n", "k"):
            extent, tile = getattr(small, name), config[f"b{name}"]
            assert extent <= getattr(workload, name)
            assert (extent - getattr(workload, name)) % tile == 0
            assert (extent >= tile) == (getattr(workload, name) >= tile)
        assert -(-small.k // config["bk"]) >= min(config["stages"] + 1, -(-workload.k // config["bk"]))
        # Same machine code: the emulated kernel is the one that would run.
        assert variant.source(small, config) == variant.source(workload, config)


# ------------------------------------------------------------------------------------------------ costs


@given(workload=drawn_workloads)
def test_costs_cover_the_work_and_are_finite(workload: Gemm) -> None:
    for variant in VARIANTS:
        if variant.refuses(workload, A100) is not None:
            continue
        table = variant.configs(workload, A100)
        costs = variant.costs(workload, table, A100)
        executed = costs.blocks * (costs.fma * 2 + costs.mma_flop)
        assert np.all(executed >= workload.flops())
        assert np.all(bound(costs, workload.traffic(), A100, rows=len(table)).us > 0)


def test_costs_of_a_divisible_workload_are_exact() -> None:
    workload = gemm("m=4096,n=4096,k=4096,dtype=f16")
    config = Config(
        {**MMA.default(workload, A100), "bm": 128, "bn": 128, "warps_m": 2, "warps_n": 2, "bk": 32}
    )
    costs = checks.costs_of(MMA, workload, config, A100)
    assert costs.blocks == 32 * 32
    assert costs.mma_flop == 2 * 128 * 128 * 4096
    assert costs.fill_bytes == 2 * 128 * 4096 * 2
    # Of pieces of 16 x 16 (or 16 x 8), a warp of 64 x 64 reads 4 and 4 and multiplies 4 x 8, per 16 of k.
    assert costs.instructions == 4 * 256 * (4 + 4 + 32)
    assert costs.smem_traffic_bytes == 4 * 256 * (4 + 4) * 512 + 4096 * 2 * 256


def test_copies_through_l1_are_not_sure_to_come_from_l2() -> None:
    narrow = gemm("m=4096,n=4096,k=4098,dtype=f16,trans=nt")
    costs = MMA.costs(narrow, MMA.configs(narrow, A100), A100)
    assert not np.any(costs.fill_bytes)
    table = SIMT.configs(narrow, A100)
    assert not np.any(SIMT.costs(narrow, table, A100).fill_bytes)


# ------------------------------------------------------------------------------------------------ results

CASES = [
    # variant, workload, choices; every path is taken by some case
    (SIMT, "m=67,n=53,k=43,dtype=f32,trans=nn,epilogue=bias+gelu", {"stages": 1}),
    (SIMT, "m=130,n=72,k=40,dtype=f16,trans=nt,epilogue=bias+residual", {"bk": 8, "group_m": 1}),
    (SIMT, "m=67,n=130,k=72,dtype=bf16,trans=tn,out=f32,batch=2", {"bm": 64, "tm": 8, "tn": 4, "lanes_n": 4}),
    (SIMT, "m=96,n=68,k=1,dtype=tf32,trans=tt,epilogue=bias+relu,out=f16", {"bk": 4, "vec": 1}),
    (MMA, "m=67,n=58,k=70,dtype=f16,trans=nn,epilogue=bias+gelu", {"stages": 2}),
    (
        MMA,
        "m=130,n=88,k=200,dtype=bf16,trans=nt,epilogue=residual,out=f32",
        {"stages": 4, "staged": 0},
    ),
    (MMA, "m=72,n=132,k=37,dtype=f16,trans=tn,out=bf16,batch=2", {"warps_m": 1, "group_m": 1}),
    (MMA, "m=68,n=33,k=136,dtype=bf16,trans=tt,epilogue=bias+relu+residual", {"stages": 3, "staged": 0}),
    (MMA, "m=43,n=37,k=41,dtype=tf32,trans=nt,epilogue=bias+relu,out=f16", {"bk": 16}),
    (MMA, "m=72,n=40,k=64,dtype=tf32,trans=tn,epilogue=bias", {"bk": 32, "stages": 3}),
    (MMA, "m=36,n=130,k=53,dtype=tf32,trans=tt", {"staged": 0}),
    (MMA, "m=43,n=41,k=100,dtype=e4m3,trans=nt,epilogue=bias+gelu,out=f32", {"staged": 0, "stages": 3}),
    (MMA, "m=43,n=44,k=208,dtype=e4m3,trans=nt,epilogue=residual,batch=2", {"staged": 1, "bk": 64}),
    (MMA, "m=43,n=41,k=100,dtype=i8,trans=nt", {"staged": 0}),
    (MMA, "m=43,n=44,k=208,dtype=i8,trans=nt,batch=2", {"staged": 1, "bk": 64}),
    (MMA, "m=43,n=44,k=100,dtype=i8,trans=nn", {"staged": 0}),
    (MMA, "m=44,n=36,k=75,dtype=e4m3,trans=tn,epilogue=bias+relu", {"staged": 1, "bk": 32}),
    (MMA, "m=144,n=99,k=84,dtype=i8,trans=tt", {"bm": 128, "bn": 32, "staged": 0, "bk": 64}),
    (MMA, "m=36,n=208,k=53,dtype=i8,trans=tn,batch=2", {"bm": 16, "bn": 128, "staged": 1}),
    (SIMT, "m=41,n=43,k=90,dtype=i8,trans=tn", {"stages": 1}),
    (SIMT, "m=41,n=43,k=90,dtype=e4m3,trans=nn,epilogue=bias+relu", {"stages": 2}),
]

DIVIDED = [
    # variant, workload, choices, and the workload whose configurations include the choices
    (
        MMA,
        "m=37,n=58,k=202,dtype=f16,epilogue=bias+gelu+residual,batch=2",
        {"split_k": 4, "staged": 1, "bk": 16},
        None,
    ),
    (MMA, "m=37,n=58,k=210,dtype=f16,out=f32", {"split_k": 4, "staged": 0, "bk": 32, "stages": 2}, "k=500"),
    (MMA, "m=33,n=35,k=36,dtype=i8,trans=nt", {"split_k": 8, "bk": 32}, "k=1000"),  # more parts than steps
    (MMA, "m=33,n=40,k=300,dtype=e4m3,trans=nt", {"split_k": 2, "staged": 0, "bk": 32, "stages": 3}, None),
    (MMA, "m=1,n=33,k=95,dtype=tf32,trans=nt,epilogue=bias", {"bm": 16, "split_k": 2, "bk": 16}, None),
    (
        MMA,
        "m=70,n=90,k=300,dtype=bf16,epilogue=bias+residual",
        {"stream_k": 108, "staged": 1},
        "n=1184,k=640",
    ),
    (MMA, "m=100,n=99,k=97,dtype=tf32,batch=2", {"stream_k": 108, "staged": 0, "bk": 16}, "n=1184,k=640"),
    (MMA, "m=65,n=95,k=16,dtype=f16,trans=nt,out=f32", {"stream_k": 108, "bk": 16}, "n=1184,k=640"),
    (MMA, "m=64,n=99,k=400,dtype=i8,trans=nt", {"stream_k": 108, "bk": 32}, "n=1184,k=640"),
    (
        SIMT,
        "m=37,n=53,k=203,dtype=f32,epilogue=bias+silu+residual,batch=2",
        {"split_k": 4, "stages": 2, "bk": 8},
        None,
    ),
    (SIMT, "m=37,n=56,k=10,dtype=f16,trans=nt,out=f32", {"split_k": 8, "stages": 1, "bk": 4}, "k=1000"),
    (SIMT, "m=33,n=35,k=203,dtype=i8,trans=tt", {"split_k": 2, "bk": 16}, None),
]


def configured(variant: Any, workload: Gemm, choices: dict[str, int]) -> Config:
    """Return a valid configuration of small tiles with the given choices."""
    return checks.pick(variant, workload, {"bm": 32, "bn": 32, **choices}, A100)


@needs_compiler
@pytest.mark.parametrize(("variant", "text", "choices"), CASES)
def test_results_are_right_in_every_order(variant: Any, text: str, choices: dict[str, int]) -> None:
    workload = gemm(text)
    checks.assert_right_in_every_order(variant, workload, configured(variant, workload, choices))


def divided(case: Any) -> tuple[Any, Gemm, Config]:
    """Return variant, workload and configuration of a case of `DIVIDED`."""
    variant, text, choices, larger = case
    workload = gemm(text)
    changes = dict(item.split("=") for item in larger.split(",")) if larger else {}
    among = dataclasses.replace(workload, **{name: int(size) for name, size in changes.items()})
    return variant, workload, configured(variant, among, choices)


@needs_compiler
@pytest.mark.parametrize("case", DIVIDED, ids=lambda case: f"{case[0]}-{case[1]}")
def test_divided_products_are_right_and_the_same_in_every_order(case: Any) -> None:
    variant, workload, config = divided(case)
    checks.assert_order_does_not_matter(variant, workload, config, sanitize=True)


def test_a_stream_of_a_small_workload_is_of_blocks_that_span_tiles() -> None:
    variant, workload, config = divided(DIVIDED[5])
    product, _ = variant.launches(workload, config)
    tiles, steps = _gemm.blocks(workload, config["bm"], config["bn"]), -(-workload.k // config["bk"])
    assert 1 < product.grid[0] < tiles * steps / 1.5
    assert tiles * steps % product.grid[0] or steps % (tiles * steps // product.grid[0])


# Where both operands come in pairs, a wrong order of k is the same in both, and not a fault.
PAIRED = (MMA, "m=45,n=36,k=76,dtype=i8,trans=nn", {"split_k": 2, "bk": 32}, "k=200")

DIVIDED_FAULTS = {
    "parts of a tile": (
        DIVIDED[0],
        "return {first, first + 1, 1, parts};",
        "return {first, first + 1, 1, parts - 1};",
    ),
    "end of a part": (DIVIDED[1], "(part + 1) / parts)", "(part + 1) / parts + (part == 1))"),
    "owner of a step": (DIVIDED[5], "((step + 1) * parts - 1) / total", "step * parts / total"),
    "slots of a stream": (DIVIDED[5], "2 * i64(blockIdx.x) + (first == 0)", "2 * i64(blockIdx.x)"),
    "between segments": (DIVIDED[6], "if (step < end) __syncthreads();", ""),
    "8-bit fragments": (
        DIVIDED[3],
        "OF_B ? matrix % 2 : matrix / 2;\n    if",
        "matrix / 2;\n    if",
    ),
    "pairs of rows": (PAIRED, "row / 2 * 4 + matrix % 2 * 2", "row / 2 * 2 + matrix % 2 * 8"),
    "order of columns": (PAIRED, "side * 2 + t / 2", "side + t / 2 * 2"),
    "short last step": (DIVIDED[11], "? k : (segment.first", "? steps * BK : (segment.first"),
}


def divided_faulty(fault: str) -> tuple[Any, Gemm, Config]:
    case, old, new = DIVIDED_FAULTS[fault]
    variant, workload, config = divided(case)
    return checks.planted(variant, old, new), workload, config


def test_planted_faults_of_divided_products_have_a_place() -> None:
    checks.assert_faults_have_a_place(map(divided_faulty, DIVIDED_FAULTS))


@needs_compiler
@pytest.mark.parametrize("fault", checks.sampled_faults(DIVIDED_FAULTS))
def test_planted_faults_of_divided_products_are_found(fault: str) -> None:
    checks.assert_fault_is_found(*divided_faulty(fault), sanitize=True)


@given(workload=drawn_workloads, choice=st.integers(0, 10**6))
def test_division_of_k_keeps_total_work(workload: Gemm, choice: int) -> None:
    for variant in (SIMT, MMA):
        if variant.refuses(workload, A100) is not None:
            continue
        table = variant.configs(workload, A100)
        row = np.array([choice % len(table)])
        config, costs = table.config(int(row[0])), variant.costs(workload, table.take(row), A100)
        tiles = _gemm.blocks(workload, config["bm"], config["bn"])
        padded = tiles * config["bm"] * config["bn"] * -(-workload.k // config["bk"]) * config["bk"]
        assert costs.blocks * (costs.fma + costs.mma_flop / 2) == pytest.approx(padded)
        assert costs.serial_launches == len(variant.launches(workload, config))
        # There are not more full blocks than blocks, and their work is not more than all work.
        grid = variant.launches(workload, config)[0].grid[0]
        assert 1 <= costs.full_blocks <= grid
        assert costs.full_blocks <= costs.blocks * (1 + 1e-9)
        assert np.all(costs.blocks * costs.fill_bytes <= _copied(workload, config) * (1 + 1e-9))


def _copied(workload: Gemm, config: Config) -> int:
    """Return the bytes that all blocks copy from a and b, without zeros."""
    down, across = -(-workload.m // config["bm"]), -(-workload.n // config["bn"])
    lines = across * workload.m + down * workload.n
    return workload.batch * lines * workload.k * itemsize(workload.dtype)


@needs_compiler
@pytest.mark.parametrize(("variant", "text", "choices"), [CASES[0], CASES[5], CASES[6]])
def test_no_access_is_out_of_bounds(variant: Any, text: str, choices: dict[str, int]) -> None:
    workload = gemm(text)
    checks.assert_emulates_right(variant, workload, configured(variant, workload, choices), sanitize=True)


FAULTS = {
    "simt barrier": (CASES[0], "    else\n      __syncthreads();  // all have read the only buffer\n", ""),
    "mma barrier": (CASES[4], "    __syncthreads();  // this tile is visible", "    // this tile is visible"),
    "mma wait": (CASES[4], "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
    "edge of c": (
        CASES[5],
        "if (row >= target.rows) continue;\n        const Vec<Out, WIDTH> residual",
        "const Vec<Out, WIDTH> residual",
    ),
    "lanes of b": (CASES[6], "OF_B ? matrix / 2 : matrix % 2, k_half", "matrix % 2, k_half"),
}
"""A case, and the text to replace in its kernel, for a fault that the case must find."""


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    (variant, text, choices), old, new = FAULTS[fault]
    workload = gemm(text)
    checks.assert_fault_is_found(
        checks.planted(variant, old, new), workload, configured(variant, workload, choices)
    )


# --------------------------------------------------------------------------------------------- machine code


@needs_nvrtc
@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.architecture)
@pytest.mark.parametrize(
    ("variant", "text"),
    [
        (SIMT, "m=4096,n=4096,k=4096,dtype=f32"),
        (SIMT, "m=50,n=77,k=61,dtype=bf16,trans=tt,epilogue=bias"),
        (MMA, "m=4096,n=4096,k=4096,dtype=bf16,trans=nt,epilogue=bias+gelu"),
        (MMA, "m=512,n=512,k=512,dtype=tf32,trans=tn,epilogue=bias+relu"),
        (MMA, "m=4,n=1024,k=8192,dtype=f16"),
        (SIMT, "m=4,n=1024,k=8192,dtype=f32"),
    ],
)
def test_defaults_compile_without_spills(variant: Any, text: str, device: Any) -> None:
    workload = gemm(text)
    config = variant.default(workload, device)
    counted = checks.opcodes(
        checks.assert_default_compiles_without_spills(variant, workload, device).payload, 12
    )
    on_tensor_cores = variant is MMA
    assert (counted[HMMA] > 0) == on_tensor_cores
    assert (counted[LDGSTS] > 0) == on_tensor_cores
    if not on_tensor_cores:
        assert counted[FFMA] >= config["tm"] * config["tn"] * config["bk"]
    elif workload.dtype == "bf16":
        assert counted[LDSM] > 0


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("dtype", ["e4m3", "i8"])
def test_8_bit_products_use_tensor_cores(dtype: str, architecture: str) -> None:
    workload, device = gemm(f"m=4096,n=4096,k=4096,dtype={dtype},trans=nt"), representative(architecture)
    if MMA.refuses(workload, device) is not None:
        pytest.skip(str(MMA.refuses(workload, device)))
    counted = checks.opcodes(checks.compiled(MMA, workload, device).payload, 12)
    # sm_80 and sm_90 have no mma.sync for e4m3.
    on_tensor_cores = IMMA if dtype == "i8" else QMMA if architecture == "sm_89" else HMMA
    assert counted[on_tensor_cores] > 0
    assert counted[LDSM] > 0


def test_few_rows_divide_k_by_default() -> None:
    """Decoding: c has fewer tiles than the GPU has SMs, and k is long."""
    for device in (A100, H100):
        for variant, dtype in ((MMA, "bf16"), (SIMT, "f32")):
            for m in (1, 8, 16, 64):
                for n, k in ((1024, 8192), (4096, 14336)):
                    workload = gemm(f"m={m},n={n},k={k},dtype={dtype},trans=nt")
                    product = variant.launches(workload, variant.default(workload, device))[0]
                    warps = product.grid[0] * product.block[0] // 32
                    assert product.grid[0] >= 0.8 * device.sm_count
                    assert warps >= 3 * device.sm_count
        square = gemm("m=4096,n=4096,k=4096,dtype=f16")
        assert MMA.default(square, device)["split_k"] == SIMT.default(square, device)["split_k"] == 1


HMMA, IMMA, QMMA, LDGSTS, LDSM, FFMA = 0x23C, 0x237, 0x27A, 0xFAE, 0x83B, 0x223
"""Lower 12 bits of an instruction of 128, as nvdisasm decodes them for sm_80 and sm_90."""
