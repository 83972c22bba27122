"""The GPU variants of conv2d: results, launches, declared costs and refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.convolutions import GPUS, conv, convolutions, training
from tests.kernels.kernel_checks import A100, H100, assert_emulates_right
from tests.support import needs_compiler, needs_numba_cuda, needs_nvrtc
from tunebench import workloads
from tunebench.bound import bound
from tunebench.device import representative
from tunebench.emulate.emulator import ORDERS
from tunebench.kernels.conv2d import _conv
from tunebench.kernels.conv2d._conv import Product, alignment, product
from tunebench.kernels.conv2d.cuda_implicit_gemm import VARIANT as SIMT
from tunebench.kernels.conv2d.cuda_implicit_gemm_mma import VARIANT as MMA
from tunebench.kernels.conv2d.numba_cuda import VARIANT as NUMBA
from tunebench.space import Config
from tunebench.workloads.operators.conv2d import Conv2d

VARIANTS = (SIMT, MMA, NUMBA)

# ---------------------------------------------------------------------------------- as a product of matrices


def met(image: int, output: int, taps: int, pad: int, workload: Conv2d) -> int:
    """Return the number of pairs of an output and a tap that meet inside the image, along one axis."""
    w = workload
    pairs = itertools.product(range(output), range(taps))
    return sum(0 <= out * w.stride - pad + tap * w.dilation < image for out, tap in pairs)


def products_inside(workload: Conv2d) -> int:
    """Return the multiply-adds with both operands inside the tensors."""
    w = workload
    rows, columns = met(w.h, w.p, w.r, w.pad, w), met(w.w, w.q, w.s, w.pad_w, w)
    return w.n * rows * columns * (w.c // w.groups) * w.k


def reached(workload: Conv2d, image: int, taps: int, pad: int) -> int:
    """Return the pairs of a pixel and a tap whose distance is a multiple of the stride, inside dy or not."""
    w = workload
    pairs = itertools.product(range(image), range(taps))
    return sum((pixel + pad - tap * w.dilation) % w.stride == 0 for pixel, tap in pairs)


@given(workload=convolutions(largest=31))
def test_residue_classes_hold_every_pixel_and_every_tap_that_reaches_it_once(workload: Conv2d) -> None:
    w = replace(workload, direction="dgrad", epilogue="none")
    classes = product(w).classes
    assert sum(c.count * c.m for c in classes) == w.n * w.h * w.w
    assert len({(c.m, c.taps) for c in classes}) == len(classes)
    expected = w.n * reached(w, w.h, w.r, w.pad) * reached(w, w.w, w.s, w.pad_w)
    assert sum(c.count * c.m * c.taps for c in classes) == expected
    # The first class in the kernels' order, remainder 0 in both directions, has most rows and decides the
    # number of tiles.
    assert product(w).m == w.n * -(-w.h // w.stride) * -(-w.w // w.stride)


def test_a_stride_beyond_the_image_leaves_a_class_a_pixel() -> None:
    whole = product(conv("n=2,c=3,h=2,w=3,k=5,r=1,s=1,stride=7,pad=0,dtype=f32,layout=nhwc,direction=dgrad"))
    assert sorted((c.count, c.m, c.taps) for c in whole.classes) == [(1, 2, 1), (5, 2, 0)]


@given(workload=convolutions(), walk=st.sampled_from(["by_tap", "flat"]))
def test_steps_cover_k_and_less_than_a_step_more(workload: Conv2d, walk: str) -> None:
    whole = product(workload)
    for c in whole.classes:
        steps = int(whole.steps(c.taps, np.array(16), np.array(walk)))
        empty = c.taps * 15 if walk == "by_tap" else 15
        assert 0 <= steps * 16 - c.taps * whole.depth <= empty


# ------------------------------------------------------------------------------------------- spaces and costs


@given(workload=convolutions(), device=st.sampled_from(GPUS))
def test_the_default_is_a_valid_configuration(workload: Conv2d, device: Any) -> None:
    checks.assert_default_is_valid(VARIANTS, workload, device)


@given(workload=convolutions(), device=st.sampled_from(GPUS))
@example(
    workload=conv("n=2,c=8,h=5,w=8,k=31,r=1,s=2,stride=1,pad=0,dtype=f32,direction=wgrad,layout=nchw"),
    device=A100,
)
def test_declared_work_covers_what_must_be_done(workload: Conv2d, device: Any) -> None:
    """Tiles are whole, so that the work of all blocks is at least that of the workload."""
    needed = products_inside(workload)
    for variant in (SIMT, MMA):
        if variant.refuses(workload, device) is not None:
            continue
        table = variant.configs(workload, device)
        assert len(table)
        costs = variant.costs(workload, table, device)
        done = costs.blocks * (costs.fma + np.asarray(costs.mma_flop) / 2)
        # The shortest part of K is declared; parts have 4 steps or more, and differ by one step at most.
        declared = np.where(table["split"] == 1, 1.0, 4 / 5)
        assert np.all(done >= declared * needed * (1 - 1e-9))
        row = random.Random(str(workload)).randrange(len(table))
        grid = variant.launches(workload, table.config(row))[0].grid
        assert 0 < np.broadcast_to(costs.full_blocks, len(table))[row] <= grid[0] * grid[1]
        assert len(bound(costs, workload.traffic(), device, rows=len(table))) == len(table)


@given(workload=convolutions())
def test_numba_declares_the_products_inside_images_of_whole_tiles(workload: Conv2d) -> None:
    if NUMBA.refuses(workload, H100) is None:
        table = NUMBA.configs(workload, H100)
        costs = NUMBA.costs(workload, table, H100)
        width = table["filters"] * table["per_thread"]
        of_group = workload.k // workload.groups
        padded = -(-of_group // width) * width / of_group
        np.testing.assert_allclose(costs.blocks * costs.fma, products_inside(workload) * padded, rtol=1e-9)


def test_spaces_are_large_enough_to_search_and_small_enough_to_enumerate() -> None:
    for layer in workloads.suite("resnet50", batch=32):
        workload = layer.workload
        if isinstance(workload, Conv2d):
            assert 500 < len(SIMT.configs(workload, A100)) < 20_000
            assert 300 < len(MMA.configs(workload, A100)) < 20_000
            assert 40 < len(NUMBA.configs(workload, A100)) < 1000


def test_unsupported_workloads_are_refused_with_a_reason() -> None:
    base = conv("n=1,c=8,h=8,w=8,k=8,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc")
    assert SIMT.refuses(base, A100) is None
    assert "f32" in str(MMA.refuses(base, A100))
    assert "sm_80" in str(MMA.refuses(replace(base, dtype="f16"), representative("sm_75")))
    assert "fprop" in str(NUMBA.refuses(replace(base, direction="wgrad"), A100))
    assert "bf16" in str(NUMBA.refuses(replace(base, dtype="bf16"), A100))
    assert "blocks" in str(NUMBA.refuses(replace(base, n=2**20, h=256, w=256, k=64), A100))
    beyond_memory = replace(base, n=2**31 - 1, h=2**10, w=2**10)
    beyond_offsets = base.changed(pad=2**30, stride=2**30, c=64)
    for variant, huge in itertools.product((SIMT, MMA), (beyond_memory, beyond_offsets)):
        assert "2**44" in str(variant.refuses(replace(huge, dtype="tf32"), A100))


def test_large_tensors_get_wide_indices_and_small_ones_share_a_binary() -> None:
    small = conv("n=2,c=64,h=56,w=56,k=64,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc")
    for variant in (SIMT, MMA):
        config = variant.default(small, A100)
        name = variant.launches(small, config)[0].entry
        assert ", i32, " in name
        assert variant.launches(replace(small, n=7, h=28), config)[0].entry == name
        large = variant.launches(replace(small, n=2**14), config)[0]
        assert large.entry == name.replace("i32", "i64")
        assert {a.ctype for a in large.arguments if not isinstance(a, str)} == {"long long"}


def test_accesses_are_no_wider_than_alignment() -> None:
    text = "n=2,c=6,h=6,w=10,k=12,r=3,s=3,stride=1,pad=1,dtype=f16"
    widths = {
        (layout, direction): alignment(conv(f"{text},layout={layout},direction={direction}"), "flat")
        for layout, direction in itertools.product(("nhwc", "nchw"), ("fprop", "dgrad", "wgrad"))
    }
    assert widths == {
        ("nhwc", "fprop"): (2, 2, 4),
        ("nhwc", "dgrad"): (4, 2, 2),
        ("nhwc", "wgrad"): (2, 4, 2),
        ("nchw", "fprop"): (1, 2, 4),
        ("nchw", "dgrad"): (1, 1, 4),
        ("nchw", "wgrad"): (1, 4, 2),
    }
    # A filter of one tap reads whole images in a row.
    pointwise = conv(f"{text},layout=nchw").changed(r=1, s=1, pad=0, h=8, w=2)
    assert alignment(pointwise, "by_tap") == (8, 2, 8)


# ------------------------------------------------------------------------------------------------ emulation


def padded_work(whole: Product, config: Config) -> float:
    return float(whole.work(config["bm"], config["bn"], config["bk"], config["walk"]))


def test_emulation_workloads_run_the_same_binary_on_few_tiles_with_the_same_edges() -> None:
    choose = random.Random(0)
    layers = [layer.workload for layer in workloads.suite("resnet50", batch=32)]
    layers = [layer for layer in layers if isinstance(layer, Conv2d)]
    for layer in choose.sample(layers, 6):
        for workload, variant in itertools.product(training(layer), (SIMT, MMA)):
            table = variant.configs(workload, A100)
            for row in choose.sample(range(len(table)), 3):
                config = table.config(row)
                small = variant.emulation_workload(workload, config)
                names = [launch.entry for launch in variant.launches(workload, config)]
                assert [launch.entry for launch in variant.launches(small, config)] == names
                large_product, small_product = product(workload), product(small)
                assert padded_work(small_product, config) < 2e7
                for tile, large_extent, small_extent in (
                    (config["bm"], large_product.m, small_product.m),
                    (config["bn"], large_product.n, small_product.n),
                ):
                    assert large_extent % tile == 0 or small_extent % tile != 0
                    assert small_extent <= large_extent


def test_small_workload_is_its_own_emulation_workload() -> None:
    tiny = conv("n=1,c=3,h=5,w=4,k=2,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc")
    for variant in VARIANTS[:2]:
        assert variant.emulation_workload(tiny, variant.default(tiny, A100)) == tiny


# ------------------------------------------------------------------------------------------------- emulation


ODD = (
    "n=2,c=5,h=11,w=7,k=7,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nchw,epilogue=bias+residual+relu",
    "n=2,c=6,h=9,w=8,k=10,r=2,s=3,stride=2,pad=1,pad_w=2,dtype=bf16,layout=nhwc,groups=2,epilogue=scale+bias+relu",
    "n=3,c=24,h=5,w=6,k=16,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nchw,epilogue=scale+bias+residual",
    "n=1,c=32,h=1,w=81,k=40,r=1,s=9,stride=2,pad=0,pad_w=4,dtype=f16,layout=nhwc",
    "n=2,c=6,h=13,w=12,k=9,r=3,s=2,stride=3,pad=2,pad_w=1,dtype=f16,layout=nhwc,groups=3,direction=dgrad",
    "n=2,c=16,h=10,w=11,k=24,r=3,s=3,stride=2,pad=1,dtype=bf16,layout=nhwc,direction=dgrad",
    "n=2,c=5,h=9,w=14,k=7,r=5,s=3,stride=2,pad=2,pad_w=3,dtype=f32,layout=nchw,dilation=2,direction=dgrad",
    "n=2,c=8,h=6,w=4,k=24,r=1,s=1,stride=1,pad=0,dtype=tf32,layout=nchw,direction=dgrad",
    "n=3,c=16,h=9,w=7,k=24,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,direction=wgrad",
    "n=2,c=5,h=11,w=8,k=6,r=3,s=3,stride=2,pad=1,pad_w=0,dtype=bf16,layout=nchw,direction=wgrad",
    "n=5,c=4,h=12,w=12,k=8,r=2,s=2,stride=1,pad=0,dtype=tf32,layout=nchw,groups=2,direction=wgrad",
)


def cases() -> list[Any]:
    """Return workloads of odd sizes, each with the default and one random configuration of each variant."""
    parameters = []
    for i, (text, variant) in enumerate(itertools.product(ODD, (SIMT, MMA))):
        workload = conv(text)
        if variant.refuses(workload, A100) is not None:
            continue
        table = variant.configs(workload, A100)
        chosen = table.config(random.Random(i).randrange(len(table)))
        config = variant.default(workload, A100) if i % 3 == 0 else chosen
        parameters.append(pytest.param(variant, workload, config, ORDERS[i % 3], id=f"{variant.name}-{text}"))
    return parameters


@needs_compiler
@pytest.mark.parametrize(("variant", "workload", "config", "order"), cases())
def test_odd_sizes_are_right(variant: Any, workload: Conv2d, config: Config, order: Any) -> None:
    assert_emulates_right(variant, workload, config, order=order)


@needs_compiler
@pytest.mark.parametrize("variant", [SIMT, MMA], ids=str)
def test_no_access_leaves_its_tensor(variant: Any) -> None:
    for text in (ODD[1], ODD[9]):
        workload = conv(text)
        assert_emulates_right(variant, workload, variant.default(workload, A100), sanitize=True)


@needs_compiler
def test_wide_indices_and_a_second_row_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_conv, "NARROW", 1)
    monkeypatch.setattr(_conv, "MAX_GRID_X", 4)
    for variant, text in ((SIMT, ODD[6]), (MMA, ODD[8])):
        workload = conv(text)
        table = variant.configs(workload, A100)
        splits = np.flatnonzero(table["split"] == 2)
        config = table.config(int(splits[0])) if len(splits) else variant.default(workload, A100)
        launch = variant.launches(workload, config)[0]
        assert launch.grid[0] == 4
        assert launch.grid[1] > 1
        assert "i64" in launch.entry
        assert_emulates_right(variant, workload, config)


@needs_compiler
def test_parts_of_k_are_summed_in_one_order() -> None:
    workload = conv("n=4,c=8,h=9,w=9,k=8,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,direction=wgrad")
    table = SIMT.configs(workload, A100)
    config = table.config(int(np.flatnonzero(table["split"] == 8)[0]))
    assert [t.shape for t in SIMT.scratch(workload, config)] == [(8, 8 * 3 * 3 * 8)]
    checks.assert_order_does_not_matter(SIMT, workload, config)


@needs_compiler
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_the_epilogue_is_applied_to_the_sum_of_parts(layout: str) -> None:
    workload = conv(
        f"n=1,c=64,h=4,w=3,k=8,r=3,s=3,stride=1,pad=1,dtype=f16,layout={layout},epilogue=scale+bias+residual+relu"
    )
    for variant in (SIMT, MMA):
        table = variant.configs(workload, A100)
        config = table.config(int(np.flatnonzero(table["split"] == 4)[0]))
        assert len(variant.launches(workload, config)) == 2
        assert_emulates_right(variant, workload, config)


@needs_compiler
def test_pixels_that_no_tap_reaches_become_zero() -> None:
    workload = conv("n=1,c=4,h=7,w=7,k=4,r=1,s=1,stride=3,pad=0,dtype=f16,layout=nhwc,direction=dgrad")
    for variant in (SIMT, MMA):
        outputs = assert_emulates_right(variant, workload, variant.default(workload, A100))
        assert not outputs["dx"][0, 1::3].any()
        assert not outputs["dx"][0, :, 2::3].any()
        assert outputs["dx"][0, ::3, ::3].all()


# ----------------------------------------------------------------------------------------------- compilation


@needs_nvrtc
@pytest.mark.parametrize("variant", [SIMT, MMA], ids=str)
def test_usual_layers_compile_without_spills(variant: Any) -> None:
    layer = workloads.parse("resnet50/conv3_2,n=32")
    assert isinstance(layer, Conv2d)
    for workload, device in zip(training(layer), (A100, H100, representative("sm_100")), strict=True):
        checks.assert_default_compiles_without_spills(variant, workload, device)


@needs_nvrtc
def test_wide_indices_compile() -> None:
    workload = conv("n=16384,c=64,h=56,w=56,k=64,r=3,s=3,stride=2,pad=1,dtype=f16,layout=nhwc")
    for variant in (SIMT, MMA):
        checks.compiled(variant, workload, A100)


@needs_numba_cuda
@pytest.mark.parametrize(
    "text",
    [
        "n=2,c=5,h=6,w=5,k=3,r=3,s=2,stride=1,pad=1,dtype=f32,layout=nhwc,epilogue=bias+residual+relu",
        "n=1,c=6,h=9,w=7,k=10,r=2,s=3,stride=2,pad=2,dtype=f16,layout=nchw,dilation=2,groups=2,epilogue=scale+bias+residual",
        "n=1,c=4,h=5,w=4,k=4,r=3,s=2,stride=2,pad=1,dtype=f32,layout=nhwc,groups=4,epilogue=scale+bias",
    ],
)
def test_numba_simulates_right(text: str) -> None:
    from tunebench.emulate.numba_simulator import simulate

    workload = conv(text)
    table = NUMBA.configs(workload, A100)
    config = table.config(random.Random(text).randrange(len(table)))
    inputs = workload.draw(np.random.default_rng(1))
    checks.assert_right(workload, inputs, simulate(NUMBA, workload, config, inputs))


@needs_numba_cuda
def test_numba_compiles_and_keeps_sums_in_registers() -> None:
    from tunebench.binary.cubin import read_cubin
    from tunebench.compile.numba_cuda import compile_numba_cuda

    text = "n=8,c=64,h=28,w=28,k=64,r=3,s=3,stride=1,pad=1,dtype=f16"
    for layout, device in (("nchw", A100), ("nhwc", H100)):
        workload = conv(f"{text},layout={layout}")
        binary = compile_numba_cuda(NUMBA, workload, NUMBA.default(workload, device), device)
        assert all(entry.stack_bytes == 0 for entry in read_cubin(binary.payload).values())


def test_numba_emulation_workloads_are_tiny() -> None:
    workload = conv("n=32,c=256,h=56,w=56,k=256,r=3,s=3,stride=1,pad=1,dtype=f16,layout=nhwc,groups=4")
    table = NUMBA.configs(workload, A100)
    for row in range(0, len(table), 7):
        config = table.config(row)
        small = NUMBA.emulation_workload(workload, config)
        assert small.n * small.p * small.q > config["pixels"]
        assert small.n * small.p * small.q * small.k * small.c // small.groups * small.r * small.s < 3_000_000
