"""Winograd's minimal filtering for 3 x 3 filters at stride 1, shared by the variants for GPUs and CPUs.

A tile of m x m outputs is computed from (m + 2) x (m + 2) inputs d and the filter g as A^T [(G g G^T) * (B^T
d B)] A, with (m + 2)^2 products in place of 9 m^2: 2.25 times fewer for m = 2, 4 times fewer for m = 4. Each
of the (m + 2)^2 elements in the middle is a matrix product over channels.

The matrices follow from points at which polynomials are evaluated: here 0, infinity and pairs of opposite
points. The points decide how much rounding errors grow. The usual points 0, 1, -1, 2, -2 of m = 4 have about
five times the error of the points here. The largest error of 64,000 outputs on normal data, as a share of
conv2d's tolerance:

channels 8        16       32       64       256
m = 2    0.16     0.08     0.05     0.03     0.02
m = 4    0.65     0.39     0.29     0.16     0.07

With few channels the transforms exceed the tolerance (see `fewest_channels`). So they do where an output
meets fewer than 4 taps of the filter, as in the corners of a padding of 2: errors have the magnitude of the
whole tile, but the tolerance follows the taps that the output meets. There the share is up to 0.55 with m = 4
and 128 channels, 0.45 with m = 2 and 16. An output that meets no tap, as in a padding of 3, must be 0 and is
not.

Source: Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016; Barabasz, Anderson,
Soodhalter and Gregg, "Error analysis and improving the accuracy of Winograd convolution for deep neural
networks", 2020.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["POINTS", "Transform", "fewest_channels", "limits", "results", "summed", "transform"]

POINTS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.75, 1.5)}
"""Pairs of opposite points by m, in addition to 0 and infinity; dyadic, so that most products are exact."""

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Transform:
    """The three matrices of one tile size.

    Attributes:
        input: B^T, (m + 2, m + 2).
        filter: G, (m + 2, 3).
        output: A^T, (m, m + 2).
    """

    input: Matrix
    filter: Matrix
    output: Matrix


def transform(m: int) -> Transform:
    """Return the matrices for tiles of m x m outputs, by the method of Toom and Cook.

    Row i of B^T is the polynomial that is 0 at all points but the i-th; its value there divides row i of G.
    """
    points = [0.0, *(sign * point for point in POINTS[m] for sign in (1.0, -1.0))]
    of_input, of_filter = [], []
    for point in points:
        others = [other for other in points if other != point]
        of_input.append((*_polynomial(others), 0.0))
        divisor = 1.0
        for other in others:
            divisor *= point - other
        of_filter.append(tuple(point**power / divisor for power in range(3)))
    of_input.append(_polynomial(points))
    of_filter.append((0.0, 0.0, 1.0))
    of_output = tuple((*(point**row for point in points), float(row == m - 1)) for row in range(m))
    return Transform(tuple(of_input), tuple(of_filter), of_output)


def _polynomial(roots: list[float]) -> tuple[float, ...]:
    """Return the coefficients of the polynomial with these roots, the constant one first."""
    found = [1.0]
    for root in roots:
        found = [low - root * high for low, high in zip([0.0, *found], [*found, 0.0], strict=True)]
    return tuple(found)


def summed(workload: Conv2d) -> int:
    """Return the channels that an output sums over."""
    return workload.c if workload.direction == "fprop" else workload.k


def results(workload: Conv2d) -> int:
    """Return the channels of an output."""
    return workload.k if workload.direction == "fprop" else workload.c


def fewest_channels(m: int, workload: Conv2d) -> int:
    """Return the fewest summed channels with which an f32 result keeps well within conv2d's tolerance."""
    return {2: 16, 4: 128}[m] if _fewest_taps(workload) < 4 else {2: 8, 4: 32}[m]


@functools.lru_cache(maxsize=256)
def _fewest_taps(workload: Conv2d) -> int:
    """Return the fewest taps that meet the image, over outputs that meet any."""
    w, found = workload, 1
    backward = w.direction == "dgrad"
    pad = 2 - w.pad if backward else w.pad
    for image, output in ((w.h, w.p), (w.w, w.q)):
        source, extent = (output, image) if backward else (image, output)
        # Outputs with the fewest taps are at the ends.
        ends = {*range(min(extent, 2)), *range(max(0, extent - 2), extent)}
        met = [sum(0 <= i - pad + tap < source for tap in range(3)) for i in ends]
        found *= min(count for count in met if count > 0)
    return found


def limits(workload: Conv2d) -> str | None:
    """Return why Winograd's algorithm cannot compute a workload, or None."""
    w = workload
    if (w.r, w.s, w.stride, w.dilation, w.groups) != (3, 3, 1, 1, 1):
        return "Winograd's algorithm needs 3 x 3 filters with stride, dilation and groups of 1"
    if w.direction == "wgrad":
        return "Winograd's algorithm does not compute gradients of filters"
    if w.pre != IDENTITY:
        return f"Winograd's algorithm does not support a prologue: pre={w.pre}"
    if w.pad > 2 or w.pad_w != w.pad:
        return "Winograd's algorithm needs equal padding in both directions, of at most 2"
    if summed(w) < (fewest := fewest_channels(2, w)):
        return f"Winograd's algorithm needs {fewest} channels or more to be accurate"
    return None
