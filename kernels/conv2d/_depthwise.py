"""Host side of depthwise convolutions: source pixels of a tile, search space, registers and shared memory."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tunebench._lazy import np
from tunebench.device import Device
from tunebench.dtype import itemsize, storage
from tunebench.kernels.common.gemm import alignment
from tunebench.space import Parameter, Space, takes_config
from tunebench.variant import ceil_div
from tunebench.workloads.operators.conv2d import Conv2d

__all__ = ["MAX_SPAN", "SPACE", "Axis", "axes", "block_tiles", "by_value", "registers", "smem_bytes"]

MAX_SPAN = 64
"""Most source pixels that a thread's tile may span along an axis (`Meeting` in depthwise.cuh)."""
MAX_PRODUCTS = 4096
"""Most multiply-adds of a tile; all are unrolled."""
OTHER_REGISTERS, SPARE_REGISTERS = 28, 40
"""Registers per thread for addresses and sizes, and those that the compiler takes in addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Rows or columns of the pixels that tiles divide, and of the source image.

    Extents of tiles are in steps: one pixel, or in dgrad `stride` pixels, since dx is divided at multiples of
    the stride.

    Attributes:
        name: The dimension of the workload that `extent` is.
        extent: Pixels of y, of dx, or in wgrad of dy.
        source: Pixels of the source: of x, or in dgrad of dy.
        taps: Taps of the filter.
        stride: Stride of the convolution.
        pad: Padding of the convolution.
        dilation: Dilation of the convolution.
        backward: Whether this is dgrad.
    """

    name: str
    extent: int
    source: int
    taps: int
    stride: int
    pad: int
    dilation: int
    backward: bool

    @property
    def unit(self) -> int:
        """Pixels of a step."""
        return self.stride if self.backward else 1

    @property
    def source_unit(self) -> int:
        """Source pixels from one step to the next."""
        return 1 if self.backward else self.stride

    @property
    def shift(self) -> int:
        """Offset of the source of the first tile."""
        return self.pad // self.stride if self.backward else -self.pad

    @property
    def remainder(self) -> int:
        """Padding modulo the stride, in dgrad."""
        return self.pad % self.stride if self.backward else 0

    @property
    def most_taps(self) -> int:
        """Most taps that one pixel meets."""
        if not self.backward:
            return self.taps
        return max(Counter(tap * self.dilation % self.stride for tap in range(self.taps)).values())

    def places(self, steps: int) -> tuple[int, ...]:
        """Return the source pixels that a tile reads, relative to the begin of its source."""
        return _places(self, steps)

    def reads(self, steps: int) -> int:
        """Return the number of source pixels that a tile reads."""
        return len(self.places(steps))

    def span(self, steps: int) -> int:
        """Return the number of source pixels that a tile spans."""
        pixels = self.places(steps)
        return pixels[-1] - pixels[0] + 1 if pixels else 1

    def fewest_inside(self, steps: int) -> int:
        """Return the fewest pixels inside the source that any tile reads."""
        firsts = np.arange(0, self.extent, steps * self.unit) // self.unit * self.source_unit + self.shift
        read = firsts[:, None] + np.array(self.places(steps), dtype=np.int64)[None, :]
        return int(((read >= 0) & (read < self.source)).sum(axis=1).min())


@functools.lru_cache(maxsize=1024)
def _places(axis: Axis, steps: int) -> tuple[int, ...]:
    pairs = itertools.product(range(steps * axis.unit), range(axis.taps))
    if not axis.backward:
        return tuple(sorted({i * axis.stride + tap * axis.dilation for i, tap in pairs}))
    positions = (i + axis.remainder - tap * axis.dilation for i, tap in pairs)
    return tuple(sorted({position // axis.stride for position in positions if position % axis.stride == 0}))


@functools.lru_cache(maxsize=256)
def axes(workload: Conv2d) -> tuple[Axis, Axis]:
    """Return rows and columns of a convolution."""
    backward, result = workload.direction == "dgrad", []
    for along, names in zip(workload.axes, (("h", "p"), ("w", "q")), strict=True):
        result.append(
            Axis(
                name=names[not backward],
                extent=along.image if backward else along.output,
                source=along.output if backward else along.image,
                taps=along.taps,
                stride=along.stride,
                pad=along.pad,
                dilation=along.dilation,
                backward=backward,
            )
        )
    return result[0], result[1]


def by_value(figure: Callable[[int], float], column: Any) -> Any:
    """Return `figure` of a number, or of each value of a column, computed once per distinct value."""
    if np.ndim(column) == 0:
        return figure(int(column))
    values, where = np.unique(column, return_inverse=True)
    return np.array([figure(int(value)) for value in values])[where]


# -- space ------------------------------------------------------------------------------------------------

_TILE = ("rows", "columns", "vec", "channels", "across", "down")


def block_tiles(workload: Conv2d, config: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the number of block tiles along channels, rows and columns (numbers or columns)."""
    rows, columns = axes(workload)
    return (
        ceil_div(workload.c, config["channels"] * config["vec"]),
        ceil_div(rows.extent, config["down"] * config["rows"] * rows.unit),
        ceil_div(columns.extent, config["across"] * config["columns"] * columns.unit),
    )


def tile_is_useful(rows: Any, columns: Any, vec: Any, workload: Conv2d) -> Any:
    """A thread's tile must be less than twice as large as the image, with few enough products to unroll."""
    down, across = axes(workload)
    of_use = ((rows == 1) | (rows * down.unit < 2 * down.extent)) & (
        (columns == 1) | (columns * across.unit < 2 * across.extent)
    )
    spans = np.maximum(by_value(down.span, rows), by_value(across.span, columns))
    few = rows * columns * vec * workload.r * workload.s <= MAX_PRODUCTS
    return of_use & few & (spans <= MAX_SPAN)


@takes_config(*_TILE)
def threads_have_work(config: Mapping[str, Any], workload: Conv2d) -> Any:
    """A block has 64 to 256 threads, less than half of them beyond the image, unless that is tiny."""
    rows, columns, vec, channels, across, down = (config[name] for name in _TILE)
    (tall, wide), threads = axes(workload), channels * across * down
    of_use = (across == 1) | (across * columns * wide.unit < 2 * wide.extent)
    of_use &= (channels == 1) | (channels * vec < 2 * workload.c)
    tiles = ceil_div(tall.extent, tall.unit) * ceil_div(wide.extent, wide.unit) * workload.c
    tiny = (threads == 64) & (tiles < 64)
    of_use &= (down == 1) | (down * rows * tall.unit < 2 * tall.extent) | tiny
    return of_use & (threads >= 64) & (threads <= 256)


def neighbours_lie_together(columns: Any, vec: Any, channels: Any, across: Any, workload: Conv2d) -> Any:
    """Neighbouring threads must read 32 contiguous bytes, or a whole line."""
    sector, wide = 32 // itemsize(storage(workload.dtype)), axes(workload)[1]
    if workload.layout == "nhwc":
        return channels * vec >= min(sector, workload.c)
    return across * columns * wide.unit >= min(sector, wide.extent)


def width_is_aligned(vec: Any, workload: Conv2d) -> Any:
    """Accesses must stay within the channels of a pixel; with channels first, they have one element."""
    widest = alignment(workload.c, storage(workload.dtype)) if workload.layout == "nhwc" else 1
    return (vec <= widest) & (4 * vec >= widest)


def registers(workload: Conv2d, rows: Any, columns: Any, vec: Any) -> Any:
    """Return an estimate of the registers per thread: its tile, the taps, and a line of the source.

    In wgrad the compiler reads lines well ahead, which takes as many registers again.
    """
    tall, wide = axes(workload)
    tile, values_per_output = rows * tall.unit * columns * wide.unit, 1 + (workload.direction == "wgrad")
    return (
        vec * (tile + values_per_output * (workload.r * workload.s + by_value(wide.span, columns)))
        + OTHER_REGISTERS
    )


@takes_config(*_TILE, "min_blocks")
def registers_suffice(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """`min_blocks` must fit on an SM without spills, and use fewer registers than the compiler would."""
    threads = config["min_blocks"] * config["channels"] * config["across"] * config["down"]
    needed = registers(workload, config["rows"], config["columns"], config["vec"])
    room = np.minimum(device.registers_per_sm // threads, 255)
    fits = (threads <= device.threads_per_sm) & (needed <= room)
    return fits & ((config["min_blocks"] == 1) | (needed + SPARE_REGISTERS > room))


def smem_bytes(workload: Conv2d, config: Mapping[str, Any]) -> Any:
    """Return the shared memory of a block in bytes: the source of its tiles, later sums of taps."""
    w, (tall, wide), channels = workload, axes(workload), config["channels"]
    depth, pixels = channels * config["vec"], config["across"] * config["down"]
    height = by_value(tall.span, config["rows"]) + (config["down"] - 1) * config["rows"] * tall.source_unit
    width = by_value(wide.span, config["columns"])
    width = width + (config["across"] - 1) * config["columns"] * wide.source_unit
    source = config["staged"] * height * width * depth * itemsize(storage(w.dtype))
    if w.direction != "wgrad":
        return source
    # Lanes with the same channel have already summed theirs (`reduce_taps`).
    together = np.maximum(1, 32 // channels) if w.layout == "nhwc" else np.minimum(pixels, 32)
    return np.maximum(source, 4 * (pixels // together) * w.r * w.s * depth)


@takes_config(*_TILE, "staged", "min_blocks")
def shared_memory_fits(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """The tiles must fit in the shared memory of a block, and those of `min_blocks` in an SM's."""
    smem = smem_bytes(workload, config)
    together = config["min_blocks"] * (smem + device.smem_reserved_bytes)
    return (smem <= device.smem_per_block_bytes) & (together <= device.smem_per_sm_bytes)


@takes_config(*_TILE, "split")
def split_is_useful(config: Mapping[str, Any], workload: Conv2d, device: Device) -> Any:
    """Only wgrad is split: into as many parts as give each SM one to four blocks, with a tile each."""
    split = config["split"]
    if workload.direction != "wgrad":
        return split == 1
    deep, tall, wide = block_tiles(workload, config)
    useful = (deep * split >= device.sm_count) & (deep * split <= 4 * device.sm_count)
    return (split == 1) | (useful & (split <= workload.n * tall * wide))


SPACE = Space(
    (
        Parameter("rows", (1, 2, 4, 8), "rows per thread (dgrad: times the stride)"),
        Parameter("columns", (1, 2, 4, 8), "columns per thread (dgrad: times the stride)"),
        Parameter("vec", (1, 2, 4, 8), "channels per access and per thread, channels last"),
        Parameter("channels", (1, 2, 4, 8, 16, 32, 64), "threads of a block along channels"),
        Parameter("across", (1, 2, 4, 8, 16, 32, 64), "threads along columns"),
        Parameter("down", (1, 2, 4, 8, 16, 32, 64), "threads along rows"),
        Parameter("staged", (0, 1), "1: a block copies the source of its tiles to shared memory"),
        Parameter("split", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "parts of the pixels (wgrad)"),
        Parameter("min_blocks", (1, 2, 4), "resident blocks per SM: limits registers per thread"),
    ),
    (
        tile_is_useful,
        width_is_aligned,
        neighbours_lie_together,
        threads_have_work,
        split_is_useful,
        shared_memory_fits,
        registers_suffice,
    ),
)
