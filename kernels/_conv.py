"""Convolutions as products of matrices, seen from the host: the sizes that `_conv_geometry.cuh` computes with."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tunebench._lazy import np
from tunebench.dtype import itemsize, storage
from tunebench.variant import ceil_div
from tunebench.workloads.operators.conv2d import Conv2d

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[Any]

__all__ = ["Product", "ResidueClass", "alignment", "miniature", "product", "wide"]

NARROW = 2**30
"""Extents and offsets below this are safe in 32 bits, with a tile beyond the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidueClass:
    """Pixels of dx that leave one remainder when divided by the stride; in other directions, all there is.

    Attributes:
        count: How many classes are like this one.
        m: Rows of the product.
        taps: Taps of the filter that reach these pixels.
    """

    count: int
    m: int
    taps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """C (m, n) = A (m, k) B (k, n), for each group and each residue class.

    Attributes:
        classes: Residue classes that have pixels, unlike ones once.
        n: Columns.
        depth: Channels of A in one group; for wgrad all of K, which is pixels.
    """

    classes: tuple[ResidueClass, ...]
    n: int
    depth: int

    @property
    def m(self) -> int:
        """Rows of the class that has most."""
        return max(c.m for c in self.classes)

    @property
    def taps(self) -> int:
        """Taps of the class that has most."""
        return max(c.taps for c in self.classes)

    def steps(self, taps: int, bk: Column, walk: Column) -> Column:
        """Return the steps of `bk` along K in a class with `taps` taps; `walk` is "by_tap" or "flat"."""
        by_tap, flat = taps * ceil_div(self.depth, bk), ceil_div(taps * self.depth, bk)
        found: Column = np.where(np.asarray(walk) == "by_tap", by_tap, flat)
        return found


@functools.lru_cache(maxsize=256)
def product(workload: Conv2d) -> Product:
    """Return the product that a convolution is."""
    w, c, k = workload, workload.c // workload.groups, workload.k // workload.groups
    if w.direction == "fprop":
        whole = ResidueClass(count=1, m=w.n * w.p * w.q, taps=w.r * w.s)
        return Product(classes=(whole,), n=k, depth=c)
    if w.direction == "wgrad":
        whole = ResidueClass(count=1, m=w.r * w.s * c, taps=1)
        return Product(classes=(whole,), n=k, depth=w.n * w.p * w.q)
    found: Counter[tuple[int, int]] = Counter()
    rows, columns = _residues(w, w.h, w.r), _residues(w, w.w, w.s)
    for ((height, r), i), ((width, s), j) in itertools.product(rows.items(), columns.items()):
        found[w.n * height * width, r * s] += i * j
    classes = tuple(ResidueClass(count=count, m=m, taps=taps) for (m, taps), count in found.items())
    return Product(classes=classes, n=c, depth=k)


def _residues(workload: Conv2d, image: int, taps: int) -> Counter[tuple[int, int]]:
    """Count, along one axis of dx, the remainders of the stride by their pixels and the taps that reach them."""
    stride = workload.stride
    reaching = Counter((tap * workload.dilation - workload.pad) % stride for tap in range(taps))
    pixels, longer = divmod(image, stride)  # the first `longer` remainders have one pixel more
    found: Counter[tuple[int, int]] = Counter()
    for remainder, count in reaching.items():
        found[pixels + (remainder < longer), count] += 1
    reached_longer = sum(remainder < longer for remainder in reaching)
    found[pixels + 1, 0] += longer - reached_longer
    found[pixels, 0] += stride - longer - (len(reaching) - reached_longer)
    return Counter({(extent, count): n for (extent, count), n in found.items() if extent and n})


def _power_of_two(extent: int, most: int) -> int:
    """Return the largest power of two that divides `extent`, up to `most`."""
    return min(extent & -extent, most)


@functools.lru_cache(maxsize=1024)
def alignment(workload: Conv2d, walk: str) -> tuple[int, int, int]:
    """Return how many neighbours of A, B and C always lie together and aligned, up to 16 bytes of them."""
    w, most = workload, 16 // itemsize(storage(workload.dtype))
    c, k, taps = w.c // w.groups, w.k // w.groups, w.r * w.s
    pixels = w.h * w.w if w.direction == "dgrad" else w.p * w.q
    if w.layout == "nhwc":
        a = {"fprop": c, "dgrad": k, "wgrad": c}[w.direction]
        b = {"fprop": c, "dgrad": c, "wgrad": k}[w.direction]
        out = {"fprop": k, "dgrad": c, "wgrad": taps * c}[w.direction]
    else:
        whole_filter = walk == "flat" or taps == 1
        a = pixels if taps == 1 and w.stride == 1 and w.pad == 0 else 1
        b = {"fprop": taps * c if whole_filter else 1, "dgrad": c if taps == 1 else 1, "wgrad": pixels}[
            w.direction
        ]
        out = {"fprop": pixels, "dgrad": pixels if w.stride == 1 else 1, "wgrad": taps * c}[w.direction]
    return _power_of_two(a, most), _power_of_two(b, most), _power_of_two(out, most)


def wide(workload: Conv2d, blocks: int) -> bool:
    """Tell whether an index, an offset or a number of blocks needs more than 32 bits.

    Offsets are sums of which one part may point into the padding, so padded images count in full.
    """
    w = workload
    height, width = w.h + 2 * w.pad, w.w + 2 * w.pad
    spans = [
        *(tensor.size for tensor in (*w.inputs(), *w.outputs())),
        w.n * w.c * height * width,
        w.n * w.k * (height // w.stride + 2) * (width // w.stride + 2),
        w.r * w.s * (max(w.c, w.k) // w.groups + 64),  # K tap by tap is rounded up
        2 * max(height, width),
        blocks,
    ]
    return max(spans) >= NARROW


# -- a small workload like a large one ------------------------------------------------------------------------------

MOST_WORK = 10_000_000
"""Multiply-adds of a miniature, those of half-empty tiles included: what emulation does in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a block computes.

    Attributes:
        m: Rows.
        n: Columns.
        k: Length of a step along K.
        steps: Steps along K that take every path of the main loop.
        walk: How K runs, "by_tap" or "flat".
    """

    m: int
    n: int
    k: int
    steps: int
    walk: str


def miniature(workload: Conv2d, tile: Tile) -> Conv2d:
    """Return a small workload of the same alignment that fills tiles, and ends within them, as `workload` does.

    Filter, stride, padding and dilation stay. Two tiles each way become one where the work would not be small.
    """
    small = workload
    for tiles_m, tiles_n in ((2, 2), (2, 1), (1, 2), (1, 1)):
        small = _shrink(workload, tile, tiles_m, tiles_n)
        if _work(small, tile) <= MOST_WORK:
            break
    return small


def _work(workload: Conv2d, tile: Tile) -> int:
    whole = product(workload)
    steps = int(whole.steps(whole.taps, np.array(tile.k), np.array(tile.walk)))
    tiles = sum(c.count * ceil_div(c.m, tile.m) for c in whole.classes) * ceil_div(whole.n, tile.n)
    work: int = workload.groups * tiles * steps * tile.m * tile.n * tile.k
    return work


def _shrink(workload: Conv2d, tile: Tile, tiles_m: int, tiles_n: int) -> Conv2d:
    """Return the smallest workload like `workload` that has so many tiles, if that one has."""
    taps = workload.r * workload.s
    groups = min(workload.groups, 2)
    c, k = workload.c // workload.groups, workload.k // workload.groups
    rounds = ceil_div(tile.steps, max(1, product(workload).taps))  # for each tap, by tap
    if workload.direction == "fprop":
        c, k = _least(c, tile.k, rounds), _least(k, tile.n, tiles_n)
    elif workload.direction == "dgrad":
        c, k = _least(c, tile.n, tiles_n), _least(k, tile.k, rounds)
    else:
        c, k = _least_rows(c, taps, tile.m, tiles_m), _least(k, tile.n, tiles_n)
    narrow = replace(workload, c=c * groups, k=k * groups, groups=groups)
    unit, count = (tile.k, tile.steps) if workload.direction == "wgrad" else (tile.m, tiles_m)
    wanted = _least(_pixels(workload), unit, count)
    for small in _images(narrow, wanted):
        pixels = _pixels(small)
        alike = (pixels % unit == 0) == (_pixels(workload) % unit == 0)
        if pixels >= wanted and alike and alignment(small, tile.walk) == alignment(narrow, tile.walk):
            return small
    return replace(narrow, n=min(narrow.n, 2))


def _least(extent: int, unit: int, count: int) -> int:
    """Return the least extent of so many units whose last is as full as that of `extent`."""
    return min(extent, unit * (count - 1) + (extent % unit or unit))


def _least_rows(c: int, taps: int, unit: int, count: int) -> int:
    """Return the least number of channels, as aligned as `c` is, whose taps are rows like those of `c`."""
    whole, aligned = (taps * c) % unit == 0, _power_of_two(c, 8)
    for channels in range(max(2, aligned), c, aligned):
        rows = taps * channels
        if rows > unit * (count - 1) and whole == (rows % unit == 0):
            return channels
    return c


def _pixels(workload: Conv2d) -> int:
    """Return the pixels that are rows of the product, or that wgrad sums over."""
    whole = product(workload)
    return whole.depth if workload.direction == "wgrad" else whole.m


def _images(workload: Conv2d, pixels: int) -> Iterator[Conv2d]:
    """Yield workloads with growing images, of each size as few as have so many pixels: one to four if that does."""
    filters = [(taps - 1) * workload.dilation + 1 for taps in (workload.r, workload.s)]
    least_h, least_w = (
        min(image, reach + workload.stride)
        for image, reach in zip((workload.h, workload.w), filters, strict=True)
    )
    for side, more in itertools.product(range(min(64, max(workload.h, workload.w))), range(8)):
        h, w = min(workload.h, least_h + side + more), min(workload.w, least_w + side)
        one = replace(workload, h=h, w=w, n=1)
        enough = ceil_div(pixels, _pixels(one))
        most = workload.n if (h, w) == (workload.h, workload.w) else min(workload.n, 4)
        for n in sorted({min(most, count) for count in (2, enough, enough + 1)}):
            yield replace(one, n=n)
