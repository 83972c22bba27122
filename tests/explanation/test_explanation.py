"""Explanations compared with calculations by hand: limiting resource, waves, alignment and advice."""

from __future__ import annotations

import builtins
import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import measured, record_outcome
from tunebench import cli, device, explanation, kernels
from tunebench._figure import significant
from tunebench.bound import RESOURCES, Bound
from tunebench.db.store import open_store
from tunebench.device import Device
from tunebench.errors import ConfigError, InputError, MissingDependency
from tunebench.explanation import (
    Explanation,
    Forecaster,
    PredictedBest,
    Waves,
    advise,
    alignments,
    explain,
)
from tunebench.explanation.limit import KINDS, limit
from tunebench.forecast import least_us
from tunebench.forecast.execution import CONSTANTS, LAUNCH_US
from tunebench.forecast.predicted_space import fastest_variant
from tunebench.outcome import VARIANT_FILE, CacheState
from tunebench.tuning import tunable
from tunebench.workload import Workload
from tunebench.workloads import parse

H100, A100, T4 = device.find("h100-sxm"), device.find("a100-80-sxm"), device.find("t4")
SQUARE, SKINNY = "gemm:m=4096,n=4096,k=4096,dtype=f16", "gemm:m=16,n=4096,k=4096,dtype=f16"
ROWS = "softmax:rows=4096,cols=1024,dtype=f16"


@pytest.fixture(scope="module", autouse=True)
def _predicted_once() -> Iterator[None]:
    """Predict the shortest time of a workload once for all tests: an explanation compares dozens."""
    predict, known = Forecaster._best, dict[tuple[object, ...], PredictedBest | None]()

    def best(forecaster: Forecaster, workload: Workload) -> PredictedBest | None:
        key = (workload, repr(forecaster.device), forecaster.cache)
        if key not in known:
            known[key] = predict(forecaster, workload)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forecaster, "_best", best)
        yield


@pytest.fixture(scope="module")
def nothing_known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explained") / "none.db"
    open_store(path).close()
    return path


# -- by hand ----------------------------------------------------------------------------------------


def test_a_square_product_on_h100_by_hand(nothing_known: Path) -> None:
    """Two warpgroups multiply tiles of 128 x 256 in steps of 64; pairs of blocks share columns of b."""
    config = (
        "bm=128,bn=256,bk=64,stages=4,consumers=2,pingpong=0,cluster_m=2,cluster_n=1,staged=1,"
        "group_m=8,min_blocks=1,split_k=1"
    )
    analysis = explain(SQUARE, H100, variant="cuda_wgmma", config=config, db=nothing_known)
    assert (analysis.category, analysis.choice.why) == ("dot product", "asked for")
    # 132 SMs at 1980 MHz, 4096 FLOP per clock: 1070.5 TFLOP/s; 3352 GB/s; so 319.4 FLOP per byte in balance.
    roof = analysis.roofline
    assert roof.used.gflop_s == pytest.approx(132 * 4096 * 1980 / 1000)
    assert roof.used.balance == pytest.approx(319.4, abs=0.05)
    # 2 x 4096^3 FLOP and three matrices of 32 MiB: 4096 / 3 FLOP/byte, 4.27 times the balance point.
    assert roof.intensity == pytest.approx(4096 / 3)
    assert (roof.limit, roof.factor) == ("math", pytest.approx(4096 / 3 / 319.371, rel=1e-4))
    assert roof.us == pytest.approx(137_438_953_472 / 1_070_530_560)
    # 32 x 16 tiles on 132 SMs: the busiest SM has 4, of 2 x 128 x 256 x 4096 FLOP each: 65,536 clocks.
    floors = analysis.bound.floors
    assert floors["tensor pipe"] == pytest.approx(4 * 65_536 / 1980)
    # Written to and read from shared memory once: 2 x (128 + 256) x 4096 x 2 bytes, 128 per clock.
    assert floors["shared"] == pytest.approx(4 * 49_152 / 1980)
    # 128 rows of a, half of 256 columns of b, 64 bytes per clock.
    assert floors["fill port"] == pytest.approx(4 * 32_768 / 1980)
    # 2 warpgroups of 4 warps issue a product of 64 rows each for every 16 of k; 4 instructions per clock.
    assert floors["issue"] == pytest.approx(4 * 2 * 4 * 256 / 4 / 1980)
    # Two matrices are read; the third fits in 50 MiB of cache.
    assert floors["dram"] == pytest.approx(2 * 33.554432e6 / 3352e3)
    assert analysis.bound.us == floors["tensor pipe"]
    # The fastest library products of this size take 166 us (library_gemm_h100_sxm.csv).
    assert 1.2 * floors["tensor pipe"] < analysis.predicted_us < 1.2 * 166
    assert (analysis.limit.kind, analysis.limit.against) == ("math", "shared")
    assert analysis.limit.factor == pytest.approx(4 / 3)
    assert analysis.tiles_used == 1
    waves, block = analysis.waves, analysis.block
    assert waves is not None
    assert (waves.blocks, waves.last_blocks, waves.idle_sms) == (512, 512 - 3 * 132, 16)
    assert waves.used == pytest.approx(512 / 528)
    assert block is not None
    assert block.occupancy is not None
    # 4 stages of (128 + 256) x 64 x 2 bytes, 8 warps' 16 x 40 floats, 10 barriers: one block of 228 KB.
    assert block.smem_bytes == 4 * 49_152 + 8 * 2560 + 80
    assert (block.threads, block.occupancy.blocks, block.occupancy.warps) == (384, 1, 12)
    assert block.occupancy.limited_by == ("shared memory",)
    share = analysis.shares(analysis.predicted_us).of_bound
    assert share == pytest.approx(analysis.bound.us / analysis.predicted_us)


def test_a_skinny_product_on_a100_by_hand(nothing_known: Path) -> None:
    """Tiles of 16 x 64 by four warps, k in steps of 64 and in two halves, summed by a second launch."""
    config = (
        "bm=16,bn=64,warps_m=1,warps_n=4,bk=64,split_k=2,stream_k=0,stages=5,staged=1,group_m=1,min_blocks=1"
    )
    analysis = explain(SKINNY, A100, variant="cuda_mma", config=config, db=nothing_known)
    read, written = 2 * 4096 * (16 + 4096), 2 * 16 * 4096
    assert analysis.roofline.intensity == pytest.approx(2 * 16 * 4096 * 4096 / (read + written))  # 15.9
    # 108 x 2048 x 1410 MHz over 2039 GB/s: 153 FLOP per byte in balance.
    assert analysis.roofline.used.balance == pytest.approx(152.95, abs=0.01)
    assert (analysis.roofline.limit, analysis.roofline.factor) == (
        "memory",
        pytest.approx(9.634, abs=0.001),
    )
    # 64 tiles, two blocks each, on 108 SMs: the busiest SM has 2, each with 2048 of k.
    clocks = {
        "tensor pipe": 2 * 16 * 64 * 2048 / 2048,
        # 4 warps read fragments of 512 bytes, one of a and one of b for every 16 of k, and the copied bytes.
        "shared": (4 * 2 * 128 * 512 + 2048 * 2 * (16 + 64)) / 128,
        "fill port": (16 + 64) * 2048 * 2 / 64,
        # A product of 16 x 8 and its fragments: 2 + 2 instructions per warp for every 16 of k.
        "issue": 4 * 4 * 128 / 4,
    }
    for resource, clock_count in clocks.items():
        assert analysis.bound.floors[resource] == pytest.approx(2 * clock_count / 1410), resource  # type: ignore[index]
    assert analysis.bound.us == pytest.approx(read / 2039e3)
    # Memory reaches a share of its peak; two launches.
    assert read / 2039e3 / CONSTANTS.dram + 2 * LAUNCH_US < analysis.predicted_us < 2 * read / 2039e3
    assert (analysis.limit.kind, analysis.limit.against) == ("memory", "shared")
    assert analysis.waves == Waves(blocks=128, sm_count=108, blocks_per_sm=3)
    assert analysis.waves.used == pytest.approx(128 / 216)
    assert analysis.block is not None
    assert analysis.block.occupancy is not None
    # 5 stages of (16 + 64) x 64 x 2 bytes and 1 KB reserved: three blocks in 164 KB.
    assert analysis.block.smem_bytes == 51_200
    assert analysis.block.occupancy.limits["shared memory"] == 3


@pytest.mark.parametrize(
    ("where", "sheet", "resident", "limited"),
    [
        # 32 blocks of 64 threads fill an SM of H100.
        (H100, (132, 1980, 3352, 50, 128), 32, "memory"),
        (A100, (108, 1410, 2039, 40, 64), 32, "memory"),
        (T4, (40, 1590, 320, 4, 64), 16, "memory"),
    ],
)
def test_a_softmax_by_hand(
    where: Device, sheet: tuple[int, ...], resident: int, limited: str, nothing_known: Path
) -> None:
    """One row per block of 64 threads, 8 elements per access, kept in registers."""
    sms, mhz, gb_s, cache_mib, lanes = sheet
    config = "cache=registers,row_threads=64,rows=1,vector=8,unroll=1"
    analysis = explain(ROWS, where, variant="cuda_block", config=config, db=nothing_known)
    assert analysis.category == "reduction"
    # 5 FLOP per element of 2 + 2 bytes.
    assert analysis.roofline.intensity == 1.25
    assert analysis.roofline.used.balance == pytest.approx(sms * 2 * lanes * mhz / (gb_s * 1000))
    assert [ceiling.pipe for ceiling in analysis.roofline.ceilings] == ["fma pipe", "tensor pipe"]
    assert analysis.roofline.us == pytest.approx(16 * 2**20 / (gb_s * 1000))
    # 8 MiB are read; of 8 MiB written, the cache may keep its size.
    from_memory = (8 + max(0, 8 - cache_mib)) * 2**20 / (gb_s * 1000)
    assert analysis.bound.floors["dram"] == analysis.bound.us == pytest.approx(from_memory)
    # Rows of the busiest SM: 1024 exponentials and 2048 multiply-adds each, or 32 + 64 instructions.
    rows = -(-4096 // sms)
    assert analysis.bound.floors["special functions"] == pytest.approx(rows * 1024 / 16 / mhz)
    assert analysis.bound.floors["fma pipe"] == pytest.approx(rows * 2048 / lanes / mhz)
    assert analysis.bound.floors["issue"] == pytest.approx(rows * 96 / 4 / mhz)
    # Reads take 64 bytes per clock, less one sector at either end.
    assert analysis.bound.floors["fill port"] == pytest.approx(rows * (2048 - 64) / 64 / mhz)
    moved_us = 16 * 2**20 / (gb_s * 1000)
    assert moved_us / CONSTANTS.dram + LAUNCH_US < analysis.predicted_us < 2 * moved_us + LAUNCH_US
    assert analysis.limit.kind == limited
    assert analysis.tiles_used == 1
    assert analysis.waves == Waves(blocks=4096, sm_count=sms, blocks_per_sm=resident)
    assert analysis.waves.used == pytest.approx(4096 / (sms * rows))


# -- the parts --------------------------------------------------------------------------------------


@given(st.integers(1, 3000), st.integers(1, 200), st.integers(1, 32))
def test_waves_match_blocks_assigned_in_turn(blocks: int, sms: int, resident: int) -> None:
    waves, remaining, rounds = Waves(blocks=blocks, sm_count=sms, blocks_per_sm=resident), blocks, 0
    while remaining > sms * resident:
        remaining, rounds = remaining - sms * resident, rounds + 1
    assert (waves.last_blocks, waves.idle_sms) == (remaining, sum(sm >= remaining for sm in range(sms)))
    assert math.ceil(waves.count) == rounds + 1
    blocks_of_sm = [
        len(range(sm, blocks, sms)) for sm in range(sms)
    ]  # assigned in turn, whatever the number of resident blocks
    assert waves.used == pytest.approx(sum(blocks_of_sm) / (sms * max(blocks_of_sm)))


@pytest.mark.parametrize("min_blocks", [1, 2])
def test_persistent_blocks_per_sm_come_from_the_launch(min_blocks: int, nothing_known: Path) -> None:
    config = (
        "bm=64,bn=64,bk=64,stages=2,consumers=1,pingpong=0,cluster_m=1,cluster_n=1,staged=0,group_m=1,"
        f"min_blocks={min_blocks},split_k=1"
    )
    analysis = explain(SQUARE, H100, variant="cuda_wgmma", config=config, db=nothing_known)
    assert analysis.block is not None
    assert analysis.block.occupancy is not None
    assert analysis.block.occupancy.blocks > 2  # more would fit
    assert analysis.waves == Waves(blocks=64 * 64, sm_count=132, blocks_per_sm=min_blocks)


def bound_of(**floors: float) -> Bound:
    named: Any = {name.replace("_", " "): us for name, us in floors.items()}
    ordered = dict(sorted(named.items(), key=lambda item: -item[1]))
    binding = next(iter(ordered))
    return Bound(us=ordered[binding], binding=binding, floors=ordered, assumed=False)


FULL, FEW = (Waves(blocks=n, sm_count=100, blocks_per_sm=1) for n in (500, 25))


@pytest.mark.parametrize(
    ("floors", "work_us", "waves", "expected"),
    [
        ({"dram": 50, "tensor_pipe": 20, "shared": 10}, 66.5, FULL, ("memory", "floor", "tensor pipe", 2.5)),
        ({"tensor_pipe": 50, "issue": 40, "dram": 10}, 66.5, FULL, ("math", "floor", "dram", 5)),
        (
            {"shared": 5, "fill_port": 4.5, "fma_pipe": 4},
            7,
            FULL,
            ("on-chip memory", "floor", "fma pipe", 1.25),
        ),
        ({"tensor_pipe": 50}, 66.5, FULL, ("math", "floor", None, None)),
        ({"tensor_pipe": 50, "dram": 10}, 66.5, FEW, ("latency", "few blocks", None, 4)),
        # Memory is the limit, whatever the number of SMs in use.
        ({"dram": 50, "tensor_pipe": 10}, 66.5, FEW, ("memory", "floor", "tensor pipe", 5)),
        ({"dram": 0.5}, LAUNCH_US / 2, FULL, ("latency", "launch", None, 2)),
        ({"dram": 3}, 3.6, FULL, ("memory", "floor", None, None)),
    ],
)
def test_limiting_resource(floors: Any, work_us: float, waves: Waves, expected: tuple[Any, ...]) -> None:
    limiting = limit(bound_of(**floors), work_us + LAUNCH_US, 1, waves)
    *names, factor = expected
    assert [limiting.kind, limiting.cause, limiting.against] == names
    assert limiting.factor == (None if factor is None else pytest.approx(factor))
    assert limiting.work_us == pytest.approx(work_us)


def test_no_launch_limit_without_launch_overhead() -> None:
    assert limit(bound_of(dram=1), 1.3, 0, None).kind == "memory"


def test_every_resource_has_a_kind_of_limit() -> None:
    assert set(KINDS) >= set(RESOURCES)


def test_alignment_of_rows_names_the_dimension_to_pad() -> None:
    by_tensor = {a.tensor: a for a in alignments(parse("gemm:m=100,n=30,k=4096,dtype=f16,trans=nn"))}
    assert [(a.line, a.aligned_bytes, a.dimension) for a in by_tensor.values()] == [
        (4096, 16, "k"),
        (30, 4, "n"),  # 60 bytes
        (30, 4, "n"),
    ]
    assert [a.full for a in by_tensor.values()] == [True, False, False]
    assert by_tensor["b"].wanted == 8
    transposed = {a.tensor: a for a in alignments(parse("gemm:m=100,n=30,k=36,dtype=e4m3,trans=tt"))}
    assert (transposed["a"].line, transposed["a"].aligned_bytes, transposed["a"].wanted) == (100, 4, 16)
    assert (transposed["b"].dimension, transposed["b"].line) == ("k", 36)
    images = "conv2d:n=2,c=3,h=8,w=8,k=24,r=3,s=3,stride=1,pad=1,dtype=f16,layout="
    last = {a.tensor: (a.dimension, a.aligned_bytes) for a in alignments(parse(f"{images}nhwc"))}
    assert last == {"x": ("c", 2), "w": ("c", 2), "y": ("k", 16)}
    assert {a.dimension for a in alignments(parse(f"{images}nchw"))} == {None}


# -- advice -----------------------------------------------------------------------------------------


def fastest_us(workload: Workload, where: Device) -> float:
    tunables, _ = tunable.find_variants(workload, where, compilable=False)
    return min(variant.predicted_us(variant.fastest()) for variant in tunables)


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize(
    "text",
    [
        "elementwise:rows=4096,cols=4096,dtype=f32,expression=x+y",
        "strided_elementwise:shape=64x48,dtype=f16,expression=x,operands=x.f16.1_64",
        "softmax:rows=64,cols=1001,dtype=f32",
        "gemm:m=96,n=255,k=127,dtype=f32",
    ],
)
def test_fastest_variant_is_the_first_of_the_lowest_predicted_time(text: str, cache: CacheState) -> None:
    for where in (H100, device.local_cpu()):
        every, _ = tunable.find_variants(parse(text), where, cache=cache, compilable=False)
        first = min(
            every, key=lambda tunable_variant: tunable_variant.predicted_us(tunable_variant.fastest())
        )
        fastest = fastest_variant(parse(text), where, cache=cache)
        assert fastest is not None
        assert fastest.variant is first.variant
        assert fastest.predicted_us(fastest.fastest()) == first.predicted_us(first.fastest())
        assert least_us(parse(text).traffic(), where, cache) <= fastest.predicted_us(fastest.fastest())


def advice_on(text: str, where: Device, subject: str | None = None) -> list[explanation.Advice]:
    """Return the advice on a workload; only that on one subject if given."""
    advice = advise(parse(text), Forecaster(device=where))
    return [change for change in advice if subject in (None, change.subject)]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("gemm:m=96,n=255,k=127,dtype=f16", A100),
        ("gemm:m=96,n=264,k=520,dtype=f32", H100),
        ("conv2d:n=2,c=3,h=30,w=30,k=30,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nchw", A100),
        ("softmax:rows=64,cols=1001,dtype=f32", T4),
        ("layernorm:rows=100,cols=64,dtype=f32", H100),
    ],
)
def test_every_gain_is_the_ratio_of_two_predictions(text: str, where: Device) -> None:
    workload, advice = parse(text), advice_on(text, where)
    assert advice
    gains = [change.gain for change in advice]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 1.01
    now = fastest_us(workload, where)
    for change in advice:
        changed, items = change.change.workload, change.change.workload.flops() / workload.flops()
        assert change.after_us == pytest.approx(
            fastest_us(changed, where) / (items if change.subject == "batch" else 1)
        )
        if change.subject != "fusion":
            assert change.before_us == pytest.approx(now)
        assert changed != workload


def test_padding_lets_odd_matrices_use_tensor_cores() -> None:
    (padding,) = advice_on("gemm:m=1000,n=1023,k=1023,dtype=f16", A100, "padding")
    assert str(padding.change.workload) == "gemm:m=1000,n=1024,k=1024,dtype=f16"
    assert padding.change.text == "pad n from 1023 to 1024, k from 1023 to 1024 with zeros"
    assert padding.best.variant == "gemm/cuda_mma"
    assert padding.gain > 3
    assert not advice_on("gemm:m=1024,n=1024,k=1024,dtype=f16", A100, "padding")


def test_batch_increases_while_each_item_gets_faster() -> None:
    where, rows = H100, 64
    (batch,) = advice_on(f"softmax:rows={rows},cols=128,dtype=f16", where, "batch")
    items = batch.change.items
    us_per_item = {
        n: fastest_us(parse(f"softmax:rows={rows * n},cols=128,dtype=f16"), where) / n for n in (1, 2, items)
    }
    assert batch.gain == pytest.approx(us_per_item[1] / us_per_item[items])
    assert us_per_item[items] < us_per_item[2] / 1.05 < us_per_item[1]
    assert batch.change.text == f"increase the batch: rows from 64 to {64 * items}"


def test_less_accurate_types_must_gain_more() -> None:
    precision = advice_on("gemm:m=1024,n=1024,k=1024,dtype=f32", H100, "precision")
    types = [a.change.workload.dtype for a in precision]  # largest gain first
    assert types == ["e4m3", "f16", "tf32"]  # bf16 is not faster than f16
    fp8 = precision[0].change.workload
    assert str(fp8) == "gemm:m=1024,n=1024,k=1024,dtype=e4m3,trans=nt"  # the only layout that wgmma supports
    assert not advice_on("layernorm:rows=99,cols=999,dtype=bf16", H100, "precision")


def test_another_layout_is_advised_where_a_variant_needs_it() -> None:
    text = "gemm:m=4096,n=4096,k=4096,dtype=e4m3"
    (layout,) = advice_on(text, H100, "layout")
    assert (layout.change.text, layout.best.variant) == ("change the layout: trans=nt", "gemm/cuda_wgmma")
    assert not advice_on(f"{text},trans=nt", H100, "layout")


def test_fusion_saves_a_launch_and_memory_traffic() -> None:
    text = "softmax:rows=65536,cols=1024,dtype=f16"  # of 128 MiB
    (fusion,) = advice_on(text, H100, "fusion")
    read_and_written = 2 * (128 - 50) * 2**20  # all but the 50 MiB that the cache holds
    spared = fusion.change.spared_us
    assert read_and_written / 3352e3 + LAUNCH_US < spared < 2 * read_and_written / 3352e3
    assert fusion.before_us == pytest.approx(fastest_us(parse(text), H100) + spared)
    assert not advice_on(f"{text},prologue=scale", H100, "fusion")


def test_a_residual_is_advised_with_what_a_product_fuses() -> None:
    text = "gemm:m=1024,n=1024,k=1024,dtype=f16"
    (fusion,) = advice_on(text, H100, "fusion")
    assert "bias+silu or residual or bias+residual" in fusion.change.text
    assert not advice_on(f"{text},epilogue=residual", H100, "fusion")


def test_changes_without_gain_are_not_advised() -> None:
    cpu = dataclasses.replace(device.local_cpu(), l2_bytes=2**20)
    text = "softmax:rows=65536,cols=1024,dtype=f16,prologue=scale"
    assert advice_on(text, cpu) == []


def test_configuration_is_compared_with_the_predicted_best(nothing_known: Path) -> None:
    slow = (
        "bm=64,bn=64,tm=4,tn=4,lanes_n=8,bk=16,split_k=1,stages=1,vec=4,group_m=1,min_blocks=1"  # one block
    )
    analysis = explain(
        "gemm:m=64,n=64,k=8192,dtype=f32", H100, variant="cuda_simt", config=slow, db=nothing_known
    )
    first = analysis.advice[0]
    assert (first.subject, first.before_us) == ("configuration", analysis.predicted_us)
    assert (analysis.limit.kind, analysis.limit.cause, analysis.limit.factor) == (
        "latency",
        "few blocks",
        132,
    )
    best = explain(
        "gemm:m=64,n=64,k=8192,dtype=f32",
        H100,
        variant=first.best.variant,
        config=str(first.best.config),
        db=nothing_known,
    )
    assert best.predicted_us == pytest.approx(first.after_us)
    assert "configuration" not in {advice.subject for advice in best.advice}


# -- what is known ----------------------------------------------------------------------------------


def remember(db: Path, where: Device, config: str, us: float, cache: CacheState = "cold") -> None:
    record_outcome(db, ROWS, where, "softmax/cuda_block", config, measured(us, cache=cache))


FAST = "cache=registers,row_threads=64,rows=1,vector=8,unroll=1"
SLOW = "cache=registers,row_threads=32,rows=1,vector=8,unroll=1"


def test_measured_time_is_relative_to_bound_and_roofline(tmp_path: Path) -> None:
    db = tmp_path / "some.db"
    remember(db, T4, FAST, 60.0)
    remember(db, T4, SLOW, 80.0)
    best = explain(ROWS, T4, db=db)
    assert (best.choice.why, str(best.choice.config)) == ("best known", FAST)
    assert best.measured == explanation.MeasuredTime(median_us=60.0, how="measured here", cache="cold")
    shares = best.to_json()["shares"]["measured"]
    assert shares["of_bound"] == pytest.approx(12 * 2**20 / 320e3 / 60)
    assert shares["of_roofline"] == pytest.approx(16 * 2**20 / 320e3 / 60)
    assert shares["gflop_s"] == pytest.approx(5 * 4096 * 1024 / 60e3)
    asked = explain(ROWS, T4, variant="cuda_block", config=SLOW, db=db)
    assert asked.measured == explanation.MeasuredTime(median_us=80.0, how="measured here", cache="cold")
    assert explain(ROWS, T4, variant="numba_cuda", db=db).measured is None


def test_warm_cache_time_is_relative_to_the_warm_cache_bound(tmp_path: Path) -> None:
    db = tmp_path / "some.db"
    remember(db, T4, FAST, 30.0, "warm")
    analysis = explain(ROWS, T4, db=db)
    assert analysis.measured is not None
    assert analysis.measured.cache == "warm"
    assert analysis.bound.us == pytest.approx((4 + 4) * 2**20 / 320e3)  # 4 MiB of each may be in the cache


def test_time_of_another_device_has_no_shares(tmp_path: Path) -> None:
    db, smaller = tmp_path / "some.db", dataclasses.replace(T4, name="t4-of-another", sm_count=20)
    remember(db, smaller, FAST, 1.0)
    analysis = explain(ROWS, T4, db=db)
    assert analysis.measured is not None
    assert analysis.measured.how == "same architecture"
    assert set(analysis.to_json()["shares"]) == {"predicted"}


def test_nothing_need_be_installed_to_compile(nothing_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunable, "unavailable", lambda language: f"{language} is not installed")
    with pytest.raises(InputError, match="is not installed"):
        tunable.find_variants(parse(ROWS), H100)
    assert explain(ROWS, H100, db=nothing_known).advice


def test_device_with_few_known_limits(nothing_known: Path) -> None:
    future = device.Device(
        name="future",
        kind="gpu",
        architecture="sm_77",
        sm_count=10,
        max_clock_mhz=1000,
        dram_gb_s=100,
        l2_bytes=0,
        fma_per_clock=64,
        smem_per_block_bytes=49152,
    )
    analysis = explain(ROWS, future, variant="cuda_block", db=nothing_known)
    assert analysis.block is not None
    assert analysis.block.occupancy is None
    assert analysis.waves is not None
    assert analysis.waves.blocks_per_sm == 1
    assert analysis.bound.floors["dram"] == pytest.approx(16 * 2**20 / 100e3)


def test_cpu_has_no_blocks_and_no_launches(nothing_known: Path) -> None:
    analysis = explain("softmax:rows=64,cols=64,dtype=f32", "cpu", db=nothing_known)
    assert (analysis.block, analysis.waves, analysis.limit.launch_us) == (None, None, 0)
    assert set(analysis.bound.floors) <= {"dram", "fma pipe"}


def test_invalid_configuration_is_rejected(nothing_known: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid; expected"):
        explain(ROWS, T4, variant="cuda_block", config="rows=99", db=nothing_known)


# -- the command, the plot --------------------------------------------------------------------------


def test_the_command_for_people_and_as_json(capsys: pytest.CaptureFixture[str], nothing_known: Path) -> None:
    arguments = ("explain", "-w", SQUARE, "--device", "a100-80-sxm", "--db", str(nothing_known))
    assert cli.run([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["variant"], shown["why"], shown["category"]) == (
        "gemm/cuda_mma",
        "predicted best",
        "dot product",
    )
    assert shown["limit"]["kind"] == "math"
    assert shown["waves"]["idle_sms"] == -shown["waves"]["blocks"] % 108
    assert shown["block"]["occupancy"]["limited_by"]
    assert shown == json.loads(json.dumps(explain(SQUARE, A100, db=nothing_known).to_json()))
    assert cli.run(arguments) == 0
    text = capsys.readouterr().out
    for part in (
        "1365 FLOP/byte: math limited on the tensor pipe (8.93x the balance point)",
        "311.9 TFLOP/s in f16, balanced with memory at 153 FLOP/byte",
        "(predicted best)",
        "100.0% of SM time is in use: 216 blocks on 108 SMs",
        "not supported here: gemm/cuda_wgmma needs sm_90",
    ):
        assert part in text, text


def test_command_shows_measured_time_and_latency_limit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    db = str(tmp_path / "some.db")
    remember(tmp_path / "some.db", T4, FAST, 60.0)
    assert cli.run(["explain", "-w", ROWS, "--device", "t4", "--db", db]) == 0
    assert (
        "66% of the rate at the lower bound, 87% of the roofline (measured here, cold caches)"
        in capsys.readouterr().out
    )
    small = "softmax:rows=64,cols=99,dtype=f16"
    assert cli.run(["explain", "-w", small, "--arch", "sm_90", "--variant", "cuda_block", "--db", db]) == 0
    text = capsys.readouterr().out
    assert "latency limited: " in text
    assert f"launch overhead about {significant(LAUNCH_US)} us" in text
    assert "16 bytes need cols: a multiple of 8" in text
    text = "gemm:m=64,n=64,k=8192,dtype=f32"
    config = "bm=64,bn=64,tm=4,tn=4,lanes_n=8,bk=16,split_k=1,stages=1,vec=4,group_m=1,min_blocks=1"
    assert (
        cli.run(["explain", "-w", text, "--arch", "sm_90", "--variant", "cuda_simt", "--config", config]) == 0
    )
    assert "latency limited: 1 blocks on 132 SMs (ratio 132.00)" in capsys.readouterr().out


def test_command_names_the_part_of_a_measured_time_that_is_unexplained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    db = tmp_path / "some.db"
    predicted_us = explain(ROWS, T4, variant="cuda_block", config=FAST, db=db).predicted_us
    for measured_us, shown in ((predicted_us + 20, True), (predicted_us - 1, False)):
        remember(db, T4, FAST, measured_us)
        assert cli.run(["explain", "-w", ROWS, "--device", "t4", "--db", str(db)]) == 0
        text = capsys.readouterr().out
        assert ("unexplained" in text) is shown
        assert ("20 us: measured minus predicted" in text) is shown


@pytest.mark.parametrize("built_in_us", [None, 60.0])
def test_command_names_a_measured_variant_whose_file_is_not_loaded(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built_in_us: float | None,
) -> None:
    db, small = tmp_path / "some.db", "softmax:rows=64,cols=64,dtype=f32"
    file = Path(__file__).parents[1] / "data" / "forty_variant.py"
    with kernels.variant_file_scope(empty=True):
        kernels.load_file(file)
        outcome = dataclasses.replace(measured(5.0), conditions={VARIANT_FILE: str(file)})
        record_outcome(db, small, device.local_cpu(), "softmax/forty", "copy=1", outcome)
    if built_in_us is not None:
        table = kernels.variant("softmax/numba_cpu").configs(parse(small), device.local_cpu())
        outcome = measured(built_in_us)
        record_outcome(db, small, device.local_cpu(), "softmax/numba_cpu", table.config(0), outcome)
    named = "softmax/forty took 5.00 us on"
    for command in ("explain", "lookup"):
        assert cli.run([command, "-w", small, "--device", "cpu", "--db", str(db)]) == (
            3 if built_in_us is None else 0
        )
        text = "".join(capsys.readouterr())
        assert named in text
        assert f"its file is not loaded: use --variant-file {file}" in text


def test_user_operator_without_category_or_changes(nothing_known: Path) -> None:
    """Run in a separate process, because a loaded operator stays registered."""
    file = Path(__file__).parents[2] / "docs" / "examples" / "my_kernel.py"
    problem = ("-w", "distance:n=200,m=300,dim=64", "--device", "cpu", "--db", str(nothing_known))
    command = (sys.executable, "-m", "tunebench", "explain", "--variant-file", str(file), *problem)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "not stated by the operator" in text
    assert "distance/numba_cpu form=difference" in text
    assert "fma pipe" in text


def explained(db: Path) -> Explanation:
    return explain(ROWS, T4, db=db)


def test_without_matplotlib_the_error_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nothing_known: Path
) -> None:
    really = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return really(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    from tunebench.explanation.plot import draw

    with pytest.raises(MissingDependency):
        draw(explained(nothing_known), tmp_path / "roofline.png")
    command = ["explain", "-w", ROWS, "--device", "t4", "--plot", str(tmp_path / "roofline.png")]
    assert cli.run([*command, "--db", str(nothing_known)]) == 6
    assert "matplotlib is not installed; run: pip install 'matplotlib>=3.9'" in capsys.readouterr().err
    assert not (tmp_path / "roofline.png").exists()


def test_the_plot_holds_ceilings_and_points(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    from tunebench.explanation.plot import draw, figure

    db = tmp_path / "some.db"
    remember(db, T4, FAST, 60.0)
    analysis = explained(db)
    (axes,) = figure(analysis).axes
    drawn = {line.get_label().partition(":")[0]: line for line in axes.get_lines()}
    assert set(drawn) == {
        *("fma pipe in f32", "tensor pipe in f16", "memory"),
        *("attainable", "bound", "predicted", "measured"),
    }
    assert drawn["fma pipe in f32"].get_xydata()[0] == pytest.approx(
        (40 * 128 * 1590 / 320e3, 40 * 128 * 1.59)
    )
    for x, y in drawn["memory"].get_xydata():
        assert y == pytest.approx(320 * x)
    assert drawn["attainable"].get_xydata()[0] == pytest.approx((1.25, 1.25 * 320))
    assert drawn["measured"].get_xydata()[0] == pytest.approx((1.25, 5 * 4096 * 1024 / 60e3))
    draw(analysis, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"must be one of .*\.svg"):
        draw(analysis, tmp_path / "roofline.txt")


@pytest.mark.parametrize(
    ("variant", "beaten"), [("cuda_winograd", True), ("cuda_implicit_gemm", False)], ids=str
)
def test_time_below_the_roofline_names_its_reason(
    nothing_known: Path, capsys: pytest.CaptureFixture[str], variant: str, beaten: bool
) -> None:
    text = "conv2d:n=32,c=256,h=28,w=28,k=256,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc"
    analysis = explain(text, H100, variant=variant, db=nothing_known)
    shares = analysis.shares(analysis.predicted_us)
    assert analysis.roofline.limit == "math"
    assert shares.of_bound <= 1
    assert (shares.of_roofline > 1) is beaten
    command = [
        "explain",
        "-w",
        text,
        "--device",
        "h100-sxm",
        "--variant",
        variant,
        "--db",
        str(nothing_known),
    ]
    assert cli.run(command) == 0
    assert ("the algorithm needs fewer" in capsys.readouterr().out.replace("\n", " ")) is beaten


def test_fusion_is_compared_with_its_parts() -> None:
    analysis = explain("gemm:m=512,n=3072,k=768,dtype=f16,epilogue=bias+gelu", "h100-sxm")
    assert analysis.fusing is not None
    product, chain = analysis.fusing.parts
    assert (product.variant.partition("/")[0], chain.variant.partition("/")[0]) == ("gemm", "elementwise")
    assert analysis.fusing.parts_us == product.us + chain.us
    assert analysis.fusing.gain > 1
    # The product stays in the cache between the two kernels; alone, the expression would read it from memory.
    forecaster = Forecaster(device=analysis.choice.device)
    alone = forecaster.best(analysis.fusing.workloads[1])
    assert alone is not None
    assert chain.us < alone.us
    assert analysis.to_json()["fusing"]["parts"][0]["workload"] == "gemm:m=512,n=3072,k=768,dtype=f16"


def test_unfused_workload_has_no_fusion_gain() -> None:
    analysis = explain("gemm:m=512,n=3072,k=768,dtype=f16", "h100-sxm")
    assert analysis.fusing is None
    assert analysis.to_json()["fusing"] is None
