from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.public_data import IS_WHOLE, table
from tunebench import device
from tunebench.bound import RESOURCES, Bounds, bound, dram_us
from tunebench.device import Device
from tunebench.forecast import interval_us, predict_us
from tunebench.forecast.utilisation import INTERVAL, LAUNCH_US, UTILISATION, Utilisation
from tunebench.variant import Costs
from tunebench.workload import Traffic

Array = NDArray[np.float64]

A100 = device.find("a100-80-sxm")
NOTHING = Traffic(read_bytes=0, write_bytes=0)


def test_every_resource_has_a_utilisation() -> None:
    assert set(UTILISATION) == set(RESOURCES)


def test_a_utilisation_rises_with_waves_to_its_limit() -> None:
    got = Utilisation(0.8, 0.2).at(np.array([0.1, 1.0, 2.0, 1e9]))
    assert got == pytest.approx([0.6, 0.6, 0.7, 0.8])


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (1.1, 0.2), (0.5, -0.1), (0.0, 0.0)])
def test_a_utilisation_is_a_share(a: float, b: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        Utilisation(a, b)


def test_prediction_is_slowest_resource_at_its_utilisation_plus_launches() -> None:
    traffic = Traffic(read_bytes=2039 * 10**5, write_bytes=0)
    costs = Costs(blocks=1080, full_blocks=1080, threads=128, fma=np.array([0.0, 1e6]), serial_launches=2)
    got = predict_us(bound(costs, traffic, A100), costs, A100)
    assert got[0] == pytest.approx(2 * LAUNCH_US + 100 / UTILISATION["dram"].a)
    fma = UTILISATION["fma pipe"]
    assert got[1] == pytest.approx(2 * LAUNCH_US + 10 * 1e6 / (64 * 1410) / (fma.a - fma.b / 10))


def test_cpu_prediction_has_no_launch_overhead() -> None:
    cpu = device.local_cpu()
    costs = Costs(blocks=1, full_blocks=0, threads=1, fma=1e9)
    bounds = bound(costs, NOTHING, cpu)
    assert predict_us(bounds, costs, cpu) == pytest.approx(bounds.us / (0.85 - 0.05))


amounts = st.floats(0, 1e12)


@given(
    st.lists(st.tuples(st.integers(1, 10**6), amounts, amounts, amounts, amounts, amounts), min_size=1),
    st.sampled_from([found for found in device.described().values() if found.mma_flop_per_clock]),
    st.integers(0, 10**12),
    st.integers(1, 4),
)
def test_never_below_the_bound(
    rows: list[tuple[Any, ...]], found: Device, read_bytes: int, serial_launches: int
) -> None:
    blocks, fma, mma_flop, sfu, smem, fill = (
        np.array(column, dtype=float) for column in zip(*rows, strict=True)
    )
    costs = Costs(
        blocks=blocks,
        full_blocks=blocks,
        threads=64,
        fma=fma,
        mma_flop=mma_flop,
        mma_dtype="f16",
        sfu=sfu,
        smem_traffic_bytes=smem,
        fill_bytes=fill,
        serial_launches=serial_launches,
    )
    bounds = bound(costs, Traffic(read_bytes=read_bytes, write_bytes=0), found)
    got = predict_us(bounds, costs, found)
    assert got.shape == bounds.us.shape
    assert np.isfinite(got).all()
    assert (got >= bounds.us + LAUNCH_US).all()


def test_an_interval_holds_the_expected_time_and_is_not_below_the_bound() -> None:
    costs = Costs(blocks=1080, full_blocks=1080, threads=128, fma=np.array([0.0, 1e3, 1e7]))
    bounds = bound(costs, NOTHING, A100)
    expected = predict_us(bounds, costs, A100)
    low, high = interval_us(expected, bounds)
    assert low == pytest.approx(np.maximum(0.55 * expected, bounds.us))
    assert low[0] == pytest.approx(0.55 * LAUNCH_US)
    assert low[2] == bounds.us[2] > 0.55 * expected[2]  # the lower bound is 85 % of the prediction
    assert high == pytest.approx(1.9 * expected)


# ------------------------------------------------------------------- the known error, as the docstring has it


def _expected_us(
    m: Array, n: Array, k: Array, memory_us: Array, tile: tuple[int, int, int], gpu: Device
) -> Array:
    """Return predicted times of bf16 products whose blocks compute one tile of a part of the reduction."""
    tile_m, tile_n, splits = tile
    blocks = np.ceil(m / tile_m) * np.ceil(n / tile_n) * splits
    depth = np.ceil(k / splits / 32) * 32
    costs = Costs(
        blocks=blocks,
        full_blocks=blocks,
        threads=256,
        mma_flop=2 * tile_m * tile_n * depth,
        mma_dtype="bf16",
        fill_bytes=2 * (tile_m + tile_n) * depth,
    )
    floors = {**bound(costs, NOTHING, gpu).floors, "dram": memory_us}
    bounds = Bounds(us=np.maximum.reduce(list(floors.values())), floors=floors, assumed=False)
    return predict_us(bounds, costs, gpu)


def _memory_us(m: Array, n: Array, k: Array, gpu: Device) -> Array:
    return np.array(
        [
            dram_us(Traffic(read_bytes=int(reads), write_bytes=int(writes)), gpu, "cold")
            for reads, writes in zip(2 * (m + n) * k, 2 * m * n, strict=True)
        ]
    )


def _products(data: str) -> tuple[Array, Array, Array, Array]:
    rows = table(f"predict/library_gemm_{data}.csv.gz")
    chosen = rows["gemm_dtype"] == "bfloat16"
    m, n, k, ms = (rows[name][chosen] for name in ("m", "n", "k", "latency_ms"))
    return m, n, k, ms * 1e3


def _error(expected: Array, measured: Array) -> float:
    return float(100 * np.abs(expected / measured - 1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "name", "filling", "over_all"),
    [("h100_sxm", "h100-sxm", 17.6, 113), ("a100_sxm", "a100-80-sxm", 18.1, 179)],
)
def test_known_error_with_one_tile_per_block(data: str, name: str, filling: float, over_all: float) -> None:
    m, n, k, measured = _products(data)
    gpu = device.find(name)
    expected = _expected_us(m, n, k, _memory_us(m, n, k, gpu), (128, 128, 1), gpu)
    fills = np.ceil(m / 128) * np.ceil(n / 128) >= gpu.sm_count
    assert 0.3 < fills.mean() < 0.6
    assert _error(expected[fills], measured[fills]) == pytest.approx(filling, abs=0.5 if IS_WHOLE else 6)
    assert _error(expected, measured) == pytest.approx(over_all, abs=1 if IS_WHOLE else 60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "name", "error", "within"),
    [
        ("h100_sxm", "h100-sxm", 15.0, 0.977),
        ("a100_sxm", "a100-80-sxm", 20.9, 0.938),
        ("b200_sxm", "b200", 21.3, 0.966),
        ("rtx_pro_6000", "rtx-pro-6000-server", 26.4, 0.920),
    ],
)
def test_known_error_of_the_best_tile(data: str, name: str, error: float, within: float) -> None:
    m, n, k, measured = _products(data)
    gpu = device.find(name)
    memory_us = _memory_us(m, n, k, gpu)
    expected = np.full(len(m), np.inf)
    for tile in itertools.product((16, 32, 64, 128), (32, 64, 128, 256), (1, 2, 4, 8, 16)):
        expected = np.minimum(expected, _expected_us(m, n, k, memory_us, tile, gpu))
    assert _error(expected, measured) == pytest.approx(error, abs=0.5 if IS_WHOLE else 6)
    low, high = INTERVAL
    inside = (measured >= low * expected) & (measured <= high * expected)
    assert inside.mean() == pytest.approx(within, abs=0.002 if IS_WHOLE else 0.1)
