"""Depthwise conv2d for Numba on the CPU, channels last: loops along channels.

Each group is one channel and one filter. Everything is a sum over taps of products of two runs of channels,
which vectorises for every filter. Where all taps of a pixel meet the image (and dgrad has no stride), a row
of taps or all taps are summed in registers; elsewhere taps are added one by one. dgrad is the same sum with
the filter mirrored, or, with a stride, over the taps that reach a pixel. wgrad keeps sums of every tap for
each thread, adds `pixels` of a row to one tap in a loop, and sums over threads in a fixed order.

Layout nhwc only; `numba_cpu` is as fast for channels first. Source: Zhang, Lo and Lu, "High performance
depthwise and pointwise convolutions on mobile devices", AAAI 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, shared, store
from tunebench.kernels.conv2d._conv import pairs_inside
from tunebench.kernels.conv2d._numba_conv import depthwise_limit, epilogue_tensors, finisher
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workloads.operators.conv2d import Conv2d

SPACE = Space(
    (
        Parameter("channels", (16, 32, 64, 128, 256, 512, 1024), "channels per loop over a pixel"),
        Parameter("rows", (1, 2, 4, 8), "rows of pixels per unit of work of a thread"),
        Parameter("taps", ("row", "all"), "taps per loop: a row of the filter, or all"),
        Parameter("pixels", (1, 2, 4, 8), "pixels of a row per loop over a tap (wgrad)"),
    ),
    (
        lambda channels, workload: (channels == 16) | (channels < 2 * workload.c),
        lambda rows, workload: (rows == 1) | (rows <= workload.h),
        lambda taps, workload: (
            (taps == "row") | ((workload.direction != "wgrad") & (1 < workload.r * workload.s <= 25))
        ),
        lambda pixels, workload: (pixels == 1) | ((workload.direction == "wgrad") & (pixels <= workload.q)),
    ),
)


class NumbaCpuDepthwise(NumbaCpuVariant[Conv2d]):
    """Depthwise convolutions of layout nhwc, of any type, direction and epilogue."""

    name = "numba_cpu_depthwise"
    operator = Conv2d
    space = SPACE

    def limits(self, workload: Conv2d, device: Device) -> str | None:
        """Return why groups, layout or filter size do not fit, or None."""
        reason = depthwise_limit(workload)
        return reason and f"{self.key} {reason}"

    def default(self, workload: Conv2d, device: Device) -> Config:
        """Return runs of 128 channels, with all taps of a small filter together."""
        channels = max(c for c in (16, 32, 64, 128) if c == 16 or c < 2 * workload.c)
        wgrad, few = workload.direction == "wgrad", 1 < workload.r * workload.s <= 9
        pixels = max(p for p in (1, 2, 4) if p == 1 or (wgrad and p <= workload.q))
        taps = "all" if few and not wgrad else "row"
        return Config({"channels": channels, "rows": 1, "taps": taps, "pixels": pixels})

    def costs(self, workload: Conv2d, table: Table, device: Device) -> Costs:
        """Count the products inside the image: none is computed with padding."""
        w = workload
        return Costs(blocks=1, full_blocks=0, threads=1, fma=float(w.n * w.c * pairs_inside(w)))

    def arguments(self, workload: Conv2d, config: Config) -> tuple[Argument, ...]:
        """Return all tensors: the output for a missing scale, bias or residual, which is not read."""
        w = workload
        first, second = (tensor.name for tensor in w.inputs()[:2])
        return (
            *(first, second, *epilogue_tensors(w), w.outputs()[0].name),
            *(Scalar("long long", size) for size in (w.stride, w.pad, w.pad_w, w.dilation)),
        )

    def kernel(self, workload: Conv2d, config: Config) -> Callable[..., None]:
        """Return the kernel `(source, other, scale, bias, residual, out, stride, pad, pad_w, dilation)`."""
        make = _filters if workload.direction == "wgrad" else _pixels
        return make(workload, config, self.fastmath)


# -- fprop and dgrad --------------------------------------------------------------------------------------


def _pixels(workload: Conv2d, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the kernel that computes pixels; threads share rows of them."""
    import numba
    import numpy as np

    row, turned, rows = _row(workload, config, fastmath), workload.direction == "dgrad", config["rows"]
    read, address_of = load(workload.inputs()[1].dtype), address()
    # A query inside the kernel would put an address of this process into the machine code.
    workers = np.int64(numba.config.NUMBA_NUM_THREADS)

    def conv2d(
        source: Any,
        filters: Any,
        scale: Any,
        bias: Any,
        residual: Any,
        out: Any,
        stride: int,
        pad: int,
        pad_w: int,
        dilation: int,
    ) -> None:
        images, height, width, channels = out.shape
        high, wide, r, s = source.shape[1], source.shape[2], filters.shape[1], filters.shape[2]
        taps = np.empty((r * s, channels), np.float32)
        for tap in range(r * s):
            place = r * s - 1 - tap if turned else tap
            for c in range(channels):
                taps[tap, c] = read(filters[c, place // s, place % s, 0])
        sums = np.empty((workers, channels), np.float32)
        parts = (height + rows - 1) // rows
        for worker in numba.prange(workers):
            added = (address_of(scale), address_of(bias), address_of(residual))
            operands = ((address_of(source), address_of(taps), *added), address_of(out))
            kept = address_of(sums[worker])
            sizes = (height, width, high, wide, channels, stride, pad, pad_w, dilation)
            for part in range(images * parts * worker // workers, images * parts * (worker + 1) // workers):
                first = part % parts * rows
                for i in range(first, min(height, first + rows)):
                    row(operands, kept, sizes, part // parts, i)

    return conv2d


def _row(workload: Conv2d, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that computes row `i` of an image of pixels.

    dgrad mirrors the filter: pixel i then meets places i - above + tap * dilation of dy, whose pixels are
    `stride` apart there.
    """
    r, s, block = workload.r, workload.s, config["channels"]
    dgrad, strided = workload.direction == "dgrad", workload.direction == "dgrad" and workload.stride > 1
    whole, one = _whole_filter(workload, config, fastmath), _one_tap(workload, fastmath)
    clear, finish = _clear(), _finish(workload)

    @inlined
    def source_pixel(place: int, stride: int, extent: int) -> Any:
        """Return the pixel at a place, or -1 where there is none."""
        if strided:
            place = place // stride if place % stride == 0 else -1
        return place if place < extent else -1

    @jitted(fastmath)
    def row(operands: Any, sums: Any, sizes: Any, image: int, i: int) -> None:
        source, taps, _, _, _ = operands[0]
        height, width, high, wide, channels, stride, pad, pad_w, dilation = sizes
        step, above, left = (
            (1, (r - 1) * dilation - pad, (s - 1) * dilation - pad_w) if dgrad else (stride, pad, pad_w)
        )
        top = i * step - above
        inside = not strided and top >= 0 and top + (r - 1) * dilation < high
        for j in range(width):
            corner = j * step - left
            complete = inside and corner >= 0 and corner + (s - 1) * dilation < wide
            for first in range(0, channels, block):
                count = min(block, channels - first)
                if complete:
                    begin = ((image * high + top) * wide + corner) * channels + first
                    whole(source, begin, dilation * channels, wide, taps, first, channels, sums, count)
                else:
                    clear(sums, count)
                    for tap in range(r * s):
                        y = source_pixel(top + tap // s * dilation, stride, high)
                        x = source_pixel(corner + tap % s * dilation, stride, wide)
                        if y >= 0 and x >= 0:
                            begin = ((image * high + y) * wide + x) * channels + first
                            one(source, begin, taps, tap * channels + first, sums, count)
                to = ((image * height + i) * width + j) * channels + first
                finish(operands, sums, first, to, count)

    return row


def _whole_filter(workload: Conv2d, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that sums all taps of a pixel, for `count` channels.

    Taps are `right` elements apart. Its innermost loops run over the taps of the filter, so that the compiler
    unrolls them.
    """
    import numpy as np

    read, zero, s = load(workload.inputs()[0].dtype), np.float32(0), workload.s
    together = workload.r if config["taps"] == "all" else 1
    parts = workload.r // together

    def rows_of_filter(begins: bool) -> Callable[..., None]:
        """Return the function that sums `together` rows of the filter, or adds them to existing sums."""

        @jitted(fastmath)
        def rows(
            x: Any, begin: int, right: int, down: int, taps: Any, tap: int, pitch: int, sums: Any, count: int
        ) -> None:
            for t in range(count):
                total = zero if begins else sums[t]
                for a in range(together):
                    for b in range(s):
                        pixel = read(x[begin + a * down + b * right + t])
                        total += pixel * taps[tap + (a * s + b) * pitch + t]
                sums[t] = total

        return rows

    first_rows, more_rows = rows_of_filter(True), rows_of_filter(False)

    @jitted(fastmath)
    def whole(
        x: Any, begin: int, right: int, wide: int, taps: Any, first: int, pitch: int, sums: Any, count: int
    ) -> None:
        down = right * wide
        first_rows(x, begin, right, down, taps, first, pitch, sums, count)
        for part in range(1, parts):
            tap = first + part * together * s * pitch
            more_rows(x, begin + part * down, right, down, taps, tap, pitch, sums, count)

    return whole


@shared
def _one_tap(workload: Conv2d, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that adds one tap of one pixel to the sums of `count` channels."""
    read = load(workload.inputs()[0].dtype)

    @jitted(fastmath)
    def one(x: Any, begin: int, taps: Any, tap: int, sums: Any, count: int) -> None:
        for t in range(count):
            sums[t] += read(x[begin + t]) * taps[tap + t]

    return one


@functools.cache
def _clear() -> Callable[..., None]:
    import numpy as np

    zero = np.float32(0)

    @jitted()
    def clear(sums: Any, count: int) -> None:
        for t in range(count):
            sums[t] = zero

    return clear


@shared
def _finish(workload: Conv2d) -> Callable[..., None]:
    """Return the function that finishes and stores the sums of `count` channels of a pixel."""
    finish = finisher(workload)

    @jitted()
    def finish_all(operands: Any, sums: Any, first: int, to: int, count: int) -> None:
        for t in range(count):
            finish(operands, sums[t], first + t, to + t)

    return finish_all


# -- wgrad ------------------------------------------------------------------------------------------------


def _filters(workload: Conv2d, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the kernel that computes filters; threads share rows of dy, each with its own sums."""
    import numba
    import numpy as np

    row, rounded, rows = _row_of_gradients(workload, config, fastmath), store(workload.dtype), config["rows"]
    address_of, zero = address(), np.float32(0)
    workers = np.int64(numba.config.NUMBA_NUM_THREADS)

    def conv2d(
        source: Any,
        gradients: Any,
        scale: Any,
        bias: Any,
        residual: Any,
        out: Any,
        stride: int,
        pad: int,
        pad_w: int,
        dilation: int,
    ) -> None:
        images, height, width, channels = gradients.shape
        high, wide, r, s = source.shape[1], source.shape[2], out.shape[1], out.shape[2]
        sums = np.zeros((workers, r * s, channels), np.float32)
        parts = (height + rows - 1) // rows
        for worker in numba.prange(workers):
            tensors = (address_of(source), address_of(gradients), address_of(sums[worker]))
            sizes = (height, width, high, wide, channels, stride, pad, pad_w, dilation)
            for part in range(images * parts * worker // workers, images * parts * (worker + 1) // workers):
                first = part % parts * rows
                for i in range(first, min(height, first + rows)):
                    row(tensors, sizes, part // parts, i)
        for c in range(channels):
            for tap in range(r * s):
                total = zero
                for worker in range(workers):
                    total += sums[worker, tap, c]
                out[c, tap // s, tap % s, 0] = rounded(total)

    return conv2d


def _row_of_gradients(workload: Conv2d, config: Config, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that adds row `i` of an image of dy to every tap that meets x there."""
    r, s, block, pixels = workload.r, workload.s, config["channels"], config["pixels"]
    several, one = _products(workload, pixels, fastmath), _products(workload, 1, fastmath)

    @jitted(fastmath)
    def row(tensors: Any, sizes: Any, image: int, i: int) -> None:
        source, gradients, sums = tensors
        height, width, high, wide, channels, stride, pad, pad_w, dilation = sizes
        apart = stride * channels
        for begin in range(0, width, pixels):
            end = min(width, begin + pixels)
            for tap in range(r * s):
                y, left = i * stride - pad + tap // s * dilation, tap % s * dilation - pad_w
                if y < 0 or y >= high:
                    continue
                together = end - begin == pixels and begin * stride + left >= 0
                together = together and (end - 1) * stride + left < wide
                for first in range(0, channels, block):
                    count, to = min(block, channels - first), tap * channels + first
                    if together:
                        at = ((image * high + y) * wide + begin * stride + left) * channels + first
                        dy = ((image * height + i) * width + begin) * channels + first
                        several(source, at, apart, gradients, dy, channels, sums, to, count)
                    else:
                        for j in range(begin, end):
                            x = j * stride + left
                            if 0 <= x < wide:
                                at = ((image * high + y) * wide + x) * channels + first
                                dy = ((image * height + i) * width + j) * channels + first
                                one(source, at, apart, gradients, dy, channels, sums, to, count)

    return row


def _products(workload: Conv2d, pixels: int, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that adds products of `pixels` neighbours in a row of dy to one tap."""
    read = load(workload.inputs()[0].dtype)

    @jitted(fastmath)
    def products(
        x: Any, at: int, apart: int, gradients: Any, dy: int, pitch: int, sums: Any, to: int, count: int
    ) -> None:
        for t in range(count):
            total = sums[to + t]
            for j in range(pixels):
                total += read(x[at + j * apart + t]) * read(gradients[dy + j * pitch + t])
            sums[to + t] = total

    return products


VARIANT = NumbaCpuDepthwise()
