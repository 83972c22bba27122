"""Roofline model: compute and memory times, power limits, and finite features for all sizes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import numpy as np
import pytest

from tunebench import device, workloads
from tunebench.errors import UnknownName
from tunebench.forecast.library.kernel import COLUMNS, Arithmetic, Family, library_kernels
from tunebench.forecast.library.roofline_model import (
    ENERGY_PJ,
    LAUNCH_US,
    RooflineModel,
    coordinates,
    flop_per_us,
    peak_flop_per_us,
    roofline_times,
)

A100, T4, L4, H100, MI210 = map(device.find, ("a100-80-sxm", "t4", "l4", "h100-sxm", "mi210"))


def one(family: Family, arithmetic: Arithmetic, on: device.Device = A100, **figures: float) -> RooflineModel:
    row = [figures[column] for column in COLUMNS[family]]
    return roofline_times(family, arithmetic, np.array([row], dtype=np.float64), on)


def product(arithmetic: Arithmetic = "bf16", on: device.Device = A100, **figures: float) -> RooflineModel:
    usual = {"batch": 1, "in_bytes": 2, "out_bytes": 2, "extra_bytes": 0}
    return one("product", arithmetic, on, **(usual | figures))


def attention(**figures: float) -> RooflineModel:
    usual = {"batch": 2, "heads": 8, "heads_k": 8, "head_dim": 64, "causal": 1, "window": 0}
    return one("attention", "bf16", A100, **(usual | {"bytes": 2, "products": 2} | figures))


@pytest.mark.parametrize(
    ("on", "arithmetic", "tflops"),
    [
        (A100, "bf16", 312),  # from the datasheets
        (A100, "tf32", 156),
        (A100, "f32", 19.5),
        (T4, "f16", 65),
        (MI210, "f32", 45.3),  # of the matrix cores
    ],
)
def test_peaks_are_those_of_datasheets(on: device.Device, arithmetic: Arithmetic, tflops: float) -> None:
    assert peak_flop_per_us(on, arithmetic) == pytest.approx(tflops * 1e6, rel=0.01)


def test_peaks_are_quoted_at_the_boost_clock() -> None:
    boosted = dataclasses.replace(A100, boost_clock_mhz=A100.max_clock_mhz / 2)
    assert peak_flop_per_us(boosted, "bf16") == pytest.approx(peak_flop_per_us(A100, "bf16") / 2)


def test_there_is_no_peak_without_tensor_cores() -> None:
    with pytest.raises(UnknownName, match="t4"):
        peak_flop_per_us(T4, "bf16")


@pytest.mark.parametrize(("on", "picojoules"), [(T4, 16.0), (L4, 5.0)])
def test_power_limits_f32_of_small_boards(on: device.Device, picojoules: float) -> None:
    assert on.tdp_w is not None
    assert flop_per_us(on, "f32") == pytest.approx(1e6 * on.tdp_w / picojoules)
    assert flop_per_us(on, "f32") < 0.6 * peak_flop_per_us(on, "f32")
    assert flop_per_us(on, "f16") == peak_flop_per_us(on, "f16")


@pytest.mark.parametrize("on", [A100, H100, MI210, dataclasses.replace(T4, tdp_w=None)], ids=lambda d: d.name)
def test_power_limits_only_f32(on: device.Device) -> None:
    assert flop_per_us(on, "f32") == peak_flop_per_us(on, "f32")


def test_energy_lies_between_processes() -> None:
    assert [size for size, _ in ENERGY_PJ] == sorted((size for size, _ in ENERGY_PJ), reverse=True)
    between = dataclasses.replace(T4, process_nm=9.5, tdp_w=10.0)
    assert flop_per_us(between, "f32") == pytest.approx(1e7 / ((16.0 + 7.0) / 2))


def test_a_product_is_its_operations_or_its_bytes() -> None:
    roofline = product(batch=3, m=1024, n=512, k=256, extra_bytes=1000)
    assert roofline.compute_us == pytest.approx(2 * 3 * 1024 * 512 * 256 / (108 * 1410 * 2048))
    nbytes = 3 * 2 * (1024 * 256 + 256 * 512 + 1024 * 512) + 1000
    assert roofline.memory_us == pytest.approx(nbytes / (A100.dram_gb_s * 1e3))
    assert roofline.us == pytest.approx(max(roofline.compute_us[0], roofline.memory_us[0]) + LAUNCH_US)


def test_types_of_operands_and_results_count() -> None:
    roofline = product("f32", m=10, n=20, k=30, in_bytes=1, out_bytes=4)
    assert roofline.memory_us == pytest.approx((300 + 600 + 4 * 200) / (A100.dram_gb_s * 1e3))
    assert roofline.compute_us == pytest.approx(2 * 6000 / (108 * 1410 * 2 * 64))


@pytest.mark.parametrize("family", ["elementwise", "softmax", "norm"])
def test_row_kernels_are_predicted_from_bytes(family: Family) -> None:
    roofline = one(family, "f32", rows=64, cols=100, read_bytes=51200, write_bytes=25600)
    assert roofline.compute_us == pytest.approx(0)
    assert roofline.memory_us == pytest.approx(76800 / (A100.dram_gb_s * 1e3))


@pytest.mark.parametrize(
    ("seq_q", "seq_k", "causal"),
    [(64, 64, True), (64, 64, False), (1, 512, True), (64, 512, True), (512, 64, False)],
)
def test_attention_counts_the_pairs_that_a_query_sees(seq_q: int, seq_k: int, causal: bool) -> None:
    heads = {"batch": 2, "heads": 8, "head_dim": 64, "dtype": "bf16"}
    workload: Any = workloads.workload("attention", **heads, seq_q=seq_q, seq_k=seq_k, causal=causal)
    roofline = attention(seq_q=seq_q, seq_k=seq_k, causal=causal)
    assert roofline.compute_us == pytest.approx(workload.flops() / peak_flop_per_us(A100, "bf16"))


@pytest.mark.parametrize(
    "sizes", ["seq_q=64,window=16", "seq_q=64,seq_k=512,window=16", "seq_q=1,seq_k=512,window=16"]
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_attention_counts_the_pairs_of_a_window(sizes: str, direction: str) -> None:
    heads = "attention:batch=2,heads=8,head_dim=64,dtype=bf16,causal=true"
    workload = workloads.parse(f"{heads},direction={direction},{sizes}")
    (launched,) = library_kernels(workload, A100)
    roofline = roofline_times(launched.family, "bf16", np.array([launched.figures], dtype=np.float64), A100)
    assert roofline.compute_us == pytest.approx(workload.flops() / peak_flop_per_us(A100, "bf16"))
    assert (roofline.block_us > roofline.compute_us).all()


SIMT = {"batch": 1, "in_bytes": 4, "out_bytes": 4, "extra_bytes": 0, "k": 4096}


@pytest.mark.parametrize(
    ("on", "m", "n", "longer"),
    [
        (A100, 8192, 8192, 1.0),  # a multiply-add in every other slot
        (device.find("p100-pcie"), 8192, 8192, 1.0),  # dual issue
        (H100, 8192, 8192, 1.12),
        (H100, 32768, 64, 1.21),  # tiles of 128 x 64
        (H100, 32768, 32, 1.65),
        (MI210, 8192, 8192, 1.0),  # matrix cores
    ],
    ids=["a100", "p100", "h100", "h100 thin", "h100 thinner", "mi210"],
)
def test_f32_products_share_issue_slots_with_other_instructions(
    on: device.Device, m: int, n: int, longer: float
) -> None:
    roofline = product("f32", on, m=m, n=n, **SIMT)
    assert roofline.compute_us == pytest.approx(longer * 2 * m * n * SIMT["k"] / peak_flop_per_us(on, "f32"))


def test_issue_slots_do_not_add_to_a_power_limit() -> None:
    roofline = product("f32", L4, m=8192, n=8192, **SIMT)
    assert roofline.compute_us == pytest.approx(2 * 8192**2 * SIMT["k"] / flop_per_us(L4, "f32"))


def test_grouped_products_read_the_matrices_of_filled_groups() -> None:
    usual = {"groups": 64, "n": 256, "k": 128, "in_bytes": 2, "out_bytes": 2}
    few, many, skewed = (
        one("grouped product", "bf16", A100, **usual, m=m, skewed=skew)
        for m, skew in ((8, 0), (4096, 0), (4096, 1))
    )
    per_us = A100.dram_gb_s * 1e3
    assert few.memory_us == pytest.approx(2 * (8 * 256 * 128 + 8 * (256 + 128)) / per_us)
    assert many.memory_us == pytest.approx(2 * (64 * 256 * 128 + 4096 * (256 + 128)) / per_us)
    assert many.compute_us == skewed.compute_us
    # With weights r ** -1.2, the last of 64 groups has 0.2 % of the rows: eight in the mean.
    assert 0.98 * many.memory_us < skewed.memory_us < many.memory_us


def test_attention_reads_shared_keys_once_and_gradients_multiply_more() -> None:
    shared, back = (
        attention(batch=512, seq_q=512, seq_k=768, heads_k=2, causal=0, products=products)
        for products in (2, 5)
    )
    nbytes = 2 * 64 * 512 * (2 * 8 * 512 + 2 * 2 * 768)
    assert shared.memory_us == pytest.approx(nbytes / (A100.dram_gb_s * 1e3))
    assert back.memory_us == pytest.approx(2.5 * shared.memory_us)
    assert back.compute_us == pytest.approx(2.5 * shared.compute_us)
    assert back.block_us == pytest.approx(2.5 * np.asarray(shared.block_us))


def test_attention_reads_what_fits_into_the_cache_from_there() -> None:
    """Expect 64 bytes per SM and clock for up to 40 MB of keys, and memory's bandwidth for more."""
    sizes = {"batch": 1, "heads": 8, "heads_k": 8, "seq_q": 1, "head_dim": 64, "causal": 0, "window": 0}
    for keys, per_us in ((8192, 64 * 108 * 1410), (32768, A100.dram_gb_s * 1e3)):
        roofline = one("decode attention", "bf16", A100, **sizes, seq_k=keys, bytes=2, products=2)
        assert roofline.memory_us == pytest.approx(2 * 2 * 8 * 64 * (keys + 1) / per_us)


SIZES = (1, 3, 2**20)


@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("on", [A100, T4, MI210], ids=lambda d: d.name)
def test_features_are_finite_for_sizes_from_1_to_a_million(family: Family, on: device.Device) -> None:
    if family == "product":
        sizes = [[*s, 2, 2, 0] for s in itertools.product(SIZES, repeat=4)]
    elif family == "grouped product":
        sizes = [[*s, 2, 2, skewed] for s in itertools.product(SIZES, repeat=4) for skewed in (0, 1)]
    elif "attention" in family:
        axes = itertools.product(*[SIZES] * 4, (0, 1), (0, 3))
        sizes = [[1, h, 1, q, k, d, c, w, 2, 2] for h, q, k, d, c, w in axes]
    else:
        sizes = [[r, c, 4 * r * c, w] for r, c in itertools.product(SIZES, repeat=2) for w in (0, 4 * r * c)]
    arithmetic: Arithmetic = "f32" if on is MI210 else "f16"
    with np.errstate(all="raise"):
        roofline = roofline_times(family, arithmetic, np.array(sizes, dtype=np.float64), on)
    assert roofline.features.shape[0] == len(sizes)
    assert np.isfinite(roofline.features).all()
    assert np.isfinite(roofline.us).all()
    assert (roofline.us > LAUNCH_US).all()


def test_waves_and_alignment_of_a_product() -> None:
    """Expect two full waves of 128 x 128 tiles and one more tile; 16 bytes are 8 elements of 2 bytes."""
    full, more = (product(m=128 * 12, n=128 * tiles, k=64).features[0] for tiles in (18, 19))
    at = 7 + 2 * 2
    assert np.exp(full[at : at + 2]) == pytest.approx([2.0, 1.0])
    assert np.exp(more[at : at + 2]) == pytest.approx([12 * 19 / 108, 12 * 19 / 108 / 3])
    aligned = [product(m=m, n=n, k=k).features[0][-6:-3].tolist() for m, n, k in ((8, 4, 16), (12, 8, 7))]
    assert aligned == [[1, 0, 1], [0, 1, 0]]


def test_view_of_a_smaller_array_moves_fewer_bytes() -> None:
    workload = workloads.parse("conv2d:n=8,c=64,h=56,w=56,k=64,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc")
    (launched,) = library_kernels(workload, A100)
    of_law = roofline_times("product", "f16", np.array([launched.figures], dtype=np.float64), A100)
    assert of_law.memory_us == pytest.approx(workload.traffic().total_bytes / (A100.dram_gb_s * 1e3))


def test_coordinates_are_generation_rate_bandwidth_and_vendor() -> None:
    fed = np.log2(A100.dram_gb_s * 1e3 / 1410 / 108)
    assert coordinates(A100, "bf16") == pytest.approx((8.0, 11.0, fed, 0.0))
    assert coordinates(A100, "f32")[1] == 7.0  # 64 multiply-adds are 128 operations
    assert coordinates(T4, "f16")[0] == 7.5
    assert coordinates(device.find("b200"), "bf16")[0] < coordinates(device.find("rtx-5090"), "bf16")[0] < 11
    assert (
        coordinates(MI210, "f32")[3] - coordinates(A100, "f32")[3] >= 5
    )  # farther apart than any two generations


def test_attention_is_placed_by_its_implementation() -> None:
    """Expect workstation Blackwell near Ada, and twice the exponentials as half a generation."""

    def apart(a: str, b: str) -> float:
        points = [np.array(coordinates(device.find(name), "bf16", attention=True)) for name in (a, b)]
        return float(np.sum((points[0] - points[1])[[0, 3]] ** 2))

    assert (
        apart("l40s", "rtx-pro-6000-server") < 0.1 < apart("l40s", "a100-80-sxm") < apart("l40s", "h100-sxm")
    )
    assert apart("b300", "b200") == pytest.approx((0.1 + 0.5) ** 2)
    assert apart("mi210", "a100-80-sxm") >= 25


def test_alike_devices_are_near_and_others_far() -> None:
    def apart(a: str, b: str) -> float:
        points = [np.array(coordinates(device.find(name), "f32")) for name in (a, b)]
        return float(np.sum((points[0] - points[1]) ** 2))

    assert apart("a100-40-pcie", "a100-80-sxm") < 0.2
    assert (
        apart("a100-40-pcie", "a100-80-sxm")
        < apart("a100-40-pcie", "v100-pcie")
        < apart("a100-40-pcie", "mi210")
    )
