"""Cost models of recorded kernels, compared with a lane-by-lane count of their source."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tunebench import device
from tunebench.kernels.recorded_kernel import (
    CONVOLUTION,
    RECORDED_KERNELS,
    SIZE,
    XGEMM,
    RecordedKernel,
    find_recorded_kernel,
)

A100 = device.find("a100-40-pcie")
LATENCIES = A100.l1_latency + A100.smem_latency

GEMM_SPACE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("MWG", "NWG"), (16, 32, 64, 128)),
    **dict.fromkeys(("MDIMC", "NDIMC", "MDIMA", "NDIMB"), (8, 16, 32)),
    **dict.fromkeys(("VWM", "VWN"), (1, 2, 4, 8)),
    **dict.fromkeys(("SA", "SB", "STRM", "STRN"), (0, 1)),
    "KWG": (32,),
    "KWI": (2,),
    "PRECISION": (32,),
}
CONVOLUTION_SPACE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("block_size_x", "block_size_y", "tile_size_x", "tile_size_y"), (1, 2, 4, 8, 16, 32)),
    **dict.fromkeys(("filter_width", "filter_height"), (15,)),
    **dict.fromkeys(("use_padding", "read_only", "use_shmem"), (0, 1)),
    "use_cmem": (1,),
}


def counted(kernel: RecordedKernel, config: dict[str, int]) -> dict[str, float]:
    columns = {name: np.array([value]) for name, value in config.items()}
    costs = kernel.costs(columns, A100)
    names = ("fma", "smem_bytes", "smem_traffic_bytes", "accesses", "instructions", "chain_clocks", "threads")
    return {name: float(np.broadcast_to(getattr(costs, name), 1)[0]) for name in names}


def passes(words: list[int]) -> int:
    """Return the passes that distinct words need, with one word from each of 32 banks per pass."""
    return max(Counter(word % 32 for word in set(words)).values())


# -- convolution ---------------------------------------------------------------------------------------------


def walk_convolution(c: dict[str, int]) -> dict[str, float]:
    """Count the accesses of a block as the kernel's source performs them, lane by lane."""
    bx, by, tx, ty = (c[name] for name in ("block_size_x", "block_size_y", "tile_size_x", "tile_size_y"))
    taps, border = c["filter_width"], c["filter_width"] // 2 * 2
    wide, high = bx * tx + border, by * ty + border
    pitch = wide + ((32 - (wide - bx)) & 31 if c["use_padding"] and bx % 32 and (wide - bx) % 32 else 0)
    warps = [
        [(lane % bx, lane // bx) for lane in range(first, min(first + 32, bx * by))]
        for first in range(0, bx * by, 32)
    ]
    accesses = moved = instructions = 0
    for warp in warps:
        seen: set[tuple[int, int]] = set()  # a thread keeps what it has read
        for i, j, yi, xi in itertools.product(range(taps), range(taps), range(ty), range(tx)):
            instructions += 1
            if (offset := (yi * by + i, xi * bx + j)) in seen:
                continue
            seen.add(offset)
            instructions += 1
            accesses += len(warp)
            words = [(y + offset[0]) * pitch + x + offset[1] for x, y in warp]
            moved += 128 * (passes(words) if c["use_shmem"] else 1)
        accesses += tx * ty * len(warp)
        instructions += tx * ty
    if c["use_shmem"]:
        accesses += 2 * wide * high
        moved += 4 * wide * high
        instructions += 2 * sum(
            any(x + j < wide and y + i < high for x, y in warp)
            for warp in warps
            for i in range(0, high, by)
            for j in range(0, wide, bx)
        )
    smem = 4 * pitch * high * c["use_shmem"]
    return {
        "fma": bx * by * tx * ty * taps * taps,
        "smem_bytes": smem,
        "smem_traffic_bytes": moved,
        "accesses": accesses,
        "instructions": instructions,
    }


@pytest.mark.parametrize(
    ("bx", "by", "tx", "ty", "padding", "shared"),
    [
        (2, 32, 1, 4, 0, 1),  # 32 lanes in few banks
        (2, 32, 1, 4, 1, 1),
        (8, 8, 3, 1, 0, 1),
        (16, 1, 2, 2, 0, 1),  # half a warp
        (16, 4, 1, 3, 1, 1),
        (48, 3, 2, 1, 0, 1),  # warps that end within a line
        (32, 2, 4, 2, 1, 1),
        (128, 2, 1, 7, 0, 1),
        (48, 2, 2, 2, 0, 0),
        (16, 2, 1, 1, 0, 0),
    ],
)
def test_convolution_costs_match_lane_by_lane_count(
    bx: int, by: int, tx: int, ty: int, padding: int, shared: int
) -> None:
    config = {"block_size_x": bx, "block_size_y": by, "tile_size_x": tx, "tile_size_y": ty}
    config |= {"filter_width": 15, "filter_height": 15, "use_padding": padding, "use_shmem": shared}
    counts, walked = counted(CONVOLUTION, config), walk_convolution(config)
    for name in ("fma", "smem_bytes", "smem_traffic_bytes", "accesses"):
        assert counts[name] == walked[name], name
    # The model counts staging by lanes; the ends of lines take instructions with few lanes.
    assert 0.95 * walked["instructions"] < counts["instructions"] <= walked["instructions"]
    assert counts["chain_clocks"] == A100.l1_latency + shared * A100.smem_latency + 225 * A100.fma_latency


def test_a_block_of_one_column_may_read_four_elements_at_a_time() -> None:
    config = {"block_size_x": 1, "block_size_y": 64, "tile_size_x": 2, "tile_size_y": 1}
    config |= {"filter_width": 15, "filter_height": 15, "use_padding": 0}
    counts, walked = counted(CONVOLUTION, config), walk_convolution(config | {"use_shmem": 1})
    assert counts["accesses"] == walked["accesses"] / 4
    assert counts["smem_traffic_bytes"] < walked["smem_traffic_bytes"] / 4


# -- Xgemm ---------------------------------------------------------------------------------------------------


def walk_gemm(c: dict[str, int]) -> dict[str, float]:
    """Count the accesses of a block for one index k, lane by lane, with the widest accesses."""
    accesses = moved = 0.0
    threads = c["MDIMC"] * c["NDIMC"]
    lanes = [(lane % c["MDIMC"], lane // c["MDIMC"]) for lane in range(threads)]
    loads = 0
    for axis, letter in enumerate("AB"):
        tile, count = c["MWG" if letter == "A" else "NWG"], c["MDIMC" if letter == "A" else "NDIMC"]
        vector, strided = c["VWM" if letter == "A" else "VWN"], c["STRM" if letter == "A" else "STRN"]
        per_thread, shared = tile // count, c[f"S{letter}"]

        vectors = range(per_thread // vector)

        width = min(4, vector) if strided or not shared else min(4, per_thread)
        for first in range(0, per_thread, width):
            loads += 1
            accesses += threads
            for warp in range(0, threads, 32):
                read = []
                for lane in lanes[warp : warp + 32]:
                    starts = [
                        vector * (lane[axis] + v * count if strided else lane[axis] * len(vectors) + v)
                        for v in vectors
                    ]
                    read.append([start + e for start in starts for e in range(vector)][first : first + width])
                assert all(part == list(range(part[0], part[0] + width)) for part in read)  # adjacent
                flat = [word for part in read for word in part]
                moved += 128 * passes(flat) if shared else max(128, 4 * len(set(flat)))
        if shared:
            inner = tile // c["MDIMA" if letter == "A" else "NDIMB"]
            accesses += tile / min(4, vector) + tile / (min(4, vector) if strided else min(4, inner))
            moved += 4 * tile
    return {"accesses": accesses, "smem_traffic_bytes": moved, "loads": loads}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mwg", "nwg", "mdimc", "ndimc"), [(128, 128, 16, 8), (64, 128, 8, 8), (32, 64, 32, 8), (16, 16, 8, 16)]
)
def test_xgemm_costs_match_lane_by_lane_count(mwg: int, nwg: int, mdimc: int, ndimc: int) -> None:
    checked = 0
    for vwm, vwn, sa, sb, strm, strn in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), *[(0, 1)] * 4):
        if mwg % (mdimc * vwm) or nwg % (ndimc * vwn):
            continue
        config = {"MWG": mwg, "NWG": nwg, "KWG": 32, "MDIMC": mdimc, "NDIMC": ndimc, "VWM": vwm, "VWN": vwn}
        config |= {"SA": sa, "SB": sb, "STRM": strm, "STRN": strn, "MDIMA": 8, "NDIMB": 8, "KWI": 2}
        counts, walked = counted(XGEMM, config), walk_gemm(config)
        assert counts["accesses"] == SIZE * walked["accesses"], config
        assert counts["smem_traffic_bytes"] == pytest.approx(SIZE * walked["smem_traffic_bytes"]), config
        least = mwg * nwg / 32 + mdimc * ndimc / 32 * walked["loads"]
        assert counts["instructions"] >= SIZE * least
        assert counts["chain_clocks"] == A100.l1_latency + (sa | sb) * A100.smem_latency + 4 * SIZE
        checked += 1
    assert checked >= 16


# -- matching ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", RECORDED_KERNELS, ids=[known.kernel for known in RECORDED_KERNELS])
def test_model_is_found_if_all_parameters_are_known(known: RecordedKernel) -> None:
    space = {"Xgemm": GEMM_SPACE, "convolution_kernel": CONVOLUTION_SPACE}[known.kernel]
    assert find_recorded_kernel(known.kernel, space, (SIZE, SIZE)) is known
    assert find_recorded_kernel(known.kernel, space | {"nvml_gr_clock": (1200, 1500)}, (SIZE, SIZE)) is known


@pytest.mark.parametrize(
    ("kernel", "changes", "problem", "reason"),
    [
        ("Xgemm", {"GEMMK": (0,), "KREG": (1,)}, (4096, 4096), None),
        ("Xgemm", {"GEMMK": (0, 1)}, (4096, 4096), "the cost model of Xgemm does not cover GEMMK=1"),
        ("Xgemm", {"PRECISION": (16,)}, (4096, 4096), "the cost model of Xgemm does not cover PRECISION=16"),
        (
            "Xgemm",
            {"USE_TENSOR_CORES": (0,)},
            (4096, 4096),
            "the cost model of Xgemm does not cover the parameter USE_TENSOR_CORES",
        ),
        ("Xgemm", {}, (2048, 2048), "Xgemm has a cost model for problem size 4096x4096, not 2048x2048"),
        ("Xgemm", {}, (), "Xgemm has a cost model for problem size 4096x4096, not unknown"),
        ("dgemm", {}, (4096, 4096), "its kernel has no cost model; Xgemm and convolution_kernel have one"),
    ],
)
def test_model_is_missing_for_unknown_values(
    kernel: str, changes: dict[str, tuple[Any, ...]], problem: tuple[int, ...], reason: str | None
) -> None:
    counts = find_recorded_kernel(kernel, GEMM_SPACE | changes, problem)
    assert counts == (reason or XGEMM)


def test_missing_required_parameter_is_named() -> None:
    space = {name: values for name, values in CONVOLUTION_SPACE.items() if name != "use_padding"}
    assert find_recorded_kernel("convolution_kernel", space, (SIZE, SIZE)) == (
        "the cost model of convolution_kernel needs the parameter use_padding"
    )
