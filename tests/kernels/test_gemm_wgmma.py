"""gemm on Hopper's tensor cores: space, declared costs, results in emulation, machine code."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import H100, HGMMA, IGMMA, QGMMA, USETMAXREG, UTMALDG, UTMASTG, parser
from tests.support import needs_compiler, needs_nvrtc
from tunebench.binary import cubin
from tunebench.bound import bound
from tunebench.device import described, representative
from tunebench.dtype import itemsize
from tunebench.emulate.emulator import emulate, watch
from tunebench.errors import InputError
from tunebench.kernels.common import gemm as _gemm
from tunebench.kernels.common import wgmma_tile
from tunebench.kernels.gemm.cuda_mma import VARIANT as MMA
from tunebench.kernels.gemm.cuda_wgmma import VARIANT
from tunebench.kernels.gemm.cuda_wgmma_promoted import VARIANT as PROMOTED
from tunebench.space import Config
from tunebench.variant import TensorMap
from tunebench.workloads.operators.gemm import Gemm

HOPPERS = [device for device in described().values() if device.architecture == "sm_90"]
gemm = parser(Gemm)


def further(*values: Any) -> Any:
    """Return a case whose parts other cases cover, which runs with --exhaustive only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


extents = st.sampled_from([1, 8, 16, 24, 63, 64, 72, 128, 136, 1000, 4096, 50264])
drawn_workloads = st.builds(
    Gemm,
    m=extents,
    n=extents,
    k=extents,
    batch=st.sampled_from([1, 2, 96]),
    dtype=st.sampled_from(["f16", "bf16", "tf32", "e4m3"]),
    trans=st.sampled_from(["nn", "nt", "tn", "tt"]),
    epilogue=st.sampled_from(Gemm.choices("epilogue")),
    out=st.sampled_from(["f32", "f16", "bf16"]),
).filter(lambda workload: VARIANT.refuses(workload, H100) is None)


# ------------------------------------------------------------------------------------------------- space


@given(workload=drawn_workloads, device=st.sampled_from(HOPPERS))
def test_the_default_is_a_valid_configuration(workload: Gemm, device: Any) -> None:
    checks.assert_default_is_valid([VARIANT], workload, device)


def test_the_default_is_what_libraries_ship() -> None:
    large = VARIANT.default(gemm("m=8192,n=8192,k=8192,dtype=bf16"), H100)
    assert (large["bm"], large["bn"], large["bk"], large["consumers"]) == (128, 256, 64, 2)
    sizes = []
    for size in (64, 512, 2048, 8192):
        config = VARIANT.default(gemm(f"m={size},n={size},k=4096,dtype=f16"), H100)
        sizes.append(config["bm"] * config["bn"])
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_the_default_stores_beside_products_where_k_is_short() -> None:
    chosen = {
        k: VARIANT.default(gemm(f"m=4096,n=4096,k={k},dtype=f16"), H100)["pingpong"] for k in (64, 256, 4096)
    }
    assert chosen == {64: 1, 256: 1, 4096: 0}


def test_unsupported_workloads_are_refused_with_a_reason() -> None:
    assert "and i8, not f32" in str(VARIANT.refuses(gemm("m=64,n=64,k=64,dtype=f32"), H100))
    assert "prologue of tf32" in str(VARIANT.refuses(gemm("m=64,n=64,k=64,dtype=tf32,pre=relu(x)"), H100))
    for architecture in ("sm_80", "sm_100", "sm_120"):
        assert "sm_90" in str(VARIANT.refuses(gemm("m=64,n=64,k=64,dtype=f16"), representative(architecture)))
    # Lines of a have k elements, or m where a is transposed; those of b have n or k.
    for odd, trans in (("k", "nn"), ("n", "nn"), ("m", "tn"), ("k", "nt"), ("k", "tt"), ("m", "tt")):
        sizes = {"m": 64, "n": 64, "k": 64, odd: 60}
        text = ",".join(f"{name}={size}" for name, size in sizes.items()) + f",trans={trans},dtype=f16"
        assert "16 bytes" in str(VARIANT.refuses(gemm(text), H100))
    assert VARIANT.refuses(gemm("m=61,n=61,k=64,dtype=f16,trans=nt"), H100) is None
    assert "trans=nt only" in str(VARIANT.refuses(gemm("m=64,n=64,k=64,dtype=e4m3"), H100))
    assert "16 bytes" in str(VARIANT.refuses(gemm("m=64,n=64,k=72,dtype=e4m3,trans=nt"), H100))
    assert VARIANT.refuses(gemm("m=61,n=61,k=80,dtype=e4m3,trans=nt"), H100) is None
    assert "tiles" in str(VARIANT.refuses(gemm("m=1,n=8,k=8,dtype=f16,batch=2147000000"), H100))
    assert "elements" in str(VARIANT.refuses(gemm("m=2147483640,n=8,k=8,dtype=f16"), H100))


def test_bulk_copies_store_rows_of_whole_16_bytes() -> None:
    for n, out, whole in ((136, "f16", True), (132, "f16", False), (132, "f32", True), (133, "f32", False)):
        table = VARIANT.configs(gemm(f"m=200,n={n},k=136,dtype=f16,trans=nt,out={out}"), H100)
        assert (2 in table["staged"]) == whole


def test_a_large_workload_has_thousands_of_configurations() -> None:
    assert 3000 <= len(VARIANT.configs(gemm("m=4096,n=4096,k=4096,dtype=f16"), H100)) <= 20_000


def test_no_block_asks_for_more_registers_than_it_was_launched_with() -> None:
    table = VARIANT.configs(gemm("m=4096,n=4096,k=4096,dtype=f16"), H100)
    consumers, min_blocks = table["consumers"], table["min_blocks"]
    launched = wgmma_tile.launched_registers(consumers, min_blocks)
    assert np.all(min_blocks * 128 * (consumers + 1) * launched <= H100.registers_per_sm)
    taken = wgmma_tile.consumer_registers(consumers, min_blocks)
    registers = 128 * (wgmma_tile.PRODUCER_REGISTERS + consumers * taken)
    moves = launched < 240
    assert np.all(registers[moves] <= (128 * (consumers + 1) * launched)[moves])
    assert np.all(taken[moves] >= launched[moves])
    assert np.all(taken[moves] % 8 == 0)
    assert moves.any()
    assert not moves.all()


def test_no_launch_exceeds_what_the_device_has() -> None:
    workload = gemm("m=4096,n=4096,k=4096,dtype=f16,trans=tn")
    table = VARIANT.configs(workload, H100)
    costs = VARIANT.costs(workload, table, H100)
    assert np.max(costs.threads) <= 1024
    assert np.max(costs.smem_bytes) <= H100.smem_per_block_bytes
    together = table["min_blocks"] * (costs.smem_bytes + H100.smem_reserved_bytes)
    assert np.max(together) <= H100.smem_per_sm_bytes
    for row in range(0, len(table), 97):
        launch = VARIANT.launches(workload, table.config(row))[0]
        assert launch.smem_bytes == costs.smem_bytes[row]
        assert launch.grid[0] % launch.cluster == 0


@given(workload=drawn_workloads, choice=st.integers(0, 10**6))
def test_copies_are_of_panels_of_128_bytes(workload: Gemm, choice: int) -> None:
    table = VARIANT.configs(workload, H100)
    config = table.config(choice % len(table))
    launch = VARIANT.launches(workload, config)[0]
    a_map, b_map, *of_c = (argument for argument in launch.arguments if isinstance(argument, TensorMap))
    assert [(c.tensor, c.extents[:2], c.box[1:]) for c in of_c] == (
        [("c", (workload.n, workload.m), (16, 1))] if config["staged"] == 2 else []
    )
    shared = {"a": (a_map, "bm", "cluster_n"), "b": (b_map, "bn", "cluster_m")}
    for name, (tensor_map, extent, parts) in shared.items():
        (tensor,) = (tensor for tensor in workload.inputs() if tensor.name == name)
        assert tensor_map.extents == tensor.shape[::-1]
        size = itemsize(tensor.dtype)
        assert tensor_map.strides_bytes[0] == size * tensor.shape[2]
        assert tensor_map.box[0] * size == tensor_map.swizzle_bytes == 128
        along_k = workload.trans[0] == "n" if name == "a" else workload.trans[1] == "t"
        assert tensor_map.box[1] * config[parts] == config[extent if along_k else "bk"]


@given(workload=drawn_workloads, choice=st.integers(0, 10**6))
def test_emulation_workload_has_the_same_edges(workload: Gemm, choice: int) -> None:
    table = VARIANT.configs(workload, H100)
    config = table.config(choice % len(table))
    small = VARIANT.emulation_workload(workload, config)
    assert small.flops() <= workload.flops()
    assert _gemm.widths(small) == _gemm.widths(workload)
    for name in ("m", "n", "k"):
        assert (getattr(small, name) - getattr(workload, name)) % config[f"b{name}"] == 0
    assert VARIANT.source(small, config) == VARIANT.source(workload, config)


# ------------------------------------------------------------------------------------------------- costs


@given(workload=drawn_workloads)
def test_costs_cover_the_work(workload: Gemm) -> None:
    table = VARIANT.configs(workload, H100)
    costs = VARIANT.costs(workload, table, H100)
    assert np.all(costs.blocks * costs.mma_flop >= workload.flops())
    assert np.all(bound(costs, workload.traffic(), H100, rows=len(table)).us > 0)


def test_shared_copies_of_a_cluster_count_as_the_smallest_part() -> None:
    table = VARIANT.configs(gemm("m=4096,n=4096,k=4096,dtype=f16"), H100)
    rows = {
        config: table.row(Config({**PLAIN, **config_of}))
        for config, config_of in {"alone": {}, "pair": {"cluster_n": 2}}.items()
    }
    for trans, k, of_a in (("nt", 136, 8 * 136), ("tt", 136, 72 * 64)):
        # 200 rows are tiles of 128 and 72: the second block copies lines of rows 64 to 71, or half of 128 of
        # k.
        workload = gemm(f"m=200,n=128,k={k},dtype=f16,trans={trans}")
        fill = VARIANT.costs(workload, table, H100).fill_bytes
        assert fill[rows["alone"]] == 2 * (72 * k + 64 * k)
        assert fill[rows["pair"]] == 2 * (of_a + 64 * k)


def test_costs_of_a_divisible_workload_are_exact() -> None:
    workload = gemm("m=4096,n=4096,k=4096,dtype=f16")
    config = VARIANT.default(workload, H100)
    costs = checks.costs_of(VARIANT, workload, config, H100)
    assert config["cluster_m"] == 2
    assert costs.blocks == 32 * 16
    assert costs.mma_flop == 2 * 128 * 256 * 4096
    assert costs.fill_bytes == (128 + 256 / 2) * 4096 * 2
    # Two warpgroups of four warps, a product of 64 x 256 per 16 of k.
    assert costs.instructions == 2 * 4 * 256
    assert costs.chain_clocks == 256 * 128  # per warpgroup, each of 128 clocks


@pytest.mark.parametrize(
    ("sizes", "changes", "clocks"),
    [
        ("m=128,n=64", {}, H100.l2_latency + 16 * 32),  # one tile, which waits for its first copy
        ("m=1408,n=768", {}, H100.l2_latency + 16 * 32),  # 132 tiles: one per SM
        ("m=1408,n=832", {}, 16 * 32),  # 143 tiles: the second one's wait is hidden
        ("m=1408,n=832", {"bm": 64, "pingpong": 1}, 16 * 32 / 2),  # two tiles in flight
    ],
)
def test_a_tile_waits_for_memory_if_nothing_is_multiplied_before(
    sizes: str, changes: dict[str, int], clocks: float
) -> None:
    workload = gemm(f"{sizes},k=256,dtype=f16")
    assert checks.costs_of(VARIANT, workload, Config({**PLAIN, **changes}), H100).chain_clocks == clocks


# ----------------------------------------------------------------------------------------------- results

PLAIN = VARIANT.space.parse(
    "bm=128,bn=64,bk=64,stages=2,consumers=2,pingpong=0,cluster_m=1,cluster_n=1,staged=1,group_m=1,min_blocks=1,"
    "split_k=1"
)
CASES = [
    ("m=200,n=136,k=136,dtype=f16,trans=nn,epilogue=bias+silu+residual", {"stages": 3}),
    ("m=200,n=133,k=136,dtype=bf16,trans=nt,epilogue=bias+residual,out=f32", {"staged": 0}),
    ("m=200,n=133,k=136,dtype=bf16,trans=tt,batch=2,epilogue=bias+relu", {"bm": 64, "consumers": 1}),
    (
        "m=136,n=200,k=140,dtype=f16,trans=tn,out=bf16",
        {"bm": 64, "bn": 128, "bk": 128, "consumers": 1, "group_m": 4},
    ),
    (
        "m=264,n=136,k=200,dtype=f16,trans=nn,batch=2,epilogue=residual",
        {"bm": 64, "pingpong": 1, "stages": 3},
    ),
    ("m=264,n=72,k=264,dtype=f16,trans=nt", {"bm": 64, "pingpong": 1, "consumers": 3, "stages": 2}),
    ("m=264,n=136,k=200,dtype=bf16,trans=nt,epilogue=bias", {"cluster_m": 2, "stages": 3}),
    ("m=136,n=200,k=200,dtype=bf16,trans=tn,out=f32", {"cluster_n": 2, "staged": 0}),
    ("m=200,n=264,k=136,dtype=f16,trans=tn", {"cluster_m": 2, "pingpong": 1, "bm": 64, "consumers": 2}),
    ("m=200,n=200,k=72,dtype=f16", {"bm": 192, "bn": 192, "consumers": 3}),
    ("m=300,n=72,k=72,dtype=f16,batch=3", {"bm": 256, "min_blocks": 2, "stages": 2}),
    ("m=3,n=8,k=8,dtype=bf16", {"bm": 64, "consumers": 1}),
    ("m=200,n=133,k=400,dtype=e4m3,trans=nt,epilogue=bias+relu", {"bk": 128, "stages": 3}),
    ("m=136,n=136,k=272,dtype=e4m3,trans=nt,out=f32", {"bk": 256, "cluster_n": 2}),
    ("m=200,n=133,k=1200,dtype=i8,trans=nt", {"bk": 128, "stages": 3}),
    ("m=136,n=136,k=272,dtype=i8,trans=nt,batch=2", {"bk": 256, "cluster_m": 2, "staged": 0, "bn": 128}),
    ("m=200,n=136,k=200,dtype=f16,trans=nn,pre=exp(min(x*scale+shift,2)),epilogue=bias", {"stages": 3}),
    ("m=136,n=136,k=133,dtype=bf16,trans=tn,pre=x/scale+cos(x)", {"bk": 128, "bm": 64, "consumers": 1}),
    ("m=264,n=72,k=264,dtype=f16,trans=nt,pre=silu(x-shift)", {"bm": 64, "pingpong": 1, "cluster_m": 2}),
    ("m=200,n=136,k=100,dtype=tf32,trans=nn,epilogue=bias", {"bk": 32, "stages": 3}),
    ("m=200,n=133,k=196,dtype=tf32,trans=nt", {"bm": 64, "consumers": 1}),
    ("m=136,n=200,k=140,dtype=tf32,trans=tn,out=bf16", {"bk": 32, "bm": 64, "pingpong": 1, "cluster_m": 2}),
    ("m=264,n=137,k=132,dtype=tf32,trans=tt,batch=2", {"bk": 32, "bm": 256, "bn": 128, "cluster_n": 2}),
    ("m=200,n=136,k=136,dtype=f16,trans=nn,epilogue=bias+silu+residual", {"staged": 2, "stages": 3}),
    ("m=200,n=132,k=136,dtype=bf16,trans=nt,epilogue=bias+residual,out=f32", {"staged": 2}),
    ("m=200,n=200,k=72,dtype=f16,out=bf16", {"bm": 192, "bn": 192, "consumers": 3, "staged": 2}),
    ("m=330,n=136,k=72,dtype=f16,batch=2", {"bm": 64, "pingpong": 1, "cluster_m": 2, "staged": 2}),
    ("m=200,n=132,k=272,dtype=i8,trans=nt,batch=2", {"bk": 128, "bm": 256, "staged": 2}),
    ("m=136,n=136,k=520,dtype=f16,trans=nn,epilogue=bias+silu+residual", {"split_k": 2}),
    ("m=72,n=133,k=584,dtype=bf16,batch=2,trans=nt,epilogue=bias", {"bm": 64, "consumers": 1, "split_k": 2}),
    ("m=72,n=72,k=1032,dtype=bf16,out=f32", {"bm": 64, "consumers": 1, "staged": 0, "split_k": 4}),
    ("m=136,n=72,k=712,dtype=f16,trans=tn", {"bm": 64, "pingpong": 1, "cluster_m": 2, "split_k": 2}),
    ("m=72,n=136,k=1040,dtype=i8,trans=nt", {"bm": 64, "bk": 128, "consumers": 1, "split_k": 2}),
    (
        "m=72,n=136,k=1040,dtype=e4m3,trans=nt",
        {"bm": 64, "bk": 128, "consumers": 1, "cluster_n": 2, "split_k": 2},
    ),
]
"""Every path is taken by some case."""


def configured(workload: Gemm, choices: dict[str, int]) -> Config:
    config = Config({**PLAIN, **choices})
    return VARIANT.space.check(config, workload=workload, device=H100)


@needs_compiler
@pytest.mark.parametrize(("text", "choices"), CASES)
def test_results_are_right_in_every_order(text: str, choices: dict[str, int]) -> None:
    workload = gemm(text)
    checks.assert_right_in_every_order(VARIANT, workload, configured(workload, choices))


FAULTS = {
    "no wait for a full stage": (0, "    mbarrier_wait(place.full(), place.parity);\n", ""),
    "no wait for an empty stage": (0, "      mbarrier_wait(place.empty(), place.parity ^ 1);\n", ""),
    "the other parity": (
        0,
        "mbarrier_wait(place.full(), place.parity)",
        "mbarrier_wait(place.full(), place.parity ^ 1)",
    ),
    "too few bytes expected": (
        0,
        "mbarrier_arrive_expect_tx(place.full(), BYTES)",
        "mbarrier_arrive_expect_tx(place.full(), C::TileA::BYTES)",
    ),
    "released before it is multiplied": (0, "if (step > 0) release<", "release<"),
    "released by nobody": (
        0,
        "    if (step > 0) release<ClusterTiles<C>::CLUSTER>(place.empty_of(previous));\n",
        "",
    ),
    "one group waited for too few": (0, "  wgmma_wait<0>();\n", "  wgmma_wait<1>();\n"),
    "no commit": (0, "    wgmma_commit();\n", ""),
    "no fence": (0, "    wgmma_fence();\n", ""),
    "no fence of the barriers": (0, "  fence_mbarrier_init();\n}", "}"),
    "a stride of half": (0, "GROUP_BYTES = 8 * LINE_BYTES", "GROUP_BYTES = 4 * LINE_BYTES"),
    "no offset between panels": (3, "K_CONTIGUOUS ? 0 : PANEL_BYTES, GROUP_BYTES", "0, GROUP_BYTES"),
    "the wrong dimension": (1, "ALONG_X = !K_CONTIGUOUS", "ALONG_X = K_CONTIGUOUS"),
    "a step of k too short": (1, "k % LINE * SIZE\n", "k % LINE\n"),
    "half of K": (12, "WGMMA_K = 32 /", "WGMMA_K = 16 /"),
    "no turns": (4, "if constexpr (CONSUMERS > 1) mbarrier_wait(barriers + 8 * consumer, parity);", ""),
    "one block releases for itself alone": (6, "cluster_address(empty_barrier, lane)", "empty_barrier"),
    "the whole tile from each": (6, "BOX_LINES = LINES / PARTS", "BOX_LINES = LINES"),
    "the other block's part": (6, "part_of_b = tiles.rank % C::CLUSTER_M", "part_of_b = 0"),
    "exit before the others": (
        6,
        "    // No block may exit while another copies to it or releases one of its stages.\n"
        "    cluster_arrive();\n    cluster_wait();\n",
        "",
    ),
    "too many registers": (9, "take_registers<C::CONSUMER_REGISTERS>", "take_registers<240>"),
    "no prologue": (16, "numbers[r / 2].apply(operands[part][i][r])", ""),
    "numbers of the other half of k": (16, "numbers[r / 2].apply", "numbers[r % 2].apply"),
    "rows without the swizzle": (16, "* Tile::SIZE ^ line % 8 * 16)", "* Tile::SIZE)"),
    "elements beyond k": (17, "left > 1 ? u32(elements.at[1].bits) : 0", "u32(elements.at[1].bits)"),
    "operands of the next step": (16, "sums[i][0], current[part][i],", "sums[i][0], operands[1][part][i],"),
    "a step released before it is multiplied": (18, "    wgmma_wait<0>();\n    release<", "    release<"),
    "a square that is not transposed": (19, "round_and_turn(tile, square);", "round_lines(tile + square);"),
    "squares of the first warp only": (19, "int(threadIdx.x) / 32 % 4 - (4 - ROUNDING_WARPS);", "0;"),
    "blocks that all stay in place": (19, "of_n = of_k ^ apart, lines", "of_n = of_k, lines"),
    "words of a along m without the swizzle": (21, "* Tile::SIZE ^ lane % 4 * 16;", "* Tile::SIZE;"),
    "a box filled again before it has been copied": (
        25,
        "        wait_for_stores<0>();  // the last box of the rows before is this one\n",
        "        wait_for_stores<1>();\n",
    ),
    "no wait between boxes": (24, "        wait_for_stores<1>();\n", "        wait_for_stores<2>();\n"),
    "exit before boxes have been copied": (23, "if (threadIdx.x % 32 == 0) wait_for_stores<0>();", ""),
    "a box of no group": (23, "      commit_stores();\n", ""),
    "boxes without the swizzle": (24, "* SIZE ^ group * 16)),", "* SIZE)),"),
    "boxes of the next rows": (23, "first.m + first_row, first.batch);", "first.m, first.batch);"),
    "parts from the start of k": (28, "return corner.batch % parts * length;", "return 0;"),
    "parts of another product": (
        29,
        "matrix_of_b(const TileIndex& corner) const { return corner.batch / parts; }",
        "matrix_of_b(const TileIndex& corner) const { return corner.batch % parts; }",
    ),
    "all parts in one slot": (28, "* parts + first.batch % parts;", "* parts;"),
    "the first rows of a slot only": (28, "at.corner += first.m % C::BM * C::BN;", ""),
    "rows beyond the edge": (
        1,
        "if (row >= target.rows) continue;\n        const Vec<Out, WIDTH> residual",
        "const Vec<Out, WIDTH> residual",
    ),
}
"""The index of a case, and the text to replace in its kernel, for a fault that the case must find."""


def faulty(fault: str) -> tuple[Any, Gemm, Config]:
    number, old, new = FAULTS[fault]
    text, choices = CASES[number]
    workload = gemm(text)
    return checks.planted(VARIANT, old, new), workload, configured(workload, choices)


def test_planted_faults_have_a_place() -> None:
    checks.assert_faults_have_a_place(map(faulty, FAULTS))
    checks.assert_faults_have_a_place(map(promoted_faulty, PROMOTED_FAULTS))


@needs_compiler
@pytest.mark.parametrize("fault", checks.sampled_faults(FAULTS))
def test_planted_faults_are_found(fault: str) -> None:
    checks.assert_fault_is_found(*faulty(fault))


NEARLY = np.float32(1 + 2.0**-10 - 2.0**-23)
"""Between two numbers of tf32: close to the upper one, but the lower 13 bits cut off give the lower one."""

UNROUNDED = {
    "a": "#pragma unroll\n        for (int r = 0; r < 4; ++r) four[r] = to_tf32(__uint_as_float(four[r]));\n",
    "b in lines along k": "part.at[e] = __uint_as_float(to_tf32(part.at[e]));",
    "b in lines along n": "__uint_as_float(to_tf32(*reinterpret_cast<const float*>(tile + at)))",
}


@needs_compiler
@pytest.mark.parametrize("operand", UNROUNDED)
def test_elements_are_rounded_to_tf32_and_missing_rounding_is_found(operand: str) -> None:
    text, choices = CASES[20 if operand == "b in lines along k" else 19]
    workload = gemm(text)
    config, inputs = configured(workload, choices), workload.draw(np.random.default_rng(2))
    inputs |= {name: np.full_like(inputs[name], NEARLY) for name in ("a", "b")}
    checks.assert_emulates_right(VARIANT, workload, config, inputs)
    remaining_text = "*reinterpret_cast<const float*>(tile + at)" if operand == "b in lines along n" else ""
    wrong = checks.planted(VARIANT, UNROUNDED[operand], remaining_text)
    checks.assert_fault_is_found(wrong, workload, config, inputs)


# ------------------------------------------------------------------------------------------ promoted sums

PROMOTED_PLAIN = Config({**PLAIN, "bk": 128, "promote": 1})
PROMOTED_CASES = [
    ("m=200,n=133,k=1040,epilogue=bias+relu", {"stages": 3}),
    ("m=136,n=136,k=912,batch=2,out=f32", {"promote": 2, "cluster_n": 2}),
    ("m=200,n=72,k=640", {"bk": 256, "bm": 64, "consumers": 1, "staged": 0}),
    (
        "m=264,n=72,k=1040,epilogue=residual",
        {"promote": 2, "bm": 64, "pingpong": 1, "consumers": 3, "stages": 4},
    ),
    ("m=300,n=72,k=144,act=tanh(x)", {"promote": 1, "bm": 256, "cluster_m": 2, "staged": 2}),
    ("m=200,n=200,k=528,out=f32", {"promote": 2, "bn": 192, "stages": 3, "staged": 2}),
    ("m=72,n=72,k=1296,epilogue=bias", {"promote": 2, "bm": 64, "consumers": 1, "split_k": 2}),
]
"""Every path is taken by some case; the last group has fewer steps than the others in some."""


def promoted(text: str, choices: dict[str, int]) -> tuple[Gemm, Config]:
    """Return the workload with sums in f32, and the configuration."""
    workload = gemm(f"{text},dtype=e4m3,trans=nt,accumulate=f32")
    config = Config({**PROMOTED_PLAIN, **choices})
    return workload, PROMOTED.space.check(config, workload=workload, device=H100)


@needs_compiler
@pytest.mark.parametrize(("text", "choices"), PROMOTED_CASES)
def test_promoted_results_are_right_in_every_order(text: str, choices: dict[str, int]) -> None:
    checks.assert_right_in_every_order(PROMOTED, *promoted(text, choices))


PROMOTION = "f32_op(totals[i][0][j][e] + sums[i][0][j][e])"
OF_GROUP = "C::PROMOTE > 1 && is_last ? steps - first : C::PROMOTE"
PROMOTED_FAULTS = {
    "only the last group": (0, PROMOTION, "f32_op(sums[i][0][j][e])"),
    "sums of the group before are kept": (0, "step > 0 || part > 0);", "true);"),
    "totals of the tile before are kept": (4, "totals[i][0][j][e] = 0.0f;", ""),
    "half of the sums": (
        0,
        "for (int e = 0; e < 4; ++e) totals[i][0][j][e] = f32",
        "for (int e = 0; e < 2; ++e) totals[i][0][j][e] = f32",
    ),
    "a last group as long as the others": (3, OF_GROUP, "C::PROMOTE"),
    "a turn passed before the last group": (3, "if (is_last) turn.pass();", "turn.pass();"),
    "a turn that is not passed": (3, "if (is_last) turn.pass();", ""),
    "added before the products have been waited for": (0, "  wgmma_wait<0>();\n", ""),
}
"""The index of a case, and the text to replace in its kernel, for a fault that the case must find."""


def promoted_faulty(fault: str) -> tuple[Any, Gemm, Config]:
    number, old, new = PROMOTED_FAULTS[fault]
    return checks.planted(PROMOTED, old, new), *promoted(*PROMOTED_CASES[number])


@needs_compiler
@pytest.mark.parametrize("fault", checks.sampled_faults(PROMOTED_FAULTS))
def test_planted_faults_of_promotion_are_found(fault: str) -> None:
    checks.assert_fault_is_found(*promoted_faulty(fault))


LONG = "m=64,n=64,k=16384,out=f32"


@needs_compiler
@pytest.mark.parametrize("promote", [1, further(2)])
def test_a_long_sum_that_is_not_promoted_is_found(promote: int) -> None:
    """The kernel that never promotes is right for accumulate=fast, and wrong for f32."""
    workload, config = promoted(LONG, {"bm": 64, "consumers": 1, "promote": promote})
    right = checks.assert_emulates_right(PROMOTED, workload, config)
    whole = "first += C::PROMOTE) {\n    const bool is_last = first + C::PROMOTE >= steps;"
    never = checks.planted(PROMOTED, whole, "first += steps) {\n    const bool is_last = true;")
    never = checks.planted(never, OF_GROUP, "steps")
    checks.assert_fault_is_found(never, workload, config)
    fast = dataclasses.replace(workload, accumulate="fast")
    plain = configured(fast, {"bm": 64, "consumers": 1, "bk": 128})
    inputs = fast.draw(np.random.default_rng(1))
    outputs = checks.assert_emulates_right(VARIANT, fast, plain, inputs)
    exact = fast.reference(checks.exact(inputs))["c"].value
    errors = [float(np.abs(result["c"] - exact).max()) for result in (right, outputs)]
    assert errors[0] < errors[1] / 10


@needs_compiler
@pytest.mark.parametrize("promote", [0, 1, 2])
def test_emulated_sums_of_e4m3_have_the_bits_that_hopper_keeps(promote: int) -> None:
    """Emulation agrees bit by bit with a model of 32 products that are cut 13 bits below the largest."""
    text = "m=64,n=64,k=1040,out=f32"
    workload, config = promoted(text, {"bm": 64, "consumers": 1, "promote": promote or 1})
    variant: Any = PROMOTED
    if not promote:
        variant, workload = VARIANT, dataclasses.replace(workload, accumulate="fast")
        config = configured(workload, {"bm": 64, "consumers": 1, "bk": 128})
    inputs = workload.draw(np.random.default_rng(3))
    a, b = (np.asarray(inputs[name][0], np.float64) for name in ("a", "b"))
    total, length = np.zeros((64, 64), np.float32), promote * 128 or workload.k
    for first in range(0, workload.k, length):
        group = np.zeros((64, 64))
        for at in range(first, min(first + length, workload.k), 32):
            group = _truncated_sum(a[:, at : at + 32], b[:, at : at + 32], group)
        total += group.astype(np.float32)
    np.testing.assert_array_equal(emulate(variant, workload, config, inputs)["c"][0], total)


def _truncated_sum(a: Any, b: Any, sums: Any) -> Any:
    """Return a b^T plus sums as Hopper's tensor cores add 32 products of e4m3."""
    terms = np.concatenate([a[:, None] * b[None], sums[..., None]], axis=2)
    return _cut(_cut(terms, np.abs(terms).max(axis=2, keepdims=True)).sum(axis=2))


def _cut(values: Any, largest: Any = None) -> Any:
    """Return values cut off, towards zero, 13 bits below the leading bit of the largest, or each its own."""
    unit = np.exp2(np.frexp(values if largest is None else largest)[1] - 14.0)
    return np.trunc(values / unit) * unit


@needs_compiler
@pytest.mark.parametrize("number", range(len(PROMOTED_CASES)))
def test_additions_of_promotion_are_declared_as_counted(number: int) -> None:
    text, choices = PROMOTED_CASES[number]
    text = text.replace("act=tanh(x)", "out=f32").partition(",epilogue")[0]  # the epilogue is not declared
    workload, config = promoted(text, choices)
    costs = checks.costs_of(PROMOTED, workload, config, H100)
    counts = watch(PROMOTED, workload, config, workload.draw(np.random.default_rng(4))).counts
    parts = (
        -(-workload.m // config["bm"]) * -(-workload.n // config["bn"]) * workload.batch * config["split_k"]
    )
    steps = -(-workload.k // config["bk"])
    steps_of_part = -(-steps // config["split_k"])
    groups = -(-steps_of_part // config["promote"])
    # Consumers also add where a tile lies beyond the product, to fill its cluster.
    assert costs.fma[0] == groups * config["bm"] * config["bn"]
    assert counts.total.fma >= costs.fma[0] * parts
    assert config["cluster_m"] * config["cluster_n"] > 1 or counts.total.fma == costs.fma[0] * parts


def test_who_computes_sums_in_f32() -> None:
    text = "m=512,n=512,k=512,dtype=e4m3,trans=nt"
    fast, f32 = gemm(text), gemm(f"{text},accumulate=f32")
    assert str(fast) == f"gemm:{text}"
    assert "accumulate=f32, not fast" in str(PROMOTED.refuses(fast, H100))
    assert "accumulate=fast, not f32" in str(VARIANT.refuses(f32, H100))
    assert VARIANT.refuses(fast, H100) is None is PROMOTED.refuses(f32, H100)
    # mma.sync of e4m3 becomes products of f16 on sm_90 and sm_100, but not on the others.
    devices = [representative(name) for name in ("sm_89", "sm_90", "sm_100", "sm_120")]
    refusing = [device.architecture for device in devices if MMA.refuses(f32, device) is not None]
    assert refusing == ["sm_89", "sm_120"]
    with pytest.raises(InputError, match="accumulate=f32 is for dtype=e4m3; leave it out for f16"):
        gemm("m=64,n=64,k=64,dtype=f16,accumulate=f32")


@given(k=st.sampled_from([16, 128, 144, 272, 4096, 50000]), m=extents, n=extents)
def test_a_promoted_configuration_sums_few_products_at_once(k: int, m: int, n: int) -> None:
    workload = Gemm(m=m, n=n, k=k, dtype="e4m3", trans="nt", accumulate="f32")
    checks.assert_default_is_valid([PROMOTED], workload, H100)
    table = PROMOTED.configs(workload, H100)
    assert np.max(table["bk"] * table["promote"]) <= 256
    both = 2 * wgmma_tile.sums(*(table[name] for name in ("bm", "bn", "consumers", "pingpong")))
    room = wgmma_tile.consumer_registers(table["consumers"], table["min_blocks"])
    assert np.all(both + wgmma_tile.OTHER_REGISTERS <= room)
    costs = PROMOTED.costs(workload, table, H100)
    assert np.all(bound(costs, workload.traffic(), H100, rows=len(table)).us > 0)


# ------------------------------------------------------------------------------------------- machine code


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("m=4096,n=4096,k=4096,dtype=bf16,trans=nt", {}),
        ("m=4096,n=4096,k=4096,dtype=f16,trans=tn,epilogue=bias+gelu,out=f32", {}),
        further("m=512,n=512,k=512,dtype=f16,trans=nn,epilogue=bias", {}),
        ("m=4096,n=4096,k=4096,dtype=f16,trans=tt", {"pingpong": 1, "bm": 64, "bn": 256}),
        ("m=4096,n=4096,k=4096,dtype=e4m3,trans=nt", {}),
        ("m=4096,n=4096,k=4096,dtype=i8,trans=nt", {}),
        ("m=4096,n=4096,k=4096,dtype=f16,trans=nt,pre=relu(x*scale+shift)", {}),
        ("m=4096,n=4096,k=4095,dtype=bf16,trans=tn,pre=silu(x*scale+shift)", {"bn": 128}),
        ("m=4096,n=4096,k=4096,dtype=tf32,trans=nn", {}),
        further("m=4096,n=4096,k=4096,dtype=tf32,trans=nt,epilogue=bias+gelu", {}),
        ("m=4096,n=4096,k=4096,dtype=tf32,trans=tt", {"bm": 256, "bn": 128}),
        ("m=4096,n=4096,k=4096,dtype=bf16,trans=nt", {"staged": 2}),
        further("m=4096,n=4096,k=4096,dtype=f16,trans=nn,epilogue=bias+gelu,out=f32", {"staged": 2}),
    ],
)
def test_it_is_compiled_to_hopper_s_instructions_without_spills(text: str, choices: dict[str, int]) -> None:
    workload = gemm(text)
    config = Config({**VARIANT.default(workload, H100), **choices})
    VARIANT.space.check(config, workload=workload, device=H100)
    made = checks.compiled_for_hopper(VARIANT, workload, config)
    counted = checks.opcodes(made.cubin, 9)
    rows = wgmma_tile.rows(config["bm"], config["consumers"], config["pingpong"])
    per_step = config["bk"] * itemsize(workload.dtype) // 32 * rows // 64
    unrolled = 2 if workload.has_pre or workload.dtype == "tf32" else 1  # two steps: operands in registers
    assert counted[{"e4m3": QGMMA, "i8": IGMMA}.get(workload.dtype, HGMMA)] == unrolled * per_step
    assert counted[UTMALDG] >= 2
    boxes = config["bn"] * itemsize(workload.out) // 128 * rows // 64
    assert counted[UTMASTG] == (boxes if config["staged"] == 2 else 0)
    assert counted[USETMAXREG] == (2 if config["consumers"] > 1 else 0)
    registers = cubin.read_cubin(made.cubin)[made.symbols[0]].registers
    if config["consumers"] > 1:
        assert registers == wgmma_tile.launched_registers(config["consumers"], config["min_blocks"])


FADD = 0x21
"""Lower 8 bits of FADD with registers and with a constant (0x221, 0x421)."""


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("m=4096,n=4096,k=4096", {}),
        further("m=4096,n=4096,k=4096,epilogue=bias+gelu,out=f32", {"bn": 128, "promote": 2, "staged": 2}),
        ("m=512,n=512,k=512", {"bk": 256, "stages": 2}),
        ("m=4096,n=4096,k=7168,out=f32", {"bm": 64, "bn": 192, "pingpong": 1}),
        ("m=4096,n=4096,k=7168", {"bm": 256, "bn": 64, "min_blocks": 1}),
    ],
)
def test_promotion_adds_while_no_product_is_split(text: str, choices: dict[str, int]) -> None:
    """Products of a step are in flight together, and one addition follows for each sum of a thread."""
    workload = gemm(f"{text},dtype=e4m3,trans=nt,accumulate=f32")
    config = Config({**PROMOTED.default(workload, H100), **choices})
    PROMOTED.space.check(config, workload=workload, device=H100)
    made = checks.compiled_for_hopper(PROMOTED, workload, config)  # ptxas does not serialise the products
    rows = wgmma_tile.rows(config["bm"], config["consumers"], config["pingpong"])
    assert checks.opcodes(made.cubin, 9)[QGMMA] == config["bk"] // 32 * rows // 64
    tile = (config[name] for name in ("bm", "bn", "consumers", "pingpong"))
    assert checks.opcodes(made.cubin, 8)[FADD] >= wgmma_tile.sums(*tile)


def test_workloads_of_equal_alignment_share_source_and_entry() -> None:
    first = gemm("m=512,n=512,k=512,dtype=f16")
    second = dataclasses.replace(first, m=1024, n=776, k=4000, batch=7)
    config = VARIANT.default(first, H100)
    assert VARIANT.revision(first, config) == VARIANT.revision(second, config)
