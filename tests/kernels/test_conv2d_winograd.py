"""conv2d by Winograd's minimal filtering in CUDA C++: its products, results, and lower bound."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import kernel_checks as checks
from tests.kernels.convolutions import conv
from tests.kernels.kernel_checks import A100, H100
from tests.support import needs_compiler, needs_nvrtc
from tunebench import workloads
from tunebench.bound import bound
from tunebench.device import representative
from tunebench.explanation.grid import blocks_and_waves
from tunebench.kernels.conv2d.cuda_implicit_gemm import VARIANT as SIMT
from tunebench.kernels.conv2d.cuda_winograd import VARIANT, product_of
from tunebench.workloads.operators.conv2d import Conv2d

LAYER = conv("n=32,c=128,h=28,w=28,k=128,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc")


def some_config(workload: Conv2d, m: int, device: Any = H100) -> Any:
    table = VARIANT.configs(workload, device)
    rows = np.flatnonzero(table["m"] == m)
    return table.config(int(random.Random(str(workload)).choice(list(rows))))


ODD = (
    (4, "n=2,c=37,h=9,w=7,k=24,pad=1,layout=nhwc,epilogue=scale+bias+residual+relu"),
    (4, "n=2,c=21,h=6,w=11,k=34,pad=1,layout=nchw,direction=dgrad"),
    (2, "n=2,c=11,h=9,w=10,k=19,pad=0,layout=nhwc,direction=dgrad"),
    (2, "n=1,c=17,h=1,w=7,k=20,pad=2,layout=nchw,epilogue=bias+relu"),
)


@needs_compiler
@pytest.mark.parametrize(("m", "text"), ODD)
def test_odd_sizes_are_right(m: int, text: str) -> None:
    workload = conv(f"{text},r=3,s=3,stride=1,dtype=f32")
    config = some_config(workload, m)
    checks.assert_emulates_right(VARIANT, workload, config, sanitize=True, order="random", seed=2)


def test_products_are_fewer_by_what_winograd_saves() -> None:
    for m, saved in ((2, 2.25), (4, 4.0)):
        assert LAYER.flops() / product_of(LAYER, m).flops() == saved
        by_filters = product_of(replace(LAYER, layout="nchw"), m)
        assert by_filters.flops() == product_of(LAYER, m).flops()
        assert (by_filters.m, by_filters.n) == (product_of(LAYER, m).n, product_of(LAYER, m).m)


def test_the_bound_is_of_the_products_that_are_made() -> None:
    """The bound must not count the multiply-adds of a direct convolution, which are four times as many."""
    floors = {}
    for variant in (VARIANT, SIMT):
        table = variant.configs(LAYER, A100)
        bounds = bound(variant.costs(LAYER, table, A100), LAYER.traffic(), A100, rows=len(table))
        floors[variant.name] = (bounds.floors["fma pipe"], table)
    textbook = LAYER.flops() / 2 / (A100.sm_count * A100.fma_per_clock * A100.max_clock_mhz)
    direct, _ = floors[SIMT.name]
    ours, table = floors[VARIANT.name]
    assert direct.min() >= textbook
    for m, saved in ((2, 2.25), (4, 4.0)):
        assert ours[table["m"] == m].min() == pytest.approx(textbook / saved, rel=0.1)


def test_blocks_and_waves_are_those_of_the_products() -> None:
    config = VARIANT.default(LAYER, A100)
    costs = checks.costs_of(VARIANT, LAYER, config, A100)
    block, waves = blocks_and_waves(VARIANT, LAYER, config, costs, A100)
    assert block is not None
    assert waves is not None
    assert waves.blocks == VARIANT.launches(LAYER, config)[2].grid[0] == 36 * 13
    assert block.smem_bytes > 0


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_tiles_of_4_are_for_many_channels_only(layout: Any) -> None:
    for channels, sizes in ((8, {2}), (31, {2}), (32, {2, 4})):
        workload = replace(LAYER, c=channels, layout=layout)
        assert set(VARIANT.configs(workload, A100)["m"].tolist()) == sizes
        assert VARIANT.default(workload, A100)["m"] == max(sizes)
    assert "8 channels" in str(VARIANT.refuses(replace(LAYER, c=7), A100))


def test_unsupported_workloads_are_refused_with_a_reason() -> None:
    assert "f16" in str(VARIANT.refuses(replace(LAYER, dtype="f16"), A100))
    assert "3 x 3" in str(VARIANT.refuses(replace(LAYER, stride=2), A100))
    assert "bytes" in str(VARIANT.refuses(replace(LAYER, n=2**16), A100))
    assert "pixels" in str(VARIANT.refuses(replace(LAYER, n=2**22), A100))


def test_emulation_workloads_are_small_and_as_accurate() -> None:
    for workload in (LAYER, replace(LAYER, direction="dgrad", layout="nchw", h=29, w=30)):
        for m in (2, 4):
            config = some_config(workload, m)
            small = VARIANT.emulation_workload(workload, config)
            assert VARIANT.refuses(small, H100) is None
            assert product_of(small, m).flops() < 2e8
            assert m in VARIANT.configs(small, H100)["m"]
            assert [launch.entry for launch in VARIANT.launches(small, config)] == [
                launch.entry for launch in VARIANT.launches(workload, config)
            ]


def test_spaces_are_large_enough_to_search_and_small_enough_to_enumerate() -> None:
    for layer in workloads.suite("resnet50", batch=32):
        workload = replace(layer.workload, dtype="f32")  # type: ignore[type-var]
        if isinstance(workload, Conv2d) and VARIANT.refuses(workload, A100) is None:
            assert 1000 < len(VARIANT.configs(workload, A100)) < 30_000


@needs_nvrtc
@pytest.mark.parametrize(
    "changes", [{"epilogue": "scale+bias+relu"}, {"layout": "nchw", "direction": "dgrad"}]
)
def test_transforms_compile_without_spills(changes: dict[str, Any]) -> None:
    workload, device = replace(LAYER, **changes), representative("sm_75")
    binary = checks.compiled(VARIANT, workload, device)
    assert len(binary.entries) == len(VARIANT.launches(workload, VARIANT.default(workload, device)))
