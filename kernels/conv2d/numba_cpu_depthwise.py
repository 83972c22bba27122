"""Depthwise conv2d for Numba on the CPU, channels last: loops along channels.

Each group is one channel and one filter. Everything is a sum over taps of products of two runs of channels,
which vectorises for every filter. Where all taps of `pixels` neighbours meet the image (and dgrad has no
stride), a row of taps or all taps are summed in registers, and neighbours share what they load; elsewhere
taps are added one by one. dgrad is the same sum with the filter mirrored, or, with a stride, over the taps
that reach a pixel. wgrad keeps sums of every tap for each thread, adds `pixels` of a row to one tap in a
loop, and sums over threads in a fixed order.

Layout nhwc only; `numba_cpu` is as fast for channels first. Source: Zhang, Lo and Lu, "High performance
depthwise and pointwise convolutions on mobile devices", AAAI 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tunebench.device import Device
from tunebench.kernels.common.numba_cpu import address, inlined, jitted, load, shared, store
from tunebench.kernels.common.numba_product import LANES, Vectors
from tunebench.kernels.conv2d._conv import pairs_inside
from tunebench.kernels.conv2d._numba_conv import depthwise_limit, epilogue_tensors, finisher
from tunebench.space import Config, Parameter, Space, Table
from tunebench.variant import Argument, Costs, NumbaCpuVariant, Scalar
from tunebench.workloads.common.activation import IDENTITY
from tunebench.workloads.operators.conv2d import Conv2d

SPACE = Space(
    (
        Parameter("channels", (16, 32, 64, 128, 256, 512, 1024), "channels per loop over a pixel"),
        Parameter("rows", (1, 2, 4, 8), "rows of pixels per unit of work of a thread"),
        Parameter("pixels", (1, 2, 4, 8), "pixels of a row per loop over taps"),
    ),
    (
        lambda channels, workload: (channels == 16) | (channels < 2 * workload.c),
        lambda rows, workload: (rows == 1) | (rows <= workload.h),
        lambda pixels, workload: (pixels == 1) | (pixels <= _neighbours(workload)),
    ),
)


def _neighbours(workload: Conv2d) -> int:
    """Return the most pixels of a row in a loop: one if neighbours meet different taps (strided dgrad)."""
    if workload.direction != "dgrad":
        return workload.q
    return workload.w if workload.stride == 1 else 1


SMALL_FILTER = 25
"""Taps of the largest filter whose rows are written out; a loop runs over the rows of larger ones."""


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
        """Return runs of 128 channels and of four pixels."""
        channels = max(c for c in (16, 32, 64, 128) if c == 16 or c < 2 * workload.c)
        pixels = max(p for p in (1, 2, 4) if p == 1 or p <= _neighbours(workload))
        return Config({"channels": channels, "rows": 1, "pixels": pixels})

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
    r, s, block, pixels = workload.r, workload.s, config["channels"], config["pixels"]
    dgrad, strided = workload.direction == "dgrad", workload.direction == "dgrad" and workload.stride > 1
    single = _whole_filter(workload, block, 1, fastmath)
    several = single if pixels == 1 else _whole_filter(workload, block, pixels, fastmath)
    add_tap, clear, finish = _add_tap(workload, fastmath), _clear(), _finish(workload)

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
        down, end, j = dilation * wide * channels, wide - (s - 1) * dilation, 0
        while j < width:
            corner = j * step - left
            complete = inside and corner >= 0 and corner < end
            together = complete and j + pixels <= width and corner + (pixels - 1) * step < end
            for first in range(0, channels, block):
                count = min(block, channels - first)
                begin = ((image * high + top) * wide + corner) * channels + first
                to = ((image * height + i) * width + j) * channels + first
                if together:
                    several(operands, begin, down, first, to, channels, count)
                elif complete:
                    single(operands, begin, down, first, to, channels, count)
                else:
                    clear(sums, 0, count)
                    for tap in range(r * s):
                        y = source_pixel(top + tap // s * dilation, stride, high)
                        x = source_pixel(corner + tap % s * dilation, stride, wide)
                        if y >= 0 and x >= 0:
                            begin = ((image * high + y) * wide + x) * channels + first
                            add_tap(source, begin, taps, tap * channels + first, sums, 0, count)
                    finish(operands, sums, 0, first, to, count)
            j += pixels if together else 1

    return row


def _whole_filter(workload: Conv2d, block: int, pixels: int, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that computes `pixels` neighbours in a row, for `count` channels from `first` on.

    Sums are on the stack, where neither x nor the result can overlap them: LLVM needs no check at run time.
    """
    vectors, stack = _vectors_of_channels(workload, block, pixels), _stack(pixels * block)
    add_tap, clear, finish = _add_tap(workload, fastmath), _clear(), _finish(workload)
    r, s, step, dilation = workload.r, workload.s, _step(workload), workload.dilation
    stored = _stores_sums(workload)

    @jitted(fastmath)
    def whole(operands: Any, begin: int, down: int, first: int, to: int, channels: int, count: int) -> None:
        x, taps, sums = operands[0][0], operands[0][1], stack()
        summed = vectors(operands, sums, begin, down, first, to, channels, count)
        done = summed if stored else 0
        for pixel in range(pixels if done < count else 0):
            at, more = pixel * block + summed, count - summed
            clear(sums, at, more)
            for tap in range(r * s if more > 0 else 0):
                x_at = begin + tap // s * down + (pixel * step + tap % s * dilation) * channels + summed
                add_tap(x, x_at, taps, tap * channels + first + summed, sums, at, more)
            out_at = to + pixel * channels + done
            finish(operands, sums, pixel * block + done, first + done, out_at, count - done)

    return whole


def _step(workload: Conv2d) -> int:
    """Return how far the pixels of x that neighbours read are apart, where all taps meet the image."""
    return 1 if workload.direction == "dgrad" else workload.stride


def _stores_sums(workload: Conv2d) -> bool:
    """Return whether vectors of sums are the result: f32 without an epilogue."""
    changed = workload.has_scale or workload.has_bias or workload.has_residual or workload.has_relu
    return workload.outputs()[0].dtype == "f32" and not changed and workload.act == IDENTITY


def _vectors_of_channels(workload: Conv2d, block: int, pixels: int) -> Callable[..., int]:
    """Return the function that sums vectors of channels, and returns how many channels that were."""
    sum_taps, stored = _sum_of_taps(workload, pixels), _stores_sums(workload)

    @inlined
    def vectors(
        operands: Any, sums: Any, begin: int, down: int, first: int, to: int, channels: int, count: int
    ) -> int:
        x, taps = operands[0][0], operands[0][1]
        whole = count // LANES * LANES
        for t in range(0, whole, LANES):
            if stored:
                sum_taps(x, begin + t, down, taps, first + t, channels, operands[1], to + t, channels)
            else:
                sum_taps(x, begin + t, down, taps, first + t, channels, sums, t, block)
        return whole

    return vectors


def _sum_of_taps(workload: Conv2d, pixels: int) -> Callable[..., None]:
    """Return the intrinsic that sums all taps of `pixels` neighbours, for a vector of channels.

    Its arguments are `(x, at, down, taps, tap, channels, sums, sums_at, apart)`: addresses, each with an
    offset; rows of x are `down` apart, pixels and taps `channels`, and sums `apart`. Each value of x and each
    tap is loaded once. The code is LLVM vectors, because LLVM does not keep the sums of a loop over arrays in
    registers if it must first check whether arrays overlap.
    """
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    r, s, dtype, index = workload.r, workload.s, workload.inputs()[0].dtype, ir.IntType(64)
    meetings: dict[int, list[tuple[int, int]]] = {}  # neighbours and columns of the filter, by pixel of x
    for column in range(s):
        for pixel in range(pixels):
            x_pixel = pixel * _step(workload) + column * workload.dilation
            meetings.setdefault(x_pixel, []).append((pixel, column))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vectors = Vectors(builder)
        read = functools.partial(vectors.load_half, dtype) if dtype in ("f16", "bf16") else vectors.load
        x, taps, sums = (builder.gep(arguments[i], [arguments[i + 1]]) for i in (0, 3, 6))
        down, channels, apart = arguments[2], arguments[5], arguments[8]
        registers = [cgutils.alloca_once(builder, vectors.kind) for _ in range(pixels)]
        for register in registers:
            builder.store(vectors.zero, register)

        def add_row(row: Any) -> None:
            """Add the products with a row of the filter."""
            line, number = builder.gep(x, [builder.mul(down, row)]), builder.mul(row, index(s))
            factors = [
                vectors.load(taps, builder.mul(channels, builder.add(number, index(column))))
                for column in range(s)
            ]
            for x_pixel, pairs in sorted(meetings.items()):
                value = read(line, builder.mul(channels, index(x_pixel)))
                for pixel, column in pairs:
                    vectors.multiply_add(value, factors[column], registers[pixel])

        if r * s <= SMALL_FILTER:
            for row in range(r):
                add_row(index(row))
        else:
            with cgutils.for_range_slice(builder, index(0), index(r), index(1), index) as (row, _):
                add_row(row)
        for pixel, register in enumerate(registers):
            vectors.store(builder.load(register), sums, builder.mul(apart, index(pixel)))
        return context.get_dummy_value()

    @intrinsic  # type: ignore[untyped-decorator]
    def sum_taps(
        _typing: Any,
        x: Any,
        at: Any,
        down: Any,
        taps: Any,
        tap: Any,
        channels: Any,
        sums: Any,
        sums_at: Any,
        apart: Any,
    ) -> Any:
        number = types.int64
        return types.void(x, number, number, taps, number, number, sums, number, number), generate

    return sum_taps  # type: ignore[no-any-return]


@functools.cache
def _stack(size: int) -> Callable[[], Any]:
    """Return the intrinsic for the address of `size` f32 elements that last until its caller returns."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(signature.return_type.dtype)
        return cgutils.alloca_once(builder, kind, size=size)

    @intrinsic  # type: ignore[untyped-decorator]
    def stack(_typing: Any) -> Any:
        return types.CPointer(types.float32)(), generate

    return stack  # type: ignore[no-any-return]


@shared
def _add_tap(workload: Conv2d, fastmath: frozenset[str]) -> Callable[..., None]:
    """Return the function that adds one tap of one pixel to the sums of `count` channels."""
    read = load(workload.inputs()[0].dtype)

    @jitted(fastmath)
    def add_tap(x: Any, begin: int, taps: Any, tap: int, sums: Any, at: int, count: int) -> None:
        for t in range(count):
            sums[at + t] += read(x[begin + t]) * taps[tap + t]

    return add_tap


@functools.cache
def _clear() -> Callable[..., None]:
    import numpy as np

    zero = np.float32(0)

    @jitted()
    def clear(sums: Any, at: int, count: int) -> None:
        for t in range(count):
            sums[at + t] = zero

    return clear


@shared
def _finish(workload: Conv2d) -> Callable[..., None]:
    """Return the function that finishes and stores the sums of `count` channels of a pixel, from `at` on."""
    finish = finisher(workload)

    @jitted()
    def finish_all(operands: Any, sums: Any, at: int, first: int, to: int, count: int) -> None:
        for t in range(count):
            finish(operands, sums[at + t], first + t, to + t)

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
