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
from tunebench.kernels.common import gemm as _gemm
from tunebench.kernels.common import wgmma_tile
from tunebench.kernels.gemm.cuda_wgmma import VARIANT
from tunebench.space import Config
from tunebench.variant import TensorMap
from tunebench.workloads.operators.gemm import Gemm

HOPPERS = [device for device in described().values() if device.architecture == "sm_90"]
gemm = parser(Gemm)

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
    held = 128 * (wgmma_tile.PRODUCER_REGISTERS + consumers * taken)
    moves = launched < 240
    assert np.all(held[moves] <= (128 * (consumers + 1) * launched)[moves])
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
        (launch,) = VARIANT.launches(workload, table.config(row))
        assert launch.smem_bytes == costs.smem_bytes[row]
        assert launch.grid[0] % launch.cluster == 0


@given(workload=drawn_workloads, choice=st.integers(0, 10**6))
def test_copies_are_of_panels_of_128_bytes(workload: Gemm, choice: int) -> None:
    table = VARIANT.configs(workload, H100)
    config = table.config(choice % len(table))
    (launch,) = VARIANT.launches(workload, config)
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
    "bm=128,bn=64,bk=64,stages=2,consumers=2,pingpong=0,cluster_m=1,cluster_n=1,staged=1,group_m=1,min_blocks=1"
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
    "words of a along m without the swizzle": (21, "r % 2 * 8, k + lane % 4", "r % 2 * 8 ^ 4, k + lane % 4"),
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
    "rows beyond the edge": (
        1,
        "if (row >= target.rows) continue;\n        const Vec<Out, WIDTH> residual",
        "const Vec<Out, WIDTH> residual",
    ),
}
"""The index of a case, and the text to replace in its kernel, for a fault that the case must find."""


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    number, old, new = FAULTS[fault]
    text, choices = CASES[number]
    workload = gemm(text)
    checks.assert_fault_is_found(checks.planted(VARIANT, old, new), workload, configured(workload, choices))


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
    kept = "*reinterpret_cast<const float*>(tile + at)" if operand == "b in lines along n" else ""
    wrong = checks.planted(VARIANT, UNROUNDED[operand], kept)
    checks.assert_fault_is_found(wrong, workload, config, inputs)


# ------------------------------------------------------------------------------------------- machine code


@needs_nvrtc
@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("m=4096,n=4096,k=4096,dtype=bf16,trans=nt", {}),
        ("m=4096,n=4096,k=4096,dtype=f16,trans=tn,epilogue=bias+gelu,out=f32", {}),
        ("m=512,n=512,k=512,dtype=f16,trans=nn,epilogue=bias", {}),
        ("m=4096,n=4096,k=4096,dtype=f16,trans=tt", {"pingpong": 1, "bm": 64, "bn": 256}),
        ("m=4096,n=4096,k=4096,dtype=e4m3,trans=nt", {}),
        ("m=4096,n=4096,k=4096,dtype=i8,trans=nt", {}),
        ("m=4096,n=4096,k=4096,dtype=f16,trans=nt,pre=relu(x*scale+shift)", {}),
        ("m=4096,n=4096,k=4095,dtype=bf16,trans=tn,pre=silu(x*scale+shift)", {"bn": 128}),
        ("m=4096,n=4096,k=4096,dtype=tf32,trans=nn", {}),
        ("m=4096,n=4096,k=4096,dtype=tf32,trans=nt,epilogue=bias+gelu", {}),
        ("m=4096,n=4096,k=4096,dtype=tf32,trans=tt", {"bm": 256, "bn": 128}),
        ("m=4096,n=4096,k=4096,dtype=bf16,trans=nt", {"staged": 2}),
        ("m=4096,n=4096,k=4096,dtype=f16,trans=nn,epilogue=bias+gelu,out=f32", {"staged": 2}),
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


def test_workloads_of_equal_alignment_share_source_and_entry() -> None:
    one = gemm("m=512,n=512,k=512,dtype=f16")
    other = dataclasses.replace(one, m=1024, n=776, k=4000, batch=7)
    config = VARIANT.default(one, H100)
    assert VARIANT.revision(one, config) == VARIANT.revision(other, config)
