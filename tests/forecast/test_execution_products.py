"""Predicted times of the project's own matrix products follow from how their blocks execute."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tunebench import device
from tunebench.forecast import predict_us
from tunebench.kernels.common.product_execution import in_sectors, line_bytes, operand_bytes, tile_copy
from tunebench.space import Config
from tunebench.tuning.tunable import TunableVariant, find_variants
from tunebench.workloads import parse

H100, A100 = "h100-sxm", "a100-80-sxm"

SQUARE = "gemm:m=4096,n=4096,k=4096,dtype=bf16,trans=nt"
FEW_ROWS = "gemm:m=64,n=2112,k=7168,dtype=bf16,trans=nt"
SHAPES = [
    SQUARE,
    FEW_ROWS,
    "gemm:m=16,n=4096,k=4096,dtype=bf16,trans=nt",
    "gemm:m=128,n=7168,k=16384,dtype=bf16,trans=nt",
    "gemm:m=4096,n=32768,k=512,dtype=bf16,trans=nt",
    "gemm:m=8192,n=8192,k=8192,dtype=bf16",
]


@functools.cache
def tunable(text: str, name: str, on: str) -> TunableVariant:
    found, _ = find_variants(parse(text), device.find(on), compilable=False)
    return next(each for each in found if each.variant.name == name)


def predicted(each: TunableVariant) -> NDArray[np.float64]:
    return predict_us(each.bounds, each.costs, each.device, each.traffic, cache=each.cache)


def steps_along(each: TunableVariant, name: str) -> list[tuple[int, int]]:
    """Return pairs of rows that differ in one parameter only, the lower value first, next to one another."""
    others = [column for column in each.table.space.names if column != name]
    order = np.lexsort([each.table[name], *(each.table[column] for column in others)])
    same = np.ones(len(order) - 1, dtype=bool)
    for column in others:
        values = each.table[column][order]
        same &= values[1:] == values[:-1]
    return [(int(order[i]), int(order[i + 1])) for i in np.flatnonzero(same)]


def resident(each: TunableVariant) -> Any:
    """Return the blocks that the shared memory of an SM has room for."""
    gpu = each.device
    return gpu.smem_per_sm_bytes // (np.asarray(each.costs.smem_bytes) + gpu.smem_reserved_bytes)


@pytest.mark.parametrize(("name", "on"), [("cuda_mma", A100), ("cuda_wgmma", H100)])
@pytest.mark.parametrize("text", [SQUARE, FEW_ROWS])
def test_more_stages_are_never_slower_until_fewer_blocks_fit(text: str, name: str, on: str) -> None:
    each = tunable(text, name, on)
    times, blocks = predicted(each), resident(each)
    compared = [(few, more) for few, more in steps_along(each, "stages") if blocks[few] == blocks[more]]
    assert len(compared) > 100
    slower = [(few, more) for few, more in compared if times[more] > times[few] * (1 + 1e-9)]
    assert not slower


def test_single_elements_are_slower_than_wide_accesses() -> None:
    each = tunable("gemm:m=4096,n=4096,k=4096,dtype=f32", "cuda_simt", A100)
    times = predicted(each)
    narrow, wide = np.array(steps_along(each, "vec")).T
    assert (times[narrow] > times[wide]).mean() > 0.95


def test_the_order_of_tiles_changes_memory_traffic() -> None:
    each = tunable("gemm:m=8192,n=8192,k=8192,dtype=bf16", "cuda_wgmma", H100)
    assert each.costs.execution is not None
    moved = np.asarray(each.costs.execution.memory_bytes)
    compulsory = 3 * 2 * 8192**2
    assert (moved >= compulsory * 0.999).all()
    best = each.table.config(int(predicted(each).argmin()))
    assert best["group_m"] > 1
    # Groups of 4 rows are as high as what a wave of 132 tiles covers anyway; 8 rows make it squarer.
    taller = [
        (low, high)
        for low, high in steps_along(each, "group_m")
        if (each.table["group_m"][high], each.table["cluster_m"][high], each.table["bm"][high]) == (8, 1, 128)
    ]
    assert len(taller) > 10
    assert all(moved[high] < moved[low] for low, high in taller)


def test_a_wave_reads_its_operands_once() -> None:
    whole = {"height": 8, "wave": 1e9, "device": device.find(H100)}
    assert operand_bytes(1e9, 1e9, 64, 64, **whole) == pytest.approx(2e9)
    small = {"height": 1, "wave": 1, "device": device.find(H100)}
    # Without reuse, each of 64 x 64 tiles reads its rows and columns.
    assert operand_bytes(64e9, 64e9, 64, 64, **small) == pytest.approx(2 * 64 * 64e9, rel=0.01)
    # L2 holds all of both.
    assert operand_bytes(1e5, 1e5, 64, 64, **small) == pytest.approx(2e5, rel=0.3)


@pytest.mark.parametrize(
    ("line", "pitch", "expected"),
    [(128, 8192, 128), (128, 8208, 144), (16, 8192, 32), (64, 1000, 88), (32, 32, 32)],
)
def test_parts_of_lines_touch_whole_sectors(line: int, pitch: int, expected: int) -> None:
    assert in_sectors(np.array([line]), pitch)[0] == expected


def test_short_steps_waste_sectors_and_narrow_loads_take_more_accesses() -> None:
    long, short = (line_bytes(128, 128, np.array([bk]), 2, 8192, along_k=True)[0] for bk in (64, 8))
    assert long == 128 * 2
    assert short == 2 * long
    wide, narrow = (tile_copy(np.array([128]), np.array([16]), vec, 2, along_k=True) for vec in (8, 1))
    assert narrow.accesses > wide.accesses


@pytest.mark.parametrize(("name", "on"), [("cuda_mma", A100), ("cuda_wgmma", H100)])
@pytest.mark.parametrize("text", SHAPES)
def test_nothing_exceeds_peaks_and_few_configurations_tie(text: str, name: str, on: str) -> None:
    each, workload = tunable(text, name, on), parse(text)
    times, gpu = predicted(each), each.device
    clock_mhz = gpu.boost_clock_mhz or gpu.max_clock_mhz
    peak = workload.flops() / (gpu.mma_flop_per_clock["bf16"] * gpu.sm_count * clock_mhz)
    assert times.min() > peak
    assert times.min() > workload.traffic().total_bytes / (gpu.dram_gb_s * 1e3)
    assert (times <= 1.001 * times.min()).mean() < 0.02


# Known gaps of the default: of k = 512, most of the time is the epilogue, which bulk copies shorten; of few
# rows, streams divide steps more evenly than parts of tiles.
GAPS = [
    (SQUARE, "cuda_mma", A100, 1.10),
    (SQUARE, "cuda_wgmma", H100, 1.15),
    (FEW_ROWS, "cuda_mma", A100, 1.25),
    (FEW_ROWS, "cuda_wgmma", H100, 1.10),
    ("gemm:m=4096,n=7168,k=16384,dtype=bf16,trans=nt", "cuda_mma", A100, 1.10),
    ("gemm:m=4096,n=7168,k=16384,dtype=bf16,trans=nt", "cuda_wgmma", H100, 1.10),
    ("gemm:m=4096,n=32768,k=512,dtype=bf16,trans=nt", "cuda_wgmma", H100, 1.45),
    ("gated_gemm:m=4096,n=14336,k=4096,dtype=bf16", "cuda_wgmma", H100, 1.10),
    ("gemm:m=4096,n=4096,k=4096,dtype=f32", "cuda_simt", A100, 1.15),
    (
        "conv2d:n=32,c=256,h=56,w=56,k=256,r=3,s=3,stride=1,pad=1,dtype=bf16,layout=nhwc",
        "cuda_wgmma",
        H100,
        1.1,
    ),
    (
        "conv2d:n=32,c=256,h=56,w=56,k=256,r=3,s=3,stride=1,pad=1,dtype=bf16,layout=nhwc",
        "cuda_implicit_gemm_mma",
        A100,
        1.15,
    ),
]


@pytest.mark.parametrize(("text", "name", "on", "factor"), GAPS)
def test_the_default_is_near_the_predicted_best(text: str, name: str, on: str, factor: float) -> None:
    each = tunable(text, name, on)
    default = each.table.row(each.variant.default(parse(text), each.device))
    assert predicted(each)[default] <= factor * predicted(each).min()


def test_large_tiles_and_several_stages_are_predicted_best() -> None:
    for name, on in (("cuda_mma", A100), ("cuda_wgmma", H100)):
        each = tunable(SQUARE, name, on)
        best = [each.table.config(int(row)) for row in predicted(each).argsort()[:10]]
        assert any((c["bm"], c["bn"]) in ((128, 128), (128, 256), (256, 128)) for c in best)
        assert all(c["stages"] >= 2 and c["bm"] * c["bn"] >= 128 * 128 for c in best)


def test_dividing_k_wins_where_tiles_are_fewer_than_multiprocessors() -> None:
    each = tunable(FEW_ROWS, "cuda_mma", A100)
    best = [each.table.config(int(row)) for row in predicted(each).argsort()[:10]]
    assert all(config["split_k"] > 1 or config["stream_k"] > 0 for config in best)


def test_pingpong_hides_the_epilogue_of_short_products() -> None:
    text = "gemm:m=4096,n=32768,k=512,dtype=bf16,trans=nt"
    each = tunable(text, "cuda_wgmma", H100)
    shared = {"bm": 128, "bn": 128, "bk": 64, "stages": 4, "consumers": 2, "cluster_m": 2, "cluster_n": 1}
    shared |= {"staged": 2, "group_m": 8, "min_blocks": 1, "split_k": 1}
    together, in_turn = (
        each.predicted_us(each.table.row(Config({**shared, "pingpong": pingpong}))) for pingpong in (0, 1)
    )
    assert in_turn < together
