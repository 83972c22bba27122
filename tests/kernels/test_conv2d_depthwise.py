"""The depthwise variant of conv2d: source pixels of tiles, results, and refusals."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import kernel_checks as checks
from tests.kernels.convolutions import GPUS, conv, convolutions, training
from tests.kernels.kernel_checks import A100
from tests.support import needs_compiler, needs_nvrtc
from tunebench.device import representative
from tunebench.emulate.emulator import ORDERS
from tunebench.kernels.conv2d._depthwise import axes
from tunebench.kernels.conv2d.cuda_depthwise import VARIANT
from tunebench.workloads.operators.conv2d import Conv2d


@st.composite
def depthwise(draw: Any) -> Conv2d:
    """Draw a depthwise convolution of any direction, layout and type."""
    workload = draw(convolutions(largest=112))
    return replace(workload, k=workload.c, groups=workload.c)


@settings(max_examples=25)
@given(workload=depthwise(), device=st.sampled_from(GPUS))
def test_the_default_is_a_valid_configuration(workload: Conv2d, device: Any) -> None:
    assert VARIANT.refuses(workload, device) is None
    checks.assert_default_is_valid([VARIANT], workload, device)


@given(workload=depthwise(), steps=st.sampled_from([1, 2, 4]))
def test_tiles_read_the_source_pixels_of_their_taps(workload: Conv2d, steps: int) -> None:
    w = workload
    for axis, taps, pad in zip(axes(workload), (w.r, w.s), (w.pad, w.pad_w), strict=True):
        fewest = []
        for first in range(0, axis.extent, steps * axis.unit):
            pixels = set()
            for i, tap in itertools.product(range(first, first + steps * axis.unit), range(taps)):
                if w.direction != "dgrad":
                    pixels.add(i * w.stride - pad + tap * w.dilation)
                elif (i + pad - tap * w.dilation) % w.stride == 0:
                    pixels.add((i + pad - tap * w.dilation) // w.stride)
            begin = first // axis.unit * axis.source_unit + axis.shift
            assert {begin + pixel for pixel in axis.places(steps)} == pixels
            fewest.append(sum(0 <= pixel < axis.source for pixel in pixels))
        assert axis.fewest_inside(steps) == min(fewest)


def test_unsupported_workloads_are_refused_with_a_reason() -> None:
    base = conv("n=1,c=8,h=16,w=16,k=8,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,groups=8")
    assert VARIANT.refuses(base, A100) is None
    assert "c=8, k=16" in str(VARIANT.refuses(replace(base, k=16), A100))
    assert "groups=4" in str(VARIANT.refuses(replace(base, groups=4), A100))
    assert "too many" in str(VARIANT.refuses(replace(base, h=40, w=40, r=31, s=31), A100))
    assert "too many" in str(VARIANT.refuses(replace(base, h=99, w=99, dilation=40), A100))
    assert "blocks" not in str(VARIANT.refuses(replace(base, n=2**20, h=512, w=512), A100))
    assert "elements" in str(VARIANT.refuses(replace(base, h=2**14, w=2**14), A100))


ODD = (
    "n=2,c=6,h=9,w=8,k=6,r=3,s=2,stride=2,pad=1,pad_w=0,dtype=bf16,layout=nhwc,groups=6,direction=dgrad",
    "n=1,c=3,h=10,w=13,k=3,r=5,s=3,stride=3,pad=2,pad_w=1,dtype=f32,layout=nchw,groups=3,direction=dgrad,dilation=2",
    "n=3,c=24,h=9,w=8,k=24,r=3,s=2,stride=2,pad=1,dtype=bf16,layout=nhwc,groups=24,direction=wgrad",
    "n=2,c=3,h=10,w=16,k=3,r=3,s=3,stride=1,pad=1,pad_w=2,dtype=f16,layout=nchw,groups=3,direction=wgrad,dilation=2",
    "n=2,c=3,h=11,w=12,k=3,r=3,s=3,stride=1,pad=0,pad_w=1,dtype=f32,layout=nchw,groups=3,epilogue=bias+residual+relu",
    "n=1,c=16,h=9,w=7,k=16,r=7,s=7,stride=1,pad=3,dtype=tf32,layout=nhwc,groups=16,epilogue=scale+bias+residual",
    "n=1,c=1,h=1,w=1,k=1,r=1,s=1,stride=1,pad=0,dtype=f16,layout=nchw",
)


@needs_compiler
@pytest.mark.parametrize("text", ODD)
def test_odd_sizes_are_right(text: str) -> None:
    """With one configuration, the same in every run, in some order of threads, with every access checked."""
    workload, choose = conv(text), random.Random(text)
    table = VARIANT.configs(workload, A100)
    config = table.config(choose.randrange(len(table)))
    checks.assert_emulates_right(VARIANT, workload, config, order=choose.choice(ORDERS), sanitize=True)


@needs_compiler
def test_parts_of_the_pixels_are_summed_in_one_order() -> None:
    text = "n=9,c=64,h=12,w=12,k=64,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc,groups=64,direction=wgrad"
    workload = conv(text)
    table = VARIANT.configs(workload, A100)
    config = table.config(int(np.flatnonzero((table["split"] > 4) & (table["staged"] == 1))[0]))
    assert len(VARIANT.launches(workload, config)) == 2
    checks.assert_order_does_not_matter(VARIANT, workload, config)


LAYERS = (
    "n=32,c=96,h=112,w=112,k=96,r=3,s=3,stride=2,pad=1,dtype=f16,layout=nhwc,groups=96,epilogue=scale+bias+relu",
    "n=32,c=384,h=28,w=28,k=384,r=7,s=7,stride=1,pad=3,dtype=bf16,layout=nhwc,groups=384",
    "n=32,c=672,h=14,w=14,k=672,r=5,s=5,stride=1,pad=2,dtype=f32,layout=nchw,groups=672",
)
"""Layers of MobileNetV2, ConvNeXt and EfficientNet."""


@pytest.mark.parametrize("text", LAYERS)
def test_spaces_are_large_enough_to_search_and_emulation_workloads_end_alike(text: str) -> None:
    for workload in training(conv(text)):
        table = VARIANT.configs(workload, A100)
        assert 200 < len(table) < 20_000
        for row in random.Random(text).sample(range(len(table)), 20):
            config = table.config(row)
            small = VARIANT.emulation_workload(workload, config)
            assert VARIANT.source(small, config) == VARIANT.source(workload, config)
            assert small.n * small.c * small.p * small.q * small.r * small.s < 10_000_000
            for ours, theirs in zip(
                VARIANT.tiles(small, config), VARIANT.tiles(workload, config), strict=True
            ):
                assert (ours.used == 1) == (theirs.used == 1)


@needs_nvrtc
@pytest.mark.parametrize(("layer", "direction"), [(0, "fprop"), (1, "dgrad"), (2, "wgrad")])
def test_usual_layers_compile_without_spills(layer: int, direction: str) -> None:
    workload = next(
        candidate for candidate in training(conv(LAYERS[layer])) if candidate.direction == direction
    )
    checks.compiled(VARIANT, workload, representative("sm_75"))
