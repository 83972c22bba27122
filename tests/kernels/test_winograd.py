"""Winograd's matrices: they compute convolutions, with the documented errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tunebench.device import local_cpu, representative
from tunebench.kernels.conv2d import _winograd
from tunebench.kernels.conv2d.cuda_winograd import VARIANT as CUDA
from tunebench.kernels.conv2d.numba_cpu_winograd import VARIANT as CPU
from tunebench.workloads import parse
from tunebench.workloads.operators.conv2d import Conv2d


@pytest.mark.parametrize("m", [2, 4])
def test_tile_transform_computes_the_convolution(m: int) -> None:
    matrices = _winograd.transform(m)
    into, of_filter, out = map(np.array, (matrices.input, matrices.filter, matrices.output))
    rng = np.random.default_rng(0)
    d, g = rng.standard_normal((m + 2, m + 2)), rng.standard_normal((3, 3))
    tile = out @ ((of_filter @ g @ of_filter.T) * (into @ d @ into.T)) @ out.T
    direct = [[(d[i : i + 3, j : j + 3] * g).sum() for j in range(m)] for i in range(m)]
    np.testing.assert_allclose(tile, direct, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("pad", [1, 2])
@pytest.mark.parametrize("m", [2, 4])
def test_errors_in_f32_keep_well_within_the_tolerance(m: int, pad: int) -> None:
    """Inside images with padding 1, and in the corners of padding 2, where an output meets a single tap."""
    plain = Conv2d(n=1, c=8, h=8, w=8, k=8, r=3, s=3, stride=1, pad=pad, dtype="f32", layout="nhwc")
    channels, tiles = _winograd.fewest_channels(m, plain), 16_000 // m**2
    matrices = _winograd.transform(m)
    into, of_filter, out = (
        np.array(matrix, np.float32) for matrix in (matrices.input, matrices.filter, matrices.output)
    )
    rng = np.random.default_rng(1)
    d = rng.standard_normal((tiles, channels, m + 2, m + 2)).astype(np.float32)
    g = rng.standard_normal((channels, 3, 3)).astype(np.float32)
    if pad == 2:
        d[:, :, :2], d[:, :, :, :2] = 0, 0
    products = (into @ d @ into.T) * (of_filter @ g @ of_filter.T)
    sums = np.zeros((tiles, m + 2, m + 2), np.float32)
    for channel in range(channels):
        sums += products[:, channel]
    computed = out @ sums @ out.T
    windows = np.lib.stride_tricks.sliding_window_view(d.astype(np.float64), (3, 3), axis=(2, 3))
    right = np.einsum("ncijab,cab->nij", windows, g.astype(np.float64))
    squares = np.einsum("ncijab,cab->nij", np.square(windows), np.square(g.astype(np.float64)))
    scale = np.sqrt(squares) + np.abs(right)
    tolerance = replace(plain, c=channels).tolerance()
    share = np.abs(computed - right) / (tolerance.eps_out * np.abs(right) + tolerance.eps_acc * scale)
    assert 0.01 < share.max() < (0.4 if pad == 1 else 0.7)


@pytest.mark.parametrize(
    ("changes", "channels"),
    [
        ("pad=0", (8, 32)),
        ("pad=1", (8, 32)),
        ("pad=2", (16, 128)),
        ("pad=1,h=1", (16, 128)),
        ("pad=1,h=2", (8, 32)),
        ("pad=0,direction=dgrad", (16, 128)),
        ("pad=2,direction=dgrad", (8, 32)),
    ],
)
def test_outputs_of_few_taps_need_more_channels(changes: str, channels: tuple[int, int]) -> None:
    base = Conv2d.split_dimensions("n=1,c=8,h=9,w=9,k=8,r=3,s=3,stride=1,dtype=f32,layout=nhwc")
    workload = Conv2d.from_dimensions(base | Conv2d.split_dimensions(changes))
    assert isinstance(workload, Conv2d)
    assert tuple(_winograd.fewest_channels(m, workload) for m in (2, 4)) == channels


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("r=1,s=3", "3 x 3 filters"),
        ("stride=2", "stride"),
        ("direction=wgrad", "gradients of filters"),
        ("direction=dgrad,pad=3", "of at most 2"),
        ("pad=3", "padding in both directions, of at most 2"),
        ("pad_w=0", "equal padding"),
        ("c=7", "8 channels"),
        ("r=9,s=9,h=1,w=1,c=4,pad=5", "3 x 3 filters"),
    ],
)
def test_unsupported_convolutions_are_refused(changes: str, says: str) -> None:
    base = Conv2d.split_dimensions("n=1,c=8,h=9,w=9,k=8,r=3,s=3,stride=1,pad=1,dtype=f32,layout=nhwc")
    workload = Conv2d.from_dimensions(base | Conv2d.split_dimensions(changes))
    assert isinstance(workload, Conv2d)
    assert says in str(_winograd.limits(workload))
    assert says in str(CPU.limits(workload, local_cpu()))
    assert says in str(CUDA.limits(workload, representative("sm_80")))
    plain = parse(f"conv2d:{','.join(f'{name}={value}' for name, value in base.items())}")
    assert isinstance(plain, Conv2d)
    assert _winograd.limits(plain) is None
