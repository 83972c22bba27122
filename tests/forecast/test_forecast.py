from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.public_data import IS_WHOLE, table
from tunebench import device
from tunebench.bound import Bounds, bound
from tunebench.device import Device
from tunebench.forecast import interval_us, predict_us
from tunebench.forecast.execution import (
    CALL_US,
    CONSTANTS,
    INTERVAL,
    LAUNCH_US,
    MEMORY_INTERVAL,
    SHORT_TENSOR_INTERVAL,
    TENSOR_INTERVAL,
    ExecutionConstants,
)
from tunebench.kernels.common.product_execution import START_CLOCKS
from tunebench.variant import Costs, Execution
from tunebench.workload import Traffic

Array = NDArray[np.float64]

A100 = device.find("a100-80-sxm")
NOTHING = Traffic(read_bytes=0, write_bytes=0)


def test_a_large_copy_takes_the_sustained_bandwidth_and_a_launch() -> None:
    traffic = Traffic(read_bytes=10**9, write_bytes=10**9)
    costs = Costs(blocks=10**5, full_blocks=10**5, threads=256)
    got = predict_us(bound(costs, traffic, A100, rows=1), costs, A100, traffic)
    memory_us = 2e9 / (2039e3 * CONSTANTS.dram)
    assert memory_us + LAUNCH_US < got[0] < 1.1 * memory_us


def test_results_are_counted_even_if_the_cache_holds_them() -> None:
    traffic = Traffic(read_bytes=0, write_bytes=A100.l2_bytes)
    costs = Costs(blocks=10**4, full_blocks=10**4, threads=256)
    bounds = bound(costs, traffic, A100, rows=1)
    assert bounds.us[0] == 0
    assert predict_us(bounds, costs, A100, traffic)[0] > A100.l2_bytes / 2039e3


def test_cpu_prediction_includes_a_call() -> None:
    cpu = device.local_cpu()
    costs = Costs(blocks=1, full_blocks=0, threads=1, fma=1e9)
    bounds = bound(costs, NOTHING, cpu)
    assert predict_us(bounds, costs, cpu) == pytest.approx(bounds.us / CONSTANTS.fma + CALL_US)


# ----------------------------------------------------------------------------------- the model of execution

MEMORY_CLOCKS = CONSTANTS.memory_clocks
NO_OVERHEAD = ExecutionConstants(
    fma=1, load_store=1, shared=1, l2=1, dram=1, address_instructions=0, pipes=64, waits=64
)
"""Constants with which the longest activity hides all others."""


def _sm_clocks(*, blocks: Any = 108, constants: ExecutionConstants = NO_OVERHEAD, **columns: Any) -> Any:
    """Return predicted clocks of the busiest SM; `columns` are of `Execution` and `Costs`."""
    names = {field.name for field in dataclasses.fields(Execution)} - {"registers"}
    declared = {name: columns.pop(name) for name in names & columns.keys()}
    execution = Execution(registers=columns.get("registers", 32), **declared)
    costs = Costs(blocks=blocks, full_blocks=0, execution=execution, **{"threads": 128, **columns})
    rows = max(np.size(value) for value in (blocks, *declared.values(), *columns.values()))
    bounds = bound(costs, NOTHING, A100, rows=rows)
    return (predict_us(bounds, costs, A100, NOTHING, constants=constants) - LAUNCH_US) * 1410


def test_a_block_alone_takes_its_pipes_and_its_waits() -> None:
    got = _sm_clocks(fma=64 * 10_000, memory_waits=10, barriers=5)
    assert got == pytest.approx(10_000 + 11 * MEMORY_CLOCKS + 5 * CONSTANTS.barrier_clocks, rel=0.01)


def test_blocks_hide_the_waits_of_one_another() -> None:
    """Sixteen blocks of an SM take the time of one while that waits, then the time of the pipes."""
    waiting = _sm_clocks(blocks=108 * np.array([1, 16]), fma=64 * 100, memory_waits=100)
    assert waiting[1] == pytest.approx(waiting[0], rel=0.02)
    computing = _sm_clocks(blocks=108 * np.array([1, 16]), fma=64 * 100_000, memory_waits=10)
    assert computing[1] == pytest.approx(16 * 100_000, rel=0.02)


def test_registers_and_shared_memory_limit_the_blocks_that_hide_waits() -> None:
    got = _sm_clocks(
        blocks=108 * 16,
        fma=6400,
        memory_waits=100,
        registers=np.array([32, 128, 32]),
        smem_bytes=np.array([0, 0, 80_000]),
    )
    assert got[1] / got[0] == pytest.approx(4, rel=0.02)  # 4 blocks of 128 registers, not 16
    assert got[2] / got[0] == pytest.approx(8, rel=0.02)  # 2 blocks of 80 kB


def test_loads_ahead_of_their_use_are_hidden_by_the_computation_of_their_block() -> None:
    late = _sm_clocks(fma=64 * 100_000, memory_waits=100)
    early = _sm_clocks(fma=64 * 100_000, prefetched_waits=100)
    assert late == pytest.approx(100_000 + 101 * MEMORY_CLOCKS, rel=0.01)
    assert early == pytest.approx(100_000 + MEMORY_CLOCKS, rel=0.01)


def test_the_last_round_takes_as_long_as_its_blocks_need() -> None:
    """17 blocks on an SM of 16: the last one waits alone."""
    got = _sm_clocks(blocks=108 * np.array([16, 17, 32]), fma=6400, memory_waits=100)
    assert got[1] == pytest.approx(got[2], rel=0.01)
    assert got[1] == pytest.approx(2 * got[0], rel=0.01)


def test_spilled_registers_are_stored_and_loaded() -> None:
    got = _sm_clocks(registers=np.array([255, 275]), iterations=1000, fma=64)
    assert got[1] - got[0] == pytest.approx(20 * 1000 * 128 / 32, rel=0.01)  # lanes, at 32 a clock


def test_bank_conflicts_and_wasted_sectors_cost_time() -> None:
    got = _sm_clocks(blocks=108 * 16, passes=np.array([1e4, 4e4]))
    assert got[1] == pytest.approx(4 * got[0], rel=0.05)
    got = _sm_clocks(blocks=108 * 16, l2_bytes=np.array([1e6, 8e6]))
    assert got[1] == pytest.approx(8 * got[0], rel=0.05)


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
    assert (low >= bounds.us).all()
    assert ((low < expected) & (expected < high)).all()


def test_an_interval_follows_the_regime() -> None:
    expected, floors = np.array([5.0, 50.0, 50.0, 50.0]), np.zeros(4)
    tensor, dram = np.array([1.0, 1.0, 1.0, 0.0]), np.array([1.0, 1.0, 45.0, 1.0])
    bounds = Bounds(us=floors, floors={"tensor pipe": tensor, "dram": dram}, assumed=False)
    low, high = (limit / expected for limit in interval_us(expected, bounds))
    regimes = (SHORT_TENSOR_INTERVAL, TENSOR_INTERVAL, MEMORY_INTERVAL, INTERVAL)
    assert list(zip(low, high, strict=True)) == [pytest.approx(interval) for interval in regimes]


# ------------------------------------------------------------------- the known error, as the docstring has it


STEP, STAGES = 32, 4
"""Elements of k of a step, and steps whose tiles are in shared memory, of usual kernels of libraries."""


def _expected_us(
    m: Array, n: Array, k: Array, memory_us: Array, tile: tuple[int, int, int], gpu: Device
) -> Array:
    """Return predicted times of bf16 products whose blocks compute one tile of a part of the reduction."""
    tile_m, tile_n, splits = tile
    blocks = np.ceil(m / tile_m) * np.ceil(n / tile_n) * splits
    depth = np.ceil(k / splits / STEP) * STEP
    shared = 2 if gpu.compute_capability >= (9, 0) else 1  # blocks of a cluster that copy a tile once
    execution = Execution(
        registers=min(255, tile_m * tile_n / 256 + 60),
        l2_bytes=2 * (tile_m + tile_n / shared) * depth + tile_m * tile_n * (2 if splits == 1 else 8),
        prefetched_waits=depth / STEP / (STAGES - 1),
        barriers=depth / STEP,
        serial_clocks=START_CLOCKS,
    )
    costs = Costs(
        blocks=blocks,
        full_blocks=blocks,
        threads=256,
        smem_bytes=2 * STAGES * STEP * (tile_m + tile_n),
        mma_flop=2 * tile_m * tile_n * depth,
        mma_dtype="bf16",
        execution=execution,
    )
    floors = {**bound(costs, NOTHING, gpu).floors, "dram": memory_us}
    bounds = Bounds(us=np.maximum.reduce(list(floors.values())), floors=floors, assumed=False)
    return predict_us(bounds, costs, gpu)


def _memory_us(m: Array, n: Array, k: Array, gpu: Device) -> Array:
    return 2 * ((m + n) * k + m * n) / (gpu.dram_gb_s * 1e3)


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
    [("h100_sxm", "h100-sxm", 15.9, 108), ("a100_sxm", "a100-80-sxm", 15.0, 149)],
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
        ("h100_sxm", "h100-sxm", 12.5, 0.911),
        ("a100_sxm", "a100-80-sxm", 21.6, 0.760),
        ("b200_sxm", "b200", 15.4, 0.899),
        ("rtx_pro_6000", "rtx-pro-6000-server", 18.8, 0.804),
    ],
)
def test_known_error_of_the_best_tile(data: str, name: str, error: float, within: float) -> None:
    m, n, k, measured = _products(data)
    gpu = device.find(name)
    memory_us = _memory_us(m, n, k, gpu)
    expected = np.full(len(m), np.inf)
    for tile in itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), (1, 2, 4, 8, 16)):
        expected = np.minimum(expected, _expected_us(m, n, k, memory_us, tile, gpu))
    assert _error(expected, measured) == pytest.approx(error, abs=0.5 if IS_WHOLE else 6)
    floors = {"dram": memory_us, "tensor pipe": np.ones(len(m))}
    low, high = interval_us(expected, Bounds(us=np.zeros(len(m)), floors=floors, assumed=False))
    assert np.median(high / low) < 1.6
    inside = (measured >= low) & (measured <= high)
    assert inside.mean() == pytest.approx(within, abs=0.002 if IS_WHOLE else 0.1)
