"""Emulation workloads of convolutions: small workloads with the same tiles, edges and alignment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tunebench.kernels.conv2d._conv import alignment, power_of_two, product
from tunebench.variant import ceil_div
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["Tile", "emulation_workload", "least"]

MOST_WORK = 10_000_000
"""Most multiply-adds of an emulation workload, counting whole tiles: emulation does them in a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile of a block.

    Attributes:
        m: Rows.
        n: Columns.
        k: Length of a step along K.
        steps: Steps along K that take every path of the main loop.
        walk: Order of K, "by_tap" or "flat".
    """

    m: int
    n: int
    k: int
    steps: int
    walk: str


def emulation_workload(workload: Conv2d, tile: Tile) -> Conv2d:
    """Return a small workload with the same alignment and with full and partial tiles like the large one.

    Filter, stride, padding and dilation stay the same. There are two tiles in each direction, or one where
    the work would be large. Rows may end within a tile if it would take too many of them to end with one.
    """
    small = workload
    for alike, tiles in itertools.product((True, False), ((2, 2), (2, 1), (1, 2), (1, 1))):
        small = _shrink(workload, tile, tiles, alike)
        if int(product(small).work(tile.m, tile.n, tile.k, tile.walk)) <= MOST_WORK:
            break
    return small


def _shrink(workload: Conv2d, tile: Tile, tiles: tuple[int, int], alike: bool) -> Conv2d:
    """Return the smallest workload with the wanted tiles, if `workload` has as many.

    Args:
        workload: The workload to emulate.
        tile: Tile of a block.
        tiles: Wanted tiles along rows and along columns.
        alike: Whether rows must end with a tile, or within one, as they do in `workload`.
    """
    tiles_m, tiles_n = tiles
    taps = workload.r * workload.s
    groups = min(workload.groups, 2)
    c, k = workload.c // workload.groups, workload.k // workload.groups
    rounds = ceil_div(tile.steps, max(1, product(workload).taps))  # per tap if K runs by tap
    if workload.direction == "fprop":
        c, k = least(c, tile.k, rounds), least(k, tile.n, tiles_n)
    elif workload.direction == "dgrad":
        c, k = least(c, tile.n, tiles_n), least(k, tile.k, rounds)
    else:
        c, k = _least_rows(c, taps, tile.m, tiles_m, alike), least(k, tile.n, tiles_n)
    narrow = replace(workload, c=c * groups, k=k * groups, groups=groups)
    unit, count = (tile.k, tile.steps) if workload.direction == "wgrad" else (tile.m, tiles_m)
    min_pixels = least(_pixels(workload), unit, count)
    for small in _images(narrow, min_pixels):
        pixels = _pixels(small)
        ends_alike = not alike or (pixels % unit == 0) == (_pixels(workload) % unit == 0)
        if (
            pixels >= min_pixels
            and ends_alike
            and alignment(small, tile.walk) == alignment(narrow, tile.walk)
        ):
            return small
    return replace(narrow, n=min(narrow.n, 2))


def least(extent: int, unit: int, count: int) -> int:
    """Return the smallest extent of `count` units whose last unit is as full as that of `extent`."""
    return min(extent, unit * (count - 1) + (extent % unit or unit))


def _least_rows(c: int, taps: int, unit: int, count: int, alike: bool) -> int:
    """Return the fewest channels, aligned as `c` is, whose taps fill rows of tiles as those of `c` do."""
    whole, aligned = (taps * c) % unit == 0, power_of_two(c, 8)
    for channels in range(max(2, aligned), c, aligned):
        rows = taps * channels
        if rows > unit * (count - 1) and (not alike or whole == (rows % unit == 0)):
            return channels
    return c


def _pixels(workload: Conv2d) -> int:
    """Return the pixels that are rows of the product, or the summed dimension of wgrad."""
    whole = product(workload)
    return whole.depth if workload.direction == "wgrad" else whole.m


def _images(workload: Conv2d, pixels: int) -> Iterator[Conv2d]:
    """Yield workloads with growing images; of each size, enough images for `pixels`, up to four."""
    filters = [(taps - 1) * workload.dilation + 1 for taps in (workload.r, workload.s)]
    least_h, least_w = (
        min(image, reach + workload.stride)
        for image, reach in zip((workload.h, workload.w), filters, strict=True)
    )
    for side, more in itertools.product(range(min(64, max(workload.h, workload.w))), range(8)):
        h, w = min(workload.h, least_h + side + more), min(workload.w, least_w + side)
        image_workload = replace(workload, h=h, w=w, n=1)
        enough = ceil_div(pixels, _pixels(image_workload))
        max_images = workload.n if (h, w) == (workload.h, workload.w) else min(workload.n, 4)
        for n in sorted({min(max_images, count) for count in (2, enough, enough + 1)}):
            yield replace(image_workload, n=n)
