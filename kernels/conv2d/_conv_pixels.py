"""TMA in im2col mode: the pixels that a tensor map covers, and the tensor maps of a convolution.

Source: PTX ISA, "im2col mode"; CUDA Driver API, "cuTensorMapEncodeIm2col".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tunebench.dtype import itemsize
from tunebench.kernels.conv2d import _conv
from tunebench.kernels.conv2d._conv import Product, ResidueClass
from tunebench.variant import PixelBox, TensorMap, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.operators.conv2d import Conv2d, ConvAxis

__all__ = ["MOST_OFFSET", "PANEL_CHANNELS", "Axis", "axes", "maps", "pixel_map", "product"]

PANEL_CHANNELS = 64
"""Channels per line of 128 bytes."""

MOST_OFFSET = 255
"""Largest distance of a tap from the first one, in images of two dimensions."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Pixels that a tensor map covers, along one axis of the copied image.

    Attributes:
        pixels: Number of pixels.
        first: Position of the first pixel in the image.
        stride: Distance between pixels.
        image: Extent of the image.
        reach: Distance of the furthest tap from the first one.
        taps: Number of taps that reach the pixels of each residue class (dgrad; else there is one class).
    """

    pixels: int
    first: int
    stride: int
    image: int
    reach: int
    taps: tuple[int, ...]

    @property
    def end(self) -> int:
        """End of the pixels, relative to the end of the image."""
        return self.first + (self.pixels - 1) * self.stride + 1 - self.image


@functools.lru_cache(maxsize=1024)
def axes(workload: Conv2d) -> tuple[Axis, Axis]:
    """Return the height and the width of the copied image."""
    height, width = map(_backward if workload.direction == "dgrad" else _forward, workload.axes)
    return height, width


def _forward(along: ConvAxis) -> Axis:
    return Axis(
        pixels=along.output,
        first=-along.pad,
        stride=along.stride if along.output > 1 else 1,
        image=along.image,
        reach=(along.taps - 1) * along.dilation,
        taps=(along.taps,),
    )


def _backward(along: ConvAxis) -> Axis:
    """Return the pixels of dy that the first tap meets; those of pixel i of each class are i further on."""
    stride, positions_of = along.stride, []
    for residue in range(min(stride, along.image)):
        reached = (residue - along.offset(tap) for tap in range(along.taps))
        positions_of.append([position // stride for position in reached if position % stride == 0])
    every = [position for positions in positions_of for position in positions]
    first, last = (min(every), max(every)) if every else (0, 0)
    return Axis(
        pixels=ceil_div(along.image, stride),
        first=first,
        stride=1,
        image=along.output,
        reach=last - first,
        taps=tuple(map(len, positions_of)),
    )


@functools.lru_cache(maxsize=1024)
def product(workload: Conv2d) -> Product:
    """Return the product as this variant tiles it: equal residue classes, columns of wgrad in panels."""
    w, whole = workload, _conv.product(workload)
    if w.direction == "fprop":
        return whole
    if w.direction == "wgrad":
        filters = ResidueClass(count=1, m=whole.n, taps=1)
        columns = w.r * w.s * ceil_div(w.c // w.groups, PANEL_CHANNELS) * PANEL_CHANNELS
        return Product(classes=(filters,), n=columns, depth=whole.depth, groups=w.groups)
    rows, columns = axes(w)
    tap_counts = Counter(r * s for r, s in itertools.product(rows.taps, columns.taps))
    pixels = w.n * rows.pixels * columns.pixels
    classes = tuple(ResidueClass(count=count, m=pixels, taps=taps) for taps, count in tap_counts.items())
    return Product(classes=classes, n=whole.n, depth=whole.depth, groups=w.groups)


# -- tensor maps --------------------------------------------------------------------------------------------


def pixel_map(workload: Conv2d, tensor: Tensor, pixels: int) -> TensorMap:
    """Return the tensor map for panels of `pixels` pixels: lines of 64 channels, as in `PanelTile`."""
    n, h, w, c = tensor.shape
    size = itemsize(tensor.dtype)
    rows, columns = axes(workload)
    return TensorMap(
        tensor=tensor.name,
        dtype=tensor.dtype,
        extents=(c, w, h, n),
        strides_bytes=(c * size, w * c * size, h * w * c * size),
        box=(PANEL_CHANNELS, pixels),
        pixel_box=PixelBox(
            lower=(columns.first, rows.first),
            upper=(columns.end, rows.end),
            strides=(columns.stride, rows.stride),
        ),
    )


def _filter_map(tensor: Tensor, filters: int) -> TensorMap:
    """Return the tensor map for boxes of 64 channels of `filters` filters, for one tap."""
    k, r, s, c = tensor.shape
    size = itemsize(tensor.dtype)
    return TensorMap(
        tensor=tensor.name,
        dtype=tensor.dtype,
        extents=(c, k, r * s),
        strides_bytes=(r * s * c * size, c * size),
        box=(PANEL_CHANNELS, filters, 1),
    )


def _gradient_map(tensor: Tensor, pixels: int) -> TensorMap:
    """Return the tensor map for boxes of 64 filters of `pixels` pixels of dy, across images."""
    n, p, q, k = tensor.shape
    size = itemsize(tensor.dtype)
    return TensorMap(
        tensor=tensor.name,
        dtype=tensor.dtype,
        extents=(k, n * p * q, 1),
        strides_bytes=(k * size, n * p * q * k * size),
        box=(PANEL_CHANNELS, pixels, 1),
    )


def maps(workload: Conv2d, config: Mapping[str, Any]) -> tuple[TensorMap, TensorMap]:
    """Return the tensor maps of A and of B. Blocks of a cluster copy parts of shared tiles."""
    bm, bn, bk, cluster_m, cluster_n = (config[name] for name in ("bm", "bn", "bk", "cluster_m", "cluster_n"))
    first, second = workload.inputs()[:2]
    if workload.direction == "wgrad":
        return _gradient_map(second, bk // cluster_n), pixel_map(workload, first, bk // cluster_m)
    lines = bn if workload.direction == "fprop" else bk
    return pixel_map(workload, first, bm // cluster_n), _filter_map(second, lines // cluster_m)
