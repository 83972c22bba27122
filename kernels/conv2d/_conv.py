"""Host side of convolutions as products of matrices (conv.cuh): shapes, alignment, constraints, launches."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.kernels.common import cuda_expression, prologue
from tunebench.kernels.common.cuda import ctype
from tunebench.space import Parameter, takes_config
from tunebench.variant import Launch, Scalar, Tiling, ceil_div
from tunebench.workload import Tensor
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.conv2d import Conv2d, ConvAxis

__all__ = [
    "RASTER",
    "SPLIT",
    "SPLITS",
    "WALK",
    "Product",
    "ResidueClass",
    "alignment",
    "along_k",
    "choices",
    "epilogue",
    "epilogue_tensors",
    "injected",
    "launches",
    "limits",
    "order_matters",
    "pairs_inside",
    "power_of_two",
    "product",
    "residue_classes",
    "scratch",
    "share",
    "sizes",
    "split_is_useful",
    "step_is_useful",
    "sum_of_parts",
    "tiles",
    "walk_is_useful",
]

MAX_GRID_X = 2**31 - 1
MAX_SCRATCH_BYTES = 2**30
SUM_THREADS = 256
"""Threads per block of `sum_parts`."""
NARROW = 2**30
"""Extents and offsets below this are safe in 32 bits, including a tile beyond the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidueClass:
    """Pixels of dx with the same remainder modulo the stride; in other directions, all pixels.

    Attributes:
        count: Number of classes with the same shape.
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
        classes: Residue classes that have pixels, one per shape.
        n: Columns.
        depth: Channels of A in one group; for wgrad all of K, which is pixels.
        groups: Number of groups.
    """

    classes: tuple[ResidueClass, ...]
    n: int
    depth: int
    groups: int

    @property
    def m(self) -> int:
        """Rows of the largest class."""
        return max(c.m for c in self.classes)

    @property
    def taps(self) -> int:
        """Taps of the class with most taps."""
        return max(c.taps for c in self.classes)

    def steps(self, taps: int, bk: Any, walk: Any) -> Any:
        """Return the steps along K of a class.

        Args:
            taps: Taps of the class.
            bk: Length of a step.
            walk: "by_tap" or "flat".
        """
        by_tap, flat = taps * ceil_div(self.depth, bk), ceil_div(taps * self.depth, bk)
        return np.where(np.asarray(walk) == "by_tap", by_tap, flat)

    def tiles(self, bm: Any, bn: Any, most_taps: bool = False) -> Any:
        """Return the tiles of bm x bn in all groups and classes, or in the classes with most taps."""
        classes = [c for c in self.classes if c.taps == self.taps or not most_taps]
        return sum(c.count * ceil_div(c.m, bm) for c in classes) * ceil_div(self.n, bn) * self.groups

    def work(self, bm: Any, bn: Any, bk: Any, walk: Any) -> Any:
        """Return the multiply-adds of whole tiles, in all groups and classes."""
        by_class = (c.count * ceil_div(c.m, bm) * self.steps(c.taps, bk, walk) for c in self.classes)
        return sum(by_class) * ceil_div(self.n, bn) * self.groups * bm * bn * bk


@functools.lru_cache(maxsize=256)
def product(workload: Conv2d) -> Product:
    """Return the shape of the matrix product that computes a convolution."""
    w, c, k = workload, workload.c // workload.groups, workload.k // workload.groups
    if w.direction == "fprop":
        whole = ResidueClass(count=1, m=w.n * w.p * w.q, taps=w.r * w.s)
        return Product(classes=(whole,), n=k, depth=c, groups=w.groups)
    if w.direction == "wgrad":
        whole = ResidueClass(count=1, m=w.r * w.s * c, taps=1)
        return Product(classes=(whole,), n=k, depth=w.n * w.p * w.q, groups=w.groups)
    found: Counter[tuple[int, int]] = Counter()
    rows, columns = map(_residues, w.axes)
    for ((height, r), i), ((width, s), j) in itertools.product(rows.items(), columns.items()):
        found[w.n * height * width, r * s] += i * j
    classes = tuple(ResidueClass(count=count, m=m, taps=taps) for (m, taps), count in found.items())
    return Product(classes=classes, n=c, depth=k, groups=w.groups)


def _residues(axis: ConvAxis) -> Counter[tuple[int, int]]:
    """Return the number of residues modulo the stride along an axis of dx, by (pixels, reaching taps)."""
    stride = axis.stride
    reaching = Counter(axis.offset(tap) % stride for tap in range(axis.taps))
    pixels, longer = divmod(axis.image, stride)  # the first `longer` remainders have one pixel more
    found: Counter[tuple[int, int]] = Counter()
    for remainder, count in reaching.items():
        found[pixels + (remainder < longer), count] += 1
    reached_longer = sum(remainder < longer for remainder in reaching)
    found[pixels + 1, 0] += longer - reached_longer
    found[pixels, 0] += stride - longer - (len(reaching) - reached_longer)
    return Counter({(extent, count): n for (extent, count), n in found.items() if extent and n})


def power_of_two(extent: int, most: int) -> int:
    """Return the largest power of two that divides `extent`, up to `most`."""
    return min(extent & -extent, most)


@functools.lru_cache(maxsize=1024)
def alignment(workload: Conv2d, walk: str) -> tuple[int, int, int]:
    """Return the widest aligned access to A, B and C, in elements; at most 16 bytes."""
    w, most = workload, 16 // itemsize(storage(workload.dtype))
    c, k, taps = w.c // w.groups, w.k // w.groups, w.r * w.s
    pixels = w.h * w.w if w.direction == "dgrad" else w.p * w.q
    if w.layout == "nhwc":
        a = {"fprop": c, "dgrad": k, "wgrad": c}[w.direction]
        b = {"fprop": c, "dgrad": c, "wgrad": k}[w.direction]
        out = {"fprop": k, "dgrad": c, "wgrad": taps * c}[w.direction]
    else:
        whole_filter = walk == "flat" or taps == 1
        a = pixels if taps == 1 and w.stride == 1 and w.padded == (w.h, w.w) else 1
        b = {"fprop": taps * c if whole_filter else 1, "dgrad": c if taps == 1 else 1, "wgrad": pixels}[
            w.direction
        ]
        out = {"fprop": pixels, "dgrad": pixels if w.stride == 1 else 1, "wgrad": taps * c}[w.direction]
    return power_of_two(a, most), power_of_two(b, most), power_of_two(out, most)


def along_k(workload: Conv2d) -> tuple[bool, bool]:
    """Return for A and for B whether neighbours in memory are neighbours along K."""
    nhwc, wgrad = workload.layout == "nhwc", workload.direction == "wgrad"
    return nhwc != wgrad, workload.direction == "fprop" or (wgrad and not nhwc)


def _spans(workload: Conv2d) -> list[int]:
    """Return bounds of all offsets. An offset is the sum of two parts; one may point into padding."""
    w = workload
    height, width = w.padded
    return [
        *(tensor.size for tensor in (*w.inputs(), *w.outputs())),
        w.n * w.c * height * width,
        w.n * w.k * (height // w.stride + 2) * (width // w.stride + 2),
        w.r * w.s * (max(w.c, w.k) // w.groups + 64),  # by tap, K is rounded up
        2 * max(height, width),
    ]


def pairs_inside(workload: Conv2d) -> int:
    """Return how many pairs of an output and a tap read an input inside the image, for one channel."""
    return math.prod(sum(len(axis.outputs_of(tap)) for tap in range(axis.taps)) for axis in workload.axes)


def limits(workload: Conv2d) -> str | None:
    """Return why a workload exceeds 64-bit offsets or the grid, or None."""
    largest = max(tensor.size for tensor in (*workload.inputs(), *workload.outputs()))
    if largest >= 2**44 or max(_spans(workload)) >= 2**60:
        return "tensors must have fewer than 2**44 elements, and padded images fewer than 2**60"
    return None


# -- constraints of several spaces ---------------------------------------------------------------------------

SPLITS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

WALK = Parameter("walk", ("by_tap", "flat"), "order of K: tap by tap, or taps and channels as one index")
SPLIT = Parameter("split", SPLITS, "parts of K, which a second kernel sums")
RASTER = Parameter("raster", ("columns", "rows"), "order of tiles: along columns or along rows first")


def walk_is_useful(walk: Any, workload: Conv2d) -> Any:
    """K runs by tap for one tap, flat where K is pixels, else either way."""
    if workload.direction == "wgrad":
        return walk == "flat"
    return (walk == "by_tap") | (workload.r * workload.s > 1)


def step_is_useful(bk: Any, walk: Any, least: int, workload: Conv2d) -> Any:
    """Return whether a step is shorter than twice the extent of K, or the shortest step."""
    whole = product(workload)
    extent = np.where(walk == "by_tap", whole.depth, max(1, whole.taps) * whole.depth)
    return (bk == least) | (bk < 2 * extent)


@takes_config("bm", "bn", "bk", "walk", "split")
def split_is_useful(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """K is split only where blocks are few, into 4 steps or more, with sums that fit in the scratch."""
    whole, (bm, bn, bk, walk, split) = product(workload), config.values()
    few = whole.tiles(1.0 * bm, 1.0 * bn) * (split // 2) < 2 * device.sm_count
    long = whole.steps(whole.taps, bk, walk) >= 4 * split
    small = 4.0 * split * workload.outputs()[0].size <= MAX_SCRATCH_BYTES
    return (split == 1) | (few & long & small)


def order_matters(bm: Any, bn: Any, split: Any, raster: Any, workload: Conv2d) -> Any:
    """Tiles run along rows first only if there are several in both directions, and K is not split."""
    whole = product(workload)
    return (raster == "columns") | ((split == 1) & (whole.m > bm) & (whole.n > bn))


def share(extent: Any, bk: Any, vec: Any, threads: Any, runs_along_k: bool) -> tuple[Any, Any]:
    """Return the accesses of a thread to a tile: across it and along K (`Share` in conv.cuh)."""
    across, lines = (bk // vec, extent) if runs_along_k else (extent // vec, bk)
    threads_across = np.minimum(across, threads)
    counts = across // threads_across, ceil_div(lines, threads // threads_across)
    return (counts[1], counts[0]) if runs_along_k else counts


def tiles(workload: Conv2d, config: Mapping[str, Any]) -> tuple[Tiling, ...]:
    """Return the tiling of the product of one group and one residue class."""
    whole = product(workload)
    rows, columns, terms = {
        "fprop": ("n*p*q", "k", "c*r*s"),
        "dgrad": ("n*h*w", "c", "k*r*s"),
        "wgrad": ("c*r*s", "k", "n*p*q"),
    }[workload.direction]
    by_tap = config["walk"] == "by_tap"
    depth = whole.depth if by_tap else max(1, whole.taps) * whole.depth
    return (
        Tiling(dimension=rows, extent=whole.m, tile=config["bm"]),
        Tiling(dimension=columns, extent=whole.n, tile=config["bn"]),
        Tiling(dimension=terms.partition("*")[0] if by_tap else terms, extent=depth, tile=config["bk"]),
    )


# -- launching ----------------------------------------------------------------------------------------------


def epilogue(workload: Conv2d, split: int) -> str:
    """Return the C++ type of the epilogue; partial sums have none."""
    flags = (workload.has_scale, workload.has_bias, workload.has_residual, workload.has_relu)
    named = f"Epilogue<{', '.join(str(flag and split == 1).lower() for flag in flags)}>"
    return named if workload.act == IDENTITY or split > 1 else f"Activated<{named}>"


# C++ type of an epilogue that ends in an expression. Needs conv.cuh.
_ACTIVATED = f"""
template <class E>
struct Activated : E {{
  static __device__ __forceinline__ float apply(float sum, float scale, float bias, float residual) {{
    return {cuda_expression.INJECTED}()(E::apply(sum, scale, bias, residual));
  }}
}};
"""


def injected(workload: Conv2d) -> str:
    """Return the source of an activation that is an expression, or "" without one."""
    return "" if workload.act == IDENTITY else cuda_expression.injected(workload.act) + _ACTIVATED


def epilogue_tensors(workload: Conv2d) -> tuple[str, str, str]:
    """Return the names of scale, bias and residual, or of an input for a missing one, which is not read."""
    known, other = {tensor.name for tensor in workload.inputs()}, workload.inputs()[0].name
    scale, bias, residual = (name if name in known else other for name in ("scale", "bias", "residual"))
    return scale, bias, residual


def choices(workload: Conv2d, config: Mapping[str, Any], index: str) -> tuple[str, ...]:
    """Return the first template arguments of every kernel: types, direction, layout, walk."""
    stored = ctype(workload.dtype)
    return (
        *(stored, stored if config["split"] == 1 else "float", index),
        *(workload.direction.upper(), workload.layout.upper(), config["walk"].upper()),
    )


def residue_classes(workload: Conv2d) -> tuple[int, int]:
    """Return the number of residue classes of rows and of columns."""
    if workload.direction != "dgrad":
        return 1, 1
    return min(workload.stride, workload.h), min(workload.stride, workload.w)


def sizes(workload: Conv2d) -> tuple[int, ...]:
    """Return the fields of `Sizes` in conv.cuh, in order."""
    w = workload
    tap_skip = w.stride // math.gcd(w.stride, w.dilation)
    return (
        *(w.n, w.c // w.groups, w.h, w.w, w.k // w.groups, w.r, w.s, w.p, w.q),
        *(w.stride, w.pad, w.pad_w, w.dilation, w.groups),
        *(tap_skip, tap_skip * w.dilation // w.stride),
        *residue_classes(w),
    )


def scratch(workload: Conv2d, split: int) -> tuple[Tensor, ...]:
    """Return the partial sums, if K is split."""
    shape = (split, workload.outputs()[0].size)
    return (Tensor(name="partial", shape=shape, dtype="f32"),) if split > 1 else ()


def launches(
    workload: Conv2d, config: Mapping[str, Any], entry: Callable[[str], str], threads: int, smem_bytes: int
) -> tuple[Launch, ...]:
    """Return the launch of the product, and that of the sum of its parts if K is split.

    Args:
        workload: The convolution.
        config: A configuration with `bm`, `bn`, `split` and `raster`.
        entry: Function of the C++ type of indices that returns the name of the kernel.
        threads: Threads per block.
        smem_bytes: Shared memory per block.
    """
    whole, split, out = product(workload), config["split"], workload.outputs()[0]
    tiles = ceil_div(whole.m, config["bm"]), ceil_div(whole.n, config["bn"])
    blocks = math.prod((*tiles, *residue_classes(workload), split, workload.groups))
    wide = max(*_spans(workload), blocks) >= NARROW
    a, b = (tensor.name for tensor in workload.inputs()[:2])
    numbers = (*sizes(workload), *tiles, int(config["raster"] == "rows"), split)
    ahead = prologue.operands(workload) if workload.has_pre else ()
    first = Launch(
        entry=entry("i64" if wide else "i32"),
        grid=(min(blocks, MAX_GRID_X), ceil_div(blocks, MAX_GRID_X), 1),
        block=(threads, 1, 1),
        arguments=(
            *(a, b, *epilogue_tensors(workload), *ahead, out.name if split == 1 else "partial"),
            *(Scalar("long long" if wide else "int", number) for number in numbers),
            Scalar("long long", out.size),
        ),
        smem_bytes=smem_bytes,
    )
    return (first,) if split == 1 else (first, sum_of_parts(workload, split, wide=wide))


def sum_of_parts(workload: Conv2d, split: int, *, wide: bool) -> Launch:
    """Return the launch of `sum_parts`.

    Args:
        workload: The convolution.
        split: Parts of K.
        wide: Whether offsets have 64 bits.
    """
    out, inner = workload.outputs()[0], 1 if workload.layout == "nhwc" else workload.p * workload.q
    numbers = (split, out.size, inner, workload.k)
    index = "i64" if wide else "i32"
    return Launch(
        entry=f"sum_parts<{ctype(workload.dtype)}, {index}, {epilogue(workload, split=1)}>",
        grid=(ceil_div(out.size, SUM_THREADS), 1, 1),
        block=(SUM_THREADS, 1, 1),
        arguments=(
            *("partial", *epilogue_tensors(workload), out.name),
            *(Scalar("long long" if wide else "int", number) for number in numbers),
        ),
    )
