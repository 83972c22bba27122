"""Lower bounds compared with measurements: no measured time may be lower than its bound.

Times are the fastest sample of each configuration. Cache states are not recorded and count as warm.
`docs/bound.md` reports how tight the bounds are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.public_data import IS_WHOLE, found, table
from tunebench import device
from tunebench.bound import bound, dram_us
from tunebench.cache_file import read
from tunebench.tuning.replay import Space
from tunebench.variant import Costs
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
    gpu = device.find(name)
    return np.array(
        [
            dram_us(Traffic(read_bytes=int(r), write_bytes=int(w)), gpu, "warm")
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
def test_no_library_gemm_beats_tensor_core_and_memory_floors(data: str, dtype: str) -> None:
    rows = table(f"predict/library_gemm_{data}.csv.gz")
    name, chosen = LIBRARY[data], rows["gemm_dtype"] == dtype
    m, n, k, us = (rows[column][chosen] for column in ("m", "n", "k", "latency_ms"))
    us = us * 1e3
    size, kind = (2, "bf16") if dtype == "bfloat16" else (1, "e4m3")
    whole = Costs(blocks=1, full_blocks=0, threads=256, mma_flop=2 * m * n * k, mma_dtype=kind)
    compute = bound(whole, NOTHING, device.find(name)).us
    memory = _dram_us((m + n) * k * size, m * n * 2, name)
    assert chosen.sum() == 35742 if IS_WHOLE else chosen.sum() >= 100
    assert (np.maximum(compute, memory) > us).sum() == 0
    assert (compute / us).max() > (0.7 if IS_WHOLE else 0.5)  # detects a rate that is 50 % too high
    assert (memory / us).max() > (0.75 if IS_WHOLE else 0.5)


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
def test_no_f32_operator_beats_fma_and_memory_floors(product: str) -> None:
    rows = table("predict/neusight_ops.csv.gz")
    of_product = rows["device"] == product
    gpu, us = device.find(F32[product]), rows["latency_ms"] * 1e3
    matrix = of_product & np.isin(rows["op_group"], ("bmm", "linear"))
    macs = rows["flops"][matrix] / 2
    if gpu.compute_capability == (0, 0):  # these use matrix cores for f32
        work: dict[str, Any] = {"mma_flop": 2 * macs, "mma_dtype": "f32"}
    else:
        work = {"fma": macs}
    compute = bound(Costs(blocks=1, full_blocks=0, threads=256, **work), NOTHING, gpu).us
    assert (compute > us[matrix]).sum() == 0
    assert (compute / us[matrix]).max() > (0.6 if IS_WHOLE else 0.4)
    rest = of_product & ~np.isin(rows["op_group"], ("bmm", "linear"))
    head_bytes = rows["B"][rest] * rows["H"][rest] * 4
    memory = _dram_us(head_bytes, head_bytes, F32[product])
    assert (memory > us[rest]).sum() == 0
    assert (memory / us[rest]).max() > (0.7 if IS_WHOLE else 0.5)


@pytest.mark.parametrize("product", [name for name in F32 if not name.startswith("AMD")])
def test_no_f32_gemm_beats_wave_quantisation_of_its_tiles(product: str) -> None:
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
    unsplit = straight | turned  # else the reduction is split
    full = np.minimum(
        np.where(straight, (m // tile_m) * (n // tile_n) * batch, np.inf),
        np.where(turned, (m // tile_n) * (n // tile_m) * batch, np.inf),
    )
    launch = Costs(
        blocks=(batch * m * n / (tile_m * tile_n))[unsplit],
        full_blocks=full[unsplit],
        threads=threads[unsplit],
        fma=(tile_m * tile_n * depth)[unsplit],
    )
    got = bound(launch, NOTHING, device.find(F32[product])).us
    assert unsplit.sum() > (5000 if IS_WHOLE else 10)
    assert (got > ms[unsplit] * 1e3).sum() == 0


# ------------------------------------------------------------------------------------- recorded spaces


# Space and device; then, as found: bound / time at the optimum by multiply-adds alone and by all floors, the
# share of the space whose bound exceeds the best time, and the highest bound / time of any configuration.
SPACES = [
    ("gemm/RTX_2080_Ti", "rtx-2080-ti", 0.655, 0.696, 0.205, 0.807),
    ("gemm/RTX_3090", "rtx-3090", 0.551, 0.606, 0.430, 0.809),
    ("convolution/RTX_2080_Ti", "rtx-2080-ti", 0.459, 0.517, 0.579, 0.679),
    ("convolution/RTX_3060_laptop", "rtx-3060-laptop", 0.259, 0.583, 0.629, 0.789),
    ("convolution_milo/A100", "a100-40-pcie", 0.700, 0.761, 0.404, 0.843),
]


@pytest.mark.parametrize(
    ("space", "name", "fma_share", "share", "pruned", "highest"), SPACES, ids=[space[0] for space in SPACES]
)
def test_no_measured_configuration_beats_its_bound(
    space: str, name: str, fma_share: float, share: float, pruned: float, highest: float
) -> None:
    recorded_space = Space.of(read(found(f"recorded/{space}.json.gz")))
    recording, got = recorded_space.recording, recorded_space.bounds
    assert got is not None
    timed = device.find(name)
    assert recorded_space.device == timed
    best = int(np.nanargmin(recording.times_us))
    ran = np.isfinite(recording.times_us)
    assert ran.sum() > (4000 if IS_WHOLE else 100)
    assert (got.us[ran] > recording.fastest_us[ran]).sum() == 0
    fma = recorded_space.multiply_adds_us
    assert fma is not None
    assert fma[best] / recording.optimum_us == pytest.approx(fma_share, abs=0.001)
    assert got.us[best] / recording.optimum_us == pytest.approx(share, abs=0.001)
    # The sample has the optimum, and random configurations besides.
    assert (got.us[ran] > recording.optimum_us).mean() == pytest.approx(
        pruned, abs=0.001 if IS_WHOLE else 0.1
    )
    assert (got.us / recording.fastest_us)[ran].max() <= highest + 0.001
    if IS_WHOLE:
        assert (got.us / recording.fastest_us)[ran].max() == pytest.approx(highest, abs=0.001)
    assert set(got.floors) == {"dram", "fma pipe", "issue", "load/store", "shared", "latency"}
