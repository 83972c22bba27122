"""conv2d on Hopper's tensor cores: copied pixels, declared costs, results, machine code."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.kernel_checks import H100, HGMMA, USETMAXREG, UTMALDG
from tests.support import needs_compiler, needs_disassembler, needs_nvrtc
from tunebench import workloads
from tunebench.binary.disassembly import sass, unmet_claims
from tunebench.bound import bound
from tunebench.device import described, representative
from tunebench.emulate.emulator import emulate, watch
from tunebench.errors import InputError
from tunebench.kernels.common import wgmma_tile
from tunebench.kernels.conv2d import _conv_pixels
from tunebench.kernels.conv2d.cuda_wgmma import PRODUCER_REGISTERS, VARIANT
from tunebench.space import Config
from tunebench.variant import TensorMap
from tunebench.workloads.operators.conv2d import Conv2d

HOPPERS = [device for device in described().values() if device.architecture == "sm_90"]


def conv(text: str, dtype: str = "f16") -> Conv2d:
    workload = workloads.parse(f"conv2d:{text},dtype={dtype},layout=nhwc")
    assert isinstance(workload, Conv2d)
    return workload


@st.composite
def drawn_workloads(draw: Any) -> Conv2d:
    """Draw a convolution that the variant supports."""
    groups, few = draw(st.sampled_from([1, 1, 2])), st.integers(1, 3)
    channels = st.sampled_from([8, 24, 64, 72, 512] if groups == 1 else [128, 384])
    direction = draw(st.sampled_from(["fprop", "dgrad", "wgrad"]))
    try:
        workload = Conv2d(
            **{name: draw(st.sampled_from([1, 2, 7, 14, 56])) for name in ("n", "h", "w")},
            **{name: draw(channels) for name in ("c", "k")},
            **{name: draw(st.integers(1, 5)) for name in ("r", "s")},
            **{name: draw(few) for name in ("stride", "dilation")},
            pad=draw(few) - 1,
            groups=groups,
            dtype=draw(st.sampled_from(["f16", "bf16"])),
            layout="nhwc",
            direction=direction,
            epilogue=draw(st.sampled_from(["none", "bias+residual+relu"]))
            if direction == "fprop"
            else "none",
        )
    except InputError:
        assume(False)
        raise
    assume(VARIANT.refuses(workload, H100) is None)
    return workload


# ---------------------------------------------------------------------------------------- pixels and taps


def met(workload: Conv2d, image: int, output: int, taps: int, pad: int) -> set[tuple[int, int, int]]:
    """Return the pairs of a pixel of x and one of y for each tap, along one axis."""
    w = workload
    pairs = itertools.product(range(output), range(taps))
    triples = {(out * w.stride - pad + tap * w.dilation, out, tap) for out, tap in pairs}
    return {(pixel, out, tap) for pixel, out, tap in triples if 0 <= pixel < image}


@settings(max_examples=15)
@given(workload=drawn_workloads())
def test_every_pixel_meets_every_tap_that_reaches_it(workload: Conv2d) -> None:
    w = workload
    height, width = _conv_pixels.axes(w)
    for axis, image, output, taps, pad in ((height, w.h, w.p, w.r, w.pad), (width, w.w, w.q, w.s, w.pad_w)):
        bases = [axis.first + i * axis.stride for i in range(axis.pixels)]
        # The map's box has all of them, and nothing beyond: the next pixel would be outside.
        assert bases[-1] < axis.image + axis.end <= bases[-1] + axis.stride
        if w.direction != "dgrad":
            assert axis.pixels == output
            assert axis.reach == (taps - 1) * w.dilation
            triples = {
                (base + tap * w.dilation, i, tap) for i, base in enumerate(bases) for tap in range(taps)
            }
            assert {(x, i, tap) for x, i, tap in triples if 0 <= x < image} == met(
                w, image, output, taps, pad
            )
            continue
        # Pixel `residue + stride * i` of dx meets tap t at an output i further than the first one.
        assert len(axis.taps) == min(w.stride, image)
        for pixel, out, _ in met(w, image, output, taps, pad):
            offset = out - (axis.first + pixel // w.stride)
            assert 0 <= offset <= axis.reach
        assert sum(axis.taps) <= taps
        assert axis.pixels * w.stride >= image


def test_pixels_of_well_known_layers() -> None:
    def corners(text: str) -> Any:
        workload = conv(text)
        (pixels,) = (m for m in _conv_pixels.maps(workload, {**PLAIN}) if m.pixel_box)
        box = pixels.pixel_box
        assert box is not None
        return box.lower, box.upper, box.strides

    plain = "n=32,c=64,h=56,w=56,k=64,r=3,s=3,pad=1,stride="
    assert corners(f"{plain}1") == ((-1, -1), (-1, -1), (1, 1))
    assert corners(f"{plain}2") == ((-1, -1), (-2, -2), (2, 2))  # the last pixel is 53
    assert corners(f"{plain}1,direction=dgrad") == ((-1, -1), (-1, -1), (1, 1))
    # 56 / 2 = 28 pixels per class, and 28 of dy; the one after the last is padding.
    assert corners(f"{plain}2,direction=dgrad") == ((0, 0), (0, 0), (1, 1))
    assert corners(f"{plain}2,direction=wgrad") == ((-1, -1), (-2, -2), (2, 2))
    assert corners("n=1,c=8,h=9,w=20,k=8,r=1,s=1,pad=0,stride=1") == ((0, 0), (0, 0), (1, 1))


# -------------------------------------------------------------------------------------------------- space


@settings(max_examples=15)
@given(workload=drawn_workloads(), device=st.sampled_from(HOPPERS))
def test_the_default_is_a_valid_configuration(workload: Conv2d, device: Any) -> None:
    checks.assert_default_is_valid([VARIANT], workload, device)


def test_the_default_fills_the_device() -> None:
    large = VARIANT.default(conv("n=64,c=256,h=56,w=56,k=256,r=3,s=3,stride=1,pad=1"), H100)
    assert (large["bm"], large["bn"], large["split"]) == (128, 256, 1)
    small = VARIANT.default(conv("n=8,c=64,h=28,w=28,k=64,r=3,s=3,stride=1,pad=1,direction=wgrad"), H100)
    assert small["split"] > 1


def test_unsupported_workloads_are_refused_with_a_reason() -> None:
    good = conv("n=2,c=64,h=9,w=9,k=64,r=3,s=3,stride=1,pad=1")
    assert VARIANT.refuses(good, H100) is None
    for change, words in (
        ({"dtype": "tf32"}, "f16 and bf16 of layout nhwc"),
        ({"layout": "nchw"}, "f16 and bf16 of layout nhwc"),
        ({"c": 12}, "multiples of 16 bytes"),
        ({"k": 12, "direction": "dgrad"}, "multiples of 16 bytes"),
        ({"k": 12, "direction": "wgrad"}, "multiples of 16 bytes"),
        ({"groups": 2}, "64 channels at a time"),
        ({"h": 30, "stride": 9}, "pixel strides from 1 to 8"),
        ({"w": 30, "stride": 9, "direction": "wgrad"}, "pixel strides from 1 to 8"),
        ({"pad": 129, "r": 1, "s": 1}, "corners from -128 to 127"),
        ({"h": 300, "w": 300, "dilation": 128}, "within 255 pixels"),
        ({"n": 2**31 // 81 + 1}, "elements"),
    ):
        assert words in str(VARIANT.refuses(replace(good, **change), H100)), change
    for change in (
        {"k": 3},
        {"stride": 8, "pad": 4},
        {"stride": 9, "direction": "dgrad"},
        {"h": 2, "stride": 9},
    ):
        assert VARIANT.refuses(replace(good, **change), H100) is None, change
    for architecture in ("sm_80", "sm_100", "sm_120"):
        assert "sm_90" in str(VARIANT.refuses(good, representative(architecture)))


def test_a_layer_has_thousands_of_configurations() -> None:
    for direction in ("fprop", "dgrad", "wgrad"):
        layer = conv(f"n=32,c=256,h=28,w=28,k=512,r=3,s=3,stride=1,pad=1,direction={direction}")
        assert 2000 <= len(VARIANT.configs(layer, H100)) <= 30_000


@settings(max_examples=15)
@given(workload=drawn_workloads())
def test_no_launch_exceeds_what_the_device_has(workload: Conv2d) -> None:
    table = VARIANT.configs(workload, H100)
    costs = VARIANT.costs(workload, table, H100)
    assert np.max(costs.threads) <= 1024
    assert np.max(costs.smem_bytes) <= H100.smem_per_block_bytes
    consumers, min_blocks = table["consumers"], table["min_blocks"]
    launched = wgmma_tile.launched_registers(consumers, min_blocks)
    taken = wgmma_tile.consumer_registers(consumers, min_blocks, PRODUCER_REGISTERS)
    registers = 128 * (PRODUCER_REGISTERS + consumers * taken)
    moves = launched < 240
    assert np.all(registers[moves] <= (128 * (consumers + 1) * launched)[moves])
    for row in range(0, len(table), max(1, len(table) // 5)):
        config = table.config(row)
        first, *later = VARIANT.launches(workload, config)
        assert first.smem_bytes == costs.smem_bytes[row]
        assert first.grid[0] % first.cluster == 0
        assert len(later) == (config["split"] > 1)
        a_map, b_map = (argument for argument in first.arguments if isinstance(argument, TensorMap))
        size = 2
        parts = config["cluster_n"], config["cluster_m"]
        tiles = config["bm"], config["bn"]
        for tensor_map, tile, shared in zip((a_map, b_map), tiles, parts, strict=True):
            line, lines = tensor_map.box[:2]
            assert line * size == tensor_map.swizzle_bytes == 128
            assert lines * shared in (tile, config["bk"])
            tensor = next(t for t in workload.inputs() if t.name == tensor_map.tensor)
            assert math.prod(tensor_map.extents) == tensor.size


@settings(max_examples=15)
@given(workload=drawn_workloads(), choice=st.integers(0, 10**6))
def test_emulation_workload_takes_the_same_paths(workload: Conv2d, choice: int) -> None:
    table = VARIANT.configs(workload, H100)
    config = table.config(choice % len(table))
    small = VARIANT.emulation_workload(workload, config)
    assert VARIANT.refuses(small, H100) is None
    assert VARIANT.source(small, config) == VARIANT.source(workload, config)


# -------------------------------------------------------------------------------------------------- costs


@settings(max_examples=15)
@given(workload=drawn_workloads())
def test_costs_cover_the_work(workload: Conv2d) -> None:
    table = VARIANT.configs(workload, H100)
    costs = VARIANT.costs(workload, table, H100)
    whole = _conv_pixels.product(workload)
    executed = 2 * whole.work(table["bm"], table["bn"], table["bk"], "by_tap")
    assert np.all(costs.blocks * costs.mma_flop <= executed * (1 + 1e-9))
    assert np.all(
        (costs.blocks * costs.mma_flop == executed) | (table["split"] > 1) | (len(whole.classes) > 1)
    )
    floors = bound(costs, workload.traffic(), H100, rows=len(table)).us
    assert np.all((floors > 0) | (executed == 0))  # possibly no tap reaches any pixel


def test_costs_of_a_divisible_workload_are_exact() -> None:
    layer = conv("n=32,c=256,h=32,w=32,k=512,r=3,s=3,stride=1,pad=1")
    config = Config({**PLAIN, "bn": 256, "cluster_m": 2})
    costs = checks.costs_of(VARIANT, layer, config, H100)
    assert costs.blocks == costs.full_blocks == 32 * 32 * 32 / 128 * 2
    assert costs.mma_flop == 2 * 128 * 256 * 9 * 256
    assert costs.fill_bytes == 256 / 2 * 9 * 256 * 2  # bytes of filters, which two blocks share
    # Two warpgroups of four warps, a product of 64 x 256 per 16 of K.
    assert costs.instructions == 2 * 4 * 9 * 16
    assert costs.chain_clocks == 9 * 16 * 128


# ------------------------------------------------------------------------------------------------ results

PLAIN = VARIANT.space.parse(
    "bm=128,bn=64,bk=64,stages=2,consumers=2,pingpong=0,cluster_m=1,cluster_n=1,split=1,group_m=1,min_blocks=1"
)
ONE = {"bm": 64, "consumers": 1}
CASES = [
    ("n=2,c=72,h=9,w=7,k=37,r=3,s=3,stride=1,pad=1,epilogue=bias+residual+relu", {"stages": 3}),
    ("n=2,c=64,h=11,w=15,k=72,r=3,s=2,stride=2,pad=2,pad_w=3,dilation=2", {**ONE, "cluster_m": 2}),
    ("n=2,c=136,h=11,w=13,k=136,r=1,s=1,stride=1,pad=0", {"cluster_n": 2, "bk": 128}),
    ("n=3,c=128,h=8,w=13,k=256,r=2,s=3,stride=3,pad=2,groups=2,epilogue=bias", {"bm": 64, "pingpong": 1}),
    ("n=1,c=128,h=8,w=8,k=72,r=3,s=3,stride=1,pad=1,epilogue=bias+relu", {**ONE, "split": 4, "stages": 3}),
    ("n=2,c=136,h=9,w=7,k=136,r=3,s=2,stride=1,pad=1,dilation=2,direction=dgrad", {**ONE, "cluster_m": 2}),
    ("n=2,c=72,h=9,w=7,k=40,r=3,s=3,stride=2,pad=1,direction=dgrad", ONE),
    ("n=2,c=64,h=5,w=7,k=40,r=1,s=1,stride=2,pad=0,direction=dgrad", ONE),
    (
        "n=5,c=128,h=12,w=9,k=128,r=3,s=5,stride=2,pad=2,pad_w=3,groups=2,direction=dgrad",
        {"bm": 64, "pingpong": 1, "stages": 3},
    ),
    ("n=2,c=72,h=9,w=7,k=40,r=3,s=3,stride=2,pad=1,direction=wgrad", {**ONE, "bn": 192}),
    ("n=4,c=136,h=9,w=9,k=136,r=1,s=3,stride=1,pad=0,direction=wgrad", {"bn": 128, "cluster_n": 2}),
    (
        "n=3,c=128,h=13,w=13,k=256,r=1,s=3,stride=1,pad=0,pad_w=1,groups=2,direction=wgrad",
        {**ONE, "cluster_m": 2, "split": 2},
    ),
]
"""Every path is taken by some case."""


def configured(workload: Conv2d, choices: dict[str, int]) -> Config:
    config = Config({**PLAIN, **choices})
    return VARIANT.space.check(config, workload=workload, device=H100)


@needs_compiler
@pytest.mark.parametrize(("text", "choices"), CASES)
def test_results_are_right_in_every_order(text: str, choices: dict[str, int]) -> None:
    workload = conv(text, dtype="bf16" if "dgrad" in text else "f16")
    checks.assert_right_in_every_order(VARIANT, workload, configured(workload, choices))


@needs_compiler
@pytest.mark.parametrize("number", [6, 9])
def test_nothing_races_and_costs_are_floors(number: int) -> None:
    text, choices = CASES[number]
    workload = conv(text)
    config = configured(workload, choices)
    inputs = workload.draw(np.random.default_rng(0))
    seen = watch(VARIANT, workload, config, inputs)
    checks.assert_right(workload, inputs, seen.outputs)
    costs = checks.costs_of(VARIANT, workload, config, H100)
    blocks = seen.counts.blocks
    for name in ("smem_traffic_bytes", "fill_bytes", "instructions"):
        assert 0 < costs.blocks * getattr(costs, name) <= sum(getattr(block, name) for block in blocks)
    assert costs.blocks * costs.mma_flop == sum(block.mma_flop["f16"] for block in blocks)


@needs_compiler
def test_infinities_that_no_tap_meets_do_not_change_results() -> None:
    # Channels and pixels of a tile beyond the edge are zeros in both operands: they must not meet an
    # infinity.
    workload = conv("n=1,c=72,h=5,w=5,k=40,r=3,s=3,stride=1,pad=1")
    inputs = workload.draw(np.random.default_rng(0))
    inputs["w"][:, 1, 1, :8] = np.inf  # of the centre tap, next to the last channels of the tap before
    y = emulate(VARIANT, workload, configured(workload, ONE), inputs)["y"]
    assert np.all(np.isinf(y) | np.isnan(y))
    inputs["w"][:, 1, 1, :8] = 0
    inputs["w"][:, 0, 0, :8] = np.inf  # only the upper row and the left column meet it, in the padding
    y = emulate(VARIANT, workload, configured(workload, ONE), inputs)["y"]
    assert np.all(np.isnan(y[:, 0]))  # zeros of the padding times infinity, as in libraries that pad
    assert not np.any(np.isfinite(y[:, 1:, 1:]))


FAULTS = {
    "taps in the other order": (1, "taps.at(row, column)", "taps.at(column, row)"),
    "no stride": (1, "left + (index - rest * width) * stride", "left + (index - rest * width)"),
    "the other block's pixels": (2, "int(shared.part_of_a) * TileA::BOX_LINES", "0"),
    "filters not mirrored": (5, "rows.tap_first + row * rows.tap_step", "rows.taps - 1 - row"),
    "all classes are the first": (6, "down * sizes.column_classes + across}", "0}"),
    "pixels beyond the image": (6, "return rest - image * height < rows.extent", "return true"),
    "stages of other tiles not skipped": (8, "skip_tiles(index + tiles.step, TURNS - 1)", "void()"),
    "a tap a tile": (9, "divide(first_panel + panel, of_tap), row", "divide(first_panel, of_tap), row"),
    "the other block's pixels of B": (11, "int(shared.part_of_b) * TileB::BOX_LINES", "0"),
    "parts on top of each other": (11, "to.tensor += tile.part * part_size;", ""),
}
"""The index of a case, and the text to replace in its kernel, for a fault that the case must find."""


def faulty(fault: str) -> tuple[Any, Conv2d, Config]:
    number, old, new = FAULTS[fault]
    text, choices = CASES[number]
    workload = conv(text)
    return checks.planted(VARIANT, old, new), workload, configured(workload, choices)


def test_planted_faults_have_a_place() -> None:
    checks.assert_faults_have_a_place(map(faulty, FAULTS))


@needs_compiler
@pytest.mark.parametrize("fault", checks.sampled_faults(FAULTS))
def test_planted_faults_are_found(fault: str) -> None:
    checks.assert_fault_is_found(*faulty(fault))


# ------------------------------------------------------------------------------------------- machine code

LAYER = "n=32,c=256,h=28,w=28,k=512,r=3,s=3,pad=1,stride="


@needs_nvrtc
@needs_disassembler
@pytest.mark.parametrize(
    ("text", "choices"),
    [
        (f"{LAYER}1,epilogue=bias+residual+relu", {"bm": 128, "bn": 256, "consumers": 2, "stages": 4}),
        (f"{LAYER}2,direction=dgrad", {}),
        (
            f"{LAYER}1,direction=wgrad",
            {"pingpong": 1, "bm": 64, "bn": 256, "consumers": 2, "split": 1, "stages": 4},
        ),
    ],
)
def test_it_is_compiled_to_hopper_s_instructions_without_spills(text: str, choices: dict[str, int]) -> None:
    workload = conv(text, dtype="bf16")
    config = Config({**VARIANT.default(workload, H100), **choices})
    VARIANT.space.check(config, workload=workload, device=H100)
    made = checks.compiled_for_hopper(VARIANT, workload, config)
    counted = checks.opcodes(made.cubin, 9)
    rows = wgmma_tile.rows(config["bm"], config["consumers"], config["pingpong"])
    assert counted[HGMMA] == config["bk"] // 16 * rows // 64
    assert counted[UTMALDG] >= 2
    assert counted[USETMAXREG] == 2
    assert not unmet_claims(VARIANT, workload, config, sass(made.cubin))
    # Without copies of pixels a claim is unmet.
    assert unmet_claims(VARIANT, workload, config, sass(made.cubin).replace(".IM2COL", "")) == (
        "UTMALDG.IM2COL",
    )


def test_workloads_of_equal_alignment_share_source_and_entry() -> None:
    first = conv("n=2,c=64,h=28,w=28,k=64,r=3,s=3,stride=1,pad=1")
    second = replace(first, n=32, c=512, h=14, w=7, k=256, r=1, s=5, pad=2, stride=2, dilation=2)
    config = VARIANT.default(first, H100)
    assert VARIANT.revision(first, config) == VARIANT.revision(second, config)
