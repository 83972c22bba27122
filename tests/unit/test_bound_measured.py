"""The bound against measurements: no row may beat it, and at the optimum it must say something.

Times are the fastest sample there is of each configuration. Cache states are not recorded, so they count
as warm. How tight the bounds are is told in `docs/bound.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from _data import Columns, recorded, table
from numpy.typing import NDArray

from tunebench import device
from tunebench.bound import bound, dram_us
from tunebench.variant import Costs, ceil_div
from tunebench.workload import Traffic

Array = NDArray[np.float64]

NOTHING = Traffic(read_bytes=0, write_bytes=0)
SIZE = 4096

# -------------------------------------------------------------------------------- products of libraries

LIBRARY = {
    "a100_sxm": "a100-80-sxm",
    "h100_sxm": "h100-sxm",
    "b200_sxm": "b200",
    "rtx_pro_6000": "rtx-pro-6000-server",
}


def _dram_us(reads: Array, writes: Array, name: str) -> Array:
    found = device.find(name)
    return np.array(
        [
            dram_us(Traffic(read_bytes=int(r), write_bytes=int(w)), found, "warm")
            for r, w in zip(reads, writes, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        (data, dtype)
        for data in LIBRARY
        for dtype in ("bfloat16", "fp8")
        if (data, dtype) != ("a100_sxm", "fp8")
    ],
)
def test_no_library_product_beats_the_tensor_pipe_or_memory(data: str, dtype: str) -> None:
    rows = table(f"predict/library_gemm_{data}.csv.gz")
    name, chosen = LIBRARY[data], rows["gemm_dtype"] == dtype
    m, n, k, us = (rows[column][chosen] for column in ("m", "n", "k", "latency_ms"))
    us = us * 1e3
    size, kind = (2, "bf16") if dtype == "bfloat16" else (1, "e4m3")
    whole = Costs(blocks=1, full_blocks=0, threads=256, mma_flop=2 * m * n * k, mma_dtype=kind)
    compute = bound(whole, NOTHING, device.find(name)).us
    memory = _dram_us((m + n) * k * size, m * n * 2, name)
    assert chosen.sum() == 35742
    assert (np.maximum(compute, memory) > us).sum() == 0
    assert (compute / us).max() > 0.7  # it would notice a rate that is half too high
    assert (memory / us).max() > 0.75


F32 = {
    "Tesla P100-PCIE-16GB": "p100-pcie",
    "Tesla P4": "p4",
    "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-40-pcie",
    "AMD Instinct MI100": "mi100",
    "AMD Instinct MI210": "mi210",
}


@pytest.mark.parametrize("product", list(F32))
def test_no_f32_operator_beats_the_multiply_adds_or_memory(product: str) -> None:
    rows = table("predict/neusight_ops.csv.gz")
    of_product = rows["device"] == product
    found, us = device.find(F32[product]), rows["latency_ms"] * 1e3
    matrix = of_product & np.isin(rows["op_group"], ("bmm", "linear"))
    macs = rows["flops"][matrix] / 2
    if found.compute_capability == (0, 0):  # these use matrix cores for f32
        work: dict[str, Any] = {"mma_flop": 2 * macs, "mma_dtype": "f32"}
    else:
        work = {"fma": macs}
    compute = bound(Costs(blocks=1, full_blocks=0, threads=256, **work), NOTHING, found).us
    assert (compute > us[matrix]).sum() == 0
    assert (compute / us[matrix]).max() > 0.6
    rest = of_product & ~np.isin(rows["op_group"], ("bmm", "linear"))
    each = rows["B"][rest] * rows["H"][rest] * 4
    memory = _dram_us(each, each, F32[product])
    assert (memory > us[rest]).sum() == 0
    assert (memory / us[rest]).max() > 0.7


@pytest.mark.parametrize("product", [name for name in F32 if not name.startswith("AMD")])
def test_no_f32_product_beats_the_waves_of_its_own_tiles(product: str) -> None:
    rows = table("predict/neusight_ops.csv.gz")
    chosen = (rows["device"] == product) & (rows["tile_rows"] > 0)
    chosen &= np.isin(rows["op_group"], ("bmm", "linear"))
    names = ("B", "M", "N", "K", "tile_rows", "tile_cols", "block_x", "latency_ms")
    batch, m, depth, n, tile_m, tile_n, threads, ms = (rows[name][chosen] for name in names)
    grid = rows["grid_x"][chosen] * rows["grid_y"][chosen] * rows["grid_z"][chosen]
    linear = rows["op_group"][chosen] == "linear"
    m, batch = np.where(linear, batch * np.where(m > 0, m, 1), m), np.where(linear, 1, batch)
    straight = grid == np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch
    turned = grid == np.ceil(m / tile_n) * np.ceil(n / tile_m) * batch
    known = straight | turned  # else the reduction is split
    full = np.minimum(
        np.where(straight, (m // tile_m) * (n // tile_n) * batch, np.inf),
        np.where(turned, (m // tile_n) * (n // tile_m) * batch, np.inf),
    )
    launch = Costs(
        blocks=(batch * m * n / (tile_m * tile_n))[known],
        full_blocks=full[known],
        threads=threads[known],
        fma=(tile_m * tile_n * depth)[known],
    )
    got = bound(launch, NOTHING, device.find(F32[product])).us
    assert known.sum() > 5000
    assert (got > ms[known] * 1e3).sum() == 0


# ------------------------------------------------------------------------------------- recorded spaces


def sgemm(columns: Columns) -> Costs:
    """What a CLBlast-style product of 4096 x 4096 f32 matrices must execute; A and B pass through L1.

    A thread holds MWI x NWI sums, MWI and NWI neighbours apart, and loads at most four neighbours at a time.
    """
    mwg, nwg, kwg, mdimc = (columns[name] for name in ("MWG", "NWG", "KWG", "MDIMC"))
    threads = mdimc * columns["NDIMC"]
    warps, mwi, nwi = threads / 32, mwg // mdimc, nwg // columns["NDIMC"]
    loads = ceil_div(mwi, 4), ceil_div(nwi, 4)
    lanes = np.minimum(32, mdimc), np.maximum(1, 32 // mdimc)
    passes = sum(
        np.maximum(128 * load, 4 * lane * width)
        for load, lane, width in zip(loads, lanes, (mwi, nwi), strict=True)
    )
    staged = 4 * (columns["SA"] * mwg + columns["SB"] * nwg)
    blocks = (SIZE // mwg) * (SIZE // nwg)
    return Costs(
        blocks=blocks,
        full_blocks=blocks,
        threads=threads,
        smem_bytes=kwg * staged,
        registers=np.minimum(255, mwi * nwi),
        fma=mwg * nwg * SIZE,
        smem_traffic_bytes=SIZE * (warps * passes + staged),
        instructions=SIZE * (mwg * nwg / 32 + warps * sum(loads) + staged / 512),
    )


def convolution(columns: Columns) -> Costs:
    """What a 15 x 15 convolution of a 4096 x 4096 image must execute; the input passes through L1.

    A thread reads every element its outputs need once, and no two lanes of a warp read the same.
    """
    block = columns["block_size_x"], columns["block_size_y"]
    tile = columns["tile_size_x"], columns["tile_size_y"]
    out_x, out_y = block[0] * tile[0], block[1] * tile[1]
    needed = np.prod(
        [
            [
                len({i + t * step for i in range(15) for t in range(count)})
                for step, count in zip(*axis, strict=True)
            ]
            for axis in zip(block, tile, strict=True)
        ],
        axis=0,
    )
    warps = block[0] * block[1] // 32
    shared = columns.get("use_shmem", np.ones_like(out_x))
    patch = (out_x + 14) * (out_y + 14) * shared
    fma = out_x * out_y * 225
    return Costs(
        blocks=SIZE**2 / (out_x * out_y),
        full_blocks=(SIZE // out_x) * (SIZE // out_y),
        threads=block[0] * block[1],
        smem_bytes=4 * patch,
        registers=np.minimum(255, tile[0] * tile[1]),
        fma=fma,
        smem_traffic_bytes=128 * warps * needed + 4 * patch,
        instructions=fma / 32 + warps * needed + patch / 128,
    )


PRODUCT = Traffic(read_bytes=2 * SIZE**2 * 4, write_bytes=SIZE**2 * 4)
IMAGE = Traffic(read_bytes=(SIZE + 14) ** 2 * 4, write_bytes=SIZE**2 * 4)

# Space, device, what it must execute, compulsory traffic; then, as found: bound / time at the optimum by
# multiply-adds alone and by all floors, and the share of the space whose bound exceeds the best time.
SPACES = [
    ("gemm/RTX_2080_Ti", "rtx-2080-ti", sgemm, PRODUCT, 0.655, 0.696, 0.030),
    ("gemm/RTX_3090", "rtx-3090", sgemm, PRODUCT, 0.551, 0.603, 0.095),
    ("convolution/RTX_2080_Ti", "rtx-2080-ti", convolution, IMAGE, 0.459, 0.460, 0.0),
    ("convolution/RTX_3060_laptop", "rtx-3060-laptop", convolution, IMAGE, 0.259, 0.326, 0.283),
    ("convolution_milo/A100", "a100-40-pcie", convolution, IMAGE, 0.700, 0.735, 0.348),
]


@pytest.mark.parametrize(
    ("space", "name", "describe", "traffic", "fma_share", "share", "pruned"),
    SPACES,
    ids=[space[0] for space in SPACES],
)
def test_no_recorded_configuration_beats_its_bound(
    space: str,
    name: str,
    describe: Callable[[Columns], Costs],
    traffic: Traffic,
    fma_share: float,
    share: float,
    pruned: float,
) -> None:
    columns, times_us, fastest_us = recorded(f"recorded/{space}.json.gz")
    found, launch = device.find(name), describe(columns)
    got = bound(launch, traffic, found, cache="warm")
    best = int(times_us.argmin())
    assert len(got) == len(times_us) > 4000
    assert (got.us > fastest_us).sum() == 0
    fma = launch.blocks * launch.fma / (found.sm_count * found.fma_per_clock * found.max_clock_mhz)
    assert (fma / times_us)[best] == pytest.approx(fma_share, abs=0.001)
    assert (got.us / times_us)[best] == pytest.approx(share, abs=0.001)
    assert (got.us > times_us[best]).mean() == pytest.approx(pruned, abs=0.001)
    assert set(got.floors) == {"dram", "fma pipe", "issue", "shared"}
