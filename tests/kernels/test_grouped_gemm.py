"""grouped_gemm: splits of the rows, number of tiles, and kernels that find their tiles on the device."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import A100, GPUS, H100, HGMMA, QGMMA, UTMALDG, parser
from tests.support import needs_compiler, needs_numba_cuda, needs_nvrtc
from tunebench import libraries
from tunebench.bound import bound
from tunebench.device import representative
from tunebench.dtype import itemsize, numpy_dtype
from tunebench.emulate.numba_simulator import simulate
from tunebench.errors import InputError
from tunebench.kernels.common import wgmma_tile
from tunebench.kernels.grouped_gemm import _grouped
from tunebench.kernels.grouped_gemm.cuda_mma import VARIANT as MMA
from tunebench.kernels.grouped_gemm.cuda_simt import VARIANT as SIMT
from tunebench.kernels.grouped_gemm.cuda_wgmma import VARIANT as WGMMA
from tunebench.kernels.grouped_gemm.cuda_wgmma_promoted import VARIANT as PROMOTED
from tunebench.kernels.grouped_gemm.numba_cuda import VARIANT as NUMBA
from tunebench.measure import baseline
from tunebench.measure.sampled import Sampled, is_sampled
from tunebench.measure.verify import InputSet
from tunebench.space import Config
from tunebench.workloads.operators.grouped_gemm import GroupedGemm

VARIANTS = (SIMT, MMA, WGMMA, NUMBA)
grouped = parser(GroupedGemm)

extents = st.sampled_from([1, 2, 3, 8, 15, 16, 17, 31, 64, 127, 128, 1000, 4096, 14336])
drawn_workloads = st.builds(
    GroupedGemm,
    groups=st.sampled_from([1, 2, 8, 60, 256]),
    m=extents,
    n=extents,
    k=extents,
    dtype=st.sampled_from(["f32", "tf32", "f16", "bf16", "e4m3"]),
    trans=st.sampled_from(["nn", "nt"]),
    skew=st.sampled_from(["uniform", "zipf", "one"]),
    out=st.sampled_from(["f32", "f16", "bf16"]),
)


def sizes_drawn(text: str, seed: int = 0) -> Any:
    return np.diff(grouped(text).draw(np.random.default_rng(seed))["offsets"])


# ----------------------------------------------------------------------------------------------- the split


@given(drawn_workloads, st.integers(0, 2**32 - 1))
def test_every_row_has_a_group(workload: GroupedGemm, seed: int) -> None:
    tensor = workload.inputs()[2]
    offsets = workload.draw_tensor(tensor, np.random.default_rng(seed))
    assert (offsets.dtype, offsets.shape) == (np.int32, tensor.shape)
    assert (offsets[0], offsets[-1]) == (0, workload.m)
    assert np.all(np.diff(offsets) >= 0)
    assert np.count_nonzero(np.diff(offsets)) <= workload.most_filled


def test_split_has_the_requested_skew() -> None:
    text = "groups=8,m=8000,n=1,k=1,dtype=f32"
    even, uneven, single = (sizes_drawn(f"{text},skew={skew}") for skew in ("uniform", "zipf", "one"))
    assert 850 < even.min() < even.max() < 1150
    assert sorted(single.tolist()) == [0] * 7 + [8000]
    # The r-th largest of 8 groups has 1 / r of 2.718 parts.
    expected = 8000 / 2.7178571 / np.arange(1, 9)
    np.testing.assert_allclose(np.sort(uneven)[::-1], expected, rtol=0.12)
    frequent = {int(np.argmax(sizes_drawn(f"{text},skew=zipf", seed))) for seed in range(20)}
    assert len(frequent) > 3, "the most frequent group must not be the same one each time"


def test_a_seed_draws_the_same_again() -> None:
    workload = grouped("groups=5,m=99,n=4,k=3,dtype=bf16,skew=zipf")
    first, second = (workload.draw(np.random.default_rng(7)) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_offsets_must_be_countable() -> None:
    with pytest.raises(InputError, match="groups=2147483647 must be below 2147483647"):
        grouped("groups=2147483647,m=1,n=1,k=1,dtype=f32")


# ---------------------------------------------------------------------------------------- the right answer


def inputs_of(workload: GroupedGemm, sizes: Any = None, seed: int = 0) -> dict[str, Any]:
    inputs = workload.draw(np.random.default_rng(seed))
    if sizes is not None:
        assert (len(sizes), sum(sizes)) == (workload.groups, workload.m)
        inputs["offsets"] = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    return inputs


@pytest.mark.parametrize("trans", ["nn", "nt"])
@pytest.mark.parametrize("sizes", [(2, 0, 3, 1), (0, 0, 6, 0), (6, 0, 0, 0), (0, 1, 0, 5)])
def test_each_row_is_multiplied_by_the_matrix_of_its_group(trans: str, sizes: tuple[int, ...]) -> None:
    workload = grouped(f"groups=4,m=6,n=3,k=5,dtype=f32,trans={trans}")
    inputs = checks.exact(inputs_of(workload, sizes))
    group_of = [group for group, size in enumerate(sizes) for _ in range(size)]
    reference = workload.reference(inputs)["c"]
    for row, column in np.ndindex(6, 3):
        matrix = inputs["b"][group_of[row]]
        terms = [
            inputs["a"][row, p] * (matrix[p, column] if trans == "nn" else matrix[column, p])
            for p in range(5)
        ]
        assert reference.value[row, column] == pytest.approx(sum(terms), rel=1e-12)
        assert reference.scale[row, column] == pytest.approx(math.hypot(*terms), rel=1e-12)


@pytest.mark.parametrize("trans", ["nn", "nt"])
def test_a_block_and_sums_are_those_of_the_whole(trans: str) -> None:
    workload = grouped(f"groups=4,m=20,n=11,k=5,dtype=f16,trans={trans}")
    inputs = checks.exact(inputs_of(workload, (7, 0, 1, 12)))
    whole = workload.reference(inputs)["c"]
    for rows, cols in itertools.product(
        (slice(0, 20), slice(6, 9), slice(8, 8)), (slice(0, 11), slice(3, 4))
    ):
        block = workload.reference_block(inputs, 0, rows, cols)
        np.testing.assert_allclose(block.value, whole.value[rows, cols], rtol=1e-12)
        np.testing.assert_allclose(block.scale, whole.scale[rows, cols], rtol=1e-12)
    signs = np.where(np.arange(11) % 3 == 0, -1.0, 1.0)
    sums = workload.reference_sums(inputs, 0, signs, 4)
    expected = np.add.reduceat(whole.value * signs, [0, 4, 8], axis=1)
    np.testing.assert_allclose(sums.value, expected, rtol=1e-9, atol=1e-12)
    least = np.sqrt(np.add.reduceat(np.square(whole.scale), [0, 4, 8], axis=1))
    assert np.all(sums.scale >= least * (1 - 1e-12))


def test_a_large_result_is_checked_in_parts() -> None:
    assert is_sampled(grouped("groups=8,m=4096,n=14336,k=4096,dtype=bf16"))
    workload = grouped("groups=5,m=300,n=290,k=64,dtype=bf16,skew=zipf")
    inputs = InputSet(workload=workload, seed=3, inputs=inputs_of(workload, seed=3))
    check = Sampled(inputs)
    c = inputs.references["c"].value.astype(numpy_dtype("bf16"))
    assert check.worst({"c": c}) <= 1
    wrong = c.copy()
    wrong[150, 140] += np.float32(400)
    assert check.worst({"c": wrong}) > 1
    wrong = c.copy()
    wrong[-1, 3] *= np.float32(1.1)
    assert "c[0,299,3] is" in check.describe({"c": wrong}, check.worst({"c": wrong}))


def test_only_the_matrix_of_one_group_is_sure_to_be_read() -> None:
    workload = grouped("groups=8,m=64,n=48,k=32,dtype=f16,skew=one")
    traffic = workload.traffic()
    assert traffic.read_bytes == 2 * 64 * 32 + 2 * 48 * 32 + 4 * 9
    assert traffic.write_bytes == 2 * 64 * 48


# ------------------------------------------------------------------------------------------------- tiles


def splits(rows: int, groups: int) -> Any:
    """Yield every way to split `rows` among `groups`."""
    if groups == 1:
        yield (rows,)
        return
    for first in range(rows + 1):
        for rest in splits(rows - first, groups - 1):
            yield (first, *rest)


@pytest.mark.parametrize("m", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_most_and_the_least_tiles_of_any_split(m: int, groups: int) -> None:
    for bm in (1, 2, 3, 4):
        counts = [sum(-(-size // bm) for size in split) for split in splits(m, groups)]
        workload = GroupedGemm(groups=groups, m=m, n=7, k=1, dtype="f32")
        assert _grouped.most_blocks(workload, bm, 2) == 4 * max(counts)
        assert _grouped.least_tiles(workload, bm, 2) == 4 * min(counts)
        assert min(counts) <= _grouped.usual_blocks(workload, bm, 7) <= max(counts)


@given(
    m=st.integers(1, 5000),
    groups=st.integers(1, 40),
    tiles_a_block=st.sampled_from([1, 2, 4, 8, 16]),
    sm_count=st.integers(1, 150),
    split=st.randoms(use_true_random=False),
)
def test_full_blocks_have_their_share_of_any_split(
    m: int, groups: int, tiles_a_block: int, sm_count: int, split: Any
) -> None:
    workload = GroupedGemm(groups=groups, m=m, n=130, k=1, dtype="f32")
    device = dataclasses.replace(A100, sm_count=sm_count)
    busiest = _grouped.busiest_blocks(workload, 16, 64, np.array([float(tiles_a_block)]), device)
    tiles, full_blocks, blocks = (float(x[0]) for x in busiest)
    grid = _grouped.grid(workload, {"bm": 16, "bn": 64, "tiles_a_block": tiles_a_block})[0]
    cuts = sorted(split.choices(range(m + 1), k=groups - 1))
    sizes = np.diff([0, *cuts, m]) if split.random() < 0.8 else np.array([m])
    all_tiles = int(np.sum(-(-sizes // 16))) * 3
    of_each = np.sort([len(range(block, all_tiles, grid)) for block in range(grid)])[::-1]
    assert full_blocks >= 1
    assert of_each[int(full_blocks) - 1] >= tiles
    assert blocks * tiles <= all_tiles * (1 + 1e-12)
    assert blocks <= grid


@given(drawn_workloads, st.integers(0, 10**6))
def test_no_block_has_more_tiles_than_declared_however_rows_are_split(w: GroupedGemm, choice: int) -> None:
    for variant in VARIANTS:
        if variant.refuses(w, H100) is None:
            table = variant.configs(w, H100)
            config = table.config(choice % len(table))
            (launch,) = variant.launches(w, config)
            max_blocks = _grouped.most_blocks(w, config["bm"], config["bn"])
            in_turn = config.get("tiles_a_block", 1)
            # A cluster's last tile in a group may have no rows or columns; it counts as a tile.
            assert -(-max_blocks // launch.grid[0]) <= in_turn
            if in_turn > 1:
                assert _grouped.least_tiles(w, config["bm"], config["bn"]) >= H100.sm_count


# ------------------------------------------------------------------------------------------------- spaces


@given(workload=drawn_workloads, device=st.sampled_from(GPUS))
def test_the_default_is_a_valid_configuration(workload: GroupedGemm, device: Any) -> None:
    checks.assert_default_is_valid(VARIANTS, workload, device)


@given(workload=drawn_workloads)
def test_cuda_simt_supports_every_type_on_every_gpu(workload: GroupedGemm) -> None:
    for device in GPUS:
        if device.compute_capability >= SIMT.minimum_cc:
            assert SIMT.refuses(workload, device) is None


def test_cuda_mma_refuses_unsupported_workloads_with_a_reason() -> None:
    assert "f32" in str(MMA.refuses(grouped("groups=2,m=64,n=64,k=64,dtype=f32"), A100))
    assert "sm_80" in str(MMA.refuses(grouped("groups=2,m=64,n=64,k=64,dtype=f16"), representative("sm_75")))
    assert "multiples of that" in str(MMA.refuses(grouped("groups=2,m=64,n=63,k=64,dtype=f16"), A100))
    assert "multiples of that" in str(
        MMA.refuses(grouped("groups=2,m=64,n=64,k=63,dtype=f16,trans=nt"), A100)
    )
    assert MMA.refuses(grouped("groups=2,m=63,n=63,k=64,dtype=f16,trans=nt"), A100) is None
    assert MMA.refuses(grouped("groups=2,m=64,n=64,k=64,dtype=e4m3,trans=nt"), A100) is None
    assert "trans must be nt" in str(MMA.refuses(grouped("groups=2,m=64,n=64,k=64,dtype=e4m3"), H100))
    assert MMA.refuses(grouped("groups=2,m=64,n=64,k=64,dtype=e4m3,trans=nt"), H100) is None


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_more_tiles_than_can_be_numbered_are_refused(variant: Any) -> None:
    dtype = "f16" if variant is WGMMA else "tf32"
    huge = grouped(f"groups=2147483646,m=2147480000,n=2000,k=8,dtype={dtype}")
    assert "tiles" in str(variant.refuses(huge, H100))


@pytest.mark.parametrize(("variant", "least"), [(SIMT, 5000), (MMA, 5000), (NUMBA, 500)], ids=str)
def test_a_large_workload_has_many_configurations(variant: Any, least: int) -> None:
    dtype = "f32" if variant is NUMBA else "bf16"
    workload = grouped(f"groups=8,m=4096,n=14336,k=4096,dtype={dtype}")
    assert least < len(variant.configs(workload, A100)) < 30_000


def test_blocks_take_tiles_in_turn_where_there_are_many() -> None:
    many, few = (grouped(f"groups=8,m={m},n=14336,k=4096,dtype=bf16") for m in (8192, 16))
    assert MMA.default(many, H100)["tiles_a_block"] > 1
    assert MMA.default(few, H100)["tiles_a_block"] == 1
    assert MMA.default(few, H100)["bm"] < MMA.default(many, H100)["bm"]


@given(workload=drawn_workloads)
def test_costs_never_exceed_what_the_most_favourable_split_executes(workload: GroupedGemm) -> None:
    for variant in VARIANTS:
        if variant.refuses(workload, H100) is not None:
            continue
        table = variant.configs(workload, H100)
        costs = variant.costs(workload, table, H100)
        rows, columns, depth = (
            -(-getattr(workload, name) // table[f"b{name}"]) * table[f"b{name}"] for name in "mnk"
        )
        executed = 1.0 * rows * columns * depth
        declared = costs.blocks * (costs.fma + costs.mma_flop / 2)
        assert np.all(declared <= executed * (1 + 1e-12))
        assert np.all(declared > executed / 2)
        grid = [variant.launches(workload, table.config(row))[0].grid[0] for row in range(0, len(table), 97)]
        assert np.all(np.broadcast_to(costs.blocks, len(table))[::97] <= grid)
        # With all rows in one group, b is read once per row of tiles, and a once per column of tiles.
        size = itemsize(workload.dtype)
        touched = workload.k * size * (workload.n * rows / table["bm"] + workload.m * columns / table["bn"])
        assert np.all(costs.blocks * costs.fill_bytes <= touched)
        assert np.all(bound(costs, workload.traffic(), H100, rows=len(table)).us > 0)


@given(workload=drawn_workloads, choice=st.integers(0, 10**6))
def test_emulation_workload_has_the_same_edges_and_machine_code(workload: GroupedGemm, choice: int) -> None:
    for variant in (SIMT, MMA, WGMMA):
        if variant.refuses(workload, H100) is not None:
            continue
        table = variant.configs(workload, H100)
        config = table.config(choice % len(table))
        small = variant.emulation_workload(workload, config)
        assert variant.source(small, config) == variant.source(workload, config)
        assert small.skew == workload.skew
        for name in ("n", "k"):
            extent, tile = getattr(small, name), config[f"b{name}"]
            assert (extent - getattr(workload, name)) % tile == 0
            assert (extent >= tile) == (getattr(workload, name) >= tile)
        assert small.m == workload.m or small.m > config["bm"]


# ------------------------------------------------------------------------------------------------ results

EDGES = {
    # bm is 32: no row, one row, a tile, one row more and less, several tiles
    "edges": (0, 1, 32, 33, 31, 0, 64, 0),
    "first has all": (161, 0, 0, 0, 0, 0, 0, 0),
    "last has all": (0, 0, 0, 0, 0, 0, 0, 161),
    "ones": (1, 1, 1, 1, 1, 1, 1, 154),
}
CASES = [
    # variant, text, choices; more tiles per block than the space would have for such a small workload
    (MMA, "n=70,k=104,dtype=f16,trans=nn", {"staged": 1, "stages": 3, "tiles_a_block": 4}),
    (MMA, "n=72,k=40,dtype=bf16,trans=nt,out=f32", {"staged": 0, "stages": 2, "tiles_a_block": 16}),
    (MMA, "n=33,k=21,dtype=tf32,trans=nt", {"staged": 0, "stages": 2, "tiles_a_block": 2}),
    (MMA, "n=40,k=100,dtype=e4m3,trans=nt", {"staged": 1, "stages": 3, "tiles_a_block": 4, "bk": 32}),
    (SIMT, "n=37,k=43,dtype=f32,trans=nn", {"stages": 1, "tiles_a_block": 4}),
    (SIMT, "n=72,k=40,dtype=bf16,trans=nt,out=f32", {"stages": 2, "tiles_a_block": 16}),
    (SIMT, "n=48,k=37,dtype=e4m3", {"stages": 2, "tiles_a_block": 2}),
]


def workload_of(text: str) -> GroupedGemm:
    return grouped(f"groups=8,m=161,{text}")


def configured(variant: Any, workload: GroupedGemm, choices: dict[str, int]) -> Config:
    """Return a configuration of small tiles with the given choices."""
    fixed = {"bm": 32, "bn": 32, "group_m": 8, **choices, "tiles_a_block": 1}
    return Config({**checks.pick(variant, workload, fixed, H100), **choices})


@needs_compiler
@pytest.mark.parametrize(("variant", "text", "choices"), CASES)
@pytest.mark.parametrize("split", EDGES)
def test_results_are_right_in_every_order(variant: Any, text: str, choices: Any, split: str) -> None:
    workload = workload_of(text)
    config, inputs = configured(variant, workload, choices), inputs_of(workload, EDGES[split])
    checks.assert_right_in_every_order(variant, workload, config, inputs)


@needs_compiler
@pytest.mark.parametrize(("variant", "text", "choices"), [CASES[0], CASES[4]])
def test_no_access_is_out_of_bounds(variant: Any, text: str, choices: dict[str, int]) -> None:
    workload = workload_of(text)
    inputs = inputs_of(workload, EDGES["edges"])
    config = configured(variant, workload, choices)
    checks.assert_emulates_right(variant, workload, config, inputs, sanitize=True)


E4M3_IN_F32 = "dtype=e4m3,trans=nt,accumulate=f32"
OF_WGMMA = [
    # text, choices, sizes of the groups; with `promote`, the variant is cuda_wgmma_promoted
    ("n=72,k=136,dtype=f16,trans=nn", {"stages": 3}, (0, 1, 64, 65, 63, 0, 128, 0)),
    ("n=133,k=136,dtype=bf16,trans=nt,out=f32", {"staged": 0}, (321, 0, 0, 0, 0, 0, 0, 0)),
    ("n=72,k=72,dtype=f16,trans=nt", {"pingpong": 1, "consumers": 2}, (0, 1, 64, 65, 63, 0, 128, 0)),
    ("n=72,k=72,dtype=bf16,trans=nn", {"cluster_m": 2}, (0, 1, 64, 65, 63, 0, 128, 0)),
    ("n=136,k=72,dtype=f16,trans=nt", {"cluster_n": 2, "group_m": 4}, (1, 1, 1, 1, 1, 1, 1, 314)),
    ("n=64,k=272,dtype=e4m3,trans=nt", {"bm": 128, "bk": 128, "consumers": 2}, (0, 0, 0, 130, 0, 0, 0, 191)),
    (f"n=72,k=656,{E4M3_IN_F32}", {"bk": 128, "promote": 2, "stages": 3}, (0, 1, 64, 65, 63, 0, 128, 0)),
    (
        f"n=72,k=400,{E4M3_IN_F32},out=f32",
        {"bk": 256, "promote": 1, "cluster_m": 2},
        (130, 0, 0, 0, 0, 0, 191, 0),
    ),
]


def of_wgmma(number: int) -> tuple[Any, GroupedGemm, Config, dict[str, Any]]:
    """Return a case of OF_WGMMA: variant, workload, configuration, inputs."""
    text, choices, sizes = OF_WGMMA[number]
    workload = grouped(f"groups=8,m=321,{text}")
    plain = {"bm": 64, "bn": 64, "bk": 64, "stages": 2, "consumers": 1, "pingpong": 0, "cluster_m": 1}
    plain |= {"cluster_n": 1, "staged": 1, "group_m": 1, "min_blocks": 1}
    variant = PROMOTED if "promote" in choices else WGMMA
    config = variant.space.check(Config({**plain, **choices}), workload=workload, device=H100)
    return variant, workload, config, inputs_of(workload, sizes)


@needs_compiler
@pytest.mark.parametrize("number", range(len(OF_WGMMA)))
def test_wgmma_results_are_right_in_every_order(number: int) -> None:
    checks.assert_right_in_every_order(*of_wgmma(number))


WGMMA_FAULTS = {
    "end of the group": (0, "clusters.begin() + clusters.rows()}", "clusters.rows()}"),
    "matrix of the group": (0, "return {{clusters.group(), ", "return {{0, "),
    "first row of the group": (0, "clusters.begin() + tile.m, tile.n}", "tile.m, tile.n}"),
    "columns of a cluster": (4, "groups, tiles_of(columns, C::BN * C::CLUSTER_N))", "groups, 1)"),
    "matrix of a": (1, "{ return 0; }  // of all", "{ return 1; }  // of all"),
    "sums that are not promoted": (6, "f32_op(totals[i][0][j][e] + sums[i][0][j][e])", "sums[i][0][j][e]"),
}


@needs_compiler
@pytest.mark.parametrize("fault", WGMMA_FAULTS)
def test_planted_faults_in_wgmma_are_found(fault: str) -> None:
    number, old, new = WGMMA_FAULTS[fault]
    variant, workload, config, inputs = of_wgmma(number)
    checks.assert_fault_is_found(checks.planted(variant, old, new), workload, config, inputs)


@needs_compiler
def test_tiles_in_turn_end_where_there_are_no_more() -> None:
    workload = grouped("groups=60,m=3,n=40,k=16,dtype=f16,skew=one")
    inputs = inputs_of(workload)
    config = configured(MMA, workload, {"bm": 16, "group_m": 1, "stages": 2, "tiles_a_block": 2})
    assert MMA.launches(workload, config)[0].grid == (3, 1, 1)
    checks.assert_emulates_right(MMA, workload, config, inputs)


@needs_numba_cuda
@pytest.mark.parametrize(
    ("trans", "split"),
    [("nn", (0, 1, 16, 0, 18, 0)), ("nt", (0, 0, 0, 0, 0, 35)), ("nt", (35, 0, 0, 0, 0, 0))],
)
def test_numba_finds_the_tiles_of_any_split(trans: str, split: tuple[int, ...]) -> None:
    workload = grouped(f"groups=6,m=35,n=19,k=5,dtype=f32,trans={trans}")
    inputs = inputs_of(workload, split)
    config = Config({"bm": 16, "bn": 16, "tm": 2, "tn": 2, "bk": 4})
    checks.assert_right(workload, inputs, simulate(NUMBA, workload, config, inputs))


FAULTS = {
    "barrier between tiles": (CASES[0], "    __syncthreads();  // all have done", "    // all have done"),
    "rows of the group": (
        CASES[4],
        "TileA of_a(a + first_row * k, k, tiles.rows() - row);",
        "TileA of_a(a + i64(row) * k, k, tiles.rows() - row);",
    ),
    "edge of a group": (CASES[1], "n, tiles.rows() - row, n - column}", "n, C::BM, n - column}"),
    "matrix of the group": (CASES[5], "b + tiles.group() * (i64(k) * n)", "b"),
    "empty groups": (CASES[4], "end_ > begin_ ? u32(tiles_of(end_ - begin_, BM))", "true ? u32(1)"),
    "walk": (CASES[1], "first_ += count_;", "first_ += 1;"),
}
"""A case, and the text to replace in its kernel, for a fault that the case must find."""


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    (variant, text, choices), old, new = FAULTS[fault]
    workload = workload_of(text)
    config, inputs = configured(variant, workload, choices), inputs_of(workload, EDGES["edges"])
    checks.assert_fault_is_found(checks.planted(variant, old, new), workload, config, inputs)


# ---------------------------------------------------------------------------------------------- libraries


@pytest.mark.parametrize("trans", ["nn", "nt"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_libraries_compute_the_same(dtype: str, trans: str) -> None:
    workload = grouped(f"groups=6,m=40,n=24,k=32,dtype={dtype},trans={trans},skew=zipf")
    inputs = inputs_of(workload)
    call: Any = libraries.numpy_call(workload, inputs)
    checks.assert_right(workload, inputs, {"c": call()})
    torch = pytest.importorskip("torch")
    calls = baseline.torch_cpu(workload, inputs)
    assert set(calls) == ({"torch"} if dtype == "f32" else {"torch", "torch grouped_mm"})
    for computed in calls.values():
        result: Any = computed()
        checks.assert_right(workload, inputs, {"c": result.to(torch.float64).numpy()})


# ------------------------------------------------------------------------------------------- machine code


@needs_nvrtc
@pytest.mark.parametrize("device", [A100, H100], ids=lambda device: device.architecture)
@pytest.mark.parametrize(
    ("variant", "text"),
    [
        (MMA, "groups=8,m=4096,n=14336,k=4096,dtype=bf16,trans=nt"),
        (MMA, "groups=8,m=16,n=14336,k=4096,dtype=f16"),
        (MMA, "groups=8,m=4096,n=14336,k=4096,dtype=e4m3,trans=nt"),
        (SIMT, "groups=8,m=4096,n=14336,k=4096,dtype=f32,trans=nt"),
        (WGMMA, "groups=8,m=16,n=14336,k=4096,dtype=f16"),
    ],
)
def test_defaults_compile_without_spills(variant: Any, text: str, device: Any) -> None:
    workload = grouped(text)
    if variant.refuses(workload, device):
        pytest.skip(str(variant.refuses(workload, device)))
    checks.assert_default_compiles_without_spills(variant, workload, device)


@needs_nvrtc
@pytest.mark.parametrize(
    "text",
    [
        "groups=8,m=4096,n=14336,k=4096,dtype=bf16,trans=nt",
        "groups=60,m=512,n=1408,k=2048,dtype=f16",
        "groups=8,m=4096,n=14336,k=4096,dtype=e4m3,trans=nt",
        f"groups=8,m=4096,n=7168,k=2048,{E4M3_IN_F32}",
    ],
)
def test_wgmma_is_compiled_to_hopper_s_instructions_without_spills(text: str) -> None:
    workload = grouped(text)
    variant = PROMOTED if workload.accumulate == "f32" else WGMMA
    config = variant.default(workload, H100)
    counted = checks.opcodes(checks.compiled_for_hopper(variant, workload, config).cubin, 9)
    rows = wgmma_tile.rows(config["bm"], config["consumers"], config["pingpong"])
    per_step = config["bk"] * itemsize(workload.dtype) // 32 * rows // 64
    assert counted[QGMMA if workload.dtype == "e4m3" else HGMMA] == per_step
    assert counted[UTMALDG] >= 2
