from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench import device
from tunebench.bound import RESOURCES, Bounds, bound, dram_us, refine, resident_blocks
from tunebench.device import Device
from tunebench.errors import InputError, UnknownName
from tunebench.outcome import Resources
from tunebench.variant import Costs
from tunebench.workload import Traffic

NOTHING = Traffic(read_bytes=0, write_bytes=0)
A100 = device.find("a100-80-sxm")
H100 = device.find("h100-sxm")
MHZ = A100.max_clock_mhz

WORK = ("fma", "mma_flop", "sfu", "smem_traffic_bytes", "fill_bytes", "accesses", "instructions")


def costs(**changes: Any) -> Costs:
    return Costs(**{"blocks": 1.0, "full_blocks": 1.0, "threads": 128, "mma_dtype": "f16", **changes})


def only(bounds: Bounds) -> float:
    (us,) = bounds.us
    return float(us)


# ------------------------------------------------------------------------------------------- floors


@pytest.mark.parametrize(
    ("work", "rate", "binding"),
    [
        ("fma", 64, "fma pipe"),
        ("mma_flop", 2048, "tensor pipe"),
        ("sfu", 16, "special functions"),
        ("smem_traffic_bytes", 128, "shared"),
        ("fill_bytes", 64, "fill port"),
        ("accesses", 32, "load/store"),
        ("instructions", 4, "issue"),
    ],
)
def test_each_floor_is_work_of_busiest_sm_divided_by_rate(work: str, rate: float, binding: str) -> None:
    per_block_us = 1e6 / (rate * MHZ)
    for blocks, rounds in ((1, 1), (108, 1), (109, 2), (1080, 10)):
        got = bound(costs(blocks=blocks, full_blocks=blocks, **{work: 1e6}), NOTHING, A100)
        assert only(got) == pytest.approx(rounds * per_block_us)
        assert list(got.binding) == [binding]


def test_partial_blocks_count_only_in_mean_load() -> None:
    got = bound(costs(blocks=162, full_blocks=54, fma=1e6), NOTHING, A100)
    assert only(got) == pytest.approx(1.5 * 1e6 / (64 * MHZ))


def test_block_of_few_warps_uses_only_its_sm_partitions() -> None:
    one_sm_us = 1e6 / (64 * MHZ)
    alone = bound(costs(threads=32, fma=1e6), NOTHING, A100)
    assert only(alone) == pytest.approx(4 * one_sm_us)
    two = bound(costs(threads=32, blocks=216, full_blocks=216, fma=1e6), NOTHING, A100)
    assert only(two) == pytest.approx(4 * one_sm_us)  # concurrent
    many = bound(costs(threads=32, blocks=1080, full_blocks=1080, fma=1e6), NOTHING, A100)
    assert only(many) == pytest.approx(10 * one_sm_us)
    apart = bound(costs(threads=32, blocks=216, full_blocks=216, fma=1e6, smem_bytes=150_000), NOTHING, A100)
    assert only(apart) == pytest.approx(8 * one_sm_us)  # sequential


def test_latency_chains_of_blocks_run_in_waves() -> None:
    """An SM of A100 holds 16 blocks of 128 threads, or 3 of 54,000 bytes."""
    chain_us = 1e6 / MHZ
    for blocks, smem_bytes, turns in (
        (1, 0, 1),
        (108 * 16, 0, 1),
        (108 * 16 + 1, 0, 2),
        (108 * 3, 54_000, 1),
        (108 * 10, 54_000, 4),
    ):
        launch = costs(blocks=blocks, full_blocks=blocks, smem_bytes=smem_bytes, chain_clocks=1e6)
        got = bound(launch, NOTHING, A100)
        assert only(got) == pytest.approx(turns * chain_us)
        assert list(got.binding) == ["latency"]


def test_no_latency_floor_without_full_block() -> None:
    assert "latency" not in bound(costs(blocks=3, full_blocks=0, chain_clocks=1e6), NOTHING, A100).floors


def test_register_usage_of_compiler_serialises_latency_chains() -> None:
    launch = costs(blocks=432, full_blocks=432, chain_clocks=1e6, registers=32)
    first = only(bound(launch, NOTHING, A100))
    assert only(refine(launch, NOTHING, A100, Resources(registers=255))) == pytest.approx(2 * first)


def test_units_shared_by_sm_are_independent_of_warp_placement() -> None:
    got = bound(costs(threads=32, smem_traffic_bytes=1e6), NOTHING, A100)
    assert only(got) == pytest.approx(1e6 / (128 * MHZ))
    b200 = device.find("b200")
    got = bound(costs(threads=32, mma_flop=1e6), NOTHING, b200)
    assert only(got) == pytest.approx(1e6 / (8192 * b200.max_clock_mhz))


def test_instructions_are_derived_from_work_if_not_counted() -> None:
    ampere = device.find("rtx-3090")
    got = bound(costs(fma=3.2e6, sfu=3.2e5, smem_traffic_bytes=5.12e5), NOTHING, ampere)
    assert got.floors["issue"][0] == pytest.approx((1e5 + 1e4 + 1e3) / (4 * ampere.max_clock_mhz))
    packed = bound(costs(fma=3.2e6), NOTHING, device.find("b200"))
    assert packed.floors["issue"][0] == pytest.approx(packed.floors["fma pipe"][0] / 2)
    assert "issue" not in bound(costs(fma=3.2e6), NOTHING, device.find("mi210")).floors


@pytest.mark.parametrize(
    ("reads_mb", "writes_mb", "cold_mb", "warm_mb"),
    [(10, 10, 10, 0), (10, 50, 20, 10), (100, 50, 110, 70), (0, 0, 0, 0)],
)
def test_memory_floor_excludes_cached_bytes(
    reads_mb: int, writes_mb: int, cold_mb: int, warm_mb: int
) -> None:
    traffic = Traffic(read_bytes=reads_mb << 20, write_bytes=writes_mb << 20)
    assert dram_us(traffic, A100, "cold") == pytest.approx((cold_mb << 20) / 2039e3)
    assert dram_us(traffic, A100, "warm") == pytest.approx((warm_mb << 20) / 2039e3)
    assert only(bound(costs(), traffic, A100, cache="warm")) == dram_us(traffic, A100, "warm")
    assert only(bound(costs(), traffic, A100)) == dram_us(traffic, A100, "cold")


def test_cpu_bound_has_memory_and_fma_floors_only() -> None:
    cpu = Device(
        name="c",
        kind="cpu",
        architecture="x86_64-v3",
        sm_count=4,
        max_clock_mhz=5000,
        dram_gb_s=100,
        l2_bytes=0,
        fma_per_clock=16,
        assumed=True,
    )
    got = bound(
        costs(fma=3.2e9, sfu=1e12, smem_traffic_bytes=1e12), Traffic(read_bytes=0, write_bytes=0), cpu
    )
    assert only(got) == pytest.approx(3.2e9 / (4 * 16 * 5000))
    assert got.assumed
    assert got.describe(0) == "10000 us: fma pipe 10000 (rates assumed)"


# ----------------------------------------------------------------------------------------- residency


@pytest.mark.parametrize(
    ("given", "blocks"),
    [
        ({"threads": 32}, 32),  # blocks of an SM
        ({"threads": 1024}, 2),  # threads
        ({"threads": 33}, 32),  # whole warps
        ({"threads": 128, "smem_bytes": 54_000}, 3),  # shared memory, 1 KB a block reserved
        ({"threads": 128, "smem_bytes": 56_000}, 2),
        ({"threads": 128, "registers": 128}, 4),
        ({"threads": 128, "registers": 129}, 3),  # allocated by 8 a thread
        ({"threads": 96, "registers": 255}, 2),  # 2 warps a partition
        ({"threads": 1024, "registers": 255}, 1),  # cannot run: counted as one block
    ],
)
def test_resident_blocks(given: dict[str, int], blocks: int) -> None:
    assert resident_blocks(costs(**given), A100) == blocks


def test_unknown_device_limits_are_ignored() -> None:
    bare = dataclasses.replace(A100, blocks_per_sm=0, threads_per_sm=0, smem_per_sm_bytes=0)
    assert resident_blocks(costs(threads=32, smem_bytes=10**9, registers=32), bare) == 64


def test_refine_uses_resources_of_binary() -> None:
    small = costs(threads=32, blocks=216, full_blocks=216, fma=1e6)
    first = only(bound(small, NOTHING, A100))
    assert only(refine(small, NOTHING, A100, Resources())) == first
    assert only(refine(small, NOTHING, A100, Resources(registers=255))) == first
    big = Resources(static_smem_bytes=1000, dynamic_smem_bytes=120_000)
    assert only(refine(small, NOTHING, A100, big)) == pytest.approx(2 * first)
    assert only(refine(small, NOTHING, A100, Resources(spill_bytes=1000))) == first


def test_refine_does_not_count_reserved_shared_memory_twice() -> None:
    lone = costs(threads=32, blocks=264, full_blocks=264, fma=1e6)
    apart = Resources(static_smem_bytes=1024, dynamic_smem_bytes=114_689)
    beside = Resources(static_smem_bytes=1024, dynamic_smem_bytes=114_688)  # 2 * (1 + 112 + 1) KB = 228 KB
    assert only(refine(lone, NOTHING, H100, apart)) == 2 * only(refine(lone, NOTHING, H100, beside))


# ------------------------------------------------------------------------------------------ the table


def test_bounds_of_columns_equal_those_of_single_rows() -> None:
    rng = np.random.default_rng(7)
    rows = 200
    columns = {name: rng.integers(0, 10**7, rows) for name in WORK}
    columns |= {"blocks": rng.integers(1, 5000, rows), "threads": rng.integers(1, 1024, rows)}
    columns |= {"smem_bytes": rng.integers(0, 100_000, rows), "registers": rng.integers(16, 255, rows)}
    columns |= {"chain_clocks": rng.integers(0, 10**6, rows)}
    traffic = Traffic(read_bytes=10**8, write_bytes=10**8)
    table = bound(costs(full_blocks=columns["blocks"] // 2, **columns), traffic, H100)
    assert len(table) == rows
    for i in range(rows):
        single = {name: int(column[i]) for name, column in columns.items()}
        got = bound(costs(full_blocks=single["blocks"] // 2, **single), traffic, H100)
        assert only(got) == pytest.approx(float(table.us[i]), rel=1e-12)
        assert got.binding[0] == table.binding[i] == table.row(i).binding


def test_scalar_costs_broadcast_to_requested_rows() -> None:
    got = bound(costs(fma=1e6), NOTHING, A100, rows=5)
    assert got.us.shape == (5,)
    assert all(floor.shape == (5,) for floor in got.floors.values())
    assert bound(costs(fma=np.ones(0)), NOTHING, A100).us.shape == (0,)


def test_floors_of_row_are_sorted_highest_first() -> None:
    traffic = Traffic(read_bytes=int(8.1 * 3352e3), write_bytes=0)
    work = costs(
        blocks=132,
        full_blocks=132,
        mma_flop=np.array([0.0, 12.3 * 4096 * 1980]),
        smem_traffic_bytes=3.04 * 128 * 1980,
    )
    got = bound(work, traffic, H100)
    assert got.describe(1) == "12.3 us: tensor pipe 12.3, dram 8.1, shared 3.0"
    assert got.describe(0) == "8.1 us: dram 8.1, shared 3.0"
    assert list(got.row(1).floors) == ["tensor pipe", "dram", "shared"]
    assert list(got.binding) == ["dram", "tensor pipe"]


def test_bound_of_no_work_is_zero() -> None:
    got = bound(costs(), NOTHING, A100)
    assert only(got) == 0
    assert got.describe(0) == "0 us: nothing binds"


# --------------------------------------------------------------------------------------------- errors


def test_missing_tensor_core_type_error_lists_available_types() -> None:
    with pytest.raises(UnknownName, match=r"tensor-core type of v100-sxm2 'bf16'.*Known: f16"):
        bound(costs(mma_flop=1, mma_dtype="bf16"), NOTHING, device.find("v100-sxm2"))
    assert only(bound(costs(mma_flop=0, mma_dtype="bf16"), NOTHING, device.find("v100-sxm2"))) == 0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_costs_must_be_finite_and_non_negative(value: float) -> None:
    with pytest.raises(InputError, match="fma must be finite and not negative"):
        bound(costs(fma=np.array([1.0, value])), NOTHING, A100)


def test_cost_columns_must_have_equal_length() -> None:
    with pytest.raises(InputError, match=r"got lengths \[2, 3\]"):
        bound(costs(fma=np.ones(2), sfu=np.ones(3)), NOTHING, A100)
    with pytest.raises(InputError, match=r"got lengths \[2, 4\]"):
        bound(costs(fma=np.ones(2)), NOTHING, A100, rows=4)


# ----------------------------------------------------------------------------------------- properties

amounts = st.floats(0, 1e12)
devices = st.sampled_from(
    [described for described in device.described().values() if described.mma_flop_per_clock]
)


@st.composite
def launches(draw: st.DrawFn) -> dict[str, Any]:
    full = draw(st.integers(0, 10**6))
    return {
        "full_blocks": full,
        "blocks": full + draw(st.floats(0, 1000)),
        "threads": draw(st.integers(1, 1024)),
        "smem_bytes": draw(st.integers(0, 300_000)),
        "registers": draw(st.integers(0, 300)),
        "chain_clocks": draw(amounts),
        **{name: draw(amounts) for name in WORK},
    }


traffics = st.builds(Traffic, read_bytes=st.integers(0, 10**12), write_bytes=st.integers(0, 10**12))


@given(launches(), traffics, devices, st.sampled_from(["cold", "warm"]))
def test_bound_is_highest_floor_and_finite(
    launch: dict[str, Any], traffic: Traffic, found: Device, cache: Any
) -> None:
    got = bound(costs(**launch), traffic, found, cache=cache)
    us = only(got)
    assert math.isfinite(us)
    assert us == max(float(floor[0]) for floor in got.floors.values())
    assert got.binding[0] == got.row(0).binding in RESOURCES
    assert got.floors[got.row(0).binding][0] == us
    assert set(got.floors) <= set(RESOURCES)


@given(
    launches(),
    traffics,
    devices,
    st.sampled_from([*WORK, "blocks", "full_blocks", "smem_bytes", "registers", "chain_clocks"]),
    st.floats(1, 100),
)
def test_bound_grows_monotonically_with_work_and_resources(
    launch: dict[str, Any], traffic: Traffic, found: Device, what: str, factor: float
) -> None:
    more = {**launch, what: launch[what] * factor}
    if what == "full_blocks":
        more["full_blocks"] = math.floor(more["full_blocks"])
    assert only(bound(costs(**more), traffic, found)) >= only(bound(costs(**launch), traffic, found))


@given(launches(), traffics, devices)
def test_warm_cache_bound_is_not_higher(launch: dict[str, Any], traffic: Traffic, found: Device) -> None:
    cold, warm = (bound(costs(**launch), traffic, found, cache=cache) for cache in ("cold", "warm"))
    assert only(warm) <= only(cold)


@given(
    full=st.integers(1, 600),
    threads=st.sampled_from([32, 64, 96, 128, 256]),
    smem_bytes=st.integers(0, 160_000),
    placement=st.integers(0, 2**32),
)
def test_simulated_schedule_of_equal_blocks_never_beats_bound(
    full: int, threads: int, smem_bytes: int, placement: int
) -> None:
    """Blocks are spread over SMs evenly or at random; each SM works at the best rate its residents allow."""
    launch = costs(blocks=full, full_blocks=full, threads=threads, smem_bytes=smem_bytes, fma=1e6)
    resident, share = int(resident_blocks(launch, A100)), threads / 32 / A100.partitions
    rng = np.random.default_rng(placement)
    even = np.bincount(np.arange(full) % A100.sm_count, minlength=A100.sm_count)
    random = np.bincount(rng.integers(0, A100.sm_count, full), minlength=A100.sm_count)
    for counts in (even, random):
        longest = max(_sm_time(int(n), resident, share) for n in counts)
        assert longest * 1e6 / (64 * MHZ) >= only(bound(launch, NOTHING, A100)) * (1 - 1e-9)


@given(
    full=st.integers(1, 600),
    smem_bytes=st.integers(0, 160_000),
    chains=st.lists(st.floats(1e6, 3e6), min_size=1, max_size=5),
    placement=st.integers(0, 2**32),
)
def test_simulated_schedule_of_latency_chains_never_beats_bound(
    full: int, smem_bytes: int, chains: list[float], placement: int
) -> None:
    """Blocks with different chains start when an SM has room, on SMs chosen evenly or at random."""
    launch = costs(blocks=full, full_blocks=full, smem_bytes=smem_bytes, chain_clocks=min(chains))
    resident = int(resident_blocks(launch, A100))
    rng = np.random.default_rng(placement)
    for chosen in (np.arange(full) % A100.sm_count, rng.integers(0, A100.sm_count, full)):
        longest = 0.0
        for sm in range(A100.sm_count):
            slots = [0.0] * resident
            for _ in range(int((chosen == sm).sum())):
                free = slots.index(min(slots))
                slots[free] += float(rng.choice(chains))
            longest = max(longest, *slots)
        assert longest / MHZ >= only(bound(launch, NOTHING, A100)) * (1 - 1e-9)


def _sm_time(blocks: int, resident: int, share: float) -> float:
    """Return when an SM is done with unit blocks, each at `share` of its rate at most, a few at a time."""
    time, running, waiting = 0.0, [], blocks
    while running or waiting:
        while waiting and len(running) < resident:
            running.append(1.0)
            waiting -= 1
        rate = min(share, 1 / len(running))
        step = min(running) / rate
        time += step
        running = [remaining - step * rate for remaining in running if remaining - step * rate > 1e-12]
    return time
